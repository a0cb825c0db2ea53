"""`fp8q inspect`: every module of a run and its outliers; on demand delayed scaling, or the same scales on another
text.
"""

from dataclasses import dataclass

from ..calibrate.measure.statistics import load_statistics
from ..core.run import Run
from ..options import Clipping
from ..quantize.scales.decisions import load_scales
from ..validate.advice.certificate import Certificate, certificate
from ..validate.advice.expert_coverage import ExpertRow, expert_rows
from ..validate.advice.findings import (
    AgainstRow,
    DelayedRow,
    Outlier,
    against_rows,
    delayed_rows,
    findings,
    jumps,
    prospective_scales,
)
from ..validate.report.rows import ModuleRow, bf16_cache_rows, module_rows
from .pipeline.stage import CALIBRATE_MODULES, Notes, needs
from .pipeline.stages import QUANTIZE


@dataclass(frozen=True)
class Inspection:
    """The results of `fp8q inspect`: every module, the cache in BF16 as FP8 would have it, outliers, the assessment of
    the calibration text, the experts' coverage, and the results of `delayed` and `against`.
    """

    modules: list[ModuleRow]
    bf16_cache: list[ModuleRow]
    findings: list[Outlier]
    certificate: Certificate
    experts: list[ExpertRow]
    all_experts: bool
    delayed: list[DelayedRow] | None = None
    against: list[AgainstRow] | None = None


def inspect(run: Run, notes: Notes, delayed: Clipping | None, against: str | None) -> Inspection:
    """Inspect `run`; `delayed` and `against` as `api.inspect` takes them. Raises InputError."""
    run.refuse_stale("measure", "quantize")
    modules = module_rows(run)
    statistics = load_statistics(run)
    scales = load_scales(run)
    prospective = prospective_scales(statistics, scales, run.options(QUANTIZE).clip)
    under_history = delayed_rows(statistics, scales, delayed) if delayed else None
    for warning in jumps(under_history or []):
        notes.note(warning)
    other = None
    if against:
        needs("calibrate", CALIBRATE_MODULES)
        from .measure import measure_text

        other = against_rows(statistics, scales, measure_text(run, against, notes))
    return Inspection(
        modules,
        bf16_cache_rows(statistics, prospective),
        findings(statistics, scales, prospective),
        certificate(statistics, scales),
        expert_rows(statistics, scales),
        bool(statistics.record.all_experts),
        under_history,
        other,
    )
