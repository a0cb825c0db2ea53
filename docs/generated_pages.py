"""Make the pages of the site that follow from the code: options, rules of the lint, decisions, the plugin for vLLM; and
the page on Python, which `public_api.py` writes.

mkdocs calls these functions (`hooks` in mkdocs.yml). A page that is made when the site is built cannot differ from
`fp8q --help` and the docstrings, and nobody has to commit it. The pages that people wrote stay readable where they lie:
`docs/NAME.md` in backticks becomes a link here, which mkdocs then checks.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import public_api
from cyclopts.argument import Argument
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from fp8q import api
from fp8q.cli import commands
from fp8q.core.reporter import LOGGED, SILENT
from fp8q.options.declare import Options
from fp8q.stages.lint import explain_rules

ROOT = Path(__file__).resolve().parent.parent
#: The page of the plugin, which lies outside of docs beside its code.
PLUGIN, PLUGIN_SOURCE = "vllm-plugin.md", "integrations/vllm/README.md"
#: The page that gets all rules of the lint, and their examples, by the anchor of each file's first heading there.
LINT = "lint.md"
EXAMPLES = {
    "tests/export/lint/examples.md": "f1xx-codes-scales-and-zero-points",
    "tests/quantize/lint/examples.md": "c1xx-fp8-checkpoints",
    "tests/quantize/lint/server_examples.md": "s1xx-what-servers-do-with-a-checkpoint",
    "tests/serve/lint/examples.md": "r1xx-triton-repositories",
}
WHO_OPTIONS = """# Options of every command

For whoever wants to know what a command takes. The page is made of the declarations that `fp8q COMMAND --help` shows;
[how options are given in files and in Python](../options.md) is a page of its own.
"""
WHO_API = """# Python

For those who call fp8q from a program: all functions and classes of `fp8q.api`, from their docstrings. Every function
raises `InputError` for a fault of its input ([exit codes](exit-codes.md) has the others). The fields of option classes
are [the options of the command line](../options.md). A function takes the fields of the option classes in its
signature by name too; editors and type checkers know them. `python docs/public_api.py --write` makes this page.
"""
WHO_DECISIONS = """# Decisions

