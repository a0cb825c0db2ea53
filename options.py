"""Every option of every command, written once: its field has type, default, help, panel, unit and rule (`declare`).

Frozen; nonsense is refused when they are made. Nothing heavy is imported here: `--help` must answer at once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter

from .declare import (
    ENGINE,
    EVALUATION,
    GENERATION,
    LARGEST_SIZE,
    MEASUREMENT,
    MODEL,
    OPTIONS,
    SCALES,
    TEXT,
    Of,
    Options,
    between,
    first_given,
    increase,
    interval_of,
    not_empty,
    option,
    part_of_all,
    percentage,
)
from .errors import InputError

#: Calibration windows and their length, where the model and the text hold as much.
DEFAULT_SAMPLES = 512
DEFAULT_SEQ_LEN = 2048
RUNTIMES = ("bf16", "reference", "onnxruntime", "onnxruntime-bf16", "onnxruntime-int8", "tensorrt")
#: What runs no FP8: the float model, and what FP8 is compared with.
WITHOUT_FP8 = frozenset({"bf16", "source", "onnxruntime-bf16", "onnxruntime-int8"})
#: Octaves that --margin may move a scale either way: E4M3 spans 18.
LARGEST_MARGIN = 16
#: MiB of workspace that a runtime takes: int64 in bytes.
LARGEST_WORKSPACE = (2**63 - 1) >> 20
#: The longest name of a Triton model in characters: it becomes a folder's name, with `_engine` behind it.
LONGEST_MODEL_NAME = 200
Method = Literal["amax", "percentile", "mse", "entropy", "delayed"]
ScaleGrid = Literal["bf16", "power-of-two"]
AmaxAlgorithm = Literal["max", "most_recent"]
WeightMethod = Literal["amax", "mse"]
KvCache = Literal["off", "v", "fp8"]
#: How many codes stand for one activation.
Terms = Literal[1, 2]
WeightRounding = Literal["nearest", "gptq", "sequential"]
WeightScale = Literal["dq", "mul"]
#: What FP8 is compared with.
Baseline = Literal["bf16", "int8"]
Precision = Literal["fp8", "bf16", "int8"]
#: How the products of codes are added: `quantize.adder`.
Accumulator = Literal["fp32", "fp22", "two-level"]
PrecisionOption = Annotated[
    Precision, option(ENGINE, "The FP8 model, or what it is compared with: BF16, or INT8 of the same modules.")
]
RuntimeOption = Annotated[
    Literal["auto", "onnxruntime", "tensorrt", "tensorrt-rtx", "reference", "bf16"],
    option(GENERATION, "What runs the model; bf16: the source model."),
]

#: What stands for a default of `fp8q scales`.
AS_THE_RUN_HAS_IT = "as the run has it"


def octaves(option: str, value: int) -> int:
    """The rule of a power of two that scales are multiplied by."""
    if abs(value) > LARGEST_MARGIN:
        raise InputError(
            f"{option} {value}: must lie between -{LARGEST_MARGIN} and {LARGEST_MARGIN}; the scale is multiplied by 2 "
            "to this power"
        )
    return value


def runtimes_of(option: str, value: Sequence[str]) -> tuple[str, ...]:
    """The rule of a list of runtimes, separated by commas as text."""
    names = value.split(",") if isinstance(value, str) else value
    found = tuple(name.strip() for name in names if name.strip())
    unknown = [name for name in found if name not in RUNTIMES]
    if unknown or not found:
        raise InputError(
            f"{option} {','.join(found) or '(none)'}: {unknown[0] if unknown else 'nothing'} is no runtime; choose "
            f"from {', '.join(RUNTIMES)}"
        )
    return found


@dataclass(frozen=True)
class Clipping(Options):
    """How the scale of an activation or cache tensor is chosen: the method's clip, 2^margin times it, on the grid of
    scales.

    The last three have Transformer Engine's names.
    """

    method: Annotated[Method, option(SCALES, "How the scales of activations and of an FP8 cache are chosen.")] = "amax"
    percentile: Annotated[
        float, option(SCALES, "For --method percentile, in percent.", "P"), Of("percentile"), percentage
    ] = 99.99
    margin: Annotated[
        int, option(SCALES, "Multiply these scales by 2^N: more headroom, more underflow.", "N"), octaves
    ] = 0
    scale_grid: Annotated[ScaleGrid, option(SCALES, "Which numbers these scales may be; rounded up to.")] = "bf16"
    amax_history_len: Annotated[
        int,
        option(SCALES, "Delayed scaling: batches in the history; more than there are means all.", "N"),
        Of("delayed"),
        between(1),
    ] = 1024
    amax_compute_algo: Annotated[
        AmaxAlgorithm, option(SCALES, "Delayed scaling: the history's largest amax, or its last."), Of("delayed")
    ] = "max"
    interval: Annotated[
        int, option(SCALES, "Delayed scaling: batches from one scale to the next.", "N"), Of("delayed"), between(1)
    ] = 1

    def __post_init__(self) -> None:
        """Refuse also the numbers of a method that is not the one asked for."""
        super().__post_init__()
        for name in self.idle:
            if given := first_given(self, [name]):
                raise InputError(
                    f"{given}: is for --method {self.declared()[name].of}, and the method is {self.method}; choose "
                    "that one, or leave this out"
                )

    @property
    def idle(self) -> list[str]:
        """The fields that belong to another method than the one asked for."""
        return [name for name, field in self.declared().items() if field.of not in (None, self.method)]


@dataclass(frozen=True)
class History(Clipping):
    """The history of amax that `fp8q inspect --delayed` simulates."""

    method: Annotated[Literal["delayed"], Parameter(parse=False)] = "delayed"


@dataclass(frozen=True)
class ScaleOptions(Options):
    """What follows from the statistics, without running the model: options of `fp8q merge`, and of `calibrate` too."""

    clip: Annotated[Clipping, Parameter(show_default=True)] = Clipping()
    weight_method: Annotated[
        WeightMethod, option(SCALES, "How the scales of the weights' output channels are chosen.")
    ] = "mse"
    kv_cache: Annotated[
        KvCache, option(SCALES, "What of the cache is kept in FP8: nothing, the values, or keys and values.")
    ] = "off"
    skip: Annotated[
        tuple[str, ...],
        option(SCALES, "Keep modules whose name matches (* and ?) in BF16. Repeatable.", "PATTERN"),
        not_empty,
    ] = ()
    only: Annotated[
        tuple[str, ...],
        option(SCALES, "Quantize only modules whose name matches (* and ?). Repeatable.", "PATTERN"),
        not_empty,
    ] = ()
    weight_rounding: Annotated[
        WeightRounding,
        option(
            SCALES,
            "gptq: let weights make up for each other's rounding errors, by the inputs' second moments. sequential: "
            "for those of earlier layers too; runs the model again, layer by layer.",
        ),
    ] = "nearest"
    activation_terms: Annotated[
        Terms,
        option(
            SCALES, "FP8 codes that stand for one activation: two lose nothing of BF16, and multiply twice the rows."
        ),
    ] = 1
    two_terms: Annotated[
        tuple[str, ...],
        option(
            SCALES,
            "Take two codes for the input of modules whose name matches (* and ?), and of all that share it. "
            "Repeatable.",
            "PATTERN",
        ),
        not_empty,
    ] = ()

    def __post_init__(self) -> None:
        """Refuse to name some modules where all are meant."""
        super().__post_init__()
        if self.two_terms and self.activation_terms == 2:
            raise InputError(
                f"--two-terms {self.two_terms[0]}: --activation-terms 2 takes two for every module; leave one of them "
                "out, or give --activation-terms 1"
            )


@Parameter(name="*", show_default=AS_THE_RUN_HAS_IT)
class RescaleOptions(ScaleOptions):
    """Options of `fp8q scales`: those of `ScaleOptions`, of which what is not given stays as the run has it.

    The method and what belongs to it are always chosen anew. An empty tuple takes back the run's `skip`, `only` or
    `two_terms`.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        object.__setattr__(self, "given", {name: getattr(self, name) for name in given} | {"clip": self.clip})

    given: dict[str, Any]

    def over(self, before: ScaleOptions) -> ScaleOptions:
        """What was chosen `before`, with what is given in its place; two terms for all also in that of some."""
        all_of_them = {"two_terms": ()} if self.given.get("activation_terms") == 2 else {}
        return replace(before, **(all_of_them | self.given))


