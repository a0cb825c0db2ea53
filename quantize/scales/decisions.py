"""`scales.json`: each tensor's decision, or why its module stays in BF16; `attention.json`."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from ...core.errors import InputError
from ...core.files import RESTORE, FirstSchema, Strict, read_document
from ...core.run import Run
from ...options import BF16, BLOCK, DYNAMIC, ONE, TWO, Form, KvCache
from ..codes.formats import E4M3, TWO_TERMS, CodeGrid
from .clip import scale_of
from .scheme import Scheme, modules_in

#: Which of a layer's keys (`k`) and values (`v`) are codes, for each `--kv-cache`.
CACHE_PARTS: dict[KvCache, str] = {"off": "", "v": "v", "fp8": "kv"}
#: The method of scales and codes that are taken from an FP8 source checkpoint.
INHERITED: Literal["inherited"] = "inherited"
#: The formats of activations, by the number of their terms.
GRIDS: dict[int, CodeGrid] = {1: E4M3, 2: TWO_TERMS}
#: Of a graph in FP16: its smallest number over E4M3's, both subnormal.
SMALLEST_FP16_SCALE = 2.0**-15
#: The scale of a probability, by the number of its terms.
PROBABILITY_SCALES = {terms: float(scale_of(1.0, grid)) for terms, grid in GRIDS.items()}


class Lossy(Strict):
    """A record with a `sqnr_db`, which is null where rounding costs nothing: that null is written, where others are
    left out.
    """

    @model_serializer(mode="wrap")
    def _with_null(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = fields(self)
        return {"sqnr_db": None} | written


class HeldOutError(Strict):
    """The error of an expert's GEMM on tokens that were held out of the second moments its codes were fitted to."""

    tokens: int = Field(description="the expert's own tokens in the held-out batches, as many as were stored")
    over_nearest: float | None = Field(
        default=None,
        description="the squared error with the compensated codes over that with each weight's nearest code; null: too "
        "few tokens to judge by",
    )
    shrunk: Literal[True] | None = Field(
        default=None, description="the compensated codes are those by second moments shrunk toward their diagonal"
    )

    @property
    def beats_nearest(self) -> bool:
        """Tell whether the compensated codes have less error than the nearest."""
        return self.over_nearest is not None and self.over_nearest < 1


class WeightScales(Lossy):
    """The scales of a weight's channels, or the one of all; the scales themselves are in the checkpoint."""

    method: str = Field(
        description="what chose them: `inherited` with its codes from an FP8 checkpoint, or `mse of 128x128 blocks`, "
        "chosen anew where that has scales of blocks: what this loses is `sqnr_db`"
    )
    rounding: Literal["nearest", "gptq", "sequential", "inherited", "learned"] = "nearest"
    held_out: HeldOutError | None = Field(
        default=None,
        description="of an expert's compensated codes: unless `over_nearest` is below 1, the weight has the nearest",
    )
    axis: int = Field(description="of the output channels")
    channels: int
    granularity: Literal["tensor", "block"] | None = Field(
        default=None,
        description="tensor: the whole weight has one scale; block: each block of 128 x 128 has its own; null: each "
        "output channel",
    )
    blocks: int | None = Field(default=None, description="of granularity block: how many there are")
    scale_min: float
    scale_max: float
    sqnr_db: float | None
    zero_channels: int | None = Field(
        default=None, description="all-zero channels: exact with any scale, they take scale_max"
    )

    @property
    def stored(self) -> int:
        """The number of scales in the checkpoint."""
        if self.granularity == "tensor":
            return 1
        return self.blocks or self.channels


#: Flag of a `dynamic` scale -> the form that it stands for; without one each token has a scale.
RUN_TIME_FLAGS: dict[str, Form] = {
    "block": BLOCK,
}


def run_time_form(flagged: object) -> Form:
    """Return the form that the flags of a `dynamic` scale, or of its row in the report, stand for."""
    return next((form for flag, form in RUN_TIME_FLAGS.items() if getattr(flagged, flag)), DYNAMIC)


def form_flags(form: Form) -> dict[str, Any]:
    """Spell `form` in the fields of a scale, or of its row in the report."""
    flags = {flag: form == other or None for flag, other in RUN_TIME_FLAGS.items()}
    return {"terms": form.terms, "tail": form.tail, "dynamic": form.at_run_time or None, **flags}


