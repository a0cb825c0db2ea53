"""`engines/<target>.json`: an engine, its proof, and the check of its FP8 share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from ...core.errors import GateError, InputError
from ...core.files import Strict, read_document
from ...core.record import stage_command
from ...core.run import Run
from ...options import Precision, WeightScale
from ...quantize.reading.run_checkpoint import ADAPTERS
from . import targets
from .profiles import Profile
from .targets import Runtime

#: Names listed in a message; the rest are counted.
LISTED = 8


class EngineInfo(Strict):
    """`engines/<target>.json`: an engine and its proof."""

    runtime: Runtime
    version: str = Field(description="of the runtime")
    target: str = Field(description="compute capability, as sm89")
    bytes: int
    promised_products: int = Field(description="modules that scales.json promises on FP8")
    fp8_products: int = Field(description="those whose product takes FP8 on both sides in every profile")
    wide_products: list[str] = Field(description="the others")
    narrow_products: list[str] = Field(
        default=[], description="those of fp8_products that answer in less than FP32, and so do not count as promised"
    )
    ran: dict[str, int] | None = Field(
        default=None, description="of an engine that promises none: how many modules' products are of which types"
    )
    weight_scale: WeightScale | None = Field(
        default=None, description="the form of the graph beside it that it was built of; null: of model.onnx"
    )
    branches: bool | None = Field(
        default=None,
        description="whether its graph chooses branches, as for experts; null: built before this was noted",
    )
    evidence: Literal["plan", "inspector", "unknown"]
    profiles: list[Profile]
    build_seconds: float


def engines_of(run: Run, precision: Precision, adapter: str | None = None) -> Path:
    """The folder of the engines of a precision (`engines/` for fp8), or of the engines with an adapter."""
    if adapter:
        return run.engines / ADAPTERS / adapter
    return run.engines if precision == "fp8" else run.engines / precision


def engine_stage(precision: Precision, adapter: str | None = None) -> str:
    """The name of the stage that builds the engines of a precision, or those with an adapter."""
    if adapter:
        return f"build-engine --adapter {adapter}"
    return "build-engine" if precision == "fp8" else f"build-engine-{precision}"


def load_engines(run: Run, precision: Precision = "fp8", adapter: str | None = None) -> list[EngineInfo]:
    """Load the JSON records of the engines of a precision, or with an adapter, in the order of their targets.

    Raises InputError when there are none, or a record was changed.
    """
    name = engine_stage(precision, adapter)
    stage = run.record().stages.get(name)
    files = [run.require(run.root / path, name) for path in (stage.outputs if stage else {}) if path.endswith(".json")]
    if not files:
        raise InputError(
            f"{engines_of(run, precision, adapter)}: holds no engine; run `{stage_command(name, run.root)}` first"
        )
    return sorted(
        (read_document(file, EngineInfo) for file in files), key=lambda info: targets.capability(info.target) or (0, 0)
    )


def check_share(engines: Sequence[EngineInfo], min_fp8_share: float) -> None:
    """Raise GateError, naming the wide products, for an engine whose share of FP8 among promised products is below
    `min_fp8_share` (a fraction).

    An engine that cannot be read has no share: it passes only where the least share is 0.
    """
    for info in engines:
        if info.evidence == "unknown" and min_fp8_share > 0:
            raise GateError(
                f"{info.target}: what the engine of {targets.TITLES[info.runtime]} {info.version} runs cannot be told "
                f"from it, which does not meet --min-fp8-share {min_fp8_share:g}; "
                f"use the version that fp8q pins, or accept it with --min-fp8-share 0"
            )
        if short := shortfall(info.promised_products, info.wide_products, info.narrow_products, min_fp8_share):
            raise GateError(
                f"{info.target}: {short}; the engine is kept, `fp8q export` again or accept it with a smaller share"
            )


def shortfall(promised: int, wide: Sequence[str], narrow: Sequence[str], min_fp8_share: float) -> str | None:
    """Say why the share of `promised` products that run as promised is below `min_fp8_share` (a fraction); None where
    it is not.

    `wide` products lack FP8 on a side, `narrow` ones have a result narrower than FP32; neither counts.
    """
    if not promised or (promised - len(wide) - len(narrow)) / promised >= min_fp8_share:
        return None
    named = [f"{word}: {first_few(those)}" for word, those in (("wide", wide), ("narrow", narrow)) if those]
    answers = f" and {len(narrow)} of them answer in less than FP32" if narrow else ""
    return (
        f"{promised - len(wide)} of {promised} promised products take FP8 on both sides{answers}, less than "
        f"--min-fp8-share {min_fp8_share:g}; {'; '.join(named)}"
    )


def first_few(items: Sequence[str]) -> str:
    """List the first of `items`, and count the others."""
    more = f" and {len(items) - LISTED} more" if len(items) > LISTED else ""
    return ", ".join(items[:LISTED]) + more