@dataclass(frozen=True)
class CalibrateOptions(ScaleOptions):
    """Options of `fp8q calibrate`. None stands for a default that is lowered to what the model and the text hold.

    `stream` None: when memory does not hold the model; `seed` None: windows evenly over the text; `batches`: measure
    those from the first up to the second alone, to be merged with others, and choose nothing.
    """

    samples: Annotated[
        int | None,
        option(TEXT, "Windows to calibrate on.", "N", f"{DEFAULT_SAMPLES}, or as many as the text has"),
        between(1),
    ] = None
    seq_len: Annotated[
        int | None, option(TEXT, "Tokens in a window.", "N", f"{DEFAULT_SEQ_LEN}, or the model's positions"), between(1)
    ] = None
    batch_size: Annotated[int, option(TEXT, "Windows run together.", "N"), between(1)] = 8
    revision: Annotated[str | None, option(MODEL, "Branch, tag or commit of a model on the hub.", "NAME")] = None
    trust_remote_code: Annotated[
        bool, option(MODEL, "Run the Python code that comes with the checkpoint's tokenizer.")
    ] = False
    stream: Annotated[
        bool | None,
        option(
            MODEL,
            "Calibrate one decoder layer at a time.",
            default="when memory does not hold the model",
            negative="--no-stream",
        ),
    ] = None
    chat_template: Annotated[
        bool,
        option(TEXT, "Render rows of `messages` (role, content) by the tokenizer's own chat template."),
    ] = False
    seed: Annotated[
        int | None, option(TEXT, "Draw the windows with this seed.", "N", "evenly over the text"), between(0, None)
    ] = None
    batches: Annotated[
        tuple[int, int] | None,
        option(
            TEXT,
            "Measure batches A up to B alone (B itself not), for `fp8q merge`; choose no scales.",
            "A:B",
            text=interval_of,
        ),
    ] = None


