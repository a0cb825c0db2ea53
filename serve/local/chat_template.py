"""Read the chat template beside a model without transformers, for `fp8q generate --chat` and servers.

`calibrate.text.template_files` finds it; its special tokens are in tokenizer_config.json. It runs in a sandbox
(`calibrate.text.template`).
"""

import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...calibrate.input.untrusted import read_bytes
from ...calibrate.text.template import Template, TemplateError
from ...calibrate.text.template_files import DEFAULT, read_fields, templates_in, without_default
from ...core.errors import BackendError, InputError

#: The special tokens that templates may use, by their names in tokenizer_config.json.
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

#: The time limit of the template for one chat, in seconds; real templates take milliseconds.
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
        config = read_fields(directory / "tokenizer_config.json")
        templates = templates_in(directory) if file is None else {DEFAULT: read_template(file)}
        if DEFAULT not in templates:
            raise InputError(
                directory,
                f"its tokenizer has {without_default(templates)}",
                "give the one that the model was trained with as --template FILE, or generate without a chat",
            )
        source = templates[DEFAULT]
        if not any(find_spec(name) for name in ("transformers", "jinja2")):
            raise BackendError(
                "",
                "jinja2 is not installed and a chat template needs it",
                "install it with `pip install 'fp8q[serve]'`",
            )
        self._lock = threading.Lock()
        self._template = Template(source, {name: _token(config[name]) for name in TOKENS if config.get(name)}, True)

    def render(self, messages: list[Message]) -> str:
        """Render a chat of `messages` as a prompt, up to where the answer begins.

        Raises InputError if the template refuses the messages.
        """
        try:
            with self._lock:  # one process renders
                self._template.allowed = SECONDS  # each chat's own, however many there were
                return self._template.render(messages)
        except TemplateError as error:
            raise InputError("", f"the chat template refuses these messages: {' '.join(str(error).split())}") from None


def read_template(file: Path) -> str:
    """Read a template that the user named; raises InputError."""
    try:
        return read_bytes(file, TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"--template {file}", f"is no text in UTF-8 ({error})", "give a template in Jinja") from None


def _token(token: object) -> str:
    """A special token, which may be a string or an object with further fields."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