class TensorScale(Lossy):
    """One activation's or cache tensor's scale; shares are fractions.

    With two `terms` a value is scale × (a + b/16), and all that is said of it is of both, with a `tail` too. Where the
    heads of a cache tensor have scales of their own, `scale` is the largest of them, and clip, shares and decibels are
    those of `scale` for the whole tensor: a histogram does not tell its heads apart.
    """

    method: str = Field(
        description="what chose the clip; where that gave nothing a scale can be made of: `amax (percentile gave 0)`"
    )
    amax: float
    clip: float
    scale: float
    heads: list[float] | None = Field(
        default=None, min_length=1, description="the scale of each head (`--kv-scale head`); null: all have `scale`"
    )
    terms: Literal[1, 2] = 1
    tail: int | None = Field(
        default=None,
        ge=1,
        description="the last positions of a call, which alone have the second code; null: all have it",
    )
    dynamic: Literal[True] | None = Field(
        default=None,
        description="each token has a scale that is computed at run time; this scale, and all that is said of it, is "
        "what a static form would have",
    )
    block: Literal[True] | None = Field(
        default=None, description="of those that are `dynamic`: each 128 values of a token have a scale of their own"
    )
    group_grid: Literal["power-of-two"] | None = Field(
        default=None, description="of those in a `block`: the scales are rounded up to powers of two; null: FP32"
    )
    saturation: float
    underflow: float
    sqnr_db: float | None
    sqnr_best_db: float | None = Field(default=None, description="at the scale of least squared error")

    @property
    def grid(self) -> CodeGrid:
        """The grid of the values under a scale of 1."""
        return GRIDS[self.terms]

    @property
    def stored(self) -> npt.NDArray[np.float32]:
        """The scale as checkpoints of compressed-tensors store it: [1], or [heads, 1, 1]."""
        return np.array([self.scale] if self.heads is None else self.heads, np.float32).reshape(
            -1, *([] if self.heads is None else [1, 1])
        )

    @property
    def form(self) -> Form:
        """The form of the input of which this is the scale."""
        if self.dynamic:
            return run_time_form(self)
        if self.tail is not None:
            return Form("tail", self.tail)
        return ONE if self.terms == 1 else TWO

    def with_form(self, form: Form) -> "TensorScale":
        """Return this scale, and all that is said of it, as that of an input in `form`."""
        return self.model_copy(update=form_flags(form))

    @property
    def fits_fp16(self) -> bool:
        """Tell whether an FP16 graph holds every code × scale: FP16's smallest number is 2^-24, E4M3's 2^-9.

        One term is rounded to this grid only, so that any scale is good enough for it.
        """
        return self.terms == 1 or self.scale >= SMALLEST_FP16_SCALE


class Skipped(Strict):
    """Why a module stays in BF16; `value` and `samples` where a measured number is the reason."""

    reason: str
    value: float | None = None
    samples: int | None = None