For those who work on fp8q, or wonder why it is so: a page for each choice that a reader would question, with what was
rejected and why.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    plugin = (ROOT / PLUGIN_SOURCE).read_text(encoding="utf-8")
    plugin = plugin.replace("../../docs/", "").replace("../../README.md", "index.md")
    made = {
        "reference/options.md": options_page(),
        "decisions/index.md": decisions_page(),
        PLUGIN: plugin,
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Turn paths of pages in backticks into links, and links to files outside of docs into those of their pages."""
    up = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace(f"../{PLUGIN_SOURCE}", PLUGIN)
    if page.file.src_uri == LINT:
        for source, anchor in EXAMPLES.items():
            markdown = markdown.replace(f"../{source}", f"#{anchor}")
        markdown += lint_rules()
    return re.sub(r"(?<!\[)`docs/([\w/-]+\.md)`", rf"[`docs/\1`]({up}\1)", markdown)


def options_page() -> str:
    """Describe every command with its arguments and options, in the panels of its help."""
    parts = [WHO_OPTIONS]
    for name in (name for name in commands.app if not name.startswith("-")):
        app = commands.app[name]
        parts.append(f"## fp8q {name}\n\n{inspect.cleandoc(app.default_command.__doc__)}\n")
        panels: dict[str, list[Argument]] = {}
        for argument in app.assemble_argument_collection():
            if argument.parse and argument.name != "*":
                panels.setdefault(argument.parameter.group[0].name, []).append(argument)
        for panel, arguments in panels.items():
            rows = "\n".join(
                f"| {cell(shown_name(argument))} | {default_of(argument)} | {help_of(argument)} |"
                for argument in arguments
            )
            parts.append(
                f"### {panel} {{ #{name}-{panel.lower().replace(' ', '-')} }}\n\n"
                f"| | default | |\n|---|---|---|\n{rows}\n"
            )
    return "\n".join(parts)


def shown_name(argument: Argument) -> str:
    """Format the name of an option with its unit and its negation, or the name of an argument."""
    unit, negative = argument.parameter.metavar, argument.parameter.negative
    name = f"`{argument.name} {unit}`" if unit and argument.index is None else f"`{argument.name}`"
    return ", ".join([name, *(f"`{negated}`" for negated in (negative or ()) if argument.index is None)])


def default_of(argument: Argument) -> str:
    """Describe the default in the words of the help; empty where there is none."""
    words, default = argument.parameter.show_default, argument.field_info.default
    if isinstance(words, str):
        return cell(words)
    empty = default in (None, (), False) or default is argument.field_info.empty
    return "" if empty else f"`{default}`"


def help_of(argument: Argument) -> str:
    """Return the help, with the choices of an option that has some."""
    choices = ", ".join(f"`{choice}`" for choice in argument.get_choices() or ())
    text = cell(argument.parameter.help or "")
    return f"{text} One of {choices}." if choices else text


def cell(text: str) -> str:
    """Escape what would end a cell of a table."""
    return text.replace("|", "\\|")


def api_page() -> str:
    """Describe every public name: functions first, then the classes, with signatures and docstrings."""
    public = {name: getattr(api, name) for name in api.__all__}
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    classes = {name: value for name, value in public.items() if inspect.isclass(value)}
    errors = [name for name, value in classes.items() if issubclass(value, Exception)]
    values = sorted(public.keys() - functions.keys() - classes.keys())
    parts = [WHO_API, "## Functions", *(described(name, value) for name, value in functions.items())]
    parts += ["## Classes", *(described(name, value) for name, value in classes.items() if name not in errors)]
    parts += [f"## Errors\n\n{', '.join(f'`{name}`' for name in errors)}: [their page](errors.md)."]
    results = ", ".join(f"`{name}`" for name in sorted(api.RETURNED))
    parts += [f"## Types of results\n\n`from fp8q.api import Accuracy` loads such a type:\n\n{results}"]
    parts += ["## Values\n\n" + "\n".join(f"- `{name}` = `{public[name]!r}`" for name in values)]
    return "\n\n".join(parts) + "\n"


def described(name: str, value: Any) -> str:
    """Describe one function or class."""
    returned = inspect.signature(value).return_annotation if inspect.isfunction(value) else inspect.Signature.empty
    arrow = "" if returned is inspect.Signature.empty else f" -> {inspect.formatannotation(returned)}".replace("'", "")
    about = inspect.getdoc(value) or ""
    if inspect.isclass(value) and issubclass(value, Options):
        about = about.partition("\n\n")[0]  # the page of options has what each does
    head = f"### {name}\n\n```python\n{name}({', '.join(parameters(value))}){arrow}\n```\n\n{about}"
    if name not in public_api.functions():
        return head
    signature = inspect.signature(inspect.unwrap(value))
    listed = {name for parameter in signature.parameters.values() for name in shown_fields(type(parameter.default))}
    options = ", ".join(f"`{option}`" for option in public_api.settings_of(value) if option not in listed)
    return f"{head}\n\nOptions by name beside them: {options}." if options else head


def shown_fields(kind: type) -> Iterator[str]:
    """The fields of an option class of `fp8q.api`, and of those classes of it within."""
    if not is_dataclass(kind) or kind.__name__ not in api.__all__:
        return
    for field in fields(kind):
        yield field.name
        yield from shown_fields(type(field.default))


def parameters(value: Any) -> Iterator[str]:
    """The parameters of a function, or of a class's fields, with their defaults."""
    for parameter in inspect.signature(value).parameters.values():
        if parameter.default is parameter.empty:
            yield parameter.name
        elif isinstance(parameter.default, Options | api.RunOptions | api.QuantizeOptions):
            yield f"{parameter.name}={type(parameter.default).__name__}()"
        elif parameter.default is LOGGED or parameter.default is SILENT:
            yield f"{parameter.name}={'LOGGED' if parameter.default is LOGGED else 'SILENT'}"
        else:
            yield f"{parameter.name}={'…' if inspect.isfunction(parameter.default) else repr(parameter.default)}"


def lint_rules() -> str:
    """Describe every rule of the lint by its own reason, above the example that breaks it."""

    def with_reason(heading: re.Match[str]) -> str:
        (rule,) = explain_rules(heading[1])
        return f"### {rule.rule} {rule.name}\n\n{rule}\n"

    parts = []
    for source in EXAMPLES:
        head, first, rules = (ROOT / source).read_text(encoding="utf-8").partition("\n## ")
        title, _, rules = rules.partition("\n")
        about = head.partition("\n")[2].strip()
        rules = re.sub(r"^### (\w+) .*$", with_reason, rules, flags=re.MULTILINE)
        parts.append(f"{first}{title}\n\n{about}\n{rules}")
    return "\n".join(parts)


def decisions_page() -> str:
    """List all decisions by number and title."""
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    titles = {page: page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for page in pages}
    return (
        WHO_DECISIONS
        + "\n"
        + "\n".join(f"- {page.name[:4]}: [{title}]({page.name})" for page, title in titles.items())
        + "\n"
    )
