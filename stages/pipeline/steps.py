"""Common steps of the stages: notes, checks for an extra, the device, and the lock of a run."""

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

#: The import names of the packages of the extras `calibrate` and `serve`.
CALIBRATE_MODULES = ("torch", "transformers", "datasets", "compressed_tensors", "onnxscript")
SERVE_MODULES = ("fastapi", "starlette", "uvicorn", "prometheus_client", "jinja2")


def needs(extra: str, modules: Sequence[str]) -> None:
    """Raise BackendError, naming the extra, when one of `modules` is not installed."""
    if missing := lacking(modules):
        raise BackendError(
            "",
            f"{missing} is not installed and this command needs it",
            f"install it with `pip install 'fp8q[{extra}]'`",
        )


def lacking(modules: Sequence[str]) -> str | None:
    """Return the first of `modules` that is not installed; None where all are."""
    return next((name for name in modules if find_spec(name) is None), None)


class Notes:
    """A reporter that passes everything on and stores the notes."""

    def __init__(self, report: Reporter):
        """Pass everything on to `report`."""
        self.report, self.track, self.lines, self.waiting = report, report.track, list[str](), False

    def note(self, line: str) -> None:
        """Pass the line on, unless notes are held, and store it."""
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
    """Return everything that the bits of a model's sums depend on, besides the model and its inputs."""
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
    """Note where this machine's CPU computes BF16 products in another way than the one that measured `run`."""
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
    """Hold the lock of `run` in this block, over all of its stages, and remove leftovers of killed calls first.

    Another process that would write to the run meanwhile is refused.
    """
    with keeping_locks(), ExitStack() as held:
        if run.exists() and process_rank().rank == 0:
            _take(run, held)
        yield


def _take(run: Run, held: ExitStack) -> None:
    """Lock `run` and sweep it; a directory that may not be written to is left for a stage to refuse."""
    try:
        held.enter_context(run.lock())
    except InputError as error:
        if isinstance(error.__cause__, PermissionError) or getattr(error.__cause__, "errno", None) == errno.EROFS:
            return
        raise
    run.sweep()
