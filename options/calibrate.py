"""Options of calibration: those of `calibrate`, with those of choosing scales, and the tokenizer of all stages."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from ..core.errors import InputError
from .declare import MODEL, SCALES, TEXT, Options, Unkeyed, between, interval_of, option
from .scales import ScaleOptions, VisionPatterns

#: What tokenizes: tokenizer.json as it is, or what transformers' AutoTokenizer makes of the files.
TokenizerChoice = Literal["file", "auto"]
#: The option's type and help.
TokenizerOption = Annotated[
    TokenizerChoice | None,
    option(
        MODEL,
        "file: tokenizer.json as it is, where there is one, to calibrate, validate and serve by. auto: what "
        "transformers' AutoTokenizer, and so vLLM, makes of the files, written to model/ as tokenizer.json. A note "
        "shows where they differ.",
        default="auto where the run is for vLLM, else file",
    ),
]


#: Calibration windows and their length, where the model and the text hold as much.
DEFAULT_SAMPLES = 512
DEFAULT_SEQ_LEN = 2048
#: The ways to use an adapter: merge it into the weights, or add its product beside them.
AdapterMode = Literal["merge", "beside"]
#: Options that go together, by what they are for; on the command line `--preset`, in Python `**PRESETS[name]`.
Preset = Literal["fast", "exact"]
PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    "fast": {"activation_terms": 1, "weight_rounding": "gptq"},
    "exact": {
        "activation_terms": "tail",
        "weight_rounding": "gptq",
        "weigh_first_token": True,
        "bf16_weights": 0.03,
    },
}
#: The servers that a run is made for. `tensorrt`: fp8q's graphs, in engines, Triton, `fp8q serve` and ONNX Runtime.
#: `vllm-plugin`: vLLM with fp8q-vllm. `any`: all that read a compressed-tensors checkpoint.
Server = Literal["tensorrt", "vllm-plugin", "vllm", "sglang", "transformers", "any"]
#: The servers that multiply second codes (`quantize.scales.servers`); FP8 weights with inputs in BF16, weights alone,
#: lose as little in the others.
WITH_SECOND_CODES: tuple[Server, ...] = ("tensorrt", "vllm-plugin")
#: The help of `--for`, of `calibrate`, `run` and `tune`.
FOR = (
    "Choose only what this server computes. tensorrt: everything, in engines, Triton and `fp8q serve`. "
    "vllm-plugin: vLLM with fp8q-vllm; its experts take one code an activation. vllm, sglang, transformers, any: no "
    "second codes; FP8 weights with activations in BF16 take their place."
)
#: The choices for the tokenizer's prefix of each window.
Bos = Literal["auto", "never"]
#: The help of `--allow-overlap`, of `calibrate` and `validate`.
ALLOW_OVERLAP = "Evaluate on text that was calibrated on, too; accuracy.json says so."


@dataclass(frozen=True)
class CorpusOptions(Options):
    """Options of cutting texts into windows. None is a default that is lowered to the limits of model and text.

    None is a default that is lowered to the limits of model and text. `seed` None: windows evenly over the text.
    """

    samples: Annotated[
        int | None,
        option(TEXT, "Windows to calibrate on.", "N", f"{DEFAULT_SAMPLES}, or as many as the text has"),
        between(1),
        Unkeyed("the windows that it gives are an input"),
    ] = None
    seq_len: Annotated[
        int | None,
        option(TEXT, "Tokens in a window.", "N", f"{DEFAULT_SEQ_LEN}, or the model's positions"),
        between(1),
        Unkeyed("the windows that it gives are an input"),
    ] = None
    chat_template: Annotated[
        bool,
        option(TEXT, "Render rows of `messages` (role, content) by the tokenizer's own chat template."),
    ] = False
    bos: Annotated[
        Bos,
        option(
            TEXT,
            "auto: each window, to calibrate and to evaluate on, begins with the special tokens that the tokenizer "
            "puts in front of a text, as served text does. never: windows are cut from the text as it is tokenized.",
        ),
    ] = "auto"
    allow_overlap: Annotated[
        bool, option(TEXT, ALLOW_OVERLAP), Unkeyed("the overlap that it lets pass is recorded")
    ] = False
    seed: Annotated[
        int | None, option(TEXT, "Draw the windows with this seed.", "N", "evenly over the text"), between(0, None)
    ] = None


@dataclass(frozen=True)
class SourceOptions(Options):
    """Options of opening the source model; its fingerprint, an input of the stages, follows from them."""

    revision: Annotated[str | None, option(MODEL, "Branch, tag or commit of a model on the hub.", "NAME")] = None
    trust_remote_code: Annotated[
        bool, option(MODEL, "Run the Python code that comes with the checkpoint's tokenizer.")
    ] = False
    tokenizer: TokenizerOption = None
    adapter: Annotated[
        tuple[Path, ...],
        option(MODEL, "A PEFT LoRA adapter of the model, to measure and to serve with it. Repeatable.", "DIR"),
    ] = ()
    adapter_mode: Annotated[
        AdapterMode,
        option(
            MODEL,
            "merge: one adapter becomes part of the weights, before they are quantized. beside: the base alone is "
            "quantized, and each adapter's BF16 sum is added behind its GEMMs.",
        ),
    ] = "merge"

    def __post_init__(self) -> None:
        """Refuse also an adapter mode without adapters."""
        super().__post_init__()
        if self.adapter_mode != "merge" and not self.adapter:
            raise InputError(
                f"--adapter-mode {self.adapter_mode}", "there is no --adapter", "give one, or leave it out"
            )


@dataclass(frozen=True)
class MeasureOptions(Options):
    """Options of measuring the float model on the windows.

    `stream` None: stream when the model does not fit in memory. `keep_moments` None: store second moments unless the
    model is streamed and the disk has no room for them. `batches`: measure only the batches from the first up
    to the second, to be merged later, and choose no scales. `vision`: modules beside the language model that are
    observed where rows with images run.
    """

    batch_size: Annotated[int, option(TEXT, "Windows run together.", "N"), between(1)] = 8
    stream: Annotated[
        bool | None,
        option(
            MODEL,
            "Calibrate one decoder layer at a time.",
            default="when memory does not hold the model",
            negative="--no-stream",
        ),
        Unkeyed("layer by layer or at once, the statistics are the same, bit for bit"),
    ] = None
    keep_moments: Annotated[
        bool | None,
        option(
            MODEL,
            "Store the second moments of --weight-rounding gptq, by which `fp8q scales` rounds again. "
            "--no-keep-moments: where decoder layers are calibrated one at a time, round each once it has run, and "
            "store none.",
            default="where the disk has room for them",
            negative="--no-keep-moments",
        ),
        Unkeyed("the codes are the same, bit for bit"),
    ] = None
    all_experts: Annotated[
        bool,
        option(
            MODEL,
            "Measure every expert of a mixture on every token; the model's outputs stay those of the routed experts.",
        ),
    ] = False
    batches: Annotated[
        tuple[int, int] | None,
        option(
            TEXT,
            "Measure batches A up to B alone (B itself not), for `fp8q merge`; choose no scales.",
            "A:B",
            text=interval_of,
        ),
    ] = None
    vision: VisionPatterns = ()


@dataclass(frozen=True)
class FormChoiceOptions(Options):
    """The server that forms are chosen for. `server` None: by the graph."""

    server: Annotated[Server | None, option(SCALES, FOR, default="tensorrt, or vllm without a graph", name="--for")] = (
        None
    )


@dataclass(frozen=True)
class CalibrateOptions(MeasureOptions, SourceOptions, CorpusOptions, ScaleOptions, FormChoiceOptions):
    """Options of `fp8q calibrate`: of the corpus, the source model, the measurement, the scales and the server."""


def server_of(named: Server | None, graph: bool) -> Server:
    """Return the server that forms are chosen for: the one that is `named`, or by the graph."""
    return named or ("tensorrt" if graph else "vllm")


def preset_options(preset: Preset, server: Server) -> Mapping[str, Any]:
    """Return the options that `preset` stands for in a run for `server`."""
    options = PRESETS[preset]
    if options["activation_terms"] == "tail" and server not in WITH_SECOND_CODES:
        return {**options, "activation_terms": "bf16"}
    return options
