"""Options of measuring the loss: those of `validate`, `sensitivity` and `tune`, and of reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from ..core.errors import InputError
from .calibrate import ALLOW_OVERLAP, FOR, Server
from .declare import (
    EVALUATION,
    OPTIONS,
    Options,
    Unkeyed,
    between,
    first_changed,
    increase_rule,
    nats_rule,
    option,
    sizes_of,
)
from .export import Baseline, Precision
from .limits import VerdictLimits

#: The libraries that run the graphs of a run, and engines made of them.
GraphLibrary = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]


@dataclass(frozen=True)
class Runtime:
    """A runtime of `fp8q validate`.

    `runs` is its cell in the table of docs/validate.md. `library` runs a graph or an engine of the run in a
    `precision`; None: torch runs the source model or the checkpoint. `arithmetic` names what it computes where that is
    not what the run is served by, such as the float model or another precision; empty for the FP8 model as it is
    served. `adapters`: it runs with any adapter of the run on; engines do with those that they were built with.
    """

    runs: str
    library: GraphLibrary | None = None
    precision: Precision = "fp8"
    arithmetic: str = ""
    adapters: bool = False

    @property
    def runs_engine(self) -> bool:
        """Tell whether it runs an engine for this machine's GPU."""
        return self.library in ("tensorrt", "tensorrt-rtx")


def _graph_runtime(library: GraphLibrary, precision: Precision = "fp8") -> Runtime:
    graph = "`model.fp32.onnx` on ONNX Runtime"
    engine = "the engine for this machine's GPU"
    runs = graph if library == "onnxruntime" else engine
    arithmetic = ""
    if precision != "fp8":
        arithmetic = precision.upper()
        command = "export" if library == "onnxruntime" else "build-engine"
        runs += f", of `{command} --precision {precision}`"
    return Runtime(runs, library, precision, arithmetic, adapters=library == "onnxruntime" and precision == "fp8")


#: The name of the original's arithmetic.
BF16_ARITHMETIC = "BF16"
#: The reference with the first codes of its activations alone, as servers run it that know no second ones.
ONE_TERM_ALONE = "one-term"
#: The runtimes by the names that `--runtimes` takes. `validate.accuracy.runtimes` has the functions that load those of
#: torch.
RUNTIMES: Mapping[str, Runtime] = {
    "bf16": Runtime("the source model in BF16", arithmetic=BF16_ARITHMETIC, adapters=True),
    "reference": Runtime("the FP8 checkpoint in torch, computed as the tensor core does", adapters=True),
    "onnxruntime": _graph_runtime("onnxruntime"),
    "fp32": Runtime("the source model in FP32", arithmetic=BF16_ARITHMETIC),
    "original": Runtime(
        "the source model in its stored type; added to `bf16` where that is another", arithmetic=BF16_ARITHMETIC
    ),
    "onnxruntime-bf16": _graph_runtime("onnxruntime", "bf16"),
    "onnxruntime-int8": _graph_runtime("onnxruntime", "int8"),
    "tensorrt": _graph_runtime("tensorrt"),
    "tensorrt-bf16": _graph_runtime("tensorrt", "bf16"),
    "tensorrt-int8": _graph_runtime("tensorrt", "int8"),
    "tensorrt-rtx": _graph_runtime("tensorrt-rtx"),
    "tensorrt-rtx-bf16": _graph_runtime("tensorrt-rtx", "bf16"),
    "tensorrt-rtx-int8": _graph_runtime("tensorrt-rtx", "int8"),
    ONE_TERM_ALONE: Runtime(
        "where the run has two codes: the reference with one, as vLLM without the plugin and transformers compute",
        arithmetic="one term where two were validated",
    ),
}
#: The runtimes that run where none are named.
DEFAULT_RUNTIMES = ("bf16", "reference", "onnxruntime")
#: The runtimes that a run is compared with, and not served by: the float model, other precisions, one term of two.
NOT_SERVED = frozenset(name for name, runtime in RUNTIMES.items() if runtime.arithmetic)
#: The runtimes that need no graph: they run the checkpoint or the source model.
WITHOUT_GRAPH = frozenset(name for name, runtime in RUNTIMES.items() if runtime.library is None)
#: The runtimes of the float model.
FLOAT = frozenset(name for name in WITHOUT_GRAPH if RUNTIMES[name].arithmetic == BF16_ARITHMETIC)
#: The accumulators for products of codes (`quantize.reference.adder`).
Accumulator = Literal["fp32", "fp22", "two-level"]
#: The tokens that are scored by default; of a longer text in evenly spaced windows.
MAX_TOKENS = 1 << 15
#: The windows that an interval needs. Of n normal values the bootstrap's interval of 95 % is mean ± 1.96 s
#: √((n - 1) / n), s by Student's t with n - 1 degrees of freedom, and holds the truth in 81 % of cases at n = 4, in
#: 90 % at ten.
LEAST_WINDOWS = 10
#: The costs that `tune` minimizes: bytes read by a decode step, or operations of a prefill.
Prefer = Literal["memory", "prefill"]


