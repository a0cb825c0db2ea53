"""What lowers the loss of weights in FP8 on two LLMs that people know, at how many minutes and bytes?

    python benchmarks/weight_levers.py [smollm2 gemma3] [--rows PATTERN] [--samples 64] [--windows 24] [--save NAME]

The protocol is that of `real_models.py`, but for windows of 512 tokens of the calibration text for both models:
WikiText-2, calibrated on the validation text, KL from FP32 on windows of the test text, inputs exact, everything in
FP32. Each row changes one thing about GPTQ of 64 windows: how it rounds, how
much text it sees, how it weighs first tokens, the modules that stay in BF16 (those of the largest predicted loss a
byte, up to 3 % more bytes, one by one, where `--bf16-weights` keeps together what servers join), or codes learned
afterwards from the same text. `exact` is all that `--preset exact` does for weights. Beside the KL stands its ratio to
that of GPTQ by the same windows, since one token can be a tenth of a mean; the seconds that making it took here; and
the bytes of weights over those of FP8 alone. The floor is BF16 itself, computed in BF16. Prints one JSON line; exit
status 2 where a package or text is not there.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from real_checkpoints import checkpoint
from real_models import PROTOCOL, Judge, asked_of, evaluation_windows, ratio, summary
from real_rows import BF16, Weights, bf16_model, quantized, stored_weights
from result import arguments, described, publish

from fp8q.api import CalibrateOptions, ExportOptions, calibrate, distill, sensitivity
from fp8q.calibrate.model.source import load_model
from fp8q.core.run import Run
from fp8q.options import PRESETS, WeightRounding
from fp8q.stages.shared.sources import source_of

#: Tokens of a calibration window.
CALIBRATION_CONTEXT = 512
#: Calibration windows of the rows that see more or less text than GPTQ's.
MORE_AND_LESS = (16, 256)
#: The share of bytes that modules in BF16 may add.
BF16_BYTES = 0.03
GPTQ, WORST, LEARNED = "gptq", "gptq, the worst in BF16", "gptq, then learned"
WEIGHED, EXACT = "gptq, weighed first token", "exact"
#: The rows that begin with the run of GPTQ, whose seconds they take too.
OF_THE_RUN = (GPTQ, WORST, LEARNED)


def without_the_worst(run: Run, weights: Weights) -> Weights:
    """`weights` but for those that `fp8q sensitivity` predicts the largest loss a byte for: they stay in BF16."""
    losses = {
        loss.module: loss.kl_nats
        for loss in sensitivity(run.root, windows=8, measure=0).modules
        if loss.kind == "weight"
    }
    left = BF16_BYTES * sum(weight.numel() for weight in weights.values())
    fp8 = dict(weights)
    for module in sorted(losses, key=lambda name: -losses[name] / weights[name].numel()):
        if weights[module].numel() <= left:
            left -= weights[module].numel()
            del fp8[module]
    return fp8


def share_of_bytes(weights: Weights, every: Weights) -> float:
    """The bytes of all weights where `weights` of `every` are FP8 and the others BF16, over those of all in FP8."""
    return 2 - sum(weight.numel() for weight in weights.values()) / sum(weight.numel() for weight in every.values())


def measure(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Row -> its figures, seconds and bytes."""
    directory = checkpoint(name, asked.folder)
    context, count = PROTOCOL[name]
    with tempfile.TemporaryDirectory(dir=asked.folder) as scratch:
        folder = Path(scratch)

        def made(name: str, samples: int, **chosen: Any) -> Run:
            shape = {"samples": samples, "seq_len": CALIBRATION_CONTEXT, "activation_terms": 2}
            options = CalibrateOptions(**shape | chosen)
            run = folder / f"{name}-{samples}"
            return calibrate(str(directory), asked.data, run, asked.eval_data, options, ExportOptions(graph=False))

        def calibrated(rounding: WeightRounding, samples: int) -> Run:
            return made(rounding, samples, weight_rounding=rounding)

        def by_preset(name: str, *options: str) -> Callable[[], Weights]:
            chosen = {name: value for name, value in PRESETS["exact"].items() if not options or name in options}
            return lambda: stored_weights(made(name, asked.samples, **chosen))

        def codes(rounding: WeightRounding, samples: int) -> Callable[[], Weights]:
            return lambda: stored_weights(calibrated(rounding, samples))

        def learned() -> Weights:
            run = calibrated("gptq", asked.samples)
            distill(run.root)
            return stored_weights(run)

        start = time.monotonic()
        run = calibrated("gptq", asked.samples)
        seconds = time.monotonic() - start
        source, gptq = source_of(run), stored_weights(run)
        judge = Judge(
            load_model(source, torch.float32, "cpu"), evaluation_windows(run, context, asked.windows or count), folder
        )
        rows: dict[str, Callable[[], Weights]] = {
            GPTQ: lambda: gptq,
            "nearest": codes("nearest", asked.samples),
            **{f"gptq, {samples} windows": codes("gptq", samples) for samples in MORE_AND_LESS},
            "sequential": codes("sequential", asked.samples),
            WEIGHED: by_preset("weighed", "weight_rounding", "weigh_first_token"),
            EXACT: by_preset("exact"),
            WORST: lambda: without_the_worst(run, gptq),
            LEARNED: learned,
        }
        tokens = {BF16: judge.compare(bf16_model(source)), GPTQ: judge.compare(quantized(source, gptq, {}))}
        results: dict[str, Any] = {BF16: summary(tokens[BF16])}
        for row, make in rows.items():
            if row != GPTQ and not re.search(asked.rows, row):
                continue
            start = time.monotonic()
            weights = make()
            taken = time.monotonic() - start + (seconds if row in OF_THE_RUN else 0)
            compared = tokens[row] if row in tokens else judge.compare(quantized(source, weights, {}))
            over, interval = ratio(compared, tokens[GPTQ])
            results[row] = summary(compared) | {
                "kl_over_gptq": over,
                "ratio_interval": interval,
                "seconds": round(taken, 1),
                "bytes": round(share_of_bytes(weights, gptq), 4),
            }
            print(f"{name}: {row}: {results[row]}", file=sys.stderr, flush=True)
    contexts = {"context": context, "calibration_context": CALIBRATION_CONTEXT}
    return {**contexts, "evaluation_tokens": int(judge.ids.numel()), "rows": results}


def main() -> int:
    """Measure and print."""
    asked = asked_of(arguments(__doc__))
    head = described("weight_levers")
    results = {name: measure(name, asked) for name in asked.models}
    return publish(head, {"samples": asked.samples, "results": results}, asked.save)


if __name__ == "__main__":
    sys.exit(main())
