"""Read evenly spread parts of a file that is larger than a calibration needs, in constant memory.

Corpora are sorted by source and topic, so their beginning does not represent them, and reading a terabyte to calibrate
on a million tokens wastes a day. A file is therefore read at `PIECES` equidistant places, whole lines at each, up to
the limit in all. A file within the limit is read whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...core.errors import InputError

PIECES = 1024


@dataclass(frozen=True)
class Excerpt:
    """The bytes `content` of a file, which begin at `offset`."""

    offset: int
    content: bytes


def is_larger(path: Path, limit: int) -> bool:
    """Tell whether the file at `path` has more than `limit` bytes."""
    return path.stat().st_size > limit


def excerpt_note(spec: str, read: int, size: int, unit: str = "bytes") -> str:
    """The note that only a part of `spec` is read."""
    return f"{spec}: {read:,} of its {size:,} {unit} are read, evenly spread over it"


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread."""
    most = min(count, most)
    return [number * count // most for number in range(most)]


def text_pieces(path: Path, limit: int) -> Iterator[Excerpt]:
    """Pieces of a text file, together about `limit` bytes.

    They begin and end with lines, or between two characters where a line is too long.
    """
    size, share = path.stat().st_size, max(limit // PIECES, 1)
    with open(path, "rb") as handle:
        for offset in _seek_lines(handle, size, share):
            content = handle.read(share)
            if content and not content.endswith(b"\n"):
                content += handle.readline(share)
            yield _whole_characters(Excerpt(offset, content), at_end=handle.tell() >= size)


def line_pieces(path: Path, limit: int) -> Iterator[Excerpt]:
    """Whole lines of a file, together about `limit` bytes.

    Raises InputError for a line longer than `limit`.
    """
    size, share = path.stat().st_size, max(limit // PIECES, 1)
    with open(path, "rb") as handle:
        for start in _seek_lines(handle, size, limit):
            end = start + share
            while (offset := handle.tell()) < end and (line := handle.readline(limit)):
                if not line.endswith(b"\n") and len(line) == limit:
                    raise InputError(
                        path,
                        f"the line at byte {offset:,} is longer than {limit:,} bytes",
                        "each line must be one document",
                    )
                yield Excerpt(offset, line)


def _seek_lines(handle: BinaryIO, size: int, reach: int) -> Iterator[int]:
    """Seek to the beginning of a line at each of `PIECES` offsets, evenly spread over `size` bytes; yield its offset.

    The line may begin up to `reach` bytes behind the offset; where none does, reading begins in the middle of a line.
    Offsets that were read past already are skipped.
    """
    for start in spread(size, PIECES):
        if start >= handle.tell():
            handle.seek(max(start - 1, 0))
            if start:
                handle.readline(reach)
            yield handle.tell()


def _whole_characters(piece: Excerpt, at_end: bool) -> Excerpt:
    """Remove the parts of UTF-8 characters at both ends of `piece`."""
    content = piece.content
    skipped = next((number for number, byte in enumerate(content[:4]) if byte & 0xC0 != 0x80), 0)
    if not at_end and not content.endswith(b"\n"):
        last = next((number for number in range(1, min(4, len(content)) + 1) if content[-number] & 0xC0 != 0x80), 0)
        needed = (
            1
            if not last or content[-last] < 0xC0
            else 2
            if content[-last] < 0xE0
            else 3
            if content[-last] < 0xF0
            else 4
        )
        content = content[:-last] if last and needed > last else content
    return Excerpt(piece.offset + skipped, content[skipped:])
