"""Add to the model card what was measured on other hosts, with no torch: the card may lie where only engines run."""

from collections.abc import Sequence
from pathlib import Path

from ...core.files import replacing

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
