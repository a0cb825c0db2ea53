"""`fp8q engine`: read the kernels of a run's engines, and compare them with what the run expects.

Needs no GPU, but for TensorRT's own engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ..core.errors import BackendError, GateError, InputError
from ..core.record import FP8_STAGES
from ..core.run import Run
from ..export.engine.cache_traffic import CacheTraffic, cache_traffic
from ..export.engine.info import LAYERS, Counted, EngineInfo, asked_share, load_engines, may_be_unknown, shortfall
from ..export.engine.inspector import read_inspector
from ..export.engine.kernel_rows import AttentionRow, GemmRow, NotFP8Row, attention_rows, gemm_rows, not_fp8_rows
from ..export.engine.numbers import CODES, FACTORS, INPUT, Difference
from ..export.engine.plan import Plan, doubt, read_plan
from ..export.engine.proof import broken, prove
from ..export.engine.runtime import inspect_plan
from ..export.engine.second_codes import TERMS
from ..export.lint.check import run_expectation, sound_graph
from ..export.lint.rules import Expectation
from ..export.onnx_file.indexed import Indexed
from ..options import BF16
from ..quantize.scales.decisions import Scales, load_scales
from ..quantize.scales.scheme import in_two_codes


@dataclass(frozen=True)
class EngineView:
    """The kernels of one engine.

    `unknown`: why they are unknown, where they are. `untold`: expected GEMMs of which the inspector does not tell
    whether they are FP8 on both sides. `codes_found`, `factors_found` and `inputs_found`: FP8 GEMMs
    that multiply the codes of their own weight, are scaled by the run's factors `s_x · s_w[channel]`, and whose input
    was quantized with the run's scale (None: not checked). `terms_found`: FP8 GEMMs without those that are expected
    in two terms and multiply one (None: none is expected so). `differences`: values that differ or are unknown.
    `cache`: the bytes of the cache that a decode step reads (None: the plan does not show them).
    """

    file: str
    runtime: str
    version: str
    target: str
    bytes: int
    evidence: Literal["plan", "inspector", "unknown"]
    unknown: str | None
    promised_products: int
    fp8_products: int
    untold: tuple[str, ...]
    codes_found: int | None
    codes_missing: tuple[str, ...]
    factors_found: int | None
    inputs_found: int | None
    terms_found: int | None
    differences: tuple[Difference, ...]
    narrow: tuple[str, ...]
    products: tuple[GemmRow, ...]
    attention: tuple[AttentionRow, ...]
    wide: tuple[NotFP8Row, ...]
    cache: CacheTraffic | None


def view_engines(run: Run, targets: Sequence[str], plan: Path | None = None) -> list[EngineView]:
    """List the kernels of the run's engines for `targets` (none: all).

    `plan`: read this file instead, as an engine of the one target. Raises InputError for a target that was not built,
    an engine file that has changed, and an engine that was built from other files than the run has now.
    """
    run.refuse_without_graph()
    run.refuse_stale(*FP8_STAGES, *(["build-engine"] if plan is None else []))
    engines = load_engines(run)
    built = [info.target for info in engines]
    if unknown := [target for target in targets if target not in built]:
        raise InputError(
            f"--target {unknown[0]}",
            f"{run.root} has no engine for it",
            f"choose from {', '.join(built)}, or build it with `fp8q build-engine {run.root} --target {unknown[0]}`",
        )
    chosen = [info for info in engines if not targets or info.target in targets]
    if plan is not None and len(chosen) > 1:
        raise InputError(f"--plan {plan}", "belongs to one target", f"name it with --target, one of {', '.join(built)}")
    scales = load_scales(run)
    graph = sound_graph(run.require(run.onnx, "export"))
    expected = run_expectation(run, scales)
    return [
        view(info, engine_file(run, info, plan), graph, expected, scales, None if plan else inspected_file(run, info))
        for info in chosen
    ]


def inspected_file(run: Run, info: EngineInfo) -> Path | None:
    """The file of what TensorRT's inspector said when it built an engine; None for engines without one."""
    file = run.engines / f"{info.target}{LAYERS}"
    built = run.record().stages["build-engine"].outputs
    if str(file.relative_to(run.root)) in built:
        return run.require(file, "build-engine")
    return None


def engine_file(run: Run, info: EngineInfo, plan: Path | None) -> Path:
    """The file of an engine: the one that `fp8q build-engine` wrote, or `plan`."""
    if plan is None:
        return run.require(run.engines / f"{info.target}.plan", "build-engine")
    if not plan.is_file():
        raise InputError(f"--plan {plan}", "there is no such file")
    return plan


