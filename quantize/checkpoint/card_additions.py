"""Add to the model card what later stages measured: a verdict, scores, what other hosts validated.

No torch is imported: the card may lie where only engines run.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from ...core.files import replacing

#: The marks before and behind a paragraph that a later stage writes, by which `state_in_card` finds it.
COST = "<!-- cost of one term -->"
TASKS = "<!-- tasks -->"
END = "<!-- end -->"
#: The paragraph on the cost of one term in the place of two.
NOT_MEASURED = "`fp8q validate RUN` measures what one term costs this model, and writes it here."
ONE_TERM_COST = f"{COST}\n{{cost}}\n{END}\n\n"
#: The paragraph on benchmarks.
TASK_SCORES = f"{TASKS}\n{{scores}}\n{END}"
NOT_EVALUATED = "`fp8q evaluate RUN --tasks TASKS` asks BF16 and FP8 lm-eval's tasks, and writes their scores here."
#: The paragraph on the verdict.
ACCURACY_MARK = "<!-- accuracy -->"
ACCURACY = f"{ACCURACY_MARK}\nNot measured yet: `fp8q validate RUN` writes its verdict here.\n{END}"
#: The marks around the paragraph on runtimes that were validated on other hosts.
MARKS = ("<!-- validated elsewhere -->", "<!-- end of validated elsewhere -->")


def state_validated(card: Path, lines: Sequence[str]) -> None:
    """Write `lines`, one for each runtime, at the end of the model card in the file `card`, in the place of those that
    are there; no lines remove the paragraph.

    A card without a file is left as it is: its owner may have taken it away.
    """
    try:
        text = card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    before, first, rest = text.partition(MARKS[0])
    if not first and not lines:
        return
    after = rest.partition(MARKS[1])[2].lstrip("\n") if first else ""
    listed = "\n".join(f"- {line}" for line in lines)
    paragraph = f"\n{MARKS[0]}\n**Validated where it is served**:\n\n{listed}\n{MARKS[1]}\n" if lines else ""
    new = before.rstrip("\n") + "\n" + paragraph + after
    if new != text:
        with replacing(card) as partial:
            partial.write_text(new, encoding="utf-8")


def state_in_card(card: Path, mark: str, text: str) -> None:
    """Write `text` into the model card in the file `card`, behind this `mark`, in the place of what it says there.

    A card without the marks, or without a file, is left as it is: its owner may have written another.
    """
    try:
        before = card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    head, first, rest = before.partition(mark)
    _, last, tail = rest.partition(END)
    new = f"{head}{first}\n{text}\n{last}{tail}"
    if last and new != before:
        with replacing(card) as partial:
            partial.write_text(new, encoding="utf-8")


def markdown_text(text: str) -> str:
    """Escape an untrusted text for Markdown: one line, which shows the text itself, without markup and HTML."""
    return _escaped(_one_line(text))


def markdown_message(text: str) -> str:
    """Escape a message for Markdown, except that its commands, in backticks, become inline code."""
    parts = re.split(r"`([^`]*)`", _one_line(text))
    return "".join(markdown_code(part) if index % 2 else _escaped(part) for index, part in enumerate(parts))


def markdown_code(text: str) -> str:
    """Format an untrusted `text` as inline code, fenced by more backticks than it contains."""
    line = _one_line(text)
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    gap = " " if "`" in line else ""
    return f"{fence}{gap}{line}{gap}{fence}"


def _one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _escaped(line: str) -> str:
    return re.sub(r"([\\`*\[\]<>~&$]|(?<!\w)_|_(?!\w))", r"\\\1", line)
