"""How well `fp8q sensitivity` predicts, and what it costs.

    python benchmarks/sensitivity.py [MODEL=CALIBRATION,EVALUATION …] [--windows 16] [--context 256] [--samples 64]

Each model is calibrated with an FP8 cache, so that weights, activations and the cache are all there. The full
measurement runs the model once for every tensor, that one alone quantized; what `fp8q sensitivity` gives by itself is
held against it: Spearman's rank correlation over all tensors, and the ratios of the two. Its cost is counted in passes,
the processor time of the float model in FP32 over the same windows (the ceiling: no method knows anything before one
pass). A peer in the same table: ranking by SQNR, as
`fp8q inspect` does. Prints one JSON line; exit status 1 when a limit is missed.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from models import ModelTexts, model_arguments, small_models
from result import described, publish

from fp8q.api import CalibrateOptions, SensitivityOptions, calibrate, sensitivity
from fp8q.calibrate.measure.scoring import log_softmax
from fp8q.core.run import Run
from fp8q.quantize.sensitivity.document import Loss, Sensitivity
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import source_of
from fp8q.validate.accuracy.runtimes import float_model

LIMITS = {"passes": 6.0, "rank_correlation": 0.9}
#: On which the limits are.
JUDGED = "llama"


def ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The rank of each value, ties in order."""
    found = np.empty(len(values))
    found[np.argsort(values, kind="stable")] = np.arange(len(values))
    return found


def spearman(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    """Rank correlation."""
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def processor_seconds(work: Callable[[], object]) -> float:
    """Processor time of `work`."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def one_pass(run: Run, windows: int) -> float:
    """Processor time of the float model, its logits and their logarithms, over as many windows."""
    every = load_tokens(run, run.calibration)
    taken = every[np.unique(np.linspace(0, len(every) - 1, min(windows, len(every))).round().astype(np.int64))]
    forward = float_model(source_of(run), torch.float32, "cpu")

    def evaluate() -> None:
        with torch.inference_mode():
            for ids in np.array_split(taken, max(1, taken.size // 1024)):
                log_softmax(forward(ids)[:, :-1])

    evaluate()
    return processor_seconds(evaluate)


def found_by(run: Run, windows: int, measure: int | None) -> tuple[Sensitivity, float]:
    """What the stage finds, and its processor time."""
    made: list[Sensitivity] = []
    spent = processor_seconds(
        lambda: made.append(sensitivity(run.root, SensitivityOptions(windows=windows, measure=measure)))
    )
    return made[0], spent


def benchmark(texts: ModelTexts, options: argparse.Namespace) -> dict[str, Any]:
    """One model."""
    with tempfile.TemporaryDirectory() as folder:
        asked = CalibrateOptions(samples=options.samples, seq_len=options.context, kv_cache="fp8")
        run = calibrate(texts.directory, texts.data, Path(folder) / "run", texts.eval_data, asked)
        unit = one_pass(run, options.windows)
        full, full_seconds = found_by(run, options.windows, 1_000_000)
        own, seconds = found_by(run, options.windows, None)
    return {
        "tensors": len(full.modules),
        "tokens": full.tokens,
        "pass_s": round(unit, 3),
        "passes": round(seconds / unit, 2),
        "full_passes": round(full_seconds / unit, 1),
        "spread": round(full.modules[0].kl_nats / full.modules[-1].kl_nats),
    } | correlations(full, own)


def correlations(full: Sensitivity, own: Sensitivity) -> dict[str, Any]:
    """How what was found, and SQNR, agree with the full measurement."""
    exact = {(loss.module, loss.kind): loss.kl_nats for loss in full.modules}

    def against(losses: list[Loss], of: Callable[[Loss], float]) -> float:
        mine = np.array([of(loss) for loss in losses])
        return round(spearman(mine, np.array([exact[loss.module, loss.kind] for loss in losses])), 3)

    ratios = [loss.kl_nats / exact[loss.module, loss.kind] for loss in own.modules if not loss.measured]
    kinds = {
        kind: against([loss for loss in own.modules if loss.kind == kind], lambda loss: loss.kl_nats)
        for kind in ("weight", "activation", "kv_cache")
    }
    return {
        "measured": sum(loss.measured for loss in own.modules),
        "rank_correlation": against(own.modules, lambda loss: loss.kl_nats),
        "rank_correlation_of": kinds,
        "sqnr_rank_correlation": against(own.modules, lambda loss: -(loss.sqnr_db or 1e3)),
        "ratio_percentiles_5_50_95": np.percentile(ratios, [5, 50, 95]).round(2).tolist(),
    }


def main() -> int:
    """Run, print, judge."""
    options = model_arguments(__doc__, windows=16, samples=64).parse_args()
    head, results = described("sensitivity"), {}
    for texts in options.models or small_models("demo", "llama", "qwen2", "gemma", "opt"):
        results[texts.name] = benchmark(texts, options)
        print(texts.name, results[texts.name], file=sys.stderr, flush=True)
    judged = results.get(JUDGED)
    passed = not judged or (
        judged["passes"] <= LIMITS["passes"] and judged["rank_correlation"] >= LIMITS["rank_correlation"]
    )
    protocol = {"windows": options.windows, "context": options.context, "samples": options.samples}
    return publish(head, {**protocol, "limits": LIMITS, "results": results, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
