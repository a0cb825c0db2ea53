"""Find the chat templates beside a model, by name, as transformers finds them; without transformers.

`chat_template.jinja` is the default, and files in `additional_chat_templates` have others under their names. Without
both, `chat_template` in tokenizer_config.json is one template, or named ones in a list or an object, and without that
chat_template.json has the default, which processors of images were saved with.
"""

import json
from pathlib import Path
from typing import Any

from ...core.errors import InputError
from ...core.files import regular_file
from ..checkpoint.companions import TEMPLATES

AGAIN = "copy it again from the model"
#: The name of the template that is used where none is named.
DEFAULT = "default"


def templates_in(directory: Path) -> dict[str, str]:
    """Name -> source of the chat templates in `directory`; raises InputError for a file that does not read."""
    default_file = directory / "chat_template.jinja"
    templates = {path.stem: _text(path) for path in sorted((directory / TEMPLATES).glob("*.jinja"))}
    templates |= {DEFAULT: _text(default_file)} if default_file.is_file() else {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        templates = templates or _named(read_fields(directory / name).get("chat_template"))
    return templates


def without_default(templates: dict[str, str]) -> str:
    """Describe `templates` among which none is the default, as the object of `has`; or that there are none."""
    if not templates:
        return "no chat template"
    return f"the chat templates {', '.join(sorted(templates))}, and none that is called {DEFAULT}"


def _named(field: object) -> dict[str, str]:
    """The templates in a field of JSON: one, or named ones in a list of objects or in one object."""
    if isinstance(field, dict):
        return {name: text for name, text in field.items() if isinstance(text, str)}
    if isinstance(field, list):
        named = [(entry.get("name"), entry.get("template")) for entry in field if isinstance(entry, dict)]
        return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}
    if isinstance(field, str):
        return {DEFAULT: field}
    return {}


def _text(path: Path) -> str:
    regular_file(path, AGAIN)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(path, f"is no text in UTF-8 ({error})", AGAIN) from None


def read_fields(path: Path) -> dict[str, Any]:
    """The fields of a JSON file; none where it is not there, or holds no object. Raises InputError where it is none."""
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:  # brackets without end
        raise InputError(path, f"is not JSON ({error})", AGAIN) from None
    return content if isinstance(content, dict) else {}