def runtimes_of(option: str, value: Sequence[str]) -> tuple[str, ...]:
    """The rule of a list of runtimes, as text separated by commas."""
    names = value.split(",") if isinstance(value, str) else value
    runtimes = tuple(name.strip() for name in names if name.strip())
    unknown = [name for name in runtimes if name not in RUNTIMES]
    if unknown or not runtimes:
        raise InputError(
            f"{option} {','.join(runtimes) or '(none)'}",
            f"{unknown[0] if unknown else 'nothing'} is no runtime",
            f"choose from {', '.join(RUNTIMES)}",
        )
    return runtimes


@dataclass(frozen=True)
class ValidateOptions(VerdictLimits):
    """Options of `fp8q validate`. `runtimes` None: bf16, reference, where the run has a graph onnxruntime, and where it
    has two terms one-term.
    `context` None: the window of calibration; `stride` None: all of the text's tokens in it.

    The others are compared with the runtime `bf16`; `fp32` is the source model in FP32, from which BF16's own distance
    is the yardstick; `original` is the source model in its stored type, and is added to `bf16` where that is another.
    `one-term` is the reference with one code for each activation, as servers run it that know no second ones. The
    runtimes `onnxruntime-bf16` and `onnxruntime-int8` run the graphs of those precisions, which `fp8q export
    --precision` writes; `tensorrt` and `tensorrt-rtx` run the engine for this machine's GPU, which `fp8q build-engine`
    builds, with a precision behind the name the one of `--precision`. `accumulator`: see `quantize.reference.adder`.
    `as_served`: see `validate.accuracy.as_served`. `max_tokens` None: `MAX_TOKENS`, but `LEAST_WINDOWS` windows.
    `stream` None: layer by layer where the models do not fit in memory.
    Needles have a stage of their own, whose key has the prompts.
    """

    runtimes: Annotated[
        tuple[str, ...] | None,
        option(
            EVALUATION,
            f"Of {', '.join(RUNTIMES)}; separated by commas.",
            "LIST",
            ",".join(DEFAULT_RUNTIMES),
            runtimes_of,
        ),
    ] = None
    context: Annotated[
        int | None, option(EVALUATION, "Tokens in an evaluation window.", "N", "the calibration window")
    ] = None
    stride: Annotated[
        int | None, option(EVALUATION, "Tokens of the text between windows.", "N", "all that a window has")
    ] = None
    allow_overlap: Annotated[
        bool, option(EVALUATION, ALLOW_OVERLAP), Unkeyed("the overlap that it lets pass is recorded")
    ] = False
    as_served: Annotated[
        int | None,
        option(
            EVALUATION,
            "Read so many tokens of each window as a prompt and the others one by one over the runtime's cache, as a "
            "server does; score these.",
            "PROMPT",
            "whole windows",
        ),
        between(1),
    ] = None
    accumulator: Annotated[
        Accumulator | None,
        option(
            EVALUATION,
            "Run the reference on some windows too, with sums as Hopper's tensor cores make them: of 14 bits, or "
            "promoted to FP32 every 128 products.",
            default="not done",
        ),
    ] = None
    accumulator_windows: Annotated[
        int, option(EVALUATION, "Windows for --accumulator, evenly spaced.", "N"), between(1)
    ] = 4
    max_tokens: Annotated[
        int | None,
        option(
            EVALUATION,
            "Score so many tokens at most, in evenly spaced windows.",
            "N",
            f"{MAX_TOKENS:,}, but {LEAST_WINDOWS} windows",
        ),
        between(1),
    ] = None
    stream: Annotated[
        bool | None,
        option(
            EVALUATION,
            "Run the models of torch one decoder layer at a time; of whole windows only.",
            default="when memory does not hold them",
            negative="--no-stream",
        ),
        Unkeyed("layer by layer or at once, the results are the same but for rounding"),
    ] = None

    needles: Annotated[
        tuple[int, ...] | None,
        option(
            EVALUATION,
            "Hide a sentence at five depths of prompts of so many tokens, and ask for it at their end; separated by "
            "commas.",
            "LENGTHS",
            "not done",
            sizes_of,
        ),
        Unkeyed("an input of the stage `needles`"),
    ] = None
    needle_trials: Annotated[
        int,
        option(EVALUATION, "Needles for each length and depth.", "N"),
        between(1),
        Unkeyed("an input of the stage `needles`"),
    ] = 1
    needle_text: Annotated[
        Path | None,
        option(
            EVALUATION,
            "File with the sentence, {key} and {value} in it, on its first line, and the text to hide it in.",
            "FILE",
            "a made sentence in the evaluation text",
        ),
        Unkeyed("an input of the stage `needles`"),
    ] = None

    def __post_init__(self) -> None:
        """Refuse the parts of needles without their lengths."""
        super().__post_init__()
        if self.needles is None and (idle := first_changed(self, ("needle_trials", "needle_text"))):
            raise InputError(idle, "is of needles, and none are asked for", "give --needles LENGTHS too")

    @property
    def chosen(self) -> tuple[str, ...]:
        """The requested runtimes, or the default ones."""
        if self.runtimes is None:
            return DEFAULT_RUNTIMES
        return self.runtimes

    @property
    def without_torch(self) -> bool:
        """Tell whether all requested runtimes run graphs or engines, for which NumPy does."""
        return not WITHOUT_GRAPH.intersection(self.chosen)

    @property
    def engines(self) -> tuple[str, ...]:
        """The requested runtimes that run engines."""
        return tuple(name for name in self.chosen if RUNTIMES[name].runs_engine)

    @property
    def baselines(self) -> "tuple[Baseline, ...]":
        """The precisions other than FP8 whose graphs ONNX Runtime needs."""
        return tuple(precision for precision in get_args(Baseline) if f"onnxruntime-{precision}" in self.chosen)


