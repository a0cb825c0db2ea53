"""Render chats as the model was trained to read them: rows of messages, by the template that comes with the tokenizer.

The template is a Jinja program in the checkpoint. transformers runs it in Jinja's sandbox, where it can reach neither
Python's objects nor the machine, in a process that can be killed (`template`). It writes the special tokens itself: its
output is tokenized without the tokenizer adding its own. Some templates (Llama 3.2) ask for today's date; they get a
constant one, so that the same chats give the same tokens tomorrow.
"""

import json
from typing import TYPE_CHECKING, Any

from ...core.errors import InputError
from ..input.untrusted import error_text
from .rows import Render, fault
from .template import Template, TemplateError
from .template_files import without_default

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: ShareGPT's names of roles -> the names that templates know.
ROLES = {"human": "user", "gpt": "assistant"}
FORM = 'a list of messages like {"role": "user", "content": "…"}'

Message = dict[str, Any]


def renderer(tokenizer: "PreTrainedTokenizerBase", name: str) -> Render:
    """A function of a row's place and its messages that renders them as text. `name`: the user's name for the model.

    Raises InputError when the tokenizer has no template; the function raises it for malformed messages, and where the
    template refuses them.
    """
    try:
        source = tokenizer.get_chat_template()
    except ValueError:
        named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
        raise InputError(
            name,
            f"its tokenizer has {without_default(named)}",
            "put the one it was trained with beside config.json as chat_template.jinja, or give text instead of chats",
        ) from None
    template = Template(source, {key: str(token) for key, token in tokenizer.special_tokens_map.items()})

    def render(where: str, value: object) -> str:
        chat = messages(where, value)
        try:
            return template.render(chat)
        except TemplateError as error:
            raise InputError(
                where, f"the tokenizer's chat template refuses it: {error_text(error)}", "mend the row, or leave it out"
            ) from None

    return render


def messages(where: str, value: object) -> list[Message]:
    """The messages of one row, in the form that templates read: `role`, `content` and further keys.

    ShareGPT's `from` and `value` are renamed. Raises InputError naming the row, the message and the fault.
    """
    if not isinstance(value, list) or not value:
        raise InputError("", f"{where} holds no chat but {_shown(value)}", f"it must hold {FORM}")
    return [_message(f"{where}, message {number}", message) for number, message in enumerate(value, 1)]


def _message(where: str, value: object) -> Message:
    if not isinstance(value, dict):
        raise InputError(where, f"is no message but {_shown(value)}", f"a chat is {FORM}")
    message = {key: entry for key, entry in value.items() if entry is not None}  # tables fill in what a row lacks
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        message = {
            "role": ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker,
            "content": message.pop("value", None),
            **message,
        }
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InputError(where, f"its role is {_shown(role)}", 'it must be a string such as "user" or "assistant"')
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise InputError(f"{where} ({role})", f"its content is {_shown(content)}", "it must be a string")
    if isinstance(content, str) and (wrong := fault(content)):
        raise InputError(f"{where} ({role})", f"its content holds {wrong}", "mend it")
    return message


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:40]}…"
