"""The stage `corpus`: from texts to the windows of tokens that are calibrated on, and those that are held out."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from ..files import reading, replacing
from ..options import DEFAULT_SAMPLES, DEFAULT_SEQ_LEN, CalibrateOptions
from ..reporter import Reporter
from ..run import Run
from .steps import Notes, stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..calibrate.measure.statistics import TextSource
    from ..calibrate.model.source import Source
    from ..calibrate.text.corpus import Documents, Reading
    from ..calibrate.text.mixture import Part

Tokens = npt.NDArray[np.int64]
#: Bytes of text that are read for each token asked for, where that is more than is read anyway: the tokens of code and
#: of Chinese have some five.
BYTES_PER_TOKEN = 16
#: The largest token id that a tokenizer can hold: tokenizers counts in 32 bits.
LARGEST_ID = 2**32 - 1


@dataclass(frozen=True)
class Collected:
    """The tokens of one run: `windows` int64 [windows, seq_len] to calibrate on, `evaluation` int64 [tokens] held out;
    `sources`: what the windows were cut from.
    """

    windows: Tokens
    evaluation: Tokens
    names: tuple[str, str]
    sources: "list[TextSource]"
    options: CalibrateOptions


@dataclass(frozen=True)
class Text:
    """One text, read and tokenized: `ids` int64 [tokens]."""

    name: str
    documents: "Documents"
    ids: Tokens


def collect(
    source: "Source",
    tokenizer: "PreTrainedTokenizerBase",
    data: str | Sequence[str],
    eval_data: str | None,
    options: CalibrateOptions,
    report: Reporter,
) -> Collected:
    """Read and cut the texts. Raises InputError for all that can be wrong with them."""
    from ..calibrate.text import corpus, mixture
    from ..calibrate.text.chat import renderer

    parts = mixture.parse(data)
    seq_len = corpus.lower_default(
        "--seq-len", options.seq_len, DEFAULT_SEQ_LEN, source.max_positions, "the model's positions", report
    )
    limit = max(corpus.Reading.limit, BYTES_PER_TOKEN * seq_len * (options.samples or DEFAULT_SAMPLES))
    reading = corpus.Reading(render=renderer(tokenizer, source.name) if options.chat_template else None, limit=limit)
    vocabulary = source.text_config.vocab_size
    texts = [read(part.spec, tokenizer, vocabulary, reading, report) for part in parts]
    names = " and ".join(text.name for text in texts)
    if options.chat_template and not any(text.documents.chat for text in texts):
        raise InputError(
            f"--chat-template: {names} holds no chats, which are rows with `messages` (or `conversations`) of role "
            "and content; leave it out"
        )
    if eval_data is None:
        kept, evaluation = hold_out(parts, texts, seq_len, report)
    else:
        other = read(eval_data, tokenizer, vocabulary, reading, report)
        corpus.check_disjoint(
            [document for text in texts for document in text.documents.texts],
            other.documents.texts,
            names,
            eval_data,
            report,
        )
        kept, evaluation = [text.ids for text in texts], other.ids
    for text, ids in zip(texts, kept, strict=True):
        if len(ids) < seq_len:
            raise InputError(
                f"{text.name}: has {len(ids):,} tokens, less than one window of {seq_len:,}; give more text or a "
                "smaller --seq-len"
            )
    if len(evaluation) < seq_len:
        raise InputError(
            f"{eval_data or names}: leaves {len(evaluation):,} tokens for evaluation, less than one window of "
            f"{seq_len:,}; give more text, --eval-data, or a smaller --seq-len"
        )
    windows, sources = share_out(parts, texts, kept, seq_len, options, report)
    return Collected(windows, evaluation, (names, eval_data or names), sources, options)


def read(
    spec: str, tokenizer: "PreTrainedTokenizerBase", vocabulary: int, reading: "Reading", report: Reporter
) -> Text:
    """Read the text `spec` and tokenize it. Raises InputError, also for a token id that is not below `vocabulary`."""
    from ..calibrate.text import corpus

    documents = corpus.load_documents(spec, reading, report)
    return Text(
        spec,
        documents,
        corpus.encode(documents.texts, tokenizer, vocabulary, special_tokens=not documents.chat, report=report),
    )


def hold_out(parts: "list[Part]", texts: list[Text], seq_len: int, report: Reporter) -> tuple[list[Tokens], Tokens]:
    """The tokens of each text to calibrate on, and the last tenth of all to evaluate on: of several texts as many
    windows of it as make up the same mixture.
    """
    from ..calibrate.text import corpus, mixture

    split = [corpus.hold_out(text.ids) for text in texts]
    kept, tails = [calibration for calibration, _ in split], [tail for _, tail in split]
    for text, (calibration, tail) in zip(texts, split, strict=True):
        report.note(
            f"{text.name}: the last {len(tail):,} of {len(calibration) + len(tail):,} tokens are held out for "
            "evaluation"
        )
    if len(parts) > 1:
        check_apart(texts)
        weights, available = [part.weight for part in parts], [len(tail) // seq_len for tail in tails]
        counts = mixture.shares(mixture.largest_total(available, weights), weights)
        tails = [tail[: count * seq_len] for tail, count in zip(tails, counts, strict=True)]
        report.note(
            f"of what is held out, {sum(counts):,} windows are evaluated on: "
            f"{', '.join(f'{count:,} of {text.name}' for text, count in zip(texts, counts, strict=True))}"
        )
    return kept, np.concatenate(tails)


def check_apart(texts: list[Text]) -> None:
    """Raise InputError when one of several texts is in another: what is held out of it would be calibrated on there."""
    from ..calibrate.text.overlap import SAME, shares

    for number, first in enumerate(texts):
        for second in texts[:number]:
            share = max(shares(first.documents.texts, second.documents.texts))
            if share >= SAME:
                raise InputError(
                    f"--data {first.name}: {share:.0%} of the text is in both this and {second.name}, so that none of "
                    "it can be held out; give it once, or --eval-data"
                )


def share_out(
    parts: "list[Part]",
    texts: list[Text],
    kept: list[Tokens],
    seq_len: int,
    options: CalibrateOptions,
    report: Reporter,
) -> tuple[Tokens, "list[TextSource]"]:
    """The windows to calibrate on, int64 [windows, seq_len], shared out by the parts' weights and interleaved, and the
    record of each part.

    Raises InputError when a text is too small for its share of `options.samples`, or when its share is no window.
    """
    from ..calibrate.text import corpus, mixture

    counts = _shares(parts, texts, [len(ids) // seq_len for ids in kept], seq_len, options, report)
    cut = [
        corpus.windows(ids, seq_len, count, None if options.seed is None else (options.seed, number))
        for number, (ids, count) in enumerate(zip(kept, counts, strict=True))
    ]
    return mixture.interleave(cut), list(map(_source, parts, texts, kept, counts))


def _shares(
    parts: "list[Part]",
    texts: list[Text],
    available: list[int],
    seq_len: int,
    options: CalibrateOptions,
    report: Reporter,
) -> list[int]:
    """How many windows each part gives, of those `available`."""
    from ..calibrate.text import corpus, mixture

    weights = [part.weight for part in parts]
    most = mixture.largest_total(available, weights)
    scarcest = min(range(len(parts)), key=lambda number: available[number] / weights[number])
    because = f"the windows of {seq_len:,} tokens in {texts[scarcest].name}"
    if len(parts) > 1:
        whole = float(weights[scarcest] / sum(weights))
        because = (
            f"of which {texts[scarcest].name} is to give {whole:.1%} and has {available[scarcest]:,} windows of "
            f"{seq_len:,} tokens"
        )
    samples = corpus.lower_default("--samples", options.samples, DEFAULT_SAMPLES, most, because, report)
    counts = mixture.shares(samples, weights)
    # rounded shares do not all shrink with the whole
    if any(count > there for count, there in zip(counts, available, strict=True)):
        nearest = mixture.largest_total(available, weights, samples)
        raise InputError(
            f"--samples {samples:,}: cannot be shared out by these weights, {because}; ask for {nearest:,} or {most:,}"
        )
    for text, weight, count in zip(texts, weights, counts, strict=True):
        if not count:
            raise InputError(
                f"--data {text.name}: its weight {float(weight):g} of {float(sum(weights)):g} is no window of "
                f"{samples:,}; give it more, or more --samples"
            )
    if len(parts) > 1:
        given = (f"{count:,} of {text.name}" for text, count in zip(texts, counts, strict=True))
        report.note(f"--data: {samples:,} windows, {', '.join(given)}")
    return counts


def _source(part: "Part", text: Text, kept: Tokens, windows: int) -> "TextSource":
    """The record of a part."""
    from ..calibrate.measure.statistics import TextSource
    from ..calibrate.text import corpus

    return TextSource(
        name=text.name,
        weight=float(part.weight),
        windows=windows,
        tokens=len(kept),
        fingerprint=corpus.fingerprint(text.documents.texts),
        chat=text.documents.chat,
    )


def write_corpus(run: Run, source: "Source", collected: Collected, notes: Notes) -> None:
    """The stage `corpus`: `calibration.npz` and `evaluation.npz`."""
    inputs = {"tokens": digest(collected.windows), "evaluation": digest(collected.evaluation)}
    options = {
        "data": collected.names[0],
        "eval_data": collected.names[1],
        "model": str(source.path.resolve()),
        "chat_template": collected.options.chat_template,
        "seed": collected.options.seed,
        "sources": [text.model_dump() for text in collected.sources],
    }
    if run.is_current("corpus", inputs, options):
        return
    model = {
        "name": source.title,
        "path": str(options["model"]),
        "revision": source.revision or "",
        "fingerprint": source.fingerprint,
    }
    with stage(run, "corpus", inputs, options, notes, model) as log:
        save_tokens(run.calibration, collected.windows)
        save_tokens(run.evaluation, collected.evaluation)
        log.outputs += [run.calibration, run.evaluation]


def digest(tokens: Tokens) -> str:
    """SHA-256 of token ids, int64 little-endian."""
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i8").tobytes()).hexdigest()


def save_tokens(path: Path, tokens: Tokens) -> None:
    """Write token ids as `input_ids` in an npz file."""
    with replacing(path) as partial, open(partial, "wb") as handle:
        np.savez(handle, allow_pickle=False, input_ids=tokens)


def load_tokens(run: Run, path: Path) -> Tokens:
    """Read the `input_ids` of a file the stage `corpus` wrote: windows [windows, seq_len], or tokens held out [tokens].

    Raises InputError for a file that is missing, damaged, or holds something else.
    """
    run.require(path, "corpus")
    with reading(path, "token ids"), open(path, "rb") as handle, np.load(handle, allow_pickle=False) as arrays:
        ids: Tokens = arrays["input_ids"]
        if ids.dtype != np.int64 or ids.ndim != (2 if path == run.calibration else 1):
            raise ValueError(f"they are {ids.dtype} in {ids.ndim} dimensions")
        if ids.size and not 0 <= ids.min() <= ids.max() <= LARGEST_ID:
            raise ValueError(f"they lie between {ids.min()} and {ids.max()}")
    return ids
