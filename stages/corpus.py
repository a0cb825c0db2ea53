"""The stage `corpus`: cut texts into the windows to calibrate on and the tokens to evaluate on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from ..calibrate.measure.statistics import TextSource
from ..calibrate.text import corpus, mixture
from ..calibrate.text.chat import renderer
from ..calibrate.text.evaluation import sha256_of
from ..calibrate.text.overlap import check_disjoint
from ..calibrate.text.packing import Packing, prefix_of
from ..core.arrays import check_array, check_range, read_arrays
from ..core.errors import InputError
from ..core.files import Strict, reading, replacing
from ..core.reporter import Reporter
from ..core.run import Run
from ..options import DEFAULT_SAMPLES, DEFAULT_SEQ_LEN, Bos, CorpusOptions
from ..quantize.reading.run_checkpoint import vocabulary_size
from .pipeline.stage import Key, Notes
from .pipeline.stages import CORPUS, LARGEST_ID, CorpusFacts, Overlap, Prefix
from .shared.run_images import ImageChat, ImageRows, image_chats, save_image_rows
from .shared.texts import Text, Tokens, check_apart, hold_out, read_tokens, share_out, without_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..calibrate.model.source import Source

#: Bytes of text to read for each token asked for, if that exceeds the default limit: a token of code or Chinese has
#: about five.
BYTES_PER_TOKEN = 16


class Opening(Strict):
    """The beginning of a run's windows, and the overlap of its texts."""

    bos: Bos
    prefix: Prefix = Field(default=[])
    overlap: Overlap = None


@dataclass(frozen=True)
class Collected:
    """The tokens of a run: `windows` int64 [windows, seq_len] to calibrate on, `evaluation` int64 [tokens] to evaluate
    on.

    `names`: of the calibration text and the evaluation text; `sources`: the texts that the windows were cut from;
    `other_tokens`: the kinds of text that vLLM reads as other tokens; `image_chats`: the rows with images, and those of
    the evaluation text, if there is one; `images`: those that are taken.
    """

    windows: Tokens
    evaluation: Tokens
    names: tuple[str, str]
    sources: list[TextSource]
    options: CorpusOptions
    opening: Opening
    other_tokens: tuple[str, ...] = ()
    image_chats: tuple[ImageChat, ...] = ()
    other_image_chats: tuple[ImageChat, ...] | None = ()
    images: ImageRows | None = None


def collect(
    source: "Source",
    tokenizer: "PreTrainedTokenizerBase",
    data: str | Sequence[str],
    eval_data: str | None,
    options: CorpusOptions,
    report: Reporter,
) -> Collected:
    """Read the texts and cut them into windows; raise InputError for every fault of theirs."""
    parts = mixture.parse(data)
    seq_len = corpus.lower_default(
        "--seq-len", options.seq_len, DEFAULT_SEQ_LEN, source.max_positions, "the model's positions", report
    )
    limit = max(corpus.Reading.limit, BYTES_PER_TOKEN * seq_len * (options.samples or DEFAULT_SAMPLES))
    render = renderer(tokenizer, source.name) if options.chat_template else None
    reading = corpus.Reading(render=render, limit=limit, images=True)
    vocabulary = source.text_config.vocab_size
    every = [read_tokens(part.spec, tokenizer, vocabulary, reading, report) for part in parts]
    names = " and ".join(text.name for text in every)
    if options.chat_template and not any(text.documents.chat for text in every):
        raise InputError(
            "--chat-template",
            f"{names} holds no chats, which are rows with `messages` (or `conversations`) of role and content",
            "leave it out",
        )
    other = None if eval_data is None else read_tokens(eval_data, tokenizer, vocabulary, reading, report)
    parts, texts = with_text(parts, every)
    packing = Packing(seq_len, prefix_for(tokenizer, texts, options, report))
    packing.check("--seq-len")
    overlap = shared(texts, other, options, report)
    calibration_tokens, evaluation = (
        ([text.ids for text in texts], other.ids) if other else hold_out(parts, texts, packing, report)
    )
    check_lengths(texts, calibration_tokens, (eval_data or names, evaluation), packing)
    windows, sources = share_out(parts, texts, calibration_tokens, packing, options, report)
    opening = Opening(bos=options.bos, prefix=list(packing.prefix), overlap=overlap)
    return Collected(
        windows,
        evaluation,
        (names, eval_data or names),
        with_every(sources, every),
        options,
        opening,
        image_chats=image_chats(every),
        other_image_chats=None if other is None else image_chats([other]),
    )


def with_text(parts: list[mixture.WeightedText], texts: list[Text]) -> tuple[list[mixture.WeightedText], list[Text]]:
    """Leave out the texts that have rows with images alone; raises InputError where no other is left."""
    with_rows = [(part, text) for part, text in zip(parts, texts, strict=True) if not text.images_alone]
    if not with_rows:
        raise InputError(
            texts[0].name,
            "has rows with images alone, and windows of text are calibrated and evaluated on too",
            "give a text beside it by another --data",
        )
    return [part for part, _ in with_rows], [text for _, text in with_rows]


def with_every(sources: list[TextSource], texts: list[Text]) -> list[TextSource]:
    """Add the records of those of `texts` that have rows with images alone."""
    windowed = {source.name: source for source in sources}
    return [windowed.get(text.name) or without_windows(text) for text in texts]


