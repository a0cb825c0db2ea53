"""The adapters beside a run's model, and the commands that do not support them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...core.errors import InputError
from ...core.run import Run
from ...options import ExportOptions, ScaleOptions
from ...quantize.reading.run_checkpoint import LEARNED
from ..pipeline.stage import Notes
from ..pipeline.stages import ADAPTER, MEASURE

if TYPE_CHECKING:
    from ...calibrate.model.source import Source

#: The runtimes that have the learned adapter on: the reference, and its source model, which it was learned from, alone.
LEARNED_RUNTIMES = ("reference", "bf16")


def adapters_of(run: Run) -> list[str]:
    """The names of the adapters that are served beside the run's model."""
    if MEASURE.name in run.record().stages:
        return [*(run.facts(MEASURE).adapters or {})]
    return []


def fingerprints(source: "Source") -> dict[str, str] | None:
    """Return name -> fingerprint of the adapters of `source`, for a stage's key; None without adapters."""
    return {adapter.name: adapter.fingerprint for adapter in source.adapters} or None


def check_adapter(run: Run, name: str | None, by: str | None = None) -> None:
    """Raise InputError for the name of an adapter that the run does not have.

    `by`: the runtime that is to have it on, for the learned adapter, which is in no graph.
    """
    there = adapters_of(run)
    if name is None or name in there:
        return
    if name == LEARNED and ADAPTER.name in run.record().stages:
        check_learned(run, by)
        return
    merged = run.record().model.get("adapter")
    known = f"there are {', '.join(there)}" if there else "there is none"
    if merged and not there:
        known = f"{merged} is merged into its weights"
    raise InputError(
        f"--adapter {name}", f"is not beside the model in {run.root} ({known})", "name another, or leave it out"
    )


def check_learned(run: Run, by: str | None) -> None:
    """Raise InputError for a learned adapter that is not there, is of another checkpoint, or is not for the runtime
    `by`.
    """
    written = [run.root / name for name in run.record().stages[ADAPTER.name].outputs]
    if run.adapter not in (path.parent for path in written):
        raise InputError(f"--adapter {LEARNED}", f"none was written, since nothing got better ({run.adapter_learning})")
    run.refuse_stale(ADAPTER.name)
    for path in written:
        run.require(path, ADAPTER.name)
    if by not in LEARNED_RUNTIMES:
        raise InputError(
            f"--adapter {LEARNED}",
            "is in no graph",
            f"use --runtime reference, or vLLM with --lora-modules {LEARNED}={run.adapter}",
        )


def check_attention(adapters: Sequence[str], asked: ExportOptions, scales: ScaleOptions = ScaleOptions()) -> None:
    """Raise InputError for FP8 attention or scales of queries with adapters: queries are measured of the base alone."""
    asking = "--attention fp8" if asked.attention == "fp8" else "--q-scale" if scales.q_scale else None
    if asking and adapters:
        raise InputError(
            asking,
            f"queries are measured without the adapter {adapters[0]} beside the model",
            "leave it out, or merge the adapter",
        )


def note_base_alone(run: Run, does: str, notes: Notes) -> None:
    """Note that a command `does` its work for the base alone, where there are adapters beside it."""
    if there := adapters_of(run):
        notes.note(f"{does} the base alone, without {', '.join(there)} beside it")
