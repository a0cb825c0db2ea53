"""The registry of text files: one entry adds a format.

Errors, the help of `--data`, the paths of `--config` files and the docs follow from it. Its reader needs libraries that
the command line does not load, so it stands in `documents.py` and names its entry (`rows.reads`). Data sets that
`datasets` saved, and those on the hub, have no suffix: the directory or the name identifies them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TextFileFormat:
    """A kind of text file: the suffixes of its names, in lower case, and what one document of it is."""

    suffixes: tuple[str, ...]
    document: str


#: The formats by name.
FORMATS: Mapping[str, TextFileFormat] = {
    "text": TextFileFormat((".txt",), "the file"),
    "jsonl": TextFileFormat((".jsonl",), "a row"),
    "parquet": TextFileFormat((".parquet",), "a row"),
}
#: The suffix of every file that is read as text; a hub name ends otherwise.
SUFFIXES = tuple(suffix for form in FORMATS.values() for suffix in form.suffixes)


def listed(suffixes: Sequence[str]) -> str:
    """The suffixes within a sentence: `.txt, .jsonl or .parquet`."""
    return " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