@dataclass(frozen=True)
class SensitivityOptions(Options):
    """Options of `fp8q sensitivity`.

    `measure` None: as many sites as one pass over the first 1,024 tokens pays for, measured on these; none with
    `stream`. `stream` None: stream when memory does not hold the whole, and large models on a CPU.
    """

    windows: Annotated[int, option(EVALUATION, "Calibration windows to run, evenly spaced.", "N"), between(1)] = 16
    measure: Annotated[
        int | None,
        option(
            EVALUATION,
            "Measure the N worst by running the model, instead of predicting them.",
            "N",
            "as many as a pass over the first 1,024 tokens pays for, and there; none with --stream",
        ),
        between(0),
    ] = None
    stream: Annotated[
        bool | None,
        option(
            EVALUATION,
            "Predict one decoder layer at a time, forward and back.",
            default="when memory does not hold the whole, and above 0.5 GB on a CPU",
            negative="--no-stream",
        ),
    ] = None


@dataclass(frozen=True)
class PageOptions(Options):
    """Options of the report's page and notebook."""

    compare: Annotated[
        tuple[Path, ...],
        option(OPTIONS, "Put this run beside it. Repeatable.", "OTHER"),
        Unkeyed("what those runs hold is an input"),
    ] = ()


@dataclass(frozen=True)
class ContinueOptions(Options):
    """Options of the report's continuations, which BF16 and FP8 write from the same prompts."""

    continuations: Annotated[
        int,
        option(EVALUATION, "Places of the evaluation text that BF16 and FP8 go on from; 0 for none.", "N"),
        between(0),
    ] = 3


@dataclass(frozen=True)
class ReportOptions(ContinueOptions, PageOptions):
    """Options of `fp8q report`."""


@dataclass(frozen=True)
class DoctorOptions(Options):
    """Options of `fp8q doctor` of a run."""

    windows: Annotated[
        int,
        option(EVALUATION, "Calibration windows to run, evenly spaced; 0 runs no model. Of a RUN only.", "N"),
        between(0),
    ] = 4


@dataclass(frozen=True)
class PlanOptions(Options):
    """Options of the plan that `fp8q run` begins with."""

    plan: Annotated[
        bool,
        option(OPTIONS, "Show the time, memory and disk that each stage takes here, and stop."),
        Unkeyed("what is planned is not computed"),
    ] = False


@dataclass(frozen=True)
class TuneOptions(Options):
    """Options of `fp8q tune`; without a budget only the frontier is computed.

    `max_ppl_increase` is stored as a fraction, and may be given as text, `"0.5%"`; `max_kl` in nats a token.
    """

    max_ppl_increase: Annotated[
        float | None,
        option(
            EVALUATION,
            "The most that perplexity may rise by, such as 0.5% or 0.005.",
            "SHARE",
            "none",
            text=increase_rule,
        ),
    ] = None
    max_kl: Annotated[
        float | None,
        option(EVALUATION, "The most KL from the float model, in nats a token.", "NATS", "none", text=nats_rule),
    ] = None
    prefer: Annotated[
        Prefer,
        option(
            EVALUATION,
            "What to minimize: the bytes of weights and cache that a decode step reads, or the operations of a prompt; "
            "the other breaks ties.",
        ),
    ] = "memory"
    windows: Annotated[
        int,
        option(
            EVALUATION,
            "Calibration windows to choose by, and as many others to check by, a quarter of all at most.",
            "N",
        ),
        between(1),
    ] = 32
    server: Annotated[Server, option(EVALUATION, FOR, name="--for")] = "tensorrt"

    def __post_init__(self) -> None:
        """Refuse two budgets."""
        super().__post_init__()
        if self.max_kl is not None and self.max_ppl_increase is not None:
            raise InputError(
                f"--max-kl {self.max_kl:g}",
                f"--max-ppl-increase {self.max_ppl_increase:.2%} is a budget too",
                "give one of them",
            )
