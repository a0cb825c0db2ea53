"""Compare the tokenizers of two checkpoints by what they do: ids of texts, and texts of ids.

A library that writes a tokenizer again may spell its rules otherwise, and mean the same. So both read the same texts,
and write the same tokens: as tokenizer.json stands, and as AutoTokenizer makes it of all files, by which vLLM serves.
What no such sample shows (a limit of length, padding, merges that are left out at random) is read from the file. Rules
that are spelt otherwise without another effect are a warning.

Sides on which a batch is filled up, and the token for that, change no answer, and are not compared.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...calibrate.checkpoint.companions import TOKENIZER
from ...calibrate.checkpoint.config_fields import abbreviated
from ...calibrate.input.silence import muted, quiet_transformers
from ...calibrate.input.untrusted import error_text, foreign
from ...calibrate.model.tokenizer import SAMPLES, auto_of
from ...core.errors import InputError
from .document import Cause

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

RULE = "tokenizer"
#: The remedy for any difference.
REMEDY = "copy the original's tokenizer files beside the weights"
#: Where the settings of AutoTokenizer stand.
SETTINGS = "tokenizer_config.json"
#: More texts for the rules of spaces and case, around which special tokens are put too.
AROUND = ("{}", "a{}b", "A {} B", " {} \n{}")
#: The most added tokens that are read within texts, and the most characters and tokens of an example.
MOST_ADDED = 200
EXAMPLE = 24
SHOWN = 8
#: Parts of tokenizer.json that are compared by themselves, or hold nothing but names.
APART = ("version", "truncation", "padding", "added_tokens")
#: Numbers of tokens that stand for no limit.
NO_LIMIT = 10**9

Encode = Callable[[str, bool], Sequence[int]]
Decode = Callable[[Sequence[int], bool], str]


@dataclass(frozen=True)
class Reader:
    """A tokenizer: `encode` of a text, with special tokens around it or without, `decode` of ids, without special
    tokens or with them, and `token`, the text of an id in the vocabulary.
    """

    encode: Encode
    decode: Decode
    token: Callable[[int], object]

    def shown(self, ids: Sequence[int]) -> str:
        """The first of some tokens."""
        text = " ".join(str(self.token(number)) for number in ids[:SHOWN])
        return f"{text} …" if len(ids) > SHOWN else text


@dataclass
class TokenizerFile:
    """The tokenizer.json of a checkpoint, in the spelling of this version of tokenizers."""

    path: Path
    tokenizer: "Tokenizer"
    parts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> "TokenizerFile":
        """Read it; raises InputError where it is missing or damaged."""
        from tokenizers import Tokenizer

        path = directory / TOKENIZER
        if not path.is_file():
            raise InputError(path, "there is no such file", "copy it from the model")

        def refusal(error: BaseException) -> InputError:
            return InputError(path, f"tokenizers cannot read it ({error_text(error)})", "copy it again from the model")

        with foreign(refusal):
            tokenizer = Tokenizer.from_file(str(path))
            parts = json.loads(tokenizer.to_str())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(path, tokenizer, parts)

    def reader(self) -> Reader:
        """Read and write as the file says."""
        tokenizer = self.tokenizer
        return Reader(
            lambda text, special: tokenizer.encode(text, add_special_tokens=special).ids,
            lambda ids, without: str(tokenizer.decode(list(ids), skip_special_tokens=without)),
            tokenizer.id_to_token,
        )


def tokenizer_differences(
    original: Path, candidate: Path, texts: Sequence[str], positions: int | None
) -> Iterator[Cause]:
    """Yield the differences of two tokenizers of one vocabulary that change what a server reads or writes.

    `texts`: some of the text that is evaluated. `positions`: of the candidate. Raises InputError where one is damaged.
    """
    ours = TokenizerFile.read(original)
    theirs = TokenizerFile.read(candidate)
    yield from _limits(ours.parts, theirs.parts, positions)
    samples = [*SAMPLES, *texts, *_with_added(ours), *_with_added(theirs)]
    size = max(ours.tokenizer.get_vocab_size(), theirs.tokenizer.get_vocab_size())
    different = next(_otherwise(ours.reader(), theirs.reader(), samples, range(size)), None)
    if different:
        yield _cause("error", TOKENIZER, different)
    else:
        yield from _spelt_otherwise(ours.parts, theirs.parts)
    yield from _as_transformers_reads(original, candidate, samples, positions, different is None)


def _cause(severity: Any, subject: str, fault: str, remedy: str = REMEDY) -> Cause:
    return Cause(rule=RULE, severity=severity, subject=subject, fault=fault, remedy=remedy)


def _limits(ours: dict[str, Any], theirs: dict[str, Any], positions: int | None) -> Iterator[Cause]:
    """Yield the limits that a text of a usual length does not show."""
    truncation = theirs["truncation"]
    padding = theirs["padding"]
    dropout = theirs["model"].get("dropout")
    if truncation and truncation != ours["truncation"] and truncation["max_length"] < (positions or NO_LIMIT):
        yield _cause(
            "error",
            f"{TOKENIZER}: truncation",
            f"cuts every text to {truncation['max_length']:,} tokens in servers that read the file as it is, and the "
            "original's does not",
            "write null there, as the original has it",
        )
    if padding and padding != ours["padding"] and padding["strategy"] != "BatchLongest":
        yield _cause(
            "error",
            f"{TOKENIZER}: padding",
            f"fills every text up by {abbreviated(padding['strategy'])} in servers that read the file as it is, and "
            "the original's does not",
            "write null there, as the original has it",
        )
    if dropout and dropout != ours["model"].get("dropout"):
        yield _cause(
            "error", f"{TOKENIZER}: dropout", f"leaves out merges at random, {dropout:g} of them: no two prompts agree"
        )


def _with_added(file: TokenizerFile) -> Iterator[str]:
    """Texts with each added token in them."""
    for entry in file.parts["added_tokens"][:MOST_ADDED]:
        yield from (form.replace("{}", entry["content"]) for form in AROUND)


def _otherwise(ours: Reader, theirs: Reader, samples: Sequence[str], single: Iterable[int]) -> Iterator[str]:
    """Yield a sentence for the first text that is read, or whose tokens are written, in another form, and for the first
    of `single` tokens that is.
    """
    for text in samples:
        for special in (True, False):
            first = ours.encode(text, special)
            second = theirs.encode(text, special)
            if first != second:
                start = max(0, _common(first, second) - 2)
                yield (
                    f"reads {_example(text)} as {theirs.shown(second[start:])}, and the original's as "
                    f"{ours.shown(first[start:])}: prompts are other tokens"
                )
                return
    written = itertools.chain((ours.encode(text, False) for text in samples), ([number] for number in single))
    for ids in written:
        for without in (True, False):
            before = ours.decode(ids, without)
            after = theirs.decode(ids, without)
            if before != after:
                yield (
                    f"writes the tokens {ours.shown(ids)} as {_example(after)}, and the original's as "
                    f"{_example(before)}: answers are other texts"
                )
                return


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of ids at the beginning that both have."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(first), len(second)))


def _example(text: str) -> str:
    return repr(text if len(text) <= EXAMPLE else f"{text[:EXAMPLE]}…")


def _spelt_otherwise(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Cause]:
    """Rules that differ in the file, and in no sample."""
    different = sorted(name for name in {*ours, *theirs} - {*APART} if ours.get(name) != theirs.get(name))
    if different:
        yield _cause(
            "warning",
            f"{TOKENIZER}: {', '.join(different)}",
            "is not the original's, though all samples are read and written alike",
        )


@contextmanager
def _transformers(directory: Path) -> Iterator[None]:
    def refusal(error: BaseException) -> InputError:
        return InputError(directory, f"its tokenizer does not load: {error_text(error)}", REMEDY)

    with foreign(refusal), quiet_transformers(), muted():
        yield


def _as_transformers_reads(
    original: Path, candidate: Path, samples: Sequence[str], positions: int | None, files_agree: bool
) -> Iterator[Cause]:
    """Compare what AutoTokenizer makes of all files; texts are read where tokenizer.json `files_agree`."""
    made: list[PreTrainedTokenizerBase] = []
    for directory in (original, candidate):
        with _transformers(directory):
            made.append(auto_of(directory))
    ours, theirs = made
    for name in ("bos_token", "eos_token", "unk_token"):
        values = getattr(ours, name), getattr(theirs, name)
        if values[0] != values[1]:
            yield _cause(
                "error", f"{SETTINGS}: {name}", f"is {values[1]!r}, and the original's {values[0]!r}: {_ROLES[name]}"
            )
    limits = [min(int(tokenizer.model_max_length), positions or NO_LIMIT, NO_LIMIT) for tokenizer in made]
    if limits[0] != limits[1]:
        fault = f"is {limits[1]:,}, and the original's {limits[0]:,}: vLLM takes no longer texts"
        yield _cause("error", f"{SETTINGS}: model_max_length", fault)
    if files_agree:
        # a name that is no token of the vocabulary, the empty one among them, has no id
        special = sorted({*ours.all_special_ids, *theirs.all_special_ids} - {None})
        with _transformers(candidate):
            different = next(_otherwise(_auto_reader(ours), _auto_reader(theirs), samples, special), None)
        if different:
            yield _cause("error", SETTINGS, f"with it, AutoTokenizer (vLLM's) {different}")


_ROLES = {
    "bos_token": "prompts begin otherwise",
    "eos_token": "answers end otherwise",
    "unk_token": "unknown characters are read otherwise",
}


def _auto_reader(tokenizer: "PreTrainedTokenizerBase") -> Reader:
    return Reader(
        lambda text, special: tokenizer.encode(text, add_special_tokens=special, verbose=False),
        lambda ids, without: str(tokenizer.decode(list(ids), skip_special_tokens=without)),
        tokenizer.convert_ids_to_tokens,
    )
