"""Compare runtimes that are loaded already, for benchmarks and tests: fp8q itself loads one at a time."""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from fp8q.calibrate.text.evaluation import Evaluation
from fp8q.core.errors import BackendError
from fp8q.core.reporter import Reporter
from fp8q.core.undo import scratch
from fp8q.validate.accuracy.as_served import LogitsPart
from fp8q.validate.accuracy.compare import AnyForward, Opener, Turns, compare_in_turn
from fp8q.validate.accuracy.document import Accuracy


def compare_runtimes(
    evaluation: Evaluation, runtimes: Mapping[str, AnyForward], vocabulary: int, report: Reporter
) -> tuple[Accuracy, dict[str, npt.NDArray[np.float32]]]:
    """Run `evaluation` through `runtimes` that are loaded (the one named "bf16" is what the others are compared with).

    Returns the summary and, for each runtime, the negative log-likelihood in nats, float32 [windows, context], NaN
    where not scored. Raises BackendError for a runtime that fails.
    """

    def loaded(forward: AnyForward) -> Opener:
        return lambda: forward

    with scratch() as folder:
        openers = {name: loaded(forward) for name, forward in runtimes.items()}
        outcome = compare_in_turn(Turns(evaluation, openers, vocabulary, folder), report)
    for why in outcome.failed.values():
        raise BackendError("", why)
    return outcome.accuracy, outcome.nll


def stacked(pieces: Iterable[LogitsPart]) -> npt.NDArray[np.float32]:
    """Put the pieces of a batch together: float32 [windows, positions, vocabulary]."""
    of_windows: dict[int, list[npt.NDArray[np.float32]]] = {}
    for piece in pieces:
        of_windows.setdefault(piece.windows.start, []).append(np.asarray(piece.logits, np.float32))
    return np.concatenate([np.concatenate(of_windows[start], axis=1) for start in sorted(of_windows)])