def view(
    info: EngineInfo,
    file: Path,
    graph: Indexed,
    expected: Expectation,
    scales: Scales,
    inspected: Path | None = None,
) -> EngineView:
    """Read one engine, and compare it with what its run expects.

    `inspected`: what the inspector said of it is in this file (None: TensorRT has to be asked).
    """
    data = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.zeros(0, np.uint8)
    plan, reason = read_engine(info, data, inspected)
    profiles = [profile.name for profile in info.profiles]
    proof = prove(data.data, plan, graph, expected, profiles)
    gemm_types = proof.evidence
    if gemm_types.kind == "unknown" and reason is None:
        reason = next(iter(gemm_types.unknown.values()), "it shows no expected GEMM")
    skipped = {module: skipped.reason for module, skipped in scales.skipped.items()}
    skipped |= dict.fromkeys(scales.in_form(BF16), "its weight alone is FP8, its input stays in BF16")
    return EngineView(
        file=str(file),
        runtime=info.runtime,
        version=info.version,
        target=info.target,
        bytes=len(data),
        evidence=gemm_types.kind,
        unknown=reason,
        promised_products=len(expected.modules),
        fp8_products=len(gemm_types.fp8),
        untold=tuple(gemm_types.unknown) if gemm_types.kind != "unknown" else (),
        codes_found=proof.matching(CODES),
        codes_missing=tuple(
            dict.fromkeys(difference.module for difference in proof.differences if difference.what == CODES)
        ),
        factors_found=proof.matching(FACTORS),
        inputs_found=proof.matching(INPUT),
        terms_found=proof.matching(TERMS) if in_two_codes(expected.forms) else None,
        differences=proof.differences,
        narrow=tuple(sorted(gemm_types.narrow)),
        products=tuple(gemm_rows(plan, profiles)) if plan else (),
        attention=tuple(attention_rows(plan, profiles)) if plan else (),
        wide=tuple(not_fp8_rows(plan, gemm_types, graph, skipped)),
        cache=cache_traffic(plan, graph, info.profiles) if plan else None,
    )


def read_engine(
    info: EngineInfo, data: np.ndarray[tuple[int], np.dtype[np.uint8]], inspected: Path | None = None
) -> tuple[Plan | None, str | None]:
    """The plan of an engine, or why it cannot be read; of TensorRT's engines by what the file `inspected` has of its
    inspector, or (None) by asking it.
    """
    if info.runtime == "tensorrt-rtx":
        plan = read_plan(data.data) if len(data) else None
        reason = doubt(data.data, plan, info.target) if plan else "its text does not read"
        return None if reason else plan, reason
    try:
        plan = read_inspector(inspected.read_text(encoding="utf-8") if inspected else inspect_plan(data.data))
    except BackendError as error:
        return None, f"TensorRT's inspector has to be asked, on the GPU that it was built for: {error}"
    return plan, None if plan else "what the inspector says does not read"


def check_views(views: Sequence[EngineView], min_fp8_share: float | None) -> None:
    """Raise GateError for an engine with too few expected GEMMs in FP8, or with other codes or scales.

    `min_fp8_share`: the least share of expected GEMMs in FP8, a fraction (None: none was asked for, and all that can
    be told must be FP8); the cache and the attention must be as expected too.
    """
    for view in views:
        if view.evidence == "unknown" and not may_be_unknown(view.runtime, min_fp8_share):
            raise GateError(
                view.target,
                f"what {view.file} runs cannot be told ({view.unknown}), which does not meet "
                f"{asked_share(min_fp8_share)}",
                "build it again with `fp8q build-engine`",
            )
        not_fp8 = [row.product for row in view.wide if row.promised and row.product not in view.untold]
        narrow = view.narrow if view.evidence == "plan" else ()
        if view.evidence != "unknown" and (
            short := shortfall(Counted(view.promised_products, not_fp8, narrow, view.untold), min_fp8_share)
        ):
            raise GateError(
                view.target, short, "`fp8q export` and `fp8q build-engine` again, or accept it with a smaller share"
            )
        if (differing := broken(view.differences)) and min_fp8_share != 0:
            first, *others = differing
            more = f" ({len(others)} more, --json has all)" if others else ""
            raise GateError(
                view.target,
                f"{view.file} is not the engine of this run: {first}{more}",
                "build it again with `fp8q build-engine`",
            )
