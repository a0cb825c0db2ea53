"""Say in plain words why a field was refused, in the place of pydantic's own messages.

Each text completes "FIELD ..." and names the limit, as do the messages that fp8q writes itself. A type of error that is
not listed here has pydantic's message.
"""

import re
from collections.abc import Mapping
from typing import Any

#: pydantic's type of an error -> its text; `{...}` are entries of the error's context.
TEXTS: Mapping[str, str] = {
    "missing": "is missing",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "none_required": "must be null",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "set_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dataclass_type": "must be an object",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
}


#: The type of an error whose message is such a text: `PydanticCustomError(PLAIN, "must be …")`.
PLAIN = "plain"


def plain_text(error: Mapping[str, Any]) -> str:
    """Return the text of one of pydantic's errors (`ValidationError.errors()`)."""
    text = TEXTS.get(error["type"])
    if error["type"] == PLAIN:
        return str(error["msg"])
    if text is None:
        message = str(error["msg"])
        return f"is refused: {message[:1].lower()}{message[1:]}"
    context = dict(error.get("ctx", {}))
    if "expected" in context:  # in the words of JSON
        context["expected"] = re.sub(r"\b(True|False)\b", lambda word: word[0].lower(), context["expected"])
    return text.format(**{name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()})
