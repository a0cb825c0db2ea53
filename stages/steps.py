"""What every stage needs: a reporter that remembers, the record of a stage, and the device models run on."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from ..errors import BackendError
from ..record import StageLog
from ..reporter import Reporter
from ..run import Run

#: What the extra `calibrate` brings, by the names they are imported under.
CALIBRATE_MODULES = ("torch", "transformers", "datasets", "modelopt", "compressed_tensors", "onnxscript")


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
        """Say the notes made in the block when it ends well: where it fails, the error is all there is to say."""
        said, self.waiting = len(self.lines), True
        yield
        self.waiting = False
        for line in self.lines[said:]:
            self.report.note(line)


def device() -> str:
    """Where models run: the first GPU, or the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def stage(
    run: Run,
    name: str,
    inputs: Mapping[str, str],
    options: Mapping[str, object],
    notes: Notes,
    model: Mapping[str, str] | None = None,
) -> Iterator[StageLog]:
    """`Run.stage`, with the notes made since the last one."""
    with run.stage(name, inputs, options, model) as log:
        yield log
        log.notes, notes.lines = notes.lines, []
