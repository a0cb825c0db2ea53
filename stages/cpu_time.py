"""Estimate the time of running a model on this CPU, by that of calibrating it."""

from ..core.run import Run
from .corpus import load_tokens
from .pipeline.stage import device

#: The time of a decoding step on a CPU, in tokens of a calibration window: the demo's took 33, of four windows at once.
STEP_TOKENS = 33


def token_seconds(run: Run) -> float | None:
    """The seconds of a token of a calibration window on this CPU; None where calibrating says nothing of it: on a GPU,
    or where the run was measured on one.
    """
    measured = run.record().stages.get("measure")
    if device() != "cpu" or measured is None or measured.machine.get("device", "CPU") != "CPU":
        return None
    return measured.seconds / max(1, load_tokens(run, run.calibration).size)
