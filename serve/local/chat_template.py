"""Read the chat template beside a model without transformers, for `fp8q generate --chat` and servers.

It is `chat_template.jinja`, or else `chat_template` in tokenizer_config.json, which may be a list of named templates;
its special tokens are there too. It runs in a sandbox (`calibrate.text.template`).
"""

import json
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...calibrate.input.untrusted import read_bytes
from ...calibrate.text.template import Template, TemplateError
from ...core.errors import BackendError, InputError

#: The special tokens that templates are told, by their names in tokenizer_config.json.
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

#: What the template may take for one chat; real ones take milliseconds.
SECONDS = 10.0

#: The most bytes of a template that the user names.
TEMPLATE_BYTES = 1 << 20

Message = dict[str, Any]


class ChatTemplate:
    """A model's template of chats; any thread may render."""

    def __init__(self, directory: Path, file: Path | None = None):
        """Read the template of the model in `directory`, or the one in `file`, with the special tokens of the model.

        Raises InputError where there is none, BackendError where the package that renders it is not installed.
        """
        config = _read(directory / "tokenizer_config.json")
        own = directory / "chat_template.jinja"
        if file is not None:
            source: str | None = read_template(file)
        else:
            source = _text(own) if own.is_file() else _default(config.get("chat_template"))
        if source is None:
            raise InputError(
                f"{directory}: its tokenizer has no chat template; give the one that the model was trained with as "
                "--template FILE, or generate without a chat"
            )
        if not any(find_spec(name) for name in ("transformers", "jinja2")):
            raise BackendError(
                "jinja2 is not installed and a chat template needs it; install it with `pip install 'fp8q[serve]'`"
            )
        self._lock = threading.Lock()
        self._template = Template(source, {name: _token(config[name]) for name in TOKENS if config.get(name)}, True)

    def render(self, messages: list[Message]) -> str:
        """The prompt that a chat of `messages` is, up to where the answer begins; raises InputError where the template
        refuses it.
        """
        try:
            with self._lock:  # one process renders
                self._template.allowed = SECONDS  # each chat's own, however many there were
                return self._template.render(messages)
        except TemplateError as error:
            raise InputError(f"the chat template refuses these messages: {' '.join(str(error).split())}") from None


def read_template(file: Path) -> str:
    """Read a template that the user named; raises InputError."""
    try:
        return read_bytes(file, TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"--template {file}: is no text in UTF-8 ({error}); give a template in Jinja") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: is no text in UTF-8 ({error}); copy it again from the model") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:  # brackets without end
        raise InputError(f"{path}: is not JSON ({error}); copy it again from the model") from None
    return content if isinstance(content, dict) else {}


def _default(given: object) -> str | None:
    """The template of tokenizer_config.json: the only one, or the one called default."""
    if isinstance(given, list):
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None


def _token(given: object) -> str:
    """A special token, which may be a string or an object with further fields."""
    return str(given.get("content", "")) if isinstance(given, dict) else str(given)
