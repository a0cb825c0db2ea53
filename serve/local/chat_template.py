"""Read the chat template beside a model without transformers, for `fp8q generate --chat` and servers.

`calibrate.text.template_files` finds it, and `loop.text` its special tokens. What it renders is read by
`calibrate.text.chat`, as calibration's chats are. It runs in a sandbox (`calibrate.text.template`).
"""

import threading
from importlib.util import find_spec
from pathlib import Path

from ...calibrate.input.untrusted import read_bytes
from ...calibrate.text.chat import Message, messages
from ...calibrate.text.template import Template, TemplateError
from ...calibrate.text.template_files import DEFAULT, templates_in, without_default
from ...core.errors import BackendError, InputError
from ..loop.text import ModelFileError, special_tokens

#: The time limit of the template for one chat, in seconds; real templates take milliseconds.
SECONDS = 10.0

#: The most bytes of a template that the user names.
TEMPLATE_BYTES = 1 << 20


class ChatTemplate:
    """A model's template of chats; any thread may render."""

    def __init__(self, directory: Path, file: Path | None = None):
        """Read the template of the model in `directory`, or the one in `file`, with the special tokens of the model.

        Raises InputError where there is none, BackendError where the package that renders it is not installed.
        """
        try:
            tokens = special_tokens(directory)
        except ModelFileError as error:
            raise InputError(error.subject, error.fault, error.remedy) from None
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
        self._template = Template(source, tokens, True)

    def render(self, chat: list[Message]) -> str:
        """Render a chat as a prompt, up to where the answer begins.

        Raises InputError for messages that are none, and if the template refuses them.
        """
        said = messages("the chat", chat)
        try:
            with self._lock:  # one process renders
                self._template.allowed = SECONDS  # each chat's own, however many there were
                return self._template.render(said)
        except TemplateError as error:
            raise InputError("", f"the chat template refuses these messages: {' '.join(str(error).split())}") from None


def read_template(file: Path) -> str:
    """Read a template that the user named; raises InputError."""
    try:
        return read_bytes(file, TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"--template {file}", f"is no text in UTF-8 ({error})", "give a template in Jinja") from None
