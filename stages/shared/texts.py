"""The texts of a run: load them, hold out a part, and divide the rest into calibration windows."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...calibrate.input.hub import is_hub_name
from ...calibrate.input.untrusted import exists, local_path
from ...calibrate.measure.statistics import TextSource
from ...calibrate.text import corpus, mixture
from ...calibrate.text.corpus import Documents, Reading
from ...calibrate.text.documents import FORMS
from ...calibrate.text.formats import SUFFIXES
from ...calibrate.text.mixture import WeightedText
from ...calibrate.text.overlap import WORTH_A_NOTE, Overlap, measure_overlap, repeated
from ...calibrate.text.packing import Packing
from ...core.errors import InputError
from ...core.reporter import Reporter
from ...options import DEFAULT_SAMPLES, CorpusOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Text:
    """A text that was loaded and tokenized: `ids` int64 [tokens]."""

    name: str
    documents: Documents
    ids: Tokens

    @property
    def images_alone(self) -> bool:
        """Tell whether all rows of the text have images, so that it is none to cut windows from."""
        return bool(self.documents.with_images) and not len(self.ids)

    @property
    def with_special_tokens(self) -> str | None:
        """The part of the text that has its special tokens already; None where the tokenizer adds them."""
        if self.documents.chat:
            return "chats"
        return None if self.documents.ids is None else "tokens"


def check_there(spec: str) -> None:
    """Raise InputError for a text that names a file which is not there, as reading it would, but at once."""
    path = local_path(spec)
    if not exists(path) and (path.suffix.lower() in SUFFIXES or not is_hub_name(spec.partition(":")[0])):
        raise InputError(spec, "there is no such file", f"give {FORMS}")


@dataclass(frozen=True)
class LearningText:
    """Windows int64 [windows, seq_len] to learn from, and held out; `name`: of their text."""

    name: str
    windows: Tokens
    held_out: Tokens


def read_tokens(
    spec: str, tokenizer: "PreTrainedTokenizerBase", vocabulary: int, reading: Reading, report: Reporter
) -> Text:
    """Load the text `spec` and tokenize it, unless it is tokens; raise InputError, also for a token id that is not
    below `vocabulary`.
    """
    documents = corpus.load_documents(spec, reading, report)
    if documents.ids is not None:
        ids, texts = corpus.joined_ids(spec, documents.ids, tokenizer, vocabulary)
        return Text(spec, replace(documents, texts=texts), ids)
    return Text(
        spec,
        documents,
        corpus.encode_texts(documents.texts, tokenizer, vocabulary, special_tokens=not documents.chat, report=report),
    )


def hold_out(
    parts: list[WeightedText], texts: list[Text], packing: Packing, report: Reporter
) -> tuple[list[Tokens], Tokens]:
    """The tokens of each text for calibration, and the last tenth of all for evaluation, taken from several texts in
    the proportion of their windows.
    """
    split = [corpus.hold_out_tail(text.ids) for text in texts]
    calibration_tokens = [calibration for calibration, _ in split]
    ends_of_texts = [tail for _, tail in split]
    for text, (calibration, tail) in zip(texts, split, strict=True):
        report.note(
            f"{text.name}: the last {len(tail):,} of {len(calibration) + len(tail):,} tokens are held out for "
            "evaluation"
        )
        if (share := repeated(calibration, tail)) >= WORTH_A_NOTE:
            report.note(f"{text.name}: {share:.1%} of what is held out stands in the rest of the text too")
    if len(parts) > 1:
        starts = [packing.starts(tail) for tail in ends_of_texts]
        weights = [part.weight for part in parts]
        counts = mixture.apportion(mixture.largest_total(list(map(len, starts)), weights), weights)
        ends = [(0, *(places + packing.text)) for places in starts]
        ends_of_texts = [tail[: end[count]] for tail, end, count in zip(ends_of_texts, ends, counts, strict=True)]
        report.note(
            f"of what is held out, {sum(counts):,} windows are evaluated on: "
            f"{', '.join(f'{count:,} of {text.name}' for text, count in zip(texts, counts, strict=True))}"
        )
    return calibration_tokens, np.concatenate(ends_of_texts)


def check_apart(texts: list[Text], report: Reporter, allowed: bool) -> float:
    """The largest share of one text that is in another of several: its held-out part would be calibrated on.

    Raises InputError when it is too large, unless `allowed`.
    """
    most = Overlap()
    for number, first in enumerate(texts):
        for second in texts[:number]:
            overlap = measure_overlap(first.documents.texts, second.documents.texts)
            most = max(most, overlap, key=lambda one: (one.too_much, one.share))
            sentence = f"--data {first.name}: {overlap.shown} of the text is in both this and {second.name}"
            if overlap.too_much and not allowed:
                raise InputError(
                    "",
                    f"{sentence}, so that none of it can be held out",
                    "give it once, or --eval-data, or --allow-overlap",
                )
            if overlap.too_much:
                report.note(sentence)
    return most.share if most.too_much else 0.0


def share_out(
    parts: list[WeightedText],
    texts: list[Text],
    calibration: list[Tokens],
    packing: Packing,
    options: CorpusOptions,
    report: Reporter,
) -> tuple[Tokens, list[TextSource]]:
    """Divide the calibration windows among the texts by weight, and interleave them; returns int64 [windows, seq_len]
    and the record of each text.

    Raises InputError when a text is too small for its share of `options.samples`, and when its share is no window.
    """
    counts = _shares(parts, texts, [len(packing.starts(ids)) for ids in calibration], packing.size, options, report)
    cut = [
        corpus.windows(
            ids, packing.size, count, None if options.seed is None else (options.seed, number), packing.prefix
        )
        for number, (ids, count) in enumerate(zip(calibration, counts, strict=True))
    ]
    return mixture.interleave(cut), list(map(_source, parts, texts, calibration, counts))


def _shares(
    parts: list[WeightedText],
    texts: list[Text],
    available: list[int],
    seq_len: int,
    options: CorpusOptions,
    report: Reporter,
) -> list[int]:
    """Return the number of windows of each text, at most those `available`."""
    weights = [part.weight for part in parts]
    most = mixture.largest_total(available, weights)
    scarcest = min(range(len(parts)), key=lambda number: available[number] / weights[number])
    because = f"the windows of {seq_len:,} tokens in {texts[scarcest].name}"
    if len(parts) > 1:
        weight_share = float(weights[scarcest] / sum(weights))
        because = (
            f"of which {texts[scarcest].name} is to give {weight_share:.1%} and has {available[scarcest]:,} windows of "
            f"{seq_len:,} tokens"
        )
    samples = corpus.lower_default("--samples", options.samples, DEFAULT_SAMPLES, most, because, report)
    counts = mixture.apportion(samples, weights)
    # rounded shares may grow when the total shrinks
    if any(count > there for count, there in zip(counts, available, strict=True)):
        nearest = mixture.largest_total(available, weights, samples)
        raise InputError(
            f"--samples {samples:,}",
            f"cannot be shared out by these weights, {because}",
            f"ask for {nearest:,} or {most:,}",
        )
    for text, weight, count in zip(texts, weights, counts, strict=True):
        if not count:
            raise InputError(
                f"--data {text.name}",
                f"its weight {float(weight):g} of {float(sum(weights)):g} is no window of {samples:,}",
                "give it more, or more --samples",
            )
    if len(parts) > 1:
        counted = (f"{count:,} of {text.name}" for text, count in zip(texts, counts, strict=True))
        report.note(f"--data: {samples:,} windows, {', '.join(counted)}")
    return counts


def without_windows(text: Text) -> TextSource:
    """Make the record of a text that has rows with images alone."""
    return _source(WeightedText(text.name), text, text.ids, 0)


def _source(part: WeightedText, text: Text, calibration: Tokens, windows: int) -> TextSource:
    """Make the record of a text."""
    return TextSource(
        name=text.name,
        weight=float(part.weight),
        windows=windows,
        tokens=len(calibration),
        fingerprint=corpus.fingerprint(text.documents.texts),
        chat=text.documents.chat,
    )
