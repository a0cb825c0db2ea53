"""What lowers the loss of weights in FP8 on two LLMs that people know, at how many minutes and bytes?

    python benchmarks/weight_levers.py [smollm2 gemma3] [--rows PATTERN] [--samples 64] [--windows 24] [--runs FOLDER]
        [--save NAME]

The protocol is that of `rounded_runs.py`: WikiText-2, calibrated on the validation text, KL from FP32 on windows of the
test text, inputs exact, everything in FP32. Each row changes one thing about GPTQ of 64 windows: how it rounds, how
much text it sees, how it weighs first tokens, what it knows of outputs, the modules that stay in BF16 (those of the
largest predicted loss a byte, up to 3 % more bytes, one by one, where `--bf16-weights` keeps together what servers
join), or codes learned afterwards, from the same text or, behind the output side of `exact`, from four times as much
(Gemma 3, whose words take its time: twice) at a third of the rate. `exact` is all that `--preset exact` does for
weights, with 3 % more bytes, or 10 % where the row says so; `every lever` is that and the output side from four times
the text. Beside the KL stands its ratio to BF16's own, and to those of GPTQ and of the row that this one goes on from,
by the same windows, since one token can be a tenth of a mean; the recorded seconds of the stages that made it here; and
the bytes of weights over those of FP8 alone. A row that revises codes says for each kind of GEMM the share that differ.
The floor is BF16 itself, computed in BF16. With `--runs` a call that was killed goes on.
Prints one JSON line; exit status 2 where a package or text is not there.
"""

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from real_models import ratio
from real_rows import Weights, quantized
from result import arguments
from rounded_runs import (
    EXACT,
    EXACT_OUTPUT_SIDE,
    GPTQ,
    MORE_BF16,
    MORE_BF16_OUTPUT_SIDE,
    OUTPUT_SIDE,
    PLAIN,
    RESCALED,
    WEIGHED,
    Rounded,
    RoundedRuns,
    with_seconds,
)
from row_figures import RowFigures, publish_rows

from fp8q.api import DistillOptions, RescaleOptions, distill, scales, sensitivity
from fp8q.core.run import Run
from fp8q.quantize.learning.linear import SMALLER

#: Calibration windows of the rows that see more or less text than GPTQ's.
MORE_AND_LESS = (16, 256)
#: The share of bytes that modules in BF16 may add.
BF16_BYTES = 0.03
WORST, LEARNED, OUTPUT_SIDE_LEARNED = "gptq, the worst in BF16", "gptq, then learned", f"{OUTPUT_SIDE}, then learned"
#: All levers at once, from four times the text: windows that are measured, those of which the output side is known, and
#: the row that learns from as many afterwards, once.
MOST_WINDOWS, MOST_OUTPUT_WINDOWS = 256, 80
MOST = f"every lever, {MOST_WINDOWS} windows"
EXACT_LEARNED, MORE_BF16_LEARNED, MOST_LEARNED = (
    f"{start}, then learned" for start in (EXACT_OUTPUT_SIDE, MORE_BF16_OUTPUT_SIDE, MOST)
)
#: Model -> the windows that it learns from behind the output side, where these are not `MOST_WINDOWS`.
LEARNED_WINDOWS = {"gemma3": 128}
#: Row -> the row that it goes on from.
STARTS = {
    WEIGHED: GPTQ,
    OUTPUT_SIDE: WEIGHED,
    EXACT: WEIGHED,
    EXACT_OUTPUT_SIDE: EXACT,
    MORE_BF16: EXACT,
    MORE_BF16_OUTPUT_SIDE: MORE_BF16,
    LEARNED: GPTQ,
    OUTPUT_SIDE_LEARNED: OUTPUT_SIDE,
    EXACT_LEARNED: EXACT_OUTPUT_SIDE,
    MORE_BF16_LEARNED: MORE_BF16_OUTPUT_SIDE,
    MOST: EXACT_OUTPUT_SIDE,
    MOST_LEARNED: MOST,
}
#: Rows whose codes are those of their start, but for some.
REVISED = (
    OUTPUT_SIDE, EXACT_OUTPUT_SIDE, MORE_BF16_OUTPUT_SIDE,
    LEARNED, OUTPUT_SIDE_LEARNED, EXACT_LEARNED, MORE_BF16_LEARNED, MOST_LEARNED,
)  # fmt: skip


