"""`fp8q generate` met with what is wrong: files of its model, chat templates, what is typed, options."""

import json
import random

from case import GENERATE, Case, change, rewrite
from options_drawn import mutate_options

#: What may stand in the place of a chat template.
TEMPLATES: tuple[object, ...] = (
    "", " ", "{% for %}", "{{ messages }}", "{{ messages[9].content }}", "{{ raise_exception('no\n\x1b[2J') }}",
    "{{ 9 ** (9 ** 9) }}", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ 'x' * 99999999 }}", "{{ strftime_now('%Y' * 9999) }}",
    "{{ '\ud800' }}", "\ud800", "\0", "{{ bos_token * 40 }}", "{% include '/etc/passwd' %}", "{{ messages.clear() }}",
    "{{ 1 / 0 }}", "{{ '\x1b[2J' }}{{ messages[0].content }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    None, 5, [], {}, [1], [{"name": "default"}], [{"name": "other", "template": "x"}], [{"name": [], "template": {}}],
    [{"name": "default", "template": "{{ messages[-1].content }}"}],
)  # fmt: skip
#: Files of `model/` that it reads, and how often each is drawn.
FILES = {
    "tokenizer.json": 3, "tokenizer_config.json": 2, "generation_config.json": 3, "config.json": 2,
    "model.fp32.onnx": 2, "model.onnx": 1, "model-00001-of-00001.safetensors": 2,
}  # fmt: skip


def mutate_template(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """A description, and tokenizer_config.json with another chat template."""
    template = draw.choice(TEMPLATES)
    return f"chat_template {str(template)[:60]!r}", json.dumps(
        json.loads(content) | {"chat_template": template}
    ).encode()


def of_generate(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """One of its ways, and one thing wrong."""
    case.argv = list(draw.choices(GENERATE, [4, 2, 1, 2, 2])[0])
    case.base = tuple(case.argv)
    kind = draw.choices(["file", "template", "typed", "options"], [5, 2, 3, 4])[0]
    record = case.folder / "run" / "run.json"
    if kind == "file":
        name = draw.choices(list(FILES), list(FILES.values()))[0]
        case.what = rewrite(draw, record.with_name("model") / name, record)
    elif kind == "template":
        case.base = tuple(case.argv) if "--chat" in case.argv else (*case.argv[:7], "--chat")
        case.argv = list(case.base)
        path = record.with_name("model") / "tokenizer_config.json"
        if draw.random() < 0.3:
            path = path.with_name("chat_template.jinja")
            path.write_text("{{ messages[-1].content }}", encoding="utf-8")
            case.what = change(draw, path)
        else:
            case.what = rewrite(draw, path, record, mutate_template)
    elif kind == "typed":
        case.typed = "texts/text.txt"
        path = case.folder / case.typed
        path.write_bytes(path.read_bytes()[: draw.choice([1, 20, 40, 300, 5000])])
        case.what = f"standard input: {change(draw, path)}"
        del case.argv[2:4]
    else:
        case.what, case.argv = mutate_options(draw, case.argv, known["generate"])
    return case
