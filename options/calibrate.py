"""Options of calibration and of choosing scales: those of `calibrate`, `merge` and `scales`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ..core.errors import InputError
from .clipping import Clipping
from .declare import (
    MODEL,
    SCALES,
    TEXT,
    Options,
    Unkeyed,
    between,
    first_given,
    interval_of,
    not_empty,
    option,
)
from .tokenizer import TokenizerOption

#: Calibration windows and their length, where the model and the text hold as much.
DEFAULT_SAMPLES = 512
DEFAULT_SEQ_LEN = 2048
#: Tokens after which the amax of an expert's last product has settled (`quantize.scales.expert_scales`).
DEFAULT_EXPERT_TOKENS = 512
WeightMethod = Literal["amax", "mse"]
KvCache = Literal["off", "v", "fp8"]
#: The part of a layer's cached keys, or values, that shares a scale: all of them (`tensor`), or those of a head.
KvScale = Literal["tensor", "head"]
#: The number of codes for one activation. `tail`: two in the last positions of a call, one in the others; `bf16`: none,
#: so that only weights are codes.
Terms = Literal[1, 2, "tail", "bf16"]
#: The positions at the end of a call that a tail has the second codes of.
DEFAULT_EXACT_TAIL = 64
WeightRounding = Literal["nearest", "gptq", "sequential"]
#: The ways to use an adapter: merge it into the weights, or add its product beside them.
AdapterMode = Literal["merge", "beside"]
#: Options that go together, by what they are for; on the command line `--preset`, in Python `**PRESETS[name]`.
Preset = Literal["fast", "exact"]
PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    "fast": {"activation_terms": 1, "weight_rounding": "gptq"},
    "exact": {"activation_terms": "tail", "weight_rounding": "gptq"},
}
#: The choices for the tokenizer's prefix of each window.
Bos = Literal["auto", "never"]
#: The help of `--allow-overlap`, of `calibrate` and `validate`.
ALLOW_OVERLAP = "Evaluate on text that was calibrated on, too; accuracy.json says so."

#: The default of options of `fp8q scales`, in words.
AS_THE_RUN_HAS_IT = "as the run has it"


@dataclass(frozen=True)
class ScaleOptions(Options):
    """Options of choosing scales from statistics, without running the model: those of `fp8q merge`, and also of
    `calibrate`.
    """

    clip: Annotated[Clipping, Parameter(show_default=True)] = Clipping()
    weight_method: Annotated[
        WeightMethod, option(SCALES, "How the scales of the weights' output channels are chosen.")
    ] = "mse"
    kv_cache: Annotated[
        KvCache,
        option(SCALES, "The part of the KV cache in FP8: none (off), the values (v), or keys and values (fp8)."),
    ] = "off"
    kv_scale: Annotated[
        KvScale,
        option(
            SCALES,
            "The part of a layer's cached keys, or of its values, with one scale: all of them, or each head. vLLM has "
            "attention for those of heads on Hopper and data-centre Blackwell GPUs alone.",
        ),
    ] = "tensor"
    kv_skip: Annotated[
        tuple[str, ...],
        option(
            SCALES,
            "Keep the cache of attention modules whose name matches (* and ?) in the compute type. Repeatable.",
            "PATTERN",
        ),
        not_empty,
    ] = ()
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
    q_scale: Annotated[
        bool,
        option(
            SCALES,
            "Write scales of queries beside those of an FP8 cache: vLLM reads them where its attention runs on FP8 "
            "codes, and takes 1.0 without. Runs the model once more, to measure them.",
            negative="--no-q-scale",
        ),
    ] = False
    weight_rounding: Annotated[
        WeightRounding,
        option(
            SCALES,
            "gptq: compensate the rounding error of each weight in the others, by the inputs' second "
            "moments. sequential: compensate the errors of earlier layers too; runs the model again, "
            "layer by layer.",
        ),
    ] = "nearest"
    activation_terms: Annotated[
        Terms,
        option(
            SCALES,
            "FP8 codes for each activation. Two lose nothing of BF16, and multiply twice the rows. tail: two for "
            "decoded tokens and the last of a prompt, one for the others; costs what one costs. bf16: none, the "
            "activation as it is; as exact as two without any support of the server, at BF16's operations.",
        ),
    ] = 1
    exact_tail: Annotated[
        int,
        option(SCALES, "The positions at the end of a prompt to which a tail gives two codes.", "N"),
        between(1),
    ] = DEFAULT_EXACT_TAIL
    two_terms: Annotated[
        tuple[str, ...],
        option(
            SCALES,
            "Take two codes for the input of modules whose name matches (* and ?), and of all modules "
            "that share it. Repeatable.",
            "PATTERN",
        ),
        not_empty,
    ] = ()
    tail: Annotated[
        tuple[str, ...],
        option(
            SCALES,
            "Take two codes in a call's last positions alone for the input of modules whose name matches (* and ?), "
            "and of all modules that share it. Repeatable.",
            "PATTERN",
        ),
        not_empty,
    ] = ()

    bf16_input: Annotated[
        tuple[str, ...],
        option(
            SCALES,
            "Leave the input of modules whose name matches (* and ?) in BF16, and of all modules that share it; their "
            "weights are FP8. Repeatable.",
            "PATTERN",
        ),
        not_empty,
    ] = ()

    inherit: Annotated[
        bool,
        option(
            SCALES,
            "Keep the static scales of activations, and of an FP8 cache, of an FP8 source checkpoint.",
            negative="--no-inherit",
        ),
    ] = False

    min_expert_tokens: Annotated[
        int,
        option(
            SCALES,
            "An expert of a mixture that saw fewer tokens takes the largest amax of its layer's other "
            "experts for the input of its last product.",
            "N",
        ),
        between(0, None),
    ] = DEFAULT_EXPERT_TOKENS

    @property
    def needs_moments(self) -> bool:
        """Tell whether weights are rounded with second moments of their inputs, which `measure` gathers."""
        return self.weight_rounding == "gptq"

    def __post_init__(self) -> None:
        """Refuse a list of modules where all are chosen, and choices that contradict inherited scales."""
        super().__post_init__()
        own = first_given(self, ("weight_method", "weight_rounding", "activation_terms"))
        own = own or next((f"--two-terms {pattern}" for pattern in self.two_terms), None)
        own = own or next((f"--tail {pattern}" for pattern in self.tail), None)
        own = own or next((f"--bf16-input {pattern}" for pattern in self.bf16_input), None)
        own = own or first_given(self.clip, self.clip.declared())
        if self.inherit and own:
            raise InputError(
                "--inherit",
                f"takes codes and scales as they were given, and {own} chooses others",
                "leave one of them out (--no-inherit)",
            )
        if self.two_terms and self.activation_terms == 2:
            raise InputError(
                f"--two-terms {self.two_terms[0]}",
                "--activation-terms 2 takes two for every module",
                "leave one of them out, or give --activation-terms 1",
            )
        if self.tail and self.activation_terms == "tail":
            raise InputError(
                f"--tail {self.tail[0]}",
                "--activation-terms tail gives every module one",
                "leave one of them out, or give --activation-terms 1",
            )
        if self.bf16_input and self.activation_terms == "bf16":
            raise InputError(
                f"--bf16-input {self.bf16_input[0]}",
                "--activation-terms bf16 leaves every input in BF16",
                "leave one of them out, or give --activation-terms 1",
            )
        self.check_tail()
        self.check_cache()

    def check_cache(self) -> None:
        """Raise InputError for layers to leave out of an FP8 cache, or scales to stand beside its own, where there is
        none.
        """
        if self.q_scale and self.kv_cache != "fp8":
            raise InputError(
                "--q-scale",
                f"is read with an FP8 cache alone, and --kv-cache is {self.kv_cache}",
                "give --kv-cache fp8, or leave it out",
            )
        if self.kv_scale != "tensor" and self.kv_cache == "off":
            raise InputError(
                f"--kv-scale {self.kv_scale}",
                "the cache of every layer stays in the compute type",
                "give --kv-cache fp8 or v, or leave it out",
            )
        if self.kv_skip and self.kv_cache == "off":
            raise InputError(
                f"--kv-skip {self.kv_skip[0]}",
                "the cache of every layer stays in the compute type",
                "give --kv-cache fp8 or v, or leave it out",
            )

    def check_tail(self) -> None:
        """Raise InputError for a length of the tail where no module has one."""
        if self.exact_tail != DEFAULT_EXACT_TAIL and not self.has_tail:
            raise InputError(
                f"--exact-tail {self.exact_tail}",
                "no module has a tail",
                "give --activation-terms tail or --tail PATTERN, or leave it out",
            )

    @property
    def has_tail(self) -> bool:
        """Tell whether these options give a tail to any module."""
        return self.activation_terms == "tail" or bool(self.tail)


@Parameter(name="*", show_default=AS_THE_RUN_HAS_IT)
class RescaleOptions(ScaleOptions):
    """Options of `fp8q scales`: those of `ScaleOptions`; options that are not given keep the run's value.

    The method and its own options are always chosen anew. An empty tuple removes the run's `skip`, `only`, `two_terms`,
    `tail`, `bf16_input` or `kv_skip`.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        object.__setattr__(self, "given", {name: getattr(self, name) for name in given} | {"clip": self.clip})

    given: dict[str, Any]

    def over(self, before: ScaleOptions) -> ScaleOptions:
        """Replace the options chosen `before` by those that are given.

        A form for all modules also replaces the patterns of that form; without a tail its length is no more, and
        without codes in the cache neither are the layers left out of it nor scales of heads, and without FP8 keys no
        scales of queries.
        """
        patterns: dict[Terms, str] = {2: "two_terms", "tail": "tail", "bf16": "bf16_input"}
        of_all = patterns.get(self.given.get("activation_terms", 1))
        replaced: dict[str, Any] = {of_all: ()} if of_all else {}
        replaced |= {"kv_skip": (), "kv_scale": "tensor"} if self.given.get("kv_cache") == "off" else {}
        replaced |= {"q_scale": False} if self.given.get("kv_cache", "fp8") != "fp8" else {}
        chosen = replaced | self.given
        terms, tails = (chosen.get(name, getattr(before, name)) for name in ("activation_terms", "tail"))
        forgotten = {} if terms == "tail" or tails else {"exact_tail": DEFAULT_EXACT_TAIL}
        return replace(before, **(forgotten | chosen))

    def check_tail(self) -> None:
        """Accept any length of the tail: it may be that of the run's, which `over` finds out."""

    def check_cache(self) -> None:
        """Accept any option of the cache: the run's may be codes, which `over` finds out."""


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
    tokenizer: TokenizerOption = "file"
    adapter: Annotated[
        tuple[Path, ...],
        option(MODEL, "A PEFT LoRA adapter of the model, to measure and to serve with it. Repeatable.", "DIR"),
    ] = ()
    adapter_mode: Annotated[
        AdapterMode,
        option(
            MODEL,
            "merge: one adapter becomes part of the weights, before they are quantized. beside: the base alone is "
            "quantized, and each adapter's BF16 sum is added behind its products.",
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

    `stream` None: stream when the model does not fit in memory. `batches`: measure only the batches from the first up
    to the second, to be merged later, and choose no scales.
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


@dataclass(frozen=True)
class CalibrateOptions(MeasureOptions, SourceOptions, CorpusOptions, ScaleOptions):
    """Options of `fp8q calibrate`: of the corpus, the source model, the measurement and the scales."""