def gently(model: str) -> DistillOptions:
    """How a `model` learns behind the output side: with the usual rate its held-out loss rises and it begins anew."""
    rate = DistillOptions().learning_rate / SMALLER
    return DistillOptions(samples=LEARNED_WINDOWS.get(model, MOST_WINDOWS), epochs=1.0, learning_rate=rate)


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


def changed(weights: Weights, start: Weights) -> dict[str, float]:
    """Kind of GEMM, which is the last part of its name -> the share of its codes that are not those of `start`, of the
    weights that have codes in both.
    """
    counts: dict[str, tuple[int, int]] = {}
    for module, weight in weights.items():
        if module not in start:
            continue
        kind = module.rpartition(".")[2]
        differing, every = counts.get(kind, (0, 0))
        counts[kind] = differing + int((weight != start[module]).sum()), every + weight.numel()
    return {kind: round(differing / every, 4) for kind, (differing, every) in counts.items()}


def rows_of(runs: RoundedRuns) -> dict[str, Callable[[], Rounded]]:
    """Row -> what makes its weights."""

    def calibrated(row: str, **chosen: Any) -> Callable[[], Rounded]:
        root = runs.folder / f"run, {row}"
        return lambda: runs.rounded(row, lambda: with_seconds(runs.calibrated(root, **chosen)))

    def worst() -> Rounded:
        run = runs.copied("copy")
        scales(run.root, RescaleOptions(**PLAIN))
        weights = without_the_worst(run, runs.rounded(GPTQ).weights)
        return Rounded(weights, runs.rounded(GPTQ).seconds + run.record().stages["sensitivity"].seconds)

    def learned(row: str, *how: Any) -> Callable[[], Rounded]:
        def make() -> tuple[Run, float]:
            start = STARTS[row]
            run = runs.copied("copy")
            scales(run.root, RescaleOptions(**PLAIN | RESCALED[start]))
            distill(run.root, *how)
            return run, runs.rounded(start).seconds + run.record().stages["distill"].seconds

        return lambda: runs.rounded(row, make)

    def rescaled(row: str) -> Callable[[], Rounded]:
        return lambda: runs.rounded(row)

    most = runs.folder / f"run, {MOST}"

    def most_learned() -> tuple[Run, float]:
        run, seconds = with_seconds(Run(most))
        distill(run.root, runs.asked.data, gently(runs.name))
        return run, seconds + run.record().stages["distill"].seconds

    samples = runs.asked.samples
    others = {f"gptq, {windows} windows": windows for windows in MORE_AND_LESS}
    return {
        "nearest": calibrated("nearest", weight_rounding="nearest"),
        **{row: calibrated(row, weight_rounding="gptq", samples=windows) for row, windows in others.items()},
        "sequential": calibrated("sequential", weight_rounding="sequential", samples=samples),
        **{row: rescaled(row) for row in RESCALED if row != GPTQ},
        WORST: worst,
        LEARNED: learned(LEARNED),
        OUTPUT_SIDE_LEARNED: learned(OUTPUT_SIDE_LEARNED),
        **{row: learned(row, runs.asked.data, gently(runs.name)) for row in (EXACT_LEARNED, MORE_BF16_LEARNED)},
        MOST: calibrated(
            MOST, **RESCALED[EXACT_OUTPUT_SIDE] | {"samples": MOST_WINDOWS, "weigh_outputs": MOST_OUTPUT_WINDOWS}
        ),
        MOST_LEARNED: lambda: runs.rounded(MOST_LEARNED, most_learned),
    }


def measure(runs: RoundedRuns) -> RowFigures:
    """Judge every row, with its seconds and bytes."""
    gptq = runs.rounded(GPTQ)
    makers: dict[str, Callable[[], Rounded]] = {GPTQ: lambda: gptq, **rows_of(runs)}
    judged = RowFigures(runs, GPTQ, "gptq")
    for row, make in makers.items():
        if row != GPTQ and not re.search(runs.asked.rows, row):
            continue
        made = make()
        figures = judged.judge(row, partial(quantized, judged.source, made.weights, {}))
        figures["seconds"] = made.seconds
        figures["bytes"] = round(share_of_bytes(made.weights, gptq.weights), 4)
        start = STARTS.get(row)
        if start is not None and start in judged.tokens:
            over, interval = ratio(judged.tokens[row], judged.tokens[start])
            figures |= {"kl_over_start": over, "start_interval": interval}
            if row in REVISED:
                figures["changed"] = changed(made.weights, makers[start]().weights)
        judged.show(row)
    return judged


if __name__ == "__main__":
    sys.exit(publish_rows("weight_levers", arguments(__doc__), measure))