@dataclass(frozen=True)
class ExportOptions(Options):
    """Options of `fp8q export`.

    `dtype`: the type the FP8 graph computes in outside its products; the graphs of other precisions compute in BF16.
    """

    dtype: Annotated[
        Literal["bf16", "fp16"], option(ENGINE, "What the graph computes in outside its FP8 products.")
    ] = "bf16"
    precision: PrecisionOption = "fp8"
    attention: Annotated[
        Literal["wide", "fp8"],
        option(ENGINE, "Multiply queries by keys and probabilities by values in the compute type, or in FP8."),
    ] = "wide"
    weight_scale: Annotated[
        WeightScale,
        option(ENGINE, "Scale a weight's channels in its DequantizeLinear, or by a Mul behind the product."),
    ] = "dq"

    def __post_init__(self) -> None:
        """Refuse a type for graphs that have no other, and FP8's attention and form in what is compared with FP8."""
        super().__post_init__()
        for name in ("attention", "weight_scale"):
            if self.precision != "fp8" and (given := first_given(self, [name])):
                raise InputError(
                    f"{given}: is for the FP8 graph, not for --precision {self.precision}; leave one of them out"
                )
        if self.precision != "fp8" and self.dtype != ExportOptions.dtype:
            raise InputError(
                f"--dtype {self.dtype}: is for the FP8 graph, and --precision {self.precision} computes in BF16; "
                "leave one of them out"
            )


