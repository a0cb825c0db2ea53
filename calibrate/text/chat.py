"""Render chats as the model was trained to read them: rows of messages, by the template that comes with the tokenizer.

`messages` is the only reader of chats: calibration, validation, `fp8q generate`, `serve` and `compare` all hand its
messages to the template, whether or not transformers is installed. It brings what people write to the form that
transformers documents for templates, and that vLLM makes of a request: arguments of tool calls are objects, whether
they come as such or as JSON text (as OpenAI's API has them); the text of `content` is one string; reasoning has every
name that templates know it by; what is null is missing. Keys come in one order, since templates may print an object.

The template is a Jinja program in the checkpoint. transformers runs it in Jinja's sandbox, where it can reach neither
Python's objects nor the machine, in a process that can be killed (`template`). It writes the special tokens itself: its
output is tokenized without the tokenizer adding its own. Some templates (Llama 3.2) ask for today's date; they get a
constant one, so that the same chats give the same tokens tomorrow.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from ...core.errors import InputError
from ..input.untrusted import error_text
from .image_rows import FORM as IMAGE_FORM
from .image_rows import is_image
from .rows import Render, fault
from .template import Template, TemplateError
from .template_files import without_default

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: ShareGPT's names of roles -> the names that templates know.
ROLES = {"human": "user", "gpt": "assistant"}
FORM = 'a list of messages like {"role": "user", "content": "…"}'
CALL_FORM = 'like {"function": {"name": "…", "arguments": {…}}}'
#: The keys of a message, and of a tool call, that come first, in this order.
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
CALL_KEYS = ("id", "type", "function")
#: The types of parts that are images at addresses, in OpenAI's API, which rows do not read.
ADDRESSES = ("image_url", "input_image")
#: The names of what a model thought before it answered; the first is what templates read, `thinking` for gpt-oss.
REASONING = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]
#: Brings the content of a message, whose place is the first argument, to the form that templates read.
ContentReader = Callable[[str, object], Any]


def renderer(tokenizer: "PreTrainedTokenizerBase", name: str) -> Render:
    """A function of a row's place and its messages that renders them as text. `name`: the user's name for the model.

    Raises InputError when the tokenizer has no template; the function raises it for malformed messages, and where the
    template refuses them.
    """
    render = message_renderer(tokenizer, name)
    return lambda where, value: render(where, messages(where, value, _text_of_row))


def message_renderer(
    tokenizer: "PreTrainedTokenizerBase", name: str
) -> Callable[[str, list[Message]], str]:  # fmt: skip
    """A function of a row's place and its messages, as `messages` reads them, that renders them; raises as `renderer`
    does.
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

    def render(where: str, chat: list[Message]) -> str:
        _check_characters(where, chat)
        try:
            return template.render(chat)
        except TemplateError as error:
            raise InputError(
                where, f"the tokenizer's chat template refuses it: {error_text(error)}", "mend the row, or leave it out"
            ) from None

    return render


def messages(where: str, value: object, content: ContentReader | None = None) -> list[Message]:
    """The messages of one chat, in the form that templates read: `role`, `content` and further keys.

    `content`: reads that of a message; None: text alone. ShareGPT's `from` and `value` are renamed. Raises InputError
    naming the chat by `where`, the message and the fault.
    """
    if not isinstance(value, list) or not value:
        raise InputError("", f"{where} holds no chat but {_shown(value)}", f"it must hold {FORM}")
    return [
        _message(f"{where}, message {number}", message, content or _text) for number, message in enumerate(value, 1)
    ]


def content_parts(where: str, content: object) -> list[Message]:
    """The content of a message as parts, images among them, which is how the templates of processors read it.

    Text stays in the order in which it stands to images. Raises InputError for a part that is neither.
    """
    parts = content if isinstance(content, list) else [content]
    return [
        {"type": "image"} if is_image(part) else {"type": "text", "text": _text_of_row(where, [part])} for part in parts
    ]


