"""Measure the cost of a tensor core's adder: run the reference on some windows with its codes summed in another way.

Adding as `quantize.reference.adder` does takes minutes where the processor's own GEMM takes seconds, so a few
windows are run, evenly spaced over the text: always the same ones. The reference with sums in FP32 goes through the
same windows, since only with that can they be compared; both scale the sum in FP32 and round it once, as the mode
`exact` does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ...calibrate.text.evaluation import Evaluation
from ...core.headers import read_header
from ...core.run import Run
from ...options import Accumulator
from ...quantize.codes.formats import CODE_DTYPE
from ...quantize.reading.run_checkpoint import vocabulary_size
from ...quantize.reference.adder import seconds_per_multiply_add
from ...quantize.reference.fp8_model import Reference
from ...quantize.scales.decisions import load_scales
from ...quantize.scales.scheme import in_two_codes
from .compare import BASELINE, Opener, Outcome, Turns, Workplace, compare_in_turn
from .runtimes import logits_of, open_reference

NLL = npt.NDArray[np.float32]
Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class Sample:
    """A sample of the `full` evaluation: its windows of the int64 indices `chosen`."""

    full: Evaluation
    chosen: npt.NDArray[np.int64]

    @property
    def evaluation(self) -> Evaluation:
        """The evaluation of the sampled windows alone."""
        return Evaluation(self.full.ids[self.chosen], self.full.scored[self.chosen], self.full.protocol)

    @property
    def tokens(self) -> int:
        """The number of scored tokens in the sample."""
        return int(self.full.scored[self.chosen].sum())

    def spread(self, nll: NLL) -> NLL:
        """Spread `nll` of the sample over all windows, float32 [windows, context]; NaN outside of the sample."""
        every = np.full(self.full.ids.shape, np.nan, np.float32)
        every[self.chosen] = nll
        return every


def sample(evaluation: Evaluation, windows: int) -> Sample:
    """`windows` windows from the first to the last, evenly spaced, or all where there are no more."""
    last = len(evaluation.ids) - 1
    return Sample(evaluation, np.unique(np.linspace(0, last, min(windows, last + 1)).round().astype(np.int64)))


def cost(run: Run, taken: Sample, accumulator: Accumulator, device: str) -> str:
    """Describe the run to come and the time that its sums take on this machine."""
    windows = len(taken.evaluation.ids)
    tokens = taken.evaluation.ids.size
    return (
        f"--accumulator {accumulator}: the reference on {windows} of {len(taken.full.ids)} windows; the sums of "
        f"{time_of_sums(run, tokens, accumulator, device)}"
    )


def time_of_sums(run: Run, tokens: int, accumulator: Accumulator, device: str) -> str:
    """Describe the sums of so many `tokens`, and the time that they take on this machine."""
    multiply_adds = multiply_adds_per_token(run)
    seconds = tokens * multiply_adds * seconds_per_multiply_add(accumulator, device)
    return f"{tokens:,} tokens of {multiply_adds:,} products take about {seconds:,.1f} s here"


def multiply_adds_per_token(run: Run) -> int:
    """Count the multiplications of codes for a token: one for each code of the checkpoint, two where the input is in
    two terms.
    """
    twice = {f"{module}.weight" for module in in_two_codes(load_scales(run).forms)}
    headers = (read_header(shard) for shard in sorted(run.model.glob("*.safetensors")))
    return sum(
        prod(tensor.shape) * (2 if name in twice else 1)
        for header in headers
        for name, tensor in header.items()
        if tensor.dtype == CODE_DTYPE
    )


def compare_sums(
    run: Run, taken: Sample, baseline: Opener | None, accumulator: Accumulator, workplace: Workplace
) -> Outcome:
    """Run the sample through the reference with sums in FP32 and with sums as `accumulator` has them.

    Both are compared with the `baseline`, and the outcome is of both.
    """
    openers: dict[str, Opener] = {BASELINE: baseline} if baseline else {}
    openers |= with_sums(run, accumulator, workplace.device, logits_of)
    count = vocabulary_size(run)
    outcome = compare_in_turn(Turns(taken.evaluation, openers, count, workplace.folder), workplace.report)
    by_runtime = {
        name: accuracy.model_copy(update={"tokens": taken.tokens})
        for name, accuracy in outcome.accuracy.runtimes.items()
        if name != BASELINE
    }
    accuracy = outcome.accuracy.model_copy(update={"runtimes": by_runtime})
    return Outcome(accuracy, {name: taken.spread(outcome.nll[name]) for name in by_runtime}, outcome.failed)


def with_sums(
    run: Run, accumulator: Accumulator, device: str, use: Callable[[Reference], Loaded]
) -> dict[str, Callable[[], Loaded]]:
    """Return the functions that load the reference for a `use`, with sums of codes in FP32 and with sums as
    `accumulator` has them, by the names of these runtimes; both round each GEMM's output once.
    """

    def load(sums: Accumulator) -> Loaded:
        loaded = open_reference(run, "exact", device)
        loaded.sum_in(sums)
        return use(loaded)

    return {f"reference-{sums}": partial(load, sums) for sums in dict.fromkeys(("fp32", accumulator))}
