"""Tokenize texts and cut them into windows; of a model only the tokenizer is used.

Windows are packed: documents follow each other, each with the tokenizer's own special tokens, and are cut into windows
(`packing`), so statistics contain no padding. If there are more windows than asked for, they are taken evenly over the
whole text: corpora are sorted by source and topic, so their beginning does not represent them. With a seed they are
drawn instead, by Philox's raw output, which NumPy keeps the same in every version.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...core.errors import InputError
from ...core.reporter import SILENT, Reporter
from ..input.silence import muted
from ..input.untrusted import error_text, foreign
from .documents import load_documents, load_texts
from .overlap import check_disjoint
from .packing import Packing
from .rows import Documents, Reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Documents",
    "Reading",
    "check_disjoint",
    "encode_texts",
    "fingerprint",
    "hold_out_tail",
    "joined_ids",
    "load_documents",
    "load_texts",
    "lower_default",
    "windows",
]

#: The most documents, and characters, that are tokenized in one call: the tokenizer needs some 450 bytes of memory for
#: each character.
DOCUMENTS = 1024
CHARACTERS = 2_000_000
Tokens = npt.NDArray[np.int64]


def fingerprint(texts: Sequence[str]) -> str:
    """SHA-256, in hexadecimal, of documents in UTF-8, each preceded by its length (8 bytes, little-endian)."""
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def encode_texts(
    texts: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    vocabulary: int | None = None,
    special_tokens: bool = True,
    report: Reporter = SILENT,
) -> Tokens:
    """Tokenize documents; returns their ids one after the other, int64 [tokens], each with its special tokens.

    `special_tokens` False: add none, for texts that contain theirs already (rendered chats). Raises InputError when an
    id is not below `vocabulary`, the number of rows of the model's embedding.
    """
    pieces = [np.zeros(0, np.int64)]
    with report.track("Tokenizing", sum(map(len, texts)), "characters") as advance:
        for batch, special in _batches(texts):
            encoded = _tokenized(batch, tokenizer, special_tokens and special)
            pieces += [np.asarray(ids, np.int64) for ids in encoded]
            advance(sum(map(len, batch)))
    ids = np.concatenate(pieces)
    if vocabulary is not None and len(ids) and ids.max() >= vocabulary:
        token = tokenizer.convert_ids_to_tokens(int(ids.max()))
        raise InputError(
            "",
            f"the tokenizer gives {token!r} the id {ids.max():,}, and the model's embedding ends at "
            f"{vocabulary - 1:,}: it is not this model's tokenizer",
            "put the right one beside config.json",
        )
    return ids


def joined_ids(
    name: str, documents: Sequence[Sequence[int]], tokenizer: "PreTrainedTokenizerBase", vocabulary: int
) -> tuple[Tokens, list[str]]:
    """Join documents, of the text `name`, that are tokenized already; returns their ids one after the other, int64
    [tokens], and the text of each, as the tokenizer decodes it.

    Raises InputError for an id that is not below `vocabulary`, the number of rows of the model's embedding.
    """
    ids = np.concatenate([np.zeros(0, np.int64), *(np.asarray(document, np.int64) for document in documents)])
    if ids.max() >= vocabulary:
        raise InputError(
            name,
            f"holds the id {ids.max():,}, and the model's embedding ends at {vocabulary - 1:,}: they are not this "
            "model's tokens",
            "give the text, or tokenize it with the tokenizer of this model",
        )

    def refusal(error: BaseException) -> InputError:
        return InputError(name, f"the tokenizer cannot decode its tokens: {error_text(error)}", "give the text itself")

    with foreign(refusal), muted():
        return ids, [str(tokenizer.decode(list(document), skip_special_tokens=False)) for document in documents]


def _tokenized(batch: list[str], tokenizer: "PreTrainedTokenizerBase", special_tokens: bool) -> list[list[int]]:
    def refusal(error: BaseException) -> InputError:
        return InputError(
            "",
            f"the tokenizer cannot read the text: {error_text(error)}",
            "put the tokenizer the model was trained with beside config.json",
        )

    with foreign(refusal), muted():
        ids: list[list[int]] = tokenizer(
            batch,
            add_special_tokens=special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
    return ids


def _batches(texts: Sequence[str]) -> Iterator[tuple[list[str], bool]]:
    """Yield lists of texts to tokenize together, in order, and whether they get special tokens.

    A document longer than `CHARACTERS` is split, and only its first part gets special tokens.
    """
    batch = list[str]()
    characters = 0
    for text in texts:
        first, *parts = _parts(text)
        if batch and (len(batch) == DOCUMENTS or characters + len(first) > CHARACTERS):
            yield batch, True
            batch = []
            characters = 0
        batch.append(first)
        characters += len(first)
        if parts:
            yield batch, True
            yield from (([part], False) for part in parts)
            batch = []
            characters = 0
    if batch:
        yield batch, True


def _parts(text: str) -> list[str]:
    """Split `text` into parts of at most `CHARACTERS`.

    It is cut at ends of lines that are not followed by white space, where no tokenizer joins the two sides.
    """
    parts: list[str] = []
    start = 0
    while len(text) - start > CHARACTERS:
        end = start + CHARACTERS
        line = text.rfind("\n", start, end)
        while line > start and text[line + 1].isspace():
            line = text.rfind("\n", start, line)
        parts.append(text[start : line + 1 if line > start else end])
        start += len(parts[-1])
    return [*parts, text[start:]]


def hold_out_tail(ids: Tokens, fraction: float = 0.1) -> tuple[Tokens, Tokens]:
    """Split tokens into those for calibration and the last `fraction` of them, for evaluation."""
    boundary = len(ids) - int(len(ids) * fraction)
    return ids[:boundary], ids[boundary:]


def windows(
    ids: Tokens, seq_len: int, count: int, seed: Sequence[int] | None = None, prefix: tuple[int, ...] = ()
) -> Tokens:
    """Cut `ids` into windows of `seq_len` tokens, with `prefix` in front of each, and take `count` of them, int64
    [count, seq_len]: evenly spread, or drawn by `seed`, in its order.

    Windows do not overlap; a rest shorter than a window is left out. Raises InputError when there are fewer than
    `count`, or none.
    """
    packing = Packing(seq_len, prefix)
    starts = packing.starts(ids)
    available = len(starts)
    if not available:
        raise InputError(
            "",
            f"the text has {len(ids):,} tokens, and one window needs {packing.text:,}",
            "give more text, or a smaller --seq-len",
        )
    if count > available:
        raise InputError(
            f"--samples {count:,}",
            f"the text has {available:,} windows of {seq_len:,} tokens",
            "give more text, or a smaller --samples or --seq-len",
        )
    if seed is None:
        chosen = np.arange(count) * available // count
    else:
        chosen = np.argsort(np.random.Philox(np.random.SeedSequence(list(seed))).random_raw(available), kind="stable")[
            :count
        ]
    return packing.windows(ids, starts[chosen])


def lower_default(
    option: str, asked: int | None, default: int, limit: int | None, because: str, report: Reporter
) -> int:
    """The value of `option`: as asked, or the default lowered to `limit`, with a note; `because` names the limit.

    Raises InputError when more than the limit was asked for. `limit` None: there is no limit.
    """
    if asked is None:
        if limit is None or default <= limit:
            return default
        report.note(f"{option}: the default {default:,} is lowered to {limit:,}, {because}")
        return limit
    if limit is not None and asked > limit:
        raise InputError(
            f"{option} {asked:,}", f"is more than {limit:,}, {because}", "ask for at most that, or leave it out"
        )
    return asked