@dataclass(frozen=True)
class ValidateOptions(Options):
    """Options of `fp8q validate`. `context` None: the window of calibration; `stride` None: the context.

    The runtimes `onnxruntime-bf16` and `onnxruntime-int8` run the graphs of those precisions, which `fp8q export
    --precision` writes. `max_ppl_increase` is held as a fraction, and may be given as text, `"1%"`. `accumulator`: see
    `quantize.adder`.
    """

    runtimes: Annotated[
        tuple[str, ...],
        option(
            EVALUATION, f"Of {', '.join(RUNTIMES)}; separated by commas.", "LIST", ",".join(RUNTIMES[:3]), runtimes_of
        ),
    ] = RUNTIMES[:3]
    context: Annotated[
        int | None, option(EVALUATION, "Tokens in an evaluation window.", "N", "the calibration window")
    ] = None
    stride: Annotated[int | None, option(EVALUATION, "Tokens between windows.", "N", "the context")] = None
    max_ppl_increase: Annotated[
        float | None,
        option(EVALUATION, "Fail (exit 3) when perplexity rises by more, such as 1% or 0.01.", "SHARE", text=increase),
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

    @property
    def baselines(self) -> "tuple[Baseline, ...]":
        """The precisions beside FP8 that the runtimes need the graphs of."""
        return tuple(precision for precision in get_args(Baseline) if f"onnxruntime-{precision}" in self.runtimes)


@dataclass(frozen=True)
class SensitivityOptions(Options):
    """Options of `fp8q sensitivity`. `measure` None: as many as less than one more pass pays for."""

    windows: Annotated[int, option(EVALUATION, "Calibration windows to run, evenly spaced.", "N"), between(1)] = 16
    measure: Annotated[
        int | None,
        option(
            EVALUATION,
            "Measure so many of the worst by running the model, instead of predicting them.",
            "N",
            "as many as one more pass pays for",
        ),
        between(0),
    ] = None


def temperature_of(option: str, value: float) -> float:
    """The rule of a temperature."""
    if not 0 <= value < float("inf"):
        raise InputError(f"{option} {value}: must be 0 or more, and finite")
    return value


def nucleus_of(option: str, value: float) -> float:
    """The rule of the share of probability that is drawn from."""
    if not 0 <= value <= 1:
        raise InputError(f"{option} {value}: must lie in [0, 1]")
    return value


@dataclass(frozen=True)
class GenerateOptions(Options):
    """Options of `fp8q generate`: how an answer is drawn, and what runs the model (`auto`: the fastest of what is
    here).
    """

    max_tokens: Annotated[int, option(GENERATION, "Most tokens of an answer.", "N"), between(1)] = 256
    temperature: Annotated[
        float,
        option(GENERATION, "0 takes the best token; higher draws more freely.", "T", default="0"),
        temperature_of,
    ] = 0.0
    top_p: Annotated[
        float, option(GENERATION, "Draw from the fewest tokens that hold this much probability.", "P"), nucleus_of
    ] = 1.0
    seed: Annotated[
        int | None,
        option(GENERATION, "Draw the same tokens again.", "N", "other ones each time"),
        between(0, 2**64 - 1),
    ] = None
    stop: Annotated[tuple[str, ...], option(GENERATION, "End before this text. Repeatable.", "TEXT"), not_empty] = ()
    runtime: RuntimeOption = "auto"


def sizes_of(option: str, value: Sequence[int] | str) -> tuple[int, ...]:
    """The rule of a list of sizes, separated by commas as text: ascending, each once."""
    words = value.split(",") if isinstance(value, str) else [str(size) for size in value]
    sizes = [int(word) if re.fullmatch(r"\s*[0-9]{1,10}\s*", word) else 0 for word in words]
    if not sizes or not all(1 <= size <= LARGEST_SIZE for size in sizes):
        raise InputError(
            f"{option} {','.join(words) or '(none)'}: is no list of whole numbers from 1 to {LARGEST_SIZE:,}; give one "
            "such as 1,8"
        )
    return tuple(sorted(set(sizes)))


def above_zero(option: str, value: float) -> float:
    """The rule of a quantity that there is some of."""
    if not 0 < value < float("inf"):
        raise InputError(f"{option} {value}: must be above 0, and finite")
    return value


@dataclass(frozen=True)
class BenchOptions(Options):
    """Options of `fp8q bench`.

    `batch_sizes` None: 1 and 8, lowered to what the runtime takes; `prompt_lengths` None: 32 and 256, lowered to what
    the model's positions hold beside the answer. `memory`, in GB of 10⁹ bytes, is what the largest batches are computed
    for (None: all that the device here has); `gpu_hour_price` in any currency.
    """

    runtime: RuntimeOption = "auto"
    batch_sizes: Annotated[
        tuple[int, ...] | None,
        option(
            MEASUREMENT,
            "Sequences answered together; separated by commas.",
            "LIST",
            "1,8, or what the runtime takes",
            sizes_of,
        ),
    ] = None
    prompt_lengths: Annotated[
        tuple[int, ...] | None,
        option(
            MEASUREMENT,
            "Tokens of each prompt; separated by commas.",
            "LIST",
            "32,256, or what the model's positions hold",
            sizes_of,
        ),
    ] = None
    tokens: Annotated[int, option(MEASUREMENT, "Tokens of each answer.", "N"), between(2)] = 64
    rounds: Annotated[int, option(MEASUREMENT, "Answers timed of each model and size.", "N"), between(1)] = 5
    memory: Annotated[
        float | None,
        option(MEASUREMENT, "Memory that the largest batches are computed for.", "GB", "what is here"),
        above_zero,
    ] = None
    gpu_hour_price: Annotated[
        float | None,
        option(MEASUREMENT, "What an hour of the GPU costs; adds the cost of a million tokens.", "PRICE", "not told"),
        above_zero,
    ] = None


@dataclass(frozen=True)
class EngineOptions(Options):
    """Options of `fp8q build-engine`.

    No target: this machine's GPU, or every RTX target; `max_seq_len` None: 2048, or the model's positions.

    `max_prompt`: tokens taken in one step (None: `max_seq_len`). `opt_batch`, `opt_seq_len`: the sizes that kernels are
    chosen for (None: see `export.engine.profiles`). `workspace`: MiB that the engine's kernels may use for intermediate
    results (None: the runtime's own limit). `min_fp8_share` is held as a fraction (None: all promised products), and
    may be given as text, `"96%"`.
    """

    runtime: Annotated[Literal["auto", "tensorrt", "tensorrt-rtx"], option(ENGINE, "What builds the engine.")] = "auto"
    targets: Annotated[
        tuple[str, ...],
        option(
            ENGINE, "Compute capability to build for. Repeatable.", "SM", "this GPU, or sm89 and sm120", name="--target"
        ),
    ] = ()
    max_batch: Annotated[int, option(ENGINE, "Most sequences in a batch.", "N"), between(1)] = 8
    max_seq_len: Annotated[
        int | None,
        option(ENGINE, "Most positions of a sequence.", "N", f"{DEFAULT_SEQ_LEN}, or the model's positions"),
        between(1),
    ] = None
    min_fp8_share: Annotated[
        float | None,
        option(
            ENGINE,
            "Fail (exit 3) when fewer of the promised products run in FP8, such as 96% or 0.96.",
            "SHARE",
            "all of them",
            part_of_all,
        ),
    ] = None
    max_prompt: Annotated[
        int | None,
        option(ENGINE, "Most tokens that one step takes in.", "N", "--max-seq-len"),
        between(1),
    ] = None
    opt_batch: Annotated[
        int | None,
        option(ENGINE, "Batch that kernels are chosen for.", "N", "1 for prompts, --max-batch for decoding"),
        between(1),
    ] = None
    opt_seq_len: Annotated[
        int | None,
        option(
            ENGINE,
            "Length that kernels are chosen for.",
            "N",
            "a quarter of --max-seq-len for prompts, all of it for decoding",
        ),
        between(1),
    ] = None
    workspace: Annotated[
        int | None,
        option(ENGINE, "Most memory for intermediate results.", "MIB", "the runtime's own limit"),
        between(1, LARGEST_WORKSPACE),
    ] = None
    precision: PrecisionOption = ExportOptions.precision

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together, and a share of nothing."""
        super().__post_init__()
        for name, limit in (("max_prompt", "max_seq_len"), ("opt_seq_len", "max_seq_len"), ("opt_batch", "max_batch")):
            value, most = getattr(self, name), getattr(self, limit)
            if value is not None and most is not None and value > most:
                option, of = (self.declared()[field].option for field in (name, limit))
                raise InputError(f"{option} {value:,}: is more than {of} {most:,}; ask for at most that, or raise {of}")
        if self.min_fp8_share is not None and self.precision != "fp8":
            raise InputError(
                f"--min-fp8-share {self.min_fp8_share:g}: is for the FP8 engine, and --precision {self.precision} "
                "promises no product in FP8; leave one of them out"
            )

    @property
    def share(self) -> float:
        """The fraction of promised products that must run in FP8."""
        return 1.0 if self.min_fp8_share is None else self.min_fp8_share


def model_name(text: str) -> str:
    """The last part of a path or hub name, as a name for a Triton model: other characters than letters, digits, '.',
    '_' and '-' become '-'.
    """
    named = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(text).name).lstrip(".-")
    return named[:LONGEST_MODEL_NAME].rstrip(".-") or "model"


def name_of_a_model(option: str, value: str) -> str:
    """The rule of a Triton model's name: one part of a path, and of a URL."""
    if value != model_name(value):
        raise InputError(
            f"{option} {value}: is no name for a Triton model; use letters, digits, '.', '_' and '-', for example "
            f"{model_name(value)}"
        )
    return value


@dataclass(frozen=True)
class TritonOptions(Options):
    """Options of `fp8q triton`. `out` None: RUN/triton."""

    out: Annotated[
        Path | None,
        option(OPTIONS, "The repository to write; what fp8q wrote there is replaced.", "REPO", "RUN/triton"),
    ] = None
    name: Annotated[
        str | None, option(OPTIONS, "What clients call the model.", "NAME", "that of the source"), name_of_a_model
    ] = None
    max_batch: Annotated[int, option(OPTIONS, "Most requests that are generated together.", "N"), between(1)] = 8
    engine_model: Annotated[
        bool,
        option(
            OPTIONS,
            "Also the plain TensorRT model where the run has no plan yet, which is put in its place on the GPU host.",
        ),
    ] = False
