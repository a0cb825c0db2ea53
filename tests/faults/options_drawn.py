"""Options: those that a command's own --help names, with values that it may or may not take."""

import random
import re

from fp8q.options import METHODS

VALUES = (
    "0", "1", "-1", "2", "3", "7", "16", "17", "32", "33", "1000000000", "9223372036854775808", "1" + "0" * 400, "1.5",
    "0.5", "-0.1", "nan", "inf", "-inf", "1e999", "99.9", "100", "0x10", "1_000", "٣", "", " ", "x", "true", "None",
    "*", "[", "\x1b[2J", "é", "\udcff", "a" * 5000, "../x", "/dev/null", "0:1", "1:1", "2:1", "0:99", "a:b",
    "1%", "101%", "-5%", "fp8", "v", "off", *METHODS, "bf16", "fp16", "int8",
    "gptq", "nearest", "power-of-two", "max", "most_recent", "sm89", "sm120", "sm00", "bf16,reference", "bf16,,bf16",
    "tensorrt", "tensorrt-rtx", "auto", "lm_head", "*.q_proj", "model.layers.0.*", "texts/text.txt", "texts/text.txt=2",
    "texts/text.txt=nan", "texts/text.txt=0", "texts/text.txt=-1", "texts/chats.jsonl", "tiny", "run",
    "nobody/nothing",
)  # fmt: skip


def names(help_text: str) -> tuple[str, ...]:
    """The long options that a command's help names, those that show it left out."""
    found = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", help_text)
    return tuple(name for name in sorted(set(found)) if name not in ("--help", "--help-all", "--version"))


def mutate_options(draw: random.Random, argv: list[str], known: tuple[str, ...]) -> tuple[str, list[str]]:
    """A description, and `argv` with one to three options more, fewer, twice, or of other values."""
    changed, told = list(argv), []
    for _ in range(draw.choice([1, 1, 2, 3])):
        at = draw.randrange(1, len(changed) + 1)
        kind = draw.choice(["option", "option", "option", "option", "replace", "delete", "argument", "unknown"])
        if kind == "option" and known:
            added = [draw.choice(known), draw.choice(VALUES)][: draw.choice([1, 2, 2, 2, 2])]
            changed += added
        elif kind == "replace" and at < len(changed):
            added = [changed[at], "->", changed.__setitem__(at, draw.choice(VALUES)) or changed[at]]
        elif kind == "delete" and at < len(changed):
            added = ["without", changed.pop(at)]
        elif kind == "argument":
            added = [draw.choice(VALUES)]
            changed.insert(at, added[0])
        else:
            added = [draw.choice(["--nonsense", "-x", "--", "-", "--jsn", "--OUT", "--data=", "@file", "--json=1"])]
            changed.insert(at, added[0])
        told.append(" ".join(added)[:60])
    return ", ".join(told), changed
