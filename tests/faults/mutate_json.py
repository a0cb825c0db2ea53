"""Mutations of a JSON file: at a random place of it another value, another key, or none; or something round the whole.

A value is written as text, since what breaks a reader is often what `json.dumps` never writes: `1e999`, a key twice, a
lone surrogate, ten thousand brackets.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

#: What a place is filled with, as JSON text.
VALUES = (
    "null", "true", "false", "0", "-1", "1", "2", "3", "17", "1.5", "-0.0", "NaN", "Infinity", "-Infinity", "1e999",
    "1e-400", "1e38", "1000000000", "2147483648", "9223372036854775808", "-9223372036854775808", "1" + "0" * 400, '""',
    '"x"', '"0"', '"null"', '"../secret"', '"/dev/zero"', '"\\u001b[2J\\u001b[1A\\r"', '"\\ud800"', '"\\u0000"',
    '"\\u202e\\u200b\\ufeff"', '"<script>alert(1)</script>"', "[]", "{}", "[null]", '[""]', "[[]]", '{"": 0}', "[0, 1]",
    json.dumps("long " * 20_000), "[" * 300 + "]" * 300, "[" * 30_000 + "]" * 30_000, json.dumps(list(range(5000))),
)  # fmt: skip
#: Keys that a reader may never have seen in a file of this kind, or has with consequences.
KEYS = (
    "", "schema", "unknown", "_class", "__proto__", "\u001b[31m", "model", "type", "version", "dtype", "torch_dtype",
    "architectures", "model_type", "auto_map", "transformers_weights", "quantization_config", "compression_config",
    "sliding_window", "layer_types", "rope_scaling", "rope_parameters", "rope_theta", "head_dim", "num_local_experts",
    "num_key_value_heads", "tie_word_embeddings", "attn_implementation", "_attn_implementation", "text_config",
    "vision_config", "is_encoder_decoder", "use_cache", "attention_bias", "mlp_bias", "hidden_act", "pad_token_id",
    "chat_template", "tokenizer_class", "add_bos_token", "model_max_length", "weight_map", "metadata", "stages",
)  # fmt: skip
PLACE = "\x00place\x00"

Place = tuple[Any, Any]


def mutate_json(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """A description, and `content` with one mutation."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return around(draw, content)
    if draw.random() < 0.12:
        return around(draw, content)
    place = descend(draw, document)
    if place is None:
        return around(draw, content)
    parent, key = place
    name = f"at {key!r}"[:60]
    kind = draw.choice(["value", "value", "value", "near", "delete", "twice", "rename", "add"])
    if kind == "delete":
        del parent[key]
        return f"{name}: deleted", json.dumps(document).encode()
    if kind == "rename" and isinstance(parent, dict):
        new = draw.choice([f"{key} ", str(key).upper(), draw.choice(KEYS), f"{key}\u200b", str(key)[::-1]])
        parent[new] = parent.pop(key)
        return f"{name}: called {new!r}"[:90], json.dumps(document).encode()
    if kind == "add" and isinstance(parent, dict):
        added, value = draw.choice(KEYS), draw.choice(VALUES)
        parent[added] = PLACE
        return f"beside {key!r}: {added!r} = {value[:30]}", filled(document, value)
    value = json.dumps(near(draw, parent[key])) if kind == "near" else draw.choice(VALUES)
    if kind == "twice" and isinstance(parent, dict):
        old, parent[key] = json.dumps(parent[key]), PLACE
        return f"{name}: twice, then {value[:30]}", filled(document, f"{old}, {json.dumps(str(key))}: {value}")
    parent[key] = PLACE
    return f"{name}: {value[:40]}", filled(document, value)


def filled(document: object, value: str) -> bytes:
    """The document as text, `value` where the placeholder is."""
    return json.dumps(document).replace(json.dumps(PLACE), value, 1).encode("utf-8", "surrogatepass")


def descend(draw: random.Random, document: object) -> Place | None:
    """A random place: a child at each level, so that a table of a thousand entries is no likelier than a field."""
    found: Place | None = None
    while isinstance(document, dict | list) and document and (found is None or draw.random() < 0.8):
        keys: Sequence[Any] = list(document) if isinstance(document, dict) else range(len(document))
        key = draw.choice(keys)
        found = (document, key)
        document = document[key]
    return found


def near(draw: random.Random, value: object) -> object:
    """A value like `value`: of another type, or the neighbour that a comparison with the wrong bound lets through."""
    if isinstance(value, bool):
        return draw.choice([not value, int(value), str(value)])
    if isinstance(value, int | float):
        return draw.choice([value + 1, value - 1, value * 2, -value, str(value), [value], value + 0.5])
    if isinstance(value, str):
        return draw.choice([value + "x", value[:-1], value.upper(), [value], {value: value}, value * 500])
    if isinstance(value, list):
        return draw.choice([value[::-1], value * 2, value[:-1], dict.fromkeys(map(str, value), 0), [value]])
    if isinstance(value, dict):
        return draw.choice([[value], list(value), {"": value}, dict.fromkeys(value)])
    return draw.choice([[value], "None", 0, {}])


def around(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """Something done to the whole file."""
    text = content.decode("utf-8", "replace")
    forms = {
        "empty": b"",
        "null": b"null",
        "a list": b"[]",
        "a string": b'"x"',
        "an empty object": b"{}",
        "in a list": b"[" + content + b"]",
        "with a byte order mark": b"\xef\xbb\xbf" + content,
        "as UTF-16": text.encode("utf-16"),
        "cut in the middle": content[: len(content) // 2],
        "with more after it": content + b"{}",
        "nested 100,000 deep": b"[" * 100_000 + b"]" * 100_000,
        "objects nested 100,000 deep": b'{"a":' * 100_000 + b"0" + b"}" * 100_000,
        "with NUL bytes": content[:-1] + b"\0\0\0" + content[-1:],
        "not UTF-8": content[:-1] + b"\xff\xfe" + content[-1:],
    }
    what = draw.choice(list(forms))
    return what, forms[what]