class Scales(Strict):
    """`scales.json`.

    Every GEMM of the model is in `weights` or in `skipped`; what `weights` has is in `activations` or in
    `bf16_inputs`.
    """

    schema_: FirstSchema = 1
    format: Literal["e4m3", "int8"] = "e4m3"
    weights: dict[str, WeightScales]
    activations: dict[str, TensorScale]
    kv_cache: dict[str, TensorScale] = Field(default_factory=dict)
    wide_cache: dict[str, TensorScale] = Field(
        default_factory=dict,
        description="the cache tensors of layers that `--kv-skip` keeps in the compute type, under the scale of a "
        "server that is not told so",
    )
    queries: dict[str, TensorScale] = Field(
        default_factory=dict,
        description="of `<attention>.q`, for vLLM's attention on FP8 codes; nothing else uses them",
    )
    skipped: dict[str, Skipped]
    bf16_inputs: list[str] = Field(
        default_factory=list, description="the modules of which the weight alone is codes; their input stays in BF16"
    )
    vision: list[str] | None = Field(
        default=None, description="the modules that text does not reach, which `--vision` named"
    )

    @classmethod
    def before_weights(
        cls,
        activations: dict[str, TensorScale],
        cache: Mapping[str, TensorScale],
        in_bf16: Collection[str],
        skipped: dict[str, Skipped],
        weights_alone: Iterable[str] = (),
    ) -> "Scales":
        """Return the decisions on all but the weights, whose scales follow when they are written.

        `cache`: the scales of every layer, also of the attention modules `in_bf16`, whose cache stays in the compute
        type.
        """
        left = {name: scale for name, scale in cache.items() if name.rpartition(".")[0] in in_bf16}
        return cls(
            weights={},
            activations=activations,
            kv_cache={name: scale for name, scale in cache.items() if name not in left},
            wide_cache=left,
            skipped=skipped,
            bf16_inputs=[*weights_alone],
        )

    @property
    def modules(self) -> list[str]:
        """The modules whose weight is codes, or shall be."""
        return [*self.activations, *self.bf16_inputs]

    @property
    def of_text(self) -> "Scales":
        """The decisions on all modules but those that text does not reach."""
        blind = frozenset(self.vision or ())
        update: dict[str, Any] = {"vision": None}
        for name in ("weights", "activations", "skipped"):
            part = getattr(self, name)
            update[name] = {module: part[module] for module in part if module not in blind}
        update["bf16_inputs"] = [module for module in self.bf16_inputs if module not in blind]
        return self.model_copy(update=update)

    @property
    def forms(self) -> dict[str, Form]:
        """Map each of `modules` to the form of its input."""
        coded = {module: scale.form for module, scale in self.activations.items()}
        return coded | dict.fromkeys(self.bf16_inputs, BF16)

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Map every module of `weights` and of `skipped` to its scheme."""
        forms = self.forms
        quantized = {
            module: Scheme(weight.granularity or "channel", forms[module]) for module, weight in self.weights.items()
        }
        return quantized | {module: Scheme(None, BF16, skipped.reason) for module, skipped in self.skipped.items()}

    def with_weights(self, decisions: Mapping[str, WeightScales | Skipped]) -> "Scales":
        """Fill in the weights that were written, by module; a module whose weight has no scale moves to `skipped`."""
        weights = {name: decisions[name] for name in self.modules if isinstance(decisions.get(name), WeightScales)}
        skipped = {module: reason for module, reason in decisions.items() if module not in weights}
        update = {
            "weights": weights,
            "activations": {module: scale for module, scale in self.activations.items() if module in weights},
            "bf16_inputs": [module for module in self.bf16_inputs if module in weights],
            "skipped": self.skipped | skipped,
        }
        return self.model_copy(update=update)

    def in_form(self, *forms: Form) -> list[str]:
        """List the `modules` whose input has one of `forms`."""
        return modules_in(self.forms, *forms)

    @property
    def static_inputs(self) -> dict[str, TensorScale]:
        """The scales in `activations` that the checkpoint stores."""
        return {module: activation for module, activation in self.activations.items() if activation.form.static}

    @property
    def fp8_gemms(self) -> list[str]:
        """The modules whose GEMM runs on FP8 codes on both sides."""
        return [module for module in self.weights if module in self.activations]

    @property
    def tensor_weights(self) -> list[str]:
        """The modules whose whole weight has one scale."""
        return [module for module, weight in self.weights.items() if weight.granularity == "tensor"]

    @property
    def cache_parts(self) -> str:
        """The parts of the cache that are codes: `kv`, `v` alone, or none."""
        return "".join(sorted({name[-1] for name in self.kv_cache}))

    @property
    def per_head(self) -> bool:
        """Tell whether the heads of a layer's cache have scales of their own."""
        return any(scale.heads is not None for scale in self.kv_cache.values())

    @property
    def cache_unit(self) -> Literal["layer", "head"]:
        """The part of the cache that has one scale for its keys, and one for its values."""
        return "head" if self.per_head else "layer"

    @property
    def bf16_caches(self) -> list[str]:
        """The attention modules whose cache stays in BF16 beside others in FP8."""
        return [*dict.fromkeys(name.rpartition(".")[0] for name in self.wide_cache)]

    @property
    def loaded_caches(self) -> dict[str, TensorScale]:
        """The scales that loaders expect among the weights: of the cache of every layer, and of queries."""
        return self.kv_cache | self.wide_cache | self.queries

    @property
    def cache_left(self) -> str:
        """State the layers that an FP8 cache leaves out, as the end of a sentence; empty where there are none."""
        left = self.bf16_caches
        coded = {name.rpartition(".")[0] for name in self.kv_cache}
        if left:
            return f", {len(left)} of {len(coded.union(left))} layers left in BF16"
        return ""


class AttentionScales(Strict):
    """`attention.json`: `<attention>.q`, `.k` and `.v` -> its scale; the scale of all probabilities, and how many codes
    stand for a query or a probability.
    """

    schema_: FirstSchema = 1
    tensors: dict[str, TensorScale]
    terms: Literal[1, 2] = 1
    probabilities: float = PROBABILITY_SCALES[1]


def load_scales(run: Run) -> Scales:
    """Read `scales.json`; raises InputError when it is missing or not the file `fp8q calibrate` wrote."""
    return read_scales(run.require(run.scales, "quantize"))


def read_scales(path: Path) -> Scales:
    """Read the `scales.json` at `path`; raises InputError where it lacks a module's weight or input."""
    scales = read_document(path, Scales)
    weights = set(scales.weights)
    inputs = set(scales.modules)
    if alone := min(weights - inputs, default=None):
        raise InputError(path, f"has {alone} in weights, and neither in activations nor in bf16_inputs", RESTORE)
    if alone := min(inputs - weights, default=None):
        raise InputError(path, f"has the input of {alone}, and not its weight", RESTORE)
    return scales
