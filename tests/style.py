"""Hold the sources to CONTRIBUTING's section "Style", as far as a syntax tree shows it. `make lint` runs it.

python tests/style.py [ROOT]    a line for each fault; exit status 1 where there are any
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = ("api.py", "cli", "core", "options", "calibrate", "quantize", "export", "validate", "serve", "stages")
#: A docstring begins with a verb, or with the noun that it describes, and not with one of these.
OPENINGS = ("What", "Which", "Whether", "Where", "Who", "How", "That of", "The same")
#: Where it may: rules of the lints are stated as sentences, and a field's description is read in a schema.
STATED = {"other_codes", "scaled_behind", "model_file", "Health"}
#: Words that say where a thing was put or found, and not what it is: no modules, variables or parameters.
VAGUE_NAMES = {"found", "each", "own", "told", "given", "kept", "way", "beside", "whole"}
VAGUE_MODULES = VAGUE_NAMES | {"made", "place", "seen", "alone", "ahead", "utils", "helpers"}
LONGEST, MOST_PARAMETERS, LONGEST_FILE = 60, 6, 600
#: A parameter of a public function keeps its name.
PUBLIC = {("api.py", "told")}
#: Not limited: `api`, the list of public functions, is as long as they are many.
LONG_FILES = {"api.py"}
#: How many there are of what is to become fewer: functions of more parameters, public names that are defined in more
#: than one module, and imports of own modules in functions, outside `api` and `cli`.
MANY, TWICE, IMPORTS_INSIDE = 1, 2, 25


@dataclass(frozen=True)
class Source:
    """A file of the package."""

    path: str
    lines: int
    tree: ast.Module

    @property
    def loads_lazily(self) -> bool:
        """Whether it is of `api` or `cli`, which import in functions and share names with what they call."""
        return self.path.startswith(("api.py", "cli/"))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return [*ast.walk(self.tree)]

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method."""
        return [node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def sources(root: Path) -> list[Source]:
    """The files of the package in `root`."""
    read = []
    for name in PACKAGE:
        path = root / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            read.append(Source(str(file.relative_to(root)), len(text.splitlines()), ast.parse(text)))
    return read


def openings(files: list[Source]) -> Iterator[str]:
    """Docstrings that open with a question's word."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for file in files:
        for node in file.nodes:
            text = (ast.get_docstring(node) or "") if isinstance(node, documented) else ""
            if getattr(node, "name", "") not in STATED and text.startswith(tuple(f"{word} " for word in OPENINGS)):
                yield f"{file.path}:{getattr(node, 'lineno', 1)}: a docstring opens with `{text.split()[0]}`"


def bindings(nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
    """Variables and parameters, with their lines; not the fields of classes, many of which are keys of files."""
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    fields = {id(field.target) for node in classes for field in node.body if isinstance(field, ast.AnnAssign)}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def vague_names(files: list[Source]) -> Iterator[str]:
    """Modules, variables and parameters whose names do not say what they hold."""
    for file in files:
        if words := VAGUE_MODULES & {*Path(file.path).with_suffix("").parts}:
            yield f"{file.path}: is called `{words.pop()}`"
        for name, line in bindings(file.nodes):
            if name in VAGUE_NAMES and (file.path, name) not in PUBLIC:
                yield f"{file.path}:{line}: `{name}` does not say what it holds"


def lengths(files: list[Source]) -> Iterator[str]:
    """Functions and files that are too long."""
    for file in files:
        if file.lines > LONGEST_FILE and file.path not in LONG_FILES:
            yield f"{file.path}: has {file.lines} lines, of at most {LONGEST_FILE}"
        for node in file.functions:
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST:
                yield f"{file.path}:{node.lineno}: {node.name} has {length} lines, of at most {LONGEST}"


def parameters(files: list[Source]) -> Iterator[str]:
    """Functions of many parameters; not kernels, which take pointers and sizes, and no values that hold several."""
    for file in files:
        for node in file.functions:
            if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            names = [entry.arg for entry in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([name for name in names if name not in {"self", "cls"}])
            if count > MOST_PARAMETERS:
                yield f"{file.path}:{node.lineno}: {node.name} has {count} parameters, of at most {MOST_PARAMETERS}"


def defined_twice(files: list[Source]) -> Iterator[str]:
    """Public names of several modules; a command, its public function and what its stage returns may share one."""
    defined = defaultdict(set)
    for file in files:
        for node in [] if file.loads_lazily else file.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].add(file.path)
    for name, paths in sorted(defined.items()):
        if len(paths) > 1:
            yield f"{name}: is defined in {', '.join(sorted(paths))}"


def imports_inside(files: list[Source]) -> Iterator[str]:
    """Imports of own modules in functions; needed where a host without torch, or Triton, does not come."""
    for file in files:
        for function in () if file.loads_lazily else file.functions:
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and node.level:
                    yield f"{file.path}:{node.lineno}: imports {node.module or 'a module'} in a function"


#: Rule -> how many faults there are, which may only become fewer.
RULES: Mapping[Callable[[list[Source]], Iterator[str]], int] = {
    openings: 0, vague_names: 0, lengths: 0, parameters: MANY, defined_twice: TWICE, imports_inside: IMPORTS_INSIDE,
}  # fmt: skip


def faults(root: Path) -> list[str]:
    """The faults of every rule that has more than it may."""
    files, listed = sources(root), []
    for rule, most in RULES.items():
        messages = list(rule(files))
        if len(messages) > most:
            listed += [f"{message} ({len(messages)}, of at most {most})" if most else message for message in messages]
    return listed


def main() -> int:
    """Print the faults."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    listed = faults(root)
    print("\n".join(listed) if listed else f"{len(sources(root))} files keep to the style")
    return bool(listed)


if __name__ == "__main__":
    sys.exit(main())
