"""The adapters beside a run's model: which there are, and which commands know nothing of them."""

from collections.abc import Sequence

from ...core.errors import InputError
from ...core.run import Run
from ...options import ExportOptions
from .steps import Notes


def adapters_of(run: Run) -> list[str]:
    """The names of the adapters that are served beside the run's model."""
    measured = run.record().stages.get("measure")
    found = measured.options.get("adapters") if measured else None
    return [*found] if isinstance(found, dict) else []


def check_adapter(run: Run, name: str | None) -> None:
    """Raise InputError for the name of an adapter that is not beside the run's model."""
    there = adapters_of(run)
    if name is None or name in there:
        return
    merged = run.record().model.get("adapter")
    known = f"there are {', '.join(there)}" if there else "there is none"
    if merged and not there:
        known = f"{merged} is merged into its weights"
    raise InputError(
        f"--adapter {name}: is not beside the model in {run.root} ({known}); name another, or leave it out"
    )


def check_attention(adapters: Sequence[str], asked: ExportOptions) -> None:
    """Raise InputError for attention in FP8 with adapters on: queries are measured of the base alone."""
    if asked.attention == "fp8" and adapters:
        raise InputError(
            f"--attention fp8: queries are measured without the adapter {adapters[0]} beside the model; leave it out, "
            "or merge the adapter"
        )


def note_base_alone(run: Run, does: str, notes: Notes) -> None:
    """Note that what a command `does` is of the base, where there are adapters beside it."""
    if there := adapters_of(run):
        notes.note(f"{does} the base alone, without {', '.join(there)} beside it")
