"""What is lost between one code for every input and none: a scale for each token, and the costliest inputs exact.

    python benchmarks/input_mixes.py [smollm2 gemma3] [--rows PATTERN] [--samples 64] [--windows 24] [--runs FOLDER]
        [--save NAME]

A stock vLLM computes `--form dynamic --form 'PATTERN=bf16'`: one FP8 GEMM where an input is codes, and one in BF16 on
FP8 weights where it is exact. Bytes are those of FP8 weights in every mix, and so a decode step's; a prompt has twice
the operations where the input is exact. The codes of weights are the same for all mixes: GPTQ's from one calibration
(`rounded_runs.py`), with first tokens weighed but where a row says `gptq` alone; one row has the codes that make up for
what codes of inputs lose, as `--form dynamic` has them rounded. Inputs that are one tensor (of q, k
and v; of gate and up) are exact together, those of the largest predicted loss an operation first (`fp8q sensitivity` of
a scale for each token, eight calibration windows), as long as they fit into the share of a prompt's operations in
GEMMs. One row takes all of a kind instead, as a pattern does.

KL from FP32, everything computed in FP32 but what is quantized, on the windows and models of `weight_levers.py`, with
its ratio to `dynamic` with GPTQ by the same windows; the operations of a prompt, where one in BF16 counts for two, over
those of BF16; and how many inputs of each kind are exact. Prints one JSON line; exit status 2 where a package or text
is not there.
"""

import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from real_rows import Weights, dynamic_input, quantized, static_input
from result import arguments
from rounded_runs import GPTQ, WEIGHED, RoundedRuns, with_seconds
from row_figures import RowFigures, publish_rows

from fp8q.api import RescaleOptions, Sensitivity, scales, sensitivity
from fp8q.core.run import Run
from fp8q.options import DYNAMIC, ONE
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.serving_cost import BF16_OPERATIONS

#: Shares of a prompt's operations in GEMMs whose inputs are exact.
SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
#: The kind of GEMM that a pattern names.
KIND = "down_proj"
DYNAMIC_GPTQ, ONE_GPTQ, ONE_WEIGHED = "dynamic, gptq", "one, gptq", "one"
ROUNDED_FOR_CODES = "0% exact, rounded for codes"


def dynamic_run(runs: RoundedRuns, name: str, **options: Any) -> Run:
    """A run whose inputs have a scale for each token, and whose weights are rounded by these `options`."""
    run = runs.copied(name)
    return scales(run.root, RescaleOptions(bf16_weights=0.0, weigh_outputs=0, form=(DYNAMIC.kind,), **options))


def costliest_inputs(losses: Sequence[tuple[Sequence[str], float]], sizes: Mapping[str, int], share: float) -> set[str]:
    """The modules whose inputs are exact: of `losses`, each the modules that read a tensor and its loss, those of the
    largest loss an operation, as long as they have at most this `share` of all operations.

    `sizes`: module -> its multiplications for a token.
    """
    left = share * sum(sizes.values())
    exact = set[str]()
    by_operation = [(loss / sum(sizes[module] for module in modules), modules) for modules, loss in losses]
    for _, modules in sorted(by_operation, key=lambda cost: -cost[0]):
        size = sum(sizes[module] for module in modules)
        if size <= left:
            left -= size
            exact.update(modules)
    return exact


def input_losses(predicted: Sensitivity) -> list[tuple[Sequence[str], float]]:
    """The modules that read each tensor, and the loss of its codes."""
    inputs = [loss for loss in predicted.modules if loss.kind == "activation"]
    return [(loss.shared_by or [loss.module], loss.kl_nats) for loss in inputs]


def operations(sizes: Mapping[str, int], exact: Collection[str]) -> float:
    """The operations of a prompt where the inputs of the modules `exact` are BF16 and others codes, over those where
    all are BF16.
    """
    costs = {module: BF16_OPERATIONS if module in exact else 1 for module in sizes}
    return sum(sizes[module] * cost for module, cost in costs.items()) / (BF16_OPERATIONS * sum(sizes.values()))


def kinds(modules: Collection[str]) -> dict[str, int]:
    """Kind of GEMM, which is the last part of its name -> how many of `modules` are."""
    return dict(sorted(Counter(module.rpartition(".")[2] for module in modules).items()))


def mixes(run: Run, sizes: Mapping[str, int]) -> dict[str, set[str]]:
    """Row -> the modules whose inputs are exact, by the losses that are predicted of `run`."""
    losses = input_losses(sensitivity(run.root, windows=8, measure=0))
    rows = {f"{share:.0%} exact": costliest_inputs(losses, sizes, share) for share in SHARES}
    return rows | {f"{KIND} exact": {module for module in sizes if module.endswith(KIND)}}


def rounded_for_codes(runs: RoundedRuns) -> Weights:
    """The weights of GPTQ with first tokens weighed, where it makes up for codes of inputs."""

    def make() -> tuple[Run, float]:
        return with_seconds(dynamic_run(runs, "for codes", weight_rounding="gptq", weigh_first_token=True))

    return runs.rounded(ROUNDED_FOR_CODES, make).weights


def measure(runs: RoundedRuns) -> RowFigures:
    """Judge every row, and count what it multiplies."""
    gptq = runs.rounded(GPTQ).weights
    weighed = runs.rounded(WEIGHED).weights
    sizes = {module: weight.numel() for module, weight in weighed.items()}
    run = Run(runs.folder / "dynamic")
    if not run.sensitivity.is_file():
        run = dynamic_run(runs, run.root.name, weight_rounding="nearest")  # the quickest
    activations = load_scales(run).activations
    static = {module: static_input(activation.with_form(ONE)) for module, activation in activations.items()}
    dynamic = dict.fromkeys(sizes, dynamic_input)
    rows: dict[str, tuple[Weights, dict[str, Any], set[str]]] = {
        DYNAMIC_GPTQ: (gptq, dynamic, set()),
        ONE_GPTQ: (gptq, static, set()),
        ONE_WEIGHED: (weighed, static, set()),
    }
    for row, modules in mixes(run, sizes).items():
        inputs = {module: function for module, function in dynamic.items() if module not in modules}
        rows[row] = weighed, inputs, modules
    if re.search(runs.asked.rows, ROUNDED_FOR_CODES):
        rows[ROUNDED_FOR_CODES] = rounded_for_codes(runs), dynamic, set()
    judged = RowFigures(runs, DYNAMIC_GPTQ, "dynamic")
    for row, (weights, inputs, modules) in rows.items():
        if row != DYNAMIC_GPTQ and not re.search(runs.asked.rows, row):
            continue
        stored = f"inputs, {row}" if inputs else WEIGHED
        figures = judged.judge(row, partial(quantized, judged.source, weights, inputs), stored)
        figures["operations"] = round(operations(sizes, modules), 4)
        figures["exact"] = kinds(modules)
        judged.show(row)
    return judged


if __name__ == "__main__":
    sys.exit(publish_rows("input_mixes", arguments(__doc__), measure))