def prefix_for(
    tokenizer: "PreTrainedTokenizerBase", texts: list[Text], options: CorpusOptions, report: Reporter
) -> tuple[int, ...]:
    """Return the tokens that each window begins with: those that the tokenizer puts in front of a text.

    Empty if `options` say never, or if a chat template renders chats without them.
    """
    documents = (document for text in texts for document in text.documents.texts)
    prefix = prefix_of(tokenizer, documents) if options.bos == "auto" else ()
    without = [text for text in texts if text.with_special_tokens and tuple(text.ids[: len(prefix)]) != prefix]
    if without:
        begins = " ".join(tokenizer.convert_ids_to_tokens(list(prefix)))
        what = f"the {without[0].with_special_tokens} of {without[0].name}"
        report.note(f"--bos: no window begins with {begins}, since {what} do not, as they are served")
    return () if without else prefix


def shared(texts: list[Text], other: Text | None, options: CorpusOptions, report: Reporter) -> float | None:
    """The share of text that the texts, or the `other` text for evaluation, have in common, where it is too large and
    allowed; None where it is small.

    Raises InputError where it is too large and not allowed.
    """
    if other is None:
        return check_apart(texts, report, options.allow_overlap) or None
    measured = check_disjoint(
        [document for text in texts for document in text.documents.texts],
        other.documents.texts,
        " and ".join(text.name for text in texts),
        other.name,
        report,
        options.allow_overlap,
    )
    return measured.share if measured.too_much else None


def check_lengths(
    texts: list[Text], calibration: list[Tokens], evaluation: tuple[str, Tokens], packing: Packing
) -> None:
    """Raise InputError when the `calibration` tokens of a text, or those of the `evaluation` (its name, its tokens),
    are shorter than a window.
    """
    for text, ids in zip(texts, calibration, strict=True):
        if not len(packing.starts(ids)):
            raise InputError(
                text.name,
                f"has {len(ids):,} tokens, less than one window of {packing.size:,}",
                "give more text or a smaller --seq-len",
            )
    name, ids = evaluation
    if not len(packing.starts(ids)):
        raise InputError(
            name,
            f"leaves {len(ids):,} tokens for evaluation, less than one window of {packing.size:,}",
            "give more text, --eval-data, or a smaller --seq-len",
        )


def write_corpus(run: Run, source: "Source", collected: Collected, notes: Notes) -> None:
    """The stage `corpus`: write `calibration.npz` and `evaluation.npz`."""
    inputs = {"tokens": sha256_of(collected.windows), "evaluation": sha256_of(collected.evaluation)}
    if collected.images:
        inputs["images"] = collected.images.digest
    data, eval_data = collected.names
    facts = CorpusFacts(
        data=data,
        eval_data=eval_data,
        model=str(source.path.resolve()),
        sources=collected.sources,
        tokenizer=source.tokenizer,
        prefix=collected.opening.prefix,
        overlap=collected.opening.overlap,
        other_tokens=list(collected.other_tokens) or None,
    )
    key = Key(inputs, collected.options, facts)
    save_corpus(run, source, key, (collected.windows, collected.evaluation), notes, collected.images)


def save_corpus(
    run: Run, source: "Source", key: Key[CorpusOptions, CorpusFacts], tokens: tuple[Tokens, Tokens], notes: Notes,
    images: ImageRows | None = None,
) -> None:  # fmt: skip
    """Write the `tokens` to calibrate and to evaluate on, and the rows with `images`, unless they are current, and the
    identity of the `source` model.
    """
    if CORPUS.is_current(run, key):
        return
    model = {
        "name": source.title,
        "path": key.facts.model,
        "revision": source.revision or "",
        "fingerprint": source.fingerprint,
        "tokenizer": source.tokenizer,
    } | ({"adapter": str(source.merged.path.resolve())} if source.merged else {})
    with CORPUS.writing(run, key, notes, model) as log:
        for path, ids in zip((run.calibration, run.evaluation), tokens, strict=True):
            save_tokens(path, ids)
            log.outputs.append(path)
        if images:
            save_image_rows(run, images)
            log.outputs.append(run.images)
        else:
            run.images.unlink(missing_ok=True)


def opening_of(run: Run) -> Opening:
    """Read the beginning of the windows of `run`; raise InputError for a malformed record."""
    facts = run.facts(CORPUS)
    return Opening(bos=run.options(CORPUS).bos, prefix=facts.prefix, overlap=facts.overlap)


def save_tokens(path: Path, tokens: Tokens) -> None:
    """Write token ids as `input_ids` in an npz file."""
    with replacing(path) as partial, open(partial, "wb") as handle:
        np.savez(handle, allow_pickle=False, input_ids=tokens)


def spread_windows(windows: Tokens, count: int) -> Tokens:
    """Select at most `count` of the `windows` [windows, seq_len], evenly spaced over all."""
    taken = np.unique(np.linspace(0, len(windows) - 1, min(count, len(windows))).round().astype(np.int64))
    return windows[taken]


def in_batches(windows: Tokens, size: int) -> dict[int, Tokens]:
    """Number the batches of `size` of the `windows` [windows, seq_len]; the last may be smaller."""
    return {batch: windows[start : start + size] for batch, start in enumerate(range(0, len(windows), size))}


def load_tokens(run: Run, path: Path, vocabulary: int | None = None) -> Tokens:
    """Read the `input_ids` of a file of the stage `corpus`: windows [windows, seq_len], or tokens held out [tokens].

    `vocabulary`: the tokens of the model, where the run has no checkpoint yet that says so. Raises InputError for a
    file that is missing, damaged, or has other contents.
    """
    arrays = read_arrays(run.require(path, "corpus"), "token ids")
    if vocabulary is None and (run.model / "config.json").is_file():
        vocabulary = vocabulary_size(run)
    with reading(path, "token ids"):
        ids: Tokens = arrays["input_ids"]
        check_array("input_ids", ids, "int64", (None, None) if path == run.calibration else (None,))
        check_range("input_ids", ids, 0, (vocabulary or LARGEST_ID + 1) - 1)
    return ids
