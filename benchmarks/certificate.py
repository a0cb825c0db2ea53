"""Whether the certificate of the calibration text tells what the next windows do.

    python benchmarks/certificate.py [MODEL=CALIBRATION,EVALUATION …] [--context 256] [--windows 256]

Each model is measured on so many windows of its calibration text, evenly spread, and on as many of its evaluation text
(or all there are), in batches of one. Then 8, 32 and 64 of the first are taken as a calibration, by lot and as they
follow each other: what the certificate says of the next window (that it exceeds a tensor's amax, and by more than
rounding costs) stands beside how often the windows that were left out did, and those of the other text; the mean over
64 draws, or over all beginnings. Within one text and by lot the two must agree: that is what the certificate promises.
In the order of the text they may not, and on other text nothing is promised: how far that goes is what is measured
here. Prints one JSON line; exit status 1 where prediction and count by lot differ by more than a quarter.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from models import ModelTexts, model_arguments, small_models
from result import described, publish

from fp8q.calibrate.measure.measurement import Measurement, measure_in_memory
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.text import corpus
from fp8q.core.reporter import SILENT
from fp8q.validate.advice.certificate import HARMLESS, next_exceeds, octaves_beyond

MODELS = ("demo", "llama", "qwen2", "gemma", "opt", "stories260k")
SIZES, DRAWS, MOST_OFF = (8, 32, 64), 64, 0.25
Amax = npt.NDArray[np.float32]


def measured(source: Source, text: str, options: argparse.Namespace) -> Amax:
    """The amax of every tensor in every window of `text`, float32 [tensors, windows]."""
    ids = corpus.encode_texts([Path(text).read_text(encoding="utf-8")], load_tokenizer(source))
    windows = corpus.windows(ids, options.context, min(options.windows, len(ids) // options.context))
    identity = ModelIdentity(name=source.title, architecture=source.architecture, fingerprint=source.fingerprint)
    name = Path(text).name
    what = Corpus(name=name, fingerprint="", windows=len(windows), seq_len=options.context, batch_size=1)
    found = measure_in_memory(load_model(source, torch.bfloat16), Measurement(windows, identity, what), SILENT)
    return np.stack([tensor.amax_batches for tensor in found.tensors.values()])


def beyond_of(first: Amax, later: Amax, octaves: float) -> float:
    """How often `later` windows [tensors, later] exceed the amax of the `first` by more than so many octaves."""
    return float((np.log2(later / first.max(1, keepdims=True)) > octaves).mean())


def told(first: Amax, octaves: float) -> float:
    """What the certificate says of the window after the `first` [tensors, windows]."""
    return next_exceeds(np.array([octaves_beyond(row) for row in first]), first.shape[1], octaves)


def parts(amax: Amax, size: int, by_lot: bool) -> list[tuple[Amax, Amax]]:
    """Calibrations of `size` windows, and those windows that each leaves out, or that follow on it."""
    windows = amax.shape[1]
    if by_lot:
        orders = [np.random.default_rng(seed).permutation(windows) for seed in range(DRAWS)]
        return [(amax[:, order[:size]], amax[:, order[size:]]) for order in orders]
    starts = range(0, windows - 2 * size + 1, size)
    return [(amax[:, start : start + size], amax[:, start + size : start + 2 * size]) for start in starts]


def rates(amax: Amax, other: Amax, size: int) -> dict[str, Any]:
    """What was said, and what happened, of calibrations of `size` windows."""
    found: dict[str, Any] = {}
    for name, octaves in (("exceeds", 0.0), ("harmful", HARMLESS)):
        lots, turns = parts(amax, size, by_lot=True), parts(amax, size, by_lot=False)
        found[name] = {
            "told": float(np.mean([told(first, octaves) for first, _ in lots])),
            "happened": float(np.mean([beyond_of(first, later, octaves) for first, later in lots])),
            "told_in_order": float(np.mean([told(first, octaves) for first, _ in turns])),
            "happened_in_order": float(np.mean([beyond_of(first, later, octaves) for first, later in turns])),
            "other_text": float(np.mean([beyond_of(first, other, octaves) for first, _ in lots])),
        }
    return found


def benchmark(texts: ModelTexts, options: argparse.Namespace) -> dict[str, Any]:
    """One model."""
    source = open_source(texts.directory)
    amax, other = (measured(source, text, options) for text in (texts.data, texts.eval_data))
    return {"tensors": len(amax), "by_windows": {str(size): rates(amax, other, size) for size in SIZES}}


def main() -> int:
    """Run, print, judge."""
    options = model_arguments(__doc__, windows=256).parse_args()
    head, results = described("certificate"), {}
    for texts in options.models or small_models(*MODELS):
        results[texts.name] = benchmark(texts, options)
        print(texts.name, results[texts.name], file=sys.stderr, flush=True)
    lots = [rate for found in results.values() for sizes in found["by_windows"].values() for rate in [sizes["exceeds"]]]
    passed = all(abs(rate["told"] - rate["happened"]) <= MOST_OFF * rate["happened"] for rate in lots)
    protocol = {"windows": options.windows, "context": options.context, "draws": DRAWS}
    return publish(head, {**protocol, "results": results, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
