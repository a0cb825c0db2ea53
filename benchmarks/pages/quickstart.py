"""The table of docs/quickstart.md: the README's commands, timed from a new clone to an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from markdown import load, table

#: Column -> what a command of it has in it.
STEPS = {"install": ("-m venv", "pip install", "docker build"), "`fp8q run`": ("fp8q run",),
         "server ready": ("vllm serve", "docker run"), "first answer": ("fp8q compare", "curl")}  # fmt: skip
NAMES = {"vllm": "vLLM", "triton": "Triton"}


def first_evening() -> str:
    """Commands, pages and seconds of each way, and what stood in for parts that the machine lacks."""
    rows = [
        [
            NAMES[name],
            str(len(way["commands"])),
            str(len(way["pages"])),
            *(_seconds(way["commands"], marks) for marks in STEPS.values()),
            f"{way['minutes']}",
            "; ".join(dict.fromkeys(reason for each in way["commands"] for reason in each["stand_ins"])),
        ]
        for name in NAMES
        for way in [load(f"first_evening_{name}")["ways"][name]]
    ]
    head = ["way", "commands", "pages", *(f"{step}, s" for step in STEPS), "minutes", "what stood in here"]
    return table(head, rows)


def _seconds(commands: Sequence[Mapping[str, Any]], marks: Sequence[str]) -> str:
    return f"{sum(each['seconds'] for each in commands if any(mark in each['command'] for mark in marks)):.0f}"


TABLES = (first_evening,)