def _message(where: str, value: object, read: ContentReader) -> Message:
    if not isinstance(value, dict):
        raise InputError(where, f"is no message but {_shown(value)}", f"a chat is {FORM}")
    message = _with_role(where, _without_nulls(value))  # tables fill in what a row lacks
    where = f"{where} ({message['role']})"
    calls = [_call(where, call) for call in _listed_calls(where, message.pop("tool_calls", []))]
    content = message.pop("content", None)
    if content is not None or not calls:
        message["content"] = read(where, content)
    if calls:
        message["tool_calls"] = calls
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return _in_order(KEYS, message)


def _with_role(where: str, message: Message) -> Message:
    """Name what a message of ShareGPT's form holds as templates do; raises InputError for one without a role."""
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        message["role"] = ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
        message["content"] = message.pop("value", None)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(where, f"its role is {_shown(role)}", 'it must be a string such as "user" or "assistant"')
    return message


def _text(where: str, content: object) -> str:
    """The text of a message, of which parts are lines of their own, as in vLLM."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    kinds = [part.get("type") or "text" for part in parts if isinstance(part, dict)]
    lines = [text for text in texts if isinstance(text, str)]
    if not isinstance(content, list) or len(lines) < len(parts) or kinds.count("text") < len(kinds):
        raise InputError(where, f"its content is {_shown(content)}", "it must be a string, or parts that are text")
    return "\n".join(lines)


def _text_of_row(where: str, content: object) -> str:
    """The text of a message of a row, whose images are files; raises InputError for images as OpenAI's API has them."""
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict) and part.get("type") in ADDRESSES:
            raise InputError(where, f"its content has an image as {part['type']}", f"name a file: {IMAGE_FORM}")
    return _text(where, content)


def _listed_calls(where: str, calls: object) -> list[Any]:
    if not isinstance(calls, list):
        raise InputError(where, f"its tool_calls is {_shown(calls)}", f"it must be a list of calls {CALL_FORM}")
    return calls


def _call(where: str, value: object) -> Message:
    """One tool call; some data sets have the function's name and arguments without a `function` around them."""
    call = _without_nulls(value) if isinstance(value, dict) else {}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(where, f"its tool call is {_shown(value)}", f"it must be {CALL_FORM}")
    function = _without_nulls(function)
    name = function["name"]
    text = function.get("arguments")
    arguments = arguments_object(text)
    if arguments is None:
        raise InputError(
            where,
            f"the arguments of its call of {name} are {_shown(text)}",
            "they must be an object, as such or in JSON",
        )
    function = _in_order(("name", "arguments"), function | {"arguments": arguments})
    if "function" not in call:
        return function
    return _in_order(CALL_KEYS, {"type": "function", **call, "function": function})


def arguments_object(value: object) -> dict[str, Any] | None:
    """The arguments of a tool call as an object: of one, of its JSON text, or of nothing; None for anything else."""
    if isinstance(value, str) and value:
        try:
            value = from_json(value, allow_inf_nan=False)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None
    if isinstance(value, dict):
        return value
    return {} if value in (None, "") else None


def _without_nulls(fields: Mapping[str, Any]) -> Message:
    return {key: value for key, value in fields.items() if value is not None}


def _in_order(keys: tuple[str, ...], fields: Message) -> Message:
    return {key: fields[key] for key in keys if key in fields} | fields


def _check_characters(where: str, chat: list[Message]) -> None:
    """Raise InputError for a message with characters that are in no text."""
    for number, message in enumerate(chat, 1):
        for key, value in message.items():
            wrong = next(filter(None, map(fault, _strings(value))), None)
            if wrong:
                raise InputError(
                    f"{where}, message {number} ({message['role']})", f"its {key} holds {wrong}", "mend it"
                )


def _strings(value: object) -> Iterator[str]:
    """Every string within a value of JSON, names of fields too; as deep as it may be."""
    waiting = [value]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            waiting += [*entry.keys(), *entry.values()]
        elif isinstance(entry, list):
            waiting += entry


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:40]}…"
