"""Mutations of a TOML file of options: another value, another key, a table, or no TOML."""

import random

from mutate_bytes import mutate_bytes

VALUES = (
    '""', '"x"', "0", "-1", "1", "1.5", "nan", "inf", "-inf", "1e400", "true", "[]", "[[]]", '["x", 1]', "{}",
    "{ a = 1 }", "1979-05-27", "07:32:00", "9223372036854775808", "0x10", '"\\u001b[2J"', "'''\nx'''",
    '"texts/other.txt"', '"../x"', "1" + "0" * 400, '"' + "long " * 5000 + '"', "[" * 200 + "]" * 200,
    "[" * 5000 + "]" * 5000, "null", "=", '"0:1"', '"\\ud800"', "0b1", "1_0", '"a\tb"', '"/dev/zero"',
)  # fmt: skip
KEYS = (
    "", "x", "out", "data",
    "Data", "eval_data", "eval-data", "samples", "skip", "method", "percentile", "json", "config",
    "print-config", "help", "version", "revision", "stream", "no-stream", '"\\u001b[2J"',
    "a.b", "model.x", '""', "seed", "chat-template", "trust-remote-code", "max-batch",
)  # fmt: skip


def mutate_toml(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """A description, and the file with one line another, more, fewer, or its bytes changed."""
    lines = content.decode().splitlines()
    at = draw.randrange(len(lines))
    key, _, value = lines[at].partition(" = ")
    new, other = draw.choice(VALUES), draw.choice(KEYS)
    forms = {
        f"{key} = {new[:30]}": [*lines[:at], f"{key} = {new}", *lines[at + 1 :]],
        f"{other} for {key}": [*lines[:at], f"{other} = {value}", *lines[at + 1 :]],
        f"{other} = {new[:30]}": [*lines, f"{other} = {new}"],
        f"{key} twice": [*lines, lines[at]],
        f"{key} gone": lines[:at] + lines[at + 1 :],
        f"[{other}] above {key}": [*lines[:at], f"[{other}]", *lines[at:]],
        "CRLF": [line + "\r" for line in lines],
    }
    what = draw.choice([*list(forms)[:3] * 3, *list(forms)[3:], "bytes", "UTF-16"])
    if what == "UTF-16":
        return what, content.decode().encode("utf-16")
    return mutate_bytes(draw, content) if what == "bytes" else (what, "\n".join([*forms[what], ""]).encode())
