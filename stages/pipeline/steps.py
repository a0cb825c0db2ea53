"""Shared parts of the stages: a reporter that remembers, the record of a stage, and the device models run on."""

import errno
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec

from ... import __version__
from ...calibrate.ranks.torchrun import process_rank
from ...core.errors import BackendError, InputError
from ...core.files import keeping_locks
from ...core.record import library_versions
from ...core.reporter import Reporter
from ...core.run import Run

#: What the extra `calibrate` brings, by the names they are imported under.
CALIBRATE_MODULES = ("torch", "transformers", "datasets", "compressed_tensors", "onnxscript")


def needs(extra: str, modules: Sequence[str]) -> None:
    """Raise BackendError, naming the extra, when one of `modules` is not installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise BackendError(
            f"{missing[0]} is not installed and this command needs it; install it with `pip install 'fp8q[{extra}]'`"
        )


class Notes:
    """A reporter that passes everything on and remembers the notes."""

    def __init__(self, report: Reporter):
        """Speak through `report`."""
        self.report, self.track, self.lines, self.waiting = report, report.track, list[str](), False

    def note(self, line: str) -> None:
        """Say the line, unless notes wait, and keep it."""
        self.lines.append(line)
        if not self.waiting:
            self.report.note(line)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the notes of this block back until it ends; where it fails, only the error is shown."""
        said, self.waiting = len(self.lines), True
        yield
        self.waiting = False
        for line in self.lines[said:]:
            self.report.note(line)


def device() -> str:
    """Return the device that models run on: the first GPU, or the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def arithmetic() -> dict[str, object]:
    """Return all that the last bits of a model's sums depend on, besides the model and its inputs."""
    import torch

    from ...calibrate.model.bf16_products import bf16_arithmetic

    return {
        "fp8q": __version__,
        "libraries": library_versions(),
        "threads": torch.get_num_threads(),
        "device": device(),
        **bf16_arithmetic(device()),
    }


def note_other_arithmetic(run: Run, notes: Notes) -> None:
    """Note where this machine's CPU computes BF16 products otherwise than the one that measured `run` did."""
    from ...calibrate.model.bf16_products import bf16_arithmetic

    measured = run.record().stages.get("measure")
    if measured is None or device() != "cpu" or measured.machine.get("device") != "CPU":
        return
    there, here = (
        "BF16" if "bf16_products" not in facts else "FP32" for facts in (measured.machine, bf16_arithmetic("cpu"))
    )
    if there != here:
        notes.note(
            f"the run was measured where {there} units compute BF16 products, and {here} units do here: sums round in "
            "another order, and last bits differ; scales and checkpoint are the run's, and nothing is measured again"
        )


@contextmanager
def alone(run: Run) -> Iterator[None]:
    """Work alone on `run` in this block, from its first stage to its last: another process that would write there
    meanwhile is refused. What killed calls left of finished stages goes first.
    """
    with keeping_locks(), ExitStack() as held:
        if run.exists() and process_rank().rank == 0:
            _take(run, held)
        yield


def _take(run: Run, held: ExitStack) -> None:
    """Lock `run` and sweep it; where it may not be written to, leave that to the stage that must write."""
    try:
        held.enter_context(run.lock())
    except InputError as error:
        if isinstance(error.__cause__, PermissionError) or getattr(error.__cause__, "errno", None) == errno.EROFS:
            return
        raise
    run.sweep()
