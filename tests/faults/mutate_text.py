"""Mutations of texts: encodings that are taken for another, rows that are none, and tables of other types."""

import io
import json
import random
from pathlib import Path

from mutate_bytes import mutate_bytes

ROWS = (
    "", "null", "[]", "{}", "0", '"text"', '{"text": null}', '{"text": 5}', '{"text": ""}', '{"text": ["a"]}',
    '{"text": "\\ud800"}', '{"messages": []}', '{"messages": null}', '{"messages": [{"role": "user"}]}',
    '{"text": NaN}', '{"messages": [{"role": 5, "content": {"a": 1}}]}', "{" * 2000, '{"a":' * 5000,
    '{"text": "x"', "\x00", "\x1b[2J", json.dumps({"text": "x " * 100_000}),
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
)  # fmt: skip


def mutate_text(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """A description, and a plain text in another form."""
    text = content.decode()
    at = draw.randrange(len(content))
    forms = {
        "UTF-16 without a byte order mark": text.encode("utf-16-le"),
        "UTF-16 (big-endian) without a byte order mark": text.encode("utf-16-be"),
        "UTF-16": text.encode("utf-16"),
        "UTF-8 with a byte order mark": b"\xef\xbb\xbf" + content,
        "UTF-32 without a byte order mark": text.encode("utf-32-le"),
        "latin-1": content[:at] + "é".encode("latin-1") + content[at:],
        "a NUL byte": content[:at] + b"\0" + content[at:],
        "NUL bytes for a tenth of it": content + bytes(len(content) // 9),
        "a lone surrogate": content[:at] + b"\xed\xa0\x80" + content[at:],
        "one line": content.replace(b"\n", b" ") * 50,
        "carriage returns": content.replace(b"\n", b"\r"),
        "one character a million times": b"a" * 1_000_000,
        "empty": b"",
        "white space": b" \n\t" * 5000,
        "short": content[:40],
        "control characters": content[:at] + b"\x1b[2J\x07\x08" + content[at:],
        "no Unicode characters": "\ufffe\uffff\U0010ffff".encode() * 300 + content,
        "special tokens": b"<s></s>" * 2000,
        "the other half": content[len(content) // 2 :] * 2,
    }
    what = draw.choice([*forms, "bytes"])
    return (what, forms[what]) if what in forms else mutate_bytes(draw, content)


def mutate_rows(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """A line of JSON replaced or added, or the file as a text mutated."""
    if draw.random() < 0.3:
        return mutate_text(draw, content)
    lines, row = content.decode().splitlines(), draw.choice(ROWS)
    at = draw.randrange(len(lines))
    if draw.random() < 0.2:
        return f"every row {row[:40]!r}", "".join(f"{row}\n" for _ in lines).encode()
    return f"row {at} {row[:40]!r}", "".join(f"{x}\n" for x in [*lines[:at], row, *lines[at + 1 :]]).encode()


def mutate_parquet(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """A table of another schema, or bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    if draw.random() < 0.4:
        return mutate_bytes(draw, content)
    texts = parquet.read_table(io.BytesIO(content))["text"].to_pylist()
    tables = {
        "no rows": pa.table({"text": pa.array([], pa.string())}),
        "no columns": pa.table({}),
        "numbers": pa.table({"text": list(range(12))}),
        "all null": pa.table({"text": [None] * 12}),
        "one null": pa.table({"text": [None, *texts[1:]]}),
        "bytes": pa.table({"text": [text.encode("utf-16-le") for text in texts]}),
        "lists": pa.table({"text": [[text] for text in texts]}),
        "another name": pa.table({"\x1b[31mtext": texts}),
        "two text columns": pa.table({"text": texts, "content": texts[::-1]}),
        "a dictionary": pa.table({"text": pa.array(texts).dictionary_encode()}),
        "large strings": pa.table({"text": pa.array(texts, pa.large_string())}),
        "not UTF-8": pa.table({"text": not_utf8(texts)}),
        "messages of numbers": pa.table({"messages": [[1, 2]] * 12}),
    }
    what = draw.choice(list(tables))
    written = io.BytesIO()
    parquet.write_table(tables[what], written)
    return what, written.getvalue()


def not_utf8(texts: list[str]) -> object:
    """A column that says it is text and holds other bytes."""
    import pyarrow as pa

    return pa.array([text.encode() + b"\xff\xfe" for text in texts], pa.binary()).view(pa.string())


#: Changes of a text after which `calibrate` refuses, or says something: the tokens would be those of no text.
MUST_BE_SAID = ("UTF-16 without", "UTF-16 (big-endian) without", "UTF-32 without", "NUL bytes for a tenth")


def mutate_saved(draw: random.Random, folder: Path) -> str:
    """One file of a saved data set mutated as bytes or JSON; what was done."""
    from mutate_json import mutate_json

    path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    change = mutate_json if path.suffix == ".json" else mutate_bytes
    what, content = change(draw, path.read_bytes())
    path.write_bytes(content)
    return f"{path.name} {what}"
