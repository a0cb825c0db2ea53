"""`engines/<target>.json`: an engine, its proof, and the check of its FP8 share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from ...core.commands import engine_stage, stage_command
from ...core.errors import GateError, InputError
from ...core.files import Strict, read_document
from ...core.run import Run
from ...options import Precision, WeightScale
from ...quantize.reading.run_checkpoint import ADAPTERS
from . import targets
from .profiles import Profile
from .targets import Runtime

#: Names listed in a message; the rest are counted.
LISTED = 8
#: The ending of the file next to a TensorRT plan that has the engine inspector's JSON.
LAYERS = ".layers.json"


class EngineInfo(Strict):
    """`engines/<target>.json`: an engine and its proof."""

    runtime: Runtime
    version: str = Field(description="of the runtime")
    target: str = Field(description="compute capability, as sm89")
    bytes: int
    promised_products: int = Field(description="modules that scales.json expects on FP8")
    fp8_products: int = Field(description="those whose GEMM takes FP8 on both sides in every profile")
    wide_products: list[str] = Field(description="those whose GEMM does not")
    narrow_products: list[str] = Field(
        default=[],
        description="those of fp8_products that answer in less than FP32; read from the plan, they do not count as "
        "promised",
    )
    unknown_products: list[str] = Field(default=[], description="those of which the engine does not tell")
    ran: dict[str, int] | None = Field(
        default=None,
        description="of an engine of which no FP8 GEMM is expected: how many modules' GEMMs are of which types",
    )
    weight_scale: WeightScale | None = Field(
        default=None, description="the form of the graph beside it that it was built of; null: that of model.onnx"
    )
    plain_attention: bool | None = Field(
        default=None,
        description="true: the graph beside it has plain GEMMs and a softmax, since its Attention could not be built",
    )
    branches: bool | None = Field(
        default=None,
        description="whether its graph chooses branches, as for experts; null: built before this was noted",
    )
    evidence: Literal["plan", "inspector", "unknown"]
    profiles: list[Profile] = Field(min_length=1)
    build_seconds: float


def engines_of(run: Run, precision: Precision, adapter: str | None = None) -> Path:
    """The folder of the engines of a precision (`engines/` for fp8), or of the engines with an adapter."""
    if adapter:
        return run.engines / ADAPTERS / adapter
    if precision == "fp8":
        return run.engines
    return run.engines / precision


def load_engines(run: Run, precision: Precision = "fp8", adapter: str | None = None) -> list[EngineInfo]:
    """Load the JSON records of the engines of a precision, or with an adapter, in the order of their targets.

    Raises InputError when there are none, or a record was changed.
    """
    name = engine_stage(precision, adapter)
    stage = run.record().stages.get(name)
    files = [run.require(run.root / path, name) for path in (stage.outputs if stage else {}) if is_record(path)]
    if not files:
        raise InputError(
            engines_of(run, precision, adapter), "holds no engine", f"run `{stage_command(name, run.root)}` first"
        )
    return sorted(
        (read_document(file, EngineInfo) for file in files), key=lambda info: targets.capability(info.target) or (0, 0)
    )


def is_record(name: str) -> bool:
    """Tell whether a file beside engines is an engine's record."""
    return name.endswith(".json") and not name.endswith(LAYERS)


@dataclass(frozen=True)
class Counted:
    """The GEMMs of an engine that `scales.json` expects on FP8: their number, and the names of those that fall short.

    `not_fp8` ones lack FP8 on a side; the types of `unknown` ones are not known; the result of `narrow` ones is
    narrower than FP32.
    """

    expected: int
    not_fp8: Sequence[str]
    narrow: Sequence[str]
    unknown: Sequence[str]


def check_share(engines: Sequence[EngineInfo], min_fp8_share: float | None) -> None:
    """Raise GateError for an engine whose share of FP8 among the expected GEMMs is below `min_fp8_share`.

    `min_fp8_share` is a fraction; None: the option was not given, and every GEMM whose types are known must be FP8.

    An engine whose types are all unknown has no share. It passes where the least share is 0, and where the option was
    not given and TensorRT's inspector, whose format varies, does not show the types.
    """
    for info in engines:
        asked = asked_share(min_fp8_share)
        if info.evidence == "unknown" and not may_be_unknown(info.runtime, min_fp8_share):
            remedy = (
                f"its inspector's words are in {info.target}{LAYERS}, which a report should have"
                if info.runtime == "tensorrt"
                else "use the version that fp8q pins"
            )
            raise GateError(
                info.target,
                f"what the engine of {targets.TITLES[info.runtime]} {info.version} runs cannot be told from it, which "
                f"does not meet {asked}",
                f"{remedy}, or accept it with --min-fp8-share 0",
            )
        narrow = info.narrow_products if info.evidence == "plan" else []
        counted = Counted(info.promised_products, info.wide_products, narrow, info.unknown_products)
        if short := shortfall(counted, min_fp8_share):
            raise GateError(
                info.target, short, "the engine is kept, `fp8q export` again or accept it with a smaller share"
            )


def asked_share(min_fp8_share: float | None) -> str:
    """Format the gate as an option, with its default if it was not given."""
    return f"--min-fp8-share {1 if min_fp8_share is None else min_fp8_share:g}"


def may_be_unknown(runtime: str, min_fp8_share: float | None) -> bool:
    """Tell whether an engine whose types are unknown may pass."""
    return min_fp8_share == 0 or (min_fp8_share is None and runtime == "tensorrt")


def shortfall(counted: Counted, min_fp8_share: float | None) -> str | None:
    """Say why the share of expected GEMMs that run as expected is below `min_fp8_share` (a fraction); None where it
    is not.

    Unknown GEMMs count against a share that was asked for; without one (None) those that are known must all be.
    """
    unknown = counted.unknown if min_fp8_share is not None else ()
    parts = {"wide": counted.not_fp8, "narrow": counted.narrow, "unknown": unknown}
    least = 1.0 if min_fp8_share is None else min_fp8_share
    if not counted.expected or (counted.expected - sum(map(len, parts.values()))) / counted.expected >= least:
        return None
    named = [f"{word}: {first_few(those)}" for word, those in parts.items() if those]
    answers = f" and {len(counted.narrow)} of them answer in less than FP32" if counted.narrow else ""
    fp8 = counted.expected - len(counted.not_fp8) - len(counted.unknown)
    return (
        f"{fp8} of {counted.expected} expected GEMMs take FP8 on both sides{answers}, less than "
        f"{asked_share(min_fp8_share)}; {'; '.join(named)}"
    )


def first_few(items: Sequence[str]) -> str:
    """List the first of `items`, and count the others."""
    more = f" and {len(items) - LISTED} more" if len(items) > LISTED else ""
    return ", ".join(items[:LISTED]) + more
