"""`tune.json`: the mix that was chosen for a budget, what it was predicted to lose and loses, and the frontier."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from ...core.files import Strict, read_document
from ...core.run import Run
from ...options import DEFAULT_EXACT_TAIL, KvCache, Prefer, ScaleOptions, Server
from .choices import Group, Mix, Shape, changes, members


class Change(Strict):
    """A change to the run.

    `choice` is `one_term`, `tail`, `two_terms`, `weights_alone` or `bf16`, of the module and all that read the same
    tensor; `wide_cache` or `coded_cache` of an attention module; `rescaled` where the run has another scale than would
    be chosen. Of the module `*`, the whole model, it is how weights are rounded, or `kv_cache=` the form of the cache.
    """

    module: str
    choice: str
    members: list[str] = Field(default_factory=list, description="all modules of the group, where there are several")


class Point(Strict):
    """One mix: what it loses and costs. `prefill_flops_ratio`: operations of a prompt, 1 for one term everywhere."""

    kl_nats: float = Field(description="mean KL(float || this) per token on calibration windows, in FP32 arithmetic")
    measured: bool
    weight_bytes: int
    cache_bytes: int = Field(description="for each position of a sequence")
    prefill_flops_ratio: float
    weight_rounding: str
    kv_cache: KvCache
    wide_cache: int = Field(default=0, description="layers whose cache stays wide beside others in FP8")
    tail: int = Field(default=0, description="products")
    two_terms: int = Field(description="products")
    weights_alone: int = Field(default=0, description="products")
    bf16: int = Field(description="products, beside those that the run keeps in BF16 already")


class Step(Point):
    """A point of the frontier, and what it changes of the point before; the first: of the run."""

    changes: list[Change]


class Interval(Strict):
    """The rise of perplexity, a fraction, and its 95 % interval, where several windows tell of it."""

    increase: float
    low: float | None = None
    high: float | None = None


class Windows(Strict):
    """The numbers of calibration windows that weights were rounded by, the mix chosen by, and the prediction checked
    by: none are shared.
    """

    rounding: int
    choosing: int
    held_out: int


class Recipe(Strict):
    """The options of `fp8q scales` for the mix, besides the run's own: `--apply` uses them."""

    tail: list[str] = Field(default_factory=list)
    two_terms: list[str]
    bf16_input: list[str] = Field(default_factory=list)
    skip: list[str]
    kv_cache: KvCache
    kv_skip: list[str] = Field(default_factory=list)
    weight_rounding: str

    @classmethod
    def of(cls, groups: Sequence[Group], mix: Mix) -> "Recipe":
        """The recipe of a mix."""
        return cls(
            tail=members(groups, mix.of("tail")),
            two_terms=members(groups, mix.of("two_terms")),
            bf16_input=members(groups, mix.of("weights_alone")),
            skip=members(groups, mix.of("bf16")),
            kv_cache=mix.kv_cache,
            kv_skip=list(mix.wide_cache),
            weight_rounding=mix.rounding,
        )

    def over(self, before: ScaleOptions) -> ScaleOptions:
        """The options that `fp8q scales` would be given on a run that was made with `before`; tails keep its length."""
        return replace(
            before,
            activation_terms=1,
            two_terms=tuple(self.two_terms),
            bf16_input=tuple(self.bf16_input),
            tail=tuple(self.tail),
            exact_tail=before.exact_tail if self.tail else DEFAULT_EXACT_TAIL,
            skip=(*before.skip, *self.skip),
            kv_cache=self.kv_cache,
            kv_scale="tensor" if self.kv_cache == "off" else before.kv_scale,
            kv_skip=tuple(self.kv_skip),
            q_scale=before.q_scale and self.kv_cache == "fp8",
            weight_rounding=self.weight_rounding,  # type: ignore[arg-type]  # of a document, whose values are these
        )


class Chosen(Point):
    """The mix for the budget. Predictions come from calibration windows, `held_out_kl_nats` from other calibration
    windows, measurements from the evaluation text.
    """

    recipe: Recipe
    predicted_increase: Interval
    held_out_kl_nats: float
    measured_kl_nats: float
    measured_increase: Interval


class Tuning(Strict):
    """`tune.json`; what is null had no budget to be chosen for."""

    schema_: Annotated[int, Field(alias="schema", ge=1, le=1)] = 1
    max_kl: float | None = None
    max_ppl_increase: float | None = None
    prefer: Prefer
    server: Server = Field(default="tensorrt", description="`--for`: the server whose forms were chosen from")
    met: bool | None = Field(default=None, description="whether prediction and evaluation text are within the budget")
    met_on_calibration: bool | None = Field(default=None, description="whether the prediction alone is")
    changes: list[Change]
    predicted_kl_nats: float | None = None
    measured_kl_nats: float | None = None
    weight_bytes: int | None = None
    cache_bytes: int | None = None
    prefill_flops_ratio: float | None = None
    chosen: Chosen | None = None
    run: Point
    frontier: list[Step]
    windows: Windows
    prompt: int | None = Field(
        default=None, description="tokens of a window that are read as a prompt; losses are of those behind it"
    )
    rise_over_kl: float = Field(description="by which a rise of NLL follows from KL")


def point(shape: Shape, mix: Mix, kl_nats: float, measured: bool) -> Point:
    """Describe the cost of `mix` and its loss."""
    cost = shape.cost(mix)
    return Point(
        kl_nats=kl_nats,
        measured=measured,
        weight_bytes=cost.weight_bytes,
        cache_bytes=cost.cache_bytes,
        prefill_flops_ratio=cost.prefill_operations / shape.plain.prefill_operations,
        weight_rounding=mix.rounding,
        kv_cache=mix.kv_cache,
        wide_cache=len(mix.wide_cache),
        tail=len(members(shape.groups, mix.of("tail"))),
        two_terms=len(members(shape.groups, mix.of("two_terms"))),
        weights_alone=len(members(shape.groups, mix.of("weights_alone"))),
        bf16=len(members(shape.groups, mix.of("bf16"))),
    )


def changed(groups: Sequence[Group], before: Mix, after: Mix) -> list[Change]:
    """List the changes that make `after` of `before`, those of a group with its members."""
    of_group = {group.name: list(group.weights) for group in groups if len(group.weights) > 1}
    return [
        Change(module=module, choice=choice, members=of_group.get(module, []))
        for module, choice in changes(before, after)
    ]


def load_tuning(run: Run) -> Tuning:
    """Read `tune.json`; raises InputError when it is missing or not the file `fp8q tune` wrote."""
    return read_document(run.require(run.tuning, "tune"), Tuning)
