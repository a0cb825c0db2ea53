"""Options of choosing scales from statistics: those of `merge` and `scales`, and also of `calibrate`."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, get_args

from cyclopts import Parameter

from ..core.errors import InputError
from .clipping import BLOCK_SCALE_GRID, Clipping, ScaleGrid, no_blocks
from .declare import (
    SCALES,
    Options,
    between,
    first_changed,
    not_empty,
    option,
    share_of,
)
from .form import (
    BF16,
    BLOCK,
    DEFAULT_EXACT_TAIL,
    EVERY,
    FORMS_HELP,
    ONE,
    TWO,
    Form,
    FormRule,
    checked_rules,
    longest_tail,
    parse_rule,
)

#: Tokens after which the amax of an expert's last GEMM has settled (`quantize.scales.expert_scales`).
DEFAULT_EXPERT_TOKENS = 512
WeightMethod = Literal["amax", "mse"]
#: The part of a weight that shares a scale: an output channel, or all of it.
WeightGranularity = Literal["channel", "tensor"]
#: The form of the files of a checkpoint: the names and shapes of scales, and what says how they are quantized.
Layout = Literal["compressed-tensors", "modelopt"]
KvCache = Literal["off", "v", "fp8"]
#: The part of a layer's cached keys, or values, that shares a scale: all of them (`tensor`), or those of a head.
KvScale = Literal["tensor", "head"]
#: The number of codes for one activation. `tail`: two in the last positions of a call, one in the others; `bf16`: none,
#: so that only weights are codes.
Terms = Literal[1, 2, "tail", "bf16"]
WeightRounding = Literal["nearest", "gptq", "sequential"]
#: The options that `form` took the place of; each goes on as a spelling of it.
OLDER_SPELLINGS = ("activation_terms", "exact_tail", "two_terms", "tail", "bf16_input")
#: The type and help of `--vision`, of measuring and of choosing scales.
VisionPatterns = Annotated[
    tuple[str, ...],
    option(
        SCALES,
        "Quantize also modules of the vision part whose name matches (* and ?), by rows with images in --data. "
        "Repeatable.",
        "PATTERN",
    ),
    not_empty,
]
#: The default of options of `fp8q scales`, in words.
AS_THE_RUN_HAS_IT = "as the run has it"


def read_granularity(option: str, value: str) -> str:
    """The rule of the part of a weight with one scale; refuses the values of `--apply-scales`, which had this name."""
    if value in ("dq", "mul"):
        raise InputError(f"{option} {value}", "is called --apply-scales now", f"write --apply-scales {value}")
    if value not in get_args(WeightGranularity):
        raise InputError(f"{option} {value}", f"is none of {', '.join(get_args(WeightGranularity))}")
    return value


@dataclass(frozen=True)
class ScaleOptions(Options):
    """Options of choosing scales from statistics, without running the model: those of `fp8q merge`, and also of
    `calibrate`.

    `bf16_weights` is stored as a fraction, and may be given as text, `"3%"`; 0 keeps none.
    """

    clip: Annotated[Clipping, Parameter(show_default=True)] = Clipping()
    weight_method: Annotated[
        WeightMethod, option(SCALES, "How the scales of the weights' output channels are chosen.")
    ] = "mse"
    weight_scale: Annotated[
        WeightGranularity,
        option(
            SCALES,
            "The part of a weight with one scale: each output channel, or the whole tensor, for servers that read no "
            "other with static inputs. Weights that servers join (q, k and v; gate and up) share it.",
            text=read_granularity,
        ),
    ] = "channel"
    layout: Annotated[
        Layout,
        option(
            SCALES,
            "Names and configuration of the files: compressed-tensors, or modelopt (hf_quant_config.json, for NVIDIA's "
            "runtimes), which says the form one under one scale a weight, or the form dynamic.",
        ),
    ] = "compressed-tensors"
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
            "Keep the cache of attention modules whose name matches (* and ?), or sliding_window: of all layers with a "
            "window, in the compute type. Repeatable.",
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
    vision: VisionPatterns = ()
    bf16_weights: Annotated[
        float,
        option(
            SCALES,
            "Keep the weights that lose most a byte in FP8 in BF16, for at most this share more bytes of weights, such "
            "as 3%. Predicts the loss of each first, on a few calibration windows.",
            "SHARE",
            text=share_of("bytes of weights", "3%", all_of_it=False),
        ),
    ] = 0.0
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
    weigh_first_token: Annotated[
        bool,
        option(
            SCALES,
            "Weigh the first token of a window, on which attention rests, by the loss's gradient there in the second "
            "moments of --weight-rounding gptq. Runs some windows forward and back in FP32.",
            negative="--no-weigh-first-token",
        ),
    ] = False
    weigh_outputs: Annotated[
        int,
        option(
            SCALES,
            "Revise the codes of --weight-rounding gptq by how the loss depends on errors of several output channels "
            "together, as the gradients of so many calibration windows have it. 0: not at all.",
            "WINDOWS",
        ),
        between(0),
    ] = 0
    form: Annotated[
        tuple[str, ...],
        option(
            SCALES,
            f"How inputs of FP8 GEMMs are coded: {FORMS_HELP}. PATTERN=FORM: of modules that match, and all that share "
            "their input. Repeatable; the last match counts.",
            "[PATTERN=]FORM",
        ),
        checked_rules,
    ] = ()
    block_scale_grid: Annotated[ScaleGrid, option(SCALES, BLOCK_SCALE_GRID)] = "power-of-two"
    activation_terms: Annotated[
        Terms,
        option(
            SCALES,
            "An older spelling of --form for every module: 1 (one), 2 (two), tail (tail:N, N by --exact-tail) or bf16.",
        ),
    ] = 1
    exact_tail: Annotated[
        int,
        option(SCALES, "The N of --form tail:N in its older spellings: positions with two codes.", "N"),
        between(1),
    ] = DEFAULT_EXACT_TAIL
    two_terms: Annotated[
        tuple[str, ...],
        option(
            SCALES,
            "An older spelling of --form PATTERN=two: take two codes for the input of modules whose name matches (* "
            "and ?), and of all modules that share it. Repeatable.",
            "PATTERN",
        ),
        not_empty,
    ] = ()
    tail: Annotated[
        tuple[str, ...],
        option(
            SCALES,
            "An older spelling of --form PATTERN=tail:N: take two codes in a call's last positions alone for the input "
            "of modules whose name matches (* and ?), and of all modules that share it. Repeatable.",
            "PATTERN",
        ),
        not_empty,
    ] = ()

    bf16_input: Annotated[
        tuple[str, ...],
        option(
            SCALES,
            "An older spelling of --form PATTERN=bf16: leave the input of modules whose name matches (* and ?) in "
            "BF16, and of all modules that share it; their weights are FP8. Repeatable.",
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
            "experts for the input of its last GEMM.",
            "N",
        ),
        between(0, None),
    ] = DEFAULT_EXPERT_TOKENS

    @property
    def needs_moments(self) -> bool:
        """Tell whether weights are rounded with second moments of their inputs, which `measure` gathers."""
        return self.weight_rounding == "gptq"

    @property
    def weighs_first_token(self) -> bool:
        """Tell whether second moments need the weight of windows' first tokens."""
        return self.needs_moments and self.weigh_first_token

    @property
    def weighs_outputs(self) -> bool:
        """Tell whether codes are revised by the gradients at outputs; those of weights in blocks never are."""
        return self.needs_moments and self.weigh_outputs > 0 and not self._all_in_blocks

    @property
    def _all_in_blocks(self) -> bool:
        """Tell whether the rules of forms leave no weight but in blocks."""
        rules = self.form_rules
        last = max(number for number, rule in enumerate(rules) if rule.every)
        return all(rule.form == BLOCK for rule in rules[last:])

    def __post_init__(self) -> None:
        """Refuse a list of modules where all are chosen, and choices that contradict inherited scales."""
        super().__post_init__()
        of_weights = ("weight_method", "weight_scale", "weight_rounding", "activation_terms", "bf16_weights")
        option = first_changed(self, of_weights)
        option = option or next((rule.written for rule in self.form_rules if rule.form != ONE or not rule.every), None)
        option = option or first_changed(self.clip, self.clip.declared())
        if self.inherit and option:
            raise InputError(
                "--inherit",
                f"takes codes and scales as they were given, and {option} chooses others",
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
        every = next((rule for rule in self.form_rules[1:] if rule.every and rule.written.startswith("--form")), None)
        if every and self.form_rules[1] != every:
            raise InputError(
                self.form_rules[1].written,
                f"{every.written} is for every module, and the last that matches counts",
                "give `--form` alone, with the form for every module first",
            )
        if self.weight_scale == "tensor" and self.form_of_all == BLOCK:
            raise InputError(
                "--weight-scale tensor", "--form block gives weights a scale for each block", "leave one of them out"
            )
        if self.block_scale_grid != "power-of-two" and all(rule.form != BLOCK for rule in self.form_rules):
            raise no_blocks(self.block_scale_grid)
        if self.vision and self.weight_rounding == "sequential":
            raise InputError(
                "--weight-rounding sequential",
                f"rounds decoder layers one after the other, and --vision {self.vision[0]} names other modules",
                "give --weight-rounding gptq or nearest, or leave --vision out",
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
        """Tell whether older spellings give a tail of `exact_tail` to any module."""
        return self.activation_terms == "tail" or bool(self.tail)

    @property
    def form_rules(self) -> tuple[FormRule, ...]:
        """The rules that give each module's input its form, of which the last that matches counts.

        The older options come first, as rules of their own; the first rule is for every module.
        """
        tail = Form("tail", self.exact_tail)
        every: dict[Terms, Form] = {1: ONE, 2: TWO, "tail": tail, "bf16": BF16}
        terms = self.activation_terms
        rules = [FormRule(every[terms], EVERY, f"--activation-terms {terms}")]
        for spelling, patterns, form in (
            ("--tail", self.tail, tail),
            ("--two-terms", self.two_terms, TWO),
            ("--bf16-input", self.bf16_input, BF16),
        ):
            rules += [FormRule(form, pattern, f"{spelling} {pattern}") for pattern in patterns]
        return (*rules, *map(parse_rule, self.form))

    @property
    def names_form(self) -> bool:
        """Tell whether a form was asked for, by `form` or an older spelling, of weights, or scales that are inherited
        with it.
        """
        older = first_changed(self, ("weight_scale", *OLDER_SPELLINGS)) or self.asks("activation_terms")
        return bool(self.form or self.inherit or older)

    @property
    def form_of_all(self) -> Form:
        """The form of modules that no pattern matches."""
        return next(rule.form for rule in reversed(self.form_rules) if rule.every)

    @property
    def tail_length(self) -> int:
        """The longest tail that any rule gives; `exact_tail` where none gives one."""
        return longest_tail(rule.form for rule in self.form_rules) or self.exact_tail

    def in_one_form(self, form: Form) -> Self:
        """Give every module's input `form`, in the place of all that these options choose."""
        older: dict[str, Any] = {name: getattr(ScaleOptions, name) for name in OLDER_SPELLINGS}
        grid = self.block_scale_grid if form == BLOCK else ScaleOptions.block_scale_grid
        return replace(self, **(older | {"form": () if form == ONE else (str(form),), "block_scale_grid": grid}))


@Parameter(name="*", show_default=AS_THE_RUN_HAS_IT)
class RescaleOptions(ScaleOptions):
    """Options of `fp8q scales`: those of `ScaleOptions`; options that are not given keep the run's value.

    The method and its own options are always chosen anew. An empty tuple removes the run's `skip`, `only`, `vision`,
    `two_terms`, `tail`, `bf16_input` or `kv_skip`.
    """

    def __init__(self, **explicit: Any) -> None:
        super().__init__(**explicit)
        object.__setattr__(self, "explicit", {name: getattr(self, name) for name in explicit} | {"clip": self.clip})

    explicit: dict[str, Any]

    def over(self, before: ScaleOptions) -> ScaleOptions:
        """Replace the options chosen `before` by those that are given.

        `form` replaces all that chose forms before, and does not mix with older spellings of it. Of these, a form for
        all modules also replaces the patterns of that form; without a tail its length is no more, and
        without codes in the cache neither are the layers left out of it nor scales of heads, and without FP8 keys no
        scales of queries.
        """
        older = next((name for name in OLDER_SPELLINGS if name in self.explicit), None)
        if older and before.form and "form" not in self.explicit:
            raise InputError(
                self.declared()[older].option,
                f"is an older spelling of --form, and the run has --form {before.form[0]}",
                "give the forms of all inputs by --form",
            )
        if "form" in self.explicit:
            before = before.in_one_form(ONE)
        patterns: dict[Terms, str] = {2: "two_terms", "tail": "tail", "bf16": "bf16_input"}
        of_all = patterns.get(self.explicit.get("activation_terms", 1))
        replaced: dict[str, Any] = {of_all: ()} if of_all else {}
        replaced |= {"kv_skip": (), "kv_scale": "tensor"} if self.explicit.get("kv_cache") == "off" else {}
        replaced |= {"q_scale": False} if self.explicit.get("kv_cache", "fp8") != "fp8" else {}
        chosen = replaced | self.explicit
        terms, tails = (chosen.get(name, getattr(before, name)) for name in ("activation_terms", "tail"))
        forgotten = {} if terms == "tail" or tails else {"exact_tail": DEFAULT_EXACT_TAIL}
        return replace(before, **(forgotten | chosen))

    def check_tail(self) -> None:
        """Accept any length of the tail: it may be that of the run's, which `over` finds out."""

    def check_cache(self) -> None:
        """Accept any option of the cache: the run's may be codes, which `over` finds out."""
