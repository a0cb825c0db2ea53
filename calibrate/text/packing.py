"""Cut windows that begin like served text: with the tokens that the tokenizer puts in front of a text, mostly one BOS.

A window of `size` tokens is the prefix and `size` less its length of the text's own tokens, packed without gaps. Where
the text has the prefix at that place, at the beginning of a document, it is not repeated. Without a prefix windows are
cut from the tokens unchanged, and only the first window of a text begins with BOS: this is the plain recipe (Hugging
Face, "Perplexity of fixed-length models"), and what fp8q did before the option existed. A model that was trained with
BOS in front attends to it from every token, and its activations are others without it (docs/decisions/0016).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...core.errors import InputError
from ..input.silence import muted
from ..input.untrusted import error_text, foreign

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Two texts without common tokens: tokens in front of both are the tokenizer's.
SAMPLES = ("The quick brown fox", "0 = x\n")
#: Characters of a text that takes the place of a sample.
SAMPLE = 40
Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """Windows of `size` tokens, each of which begins with the tokens `prefix`."""

    size: int
    prefix: tuple[int, ...] = ()

    @property
    def text(self) -> int:
        """The number of tokens of the text in each window."""
        return self.size - len(self.prefix)

    def check(self, option: str) -> None:
        """Raise InputError, naming the `option` of the size, when a window has no room for the text."""
        if self.text < 1:
            raise InputError(
                f"{option} {self.size}",
                f"leaves no token of the text in a window, which begins with the tokenizer's {len(self.prefix)}",
                f"give at least {len(self.prefix) + 1}, or calibrate with --bos never",
            )

    def starts(self, ids: Tokens, stride: int | None = None) -> Tokens:
        """The positions in `ids` int64 [tokens] at which the text of each whole window begins.

        `stride`: tokens from one start to the next; None: windows follow each other without overlap. Tokens that fill
        no window are dropped.
        """
        begins = self.beginnings(ids)
        starts: list[int] = []
        place = 0
        while True:
            if place < len(ids) and begins[place]:
                place += len(self.prefix)
            if place + self.text > len(ids):
                return np.array(starts, np.int64)
            starts.append(place)
            place += stride or self.text

    def windows(self, ids: Tokens, starts: Tokens) -> Tokens:
        """Make the windows whose text begins at `starts`, int64 [windows, size]."""
        text = ids[starts[:, None] + np.arange(self.text)]
        return np.concatenate([np.tile(np.array(self.prefix, np.int64), (len(starts), 1)), text], axis=1)

    def beginnings(self, ids: Tokens) -> npt.NDArray[np.bool_]:
        """Mark the positions in `ids` at which the prefix begins, bool [tokens]."""
        marks = np.zeros(len(ids), np.bool_)
        length = len(self.prefix)
        if 0 < length <= len(ids):
            marks[: len(ids) - length + 1] = (np.lib.stride_tricks.sliding_window_view(ids, length) == self.prefix).all(
                1
            )
        return marks


def prefix_of(tokenizer: "PreTrainedTokenizerBase", texts: Iterable[str] = ()) -> tuple[int, ...]:
    """The special tokens that the tokenizer puts in front of any text; empty where it puts none there.

    Where it cannot encode our samples, the beginnings of the first two of `texts` take their place. Raises InputError
    where the tokens cannot be told: windows without the BOS that is served would be measured without a word.
    """
    text_samples = tuple(text[:SAMPLE] for text in islice((text for text in texts if text.strip()), len(SAMPLES)))
    try:
        return _common_prefix(tokenizer, SAMPLES)
    except InputError:
        if not text_samples:
            raise
    return _common_prefix(tokenizer, text_samples)


def _common_prefix(tokenizer: "PreTrainedTokenizerBase", samples: tuple[str, ...]) -> tuple[int, ...]:
    """Return the tokens that are added in front of each of `samples`; raises InputError where these differ."""

    def unknown(why: str) -> InputError:
        return InputError(
            "--bos auto",
            f"what the tokenizer puts in front of a text cannot be told, since {why}",
            "give --bos never, which adds nothing to the text as it is tokenized",
        )

    with foreign(lambda error: unknown(f"it cannot encode {samples[0]!r}: {error_text(error)}")), muted():
        prefixes = {text: _before(tokenizer, text) for text in samples}
    for text, prefix in prefixes.items():
        if prefix is None:
            raise unknown(f"special tokens change those of {text!r}")
        if prefix != prefixes[samples[0]]:
            raise unknown(f"it is not the same for {samples[0]!r} and {text!r}")
    return prefixes[samples[0]] or ()


def _before(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[int, ...] | None:
    """Return the tokens that are added in front of those of `text` when it is encoded with special tokens; None where
    its own tokens are not among them.
    """
    with_special, plain = (
        list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]) for special in (True, False)
    )
    places = range(len(with_special) - len(plain) + 1)
    return next(
        (tuple(with_special[:place]) for place in places if with_special[place : place + len(plain)] == plain), None
    )
