"""Make the prompts of needles: filler text with one sentence hidden at a depth, and the beginning of it at the end.

    filler … The secret number of Bavodi is 4821. … filler. The secret number of Bavodi is

The answer is what the sentence said. Prompts are made of tokens, so that each has the length that was asked for; the
text is the same for every model of a run, and is drawn by a fixed seed. The names are made, so that no model knows
them, and each number is drawn, so that it has to be read.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...core.errors import InputError
from ...core.files import reading

#: The shares of the filler that stand before the sentence.
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SENTENCE = "The secret number of {key} is {value}."
#: The least and the largest number that is hidden.
NUMBERS = (1000, 9999)
CONSONANTS = list("bdfgklmnprstvz")
VOWELS = list("aeiou")
SYLLABLES = 3
SEED = 0
Tokens = npt.NDArray[np.int64]
#: Token ids of a text, without the tokens that a tokenizer puts in front.
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Haystack:
    """The text that needles are hidden in: `ids` int64 [tokens] of the text `name`, and the `sentence` with `{key}` and
    `{value}`. `prefix`: the tokens that every prompt begins with.
    """

    name: str
    ids: Tokens
    sentence: str = SENTENCE
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True)
class Needle:
    """A prompt with its answer: `ids` int64 [length], of which the last `answer` ones are the answer's."""

    length: int
    depth: float
    trial: int
    key: str
    value: str
    ids: Tokens
    answer: int


def read_haystack(path: Path, encode: Encode, prefix: tuple[int, ...]) -> Haystack:
    """Read a file of needles: the sentence on its first line, and the filler text behind it.

    Raises InputError for a file that is no text, or whose first line lacks `{key}` before `{value}`.
    """
    with reading(path, "text", "give a UTF-8 file"):
        first, _, filler = path.read_text(encoding="utf-8").partition("\n")
    if not re.fullmatch(r"[^{}]*\{key\}[^{}]*\{value\}[^{}]*", first):
        raise InputError(
            f"--needle-text {path}",
            f"its first line is {first[:60]!r}",
            f"give there the sentence to hide, with {{key}} and behind it {{value}}, such as {SENTENCE!r}, and the "
            "filler text behind that line",
        )
    return Haystack(str(path), np.array(encode(filler), np.int64), first, prefix)


def make_needles(haystack: Haystack, lengths: Sequence[int], trials: int, encode: Encode) -> list[Needle]:
    """Make `trials` needles at each depth of prompts of each of `lengths` tokens, answer included.

    Raises InputError for a length that has no room for the sentence, or is longer than the text fills.
    """
    draw = np.random.default_rng(SEED)
    return [
        _needle(haystack, (length, depth, trial), encode, draw)
        for length in lengths
        for trial in range(trials)
        for depth in DEPTHS
    ]


def _needle(haystack: Haystack, cell: tuple[int, float, int], encode: Encode, draw: np.random.Generator) -> Needle:
    """Make the needle of a `cell`: length, depth and trial."""
    length, depth, trial = cell
    key = "".join(draw.choice(letters) for letters in (CONSONANTS, VOWELS) * SYLLABLES).capitalize()
    value = str(draw.integers(*NUMBERS, endpoint=True))
    begun = haystack.sentence[: haystack.sentence.index("{value}")].replace("{key}", key)
    hidden = encode("\n" + haystack.sentence.replace("{key}", key).replace("{value}", value) + "\n")
    question = encode("\n" + begun.rstrip())
    answered = encode("\n" + begun + value)
    asked = next(
        (n for n, pair in enumerate(zip(question, answered, strict=False)) if pair[0] != pair[1]), len(question)
    )
    room = length - len(haystack.prefix) - len(hidden) - len(answered)
    if room < 1:
        raise InputError(
            f"--needles {length}",
            f"leaves no token of the text beside {length - room} of the sentence and the question",
            f"give at least {length - room + 1}",
        )
    if len(haystack.ids) < room:
        raise InputError(
            f"--needles {length}",
            f"hides a needle in {room:,} tokens of text, and {haystack.name} has {len(haystack.ids):,}",
            "give more with --needle-text FILE, or fewer tokens",
        )
    start = draw.integers(len(haystack.ids) - room, endpoint=True)
    filler = haystack.ids[start : start + room].tolist()
    cut = round(depth * room)
    ids = [*haystack.prefix, *filler[:cut], *hidden, *filler[cut:], *answered]
    return Needle(length, depth, trial, key, value, np.array(ids, np.int64), len(answered) - asked)


def digest_of(needles: Sequence[Needle]) -> str:
    """SHA-256 of all prompts and of where their answers begin."""
    digest = hashlib.sha256()
    for needle in needles:
        digest.update(f"{needle.length} {needle.depth} {needle.trial} {needle.answer}\n".encode())
        digest.update(np.ascontiguousarray(needle.ids, dtype="<i8").tobytes())
    return digest.hexdigest()
