"""`tune.json`: the mix that was chosen for a budget, its predicted and its measured loss, and the frontier; and the
tables that show them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import expm1, isfinite
from typing import Self

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from ...core.columns import Column, Table, count, increase, nats, number_column, size, text_column
from ...core.files import PLAIN, FirstSchema, Strict, read_document
from ...core.run import Run
from ...options import DEFAULT_EXACT_TAIL, ONE, KvCache, Prefer, ScaleOptions, Server
from .choices import Group, GroupForm, Mix, Shape, changes, members

#: Points of the frontier that are shown; `--json` and `tune.json` have all.
SHOWN = 12


#: The forms whose GEMMs a point counts.
COUNTED: tuple[GroupForm, ...] = ("tail", "two_terms", "weights_alone", "bf16")


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
    """The loss and the cost of one mix. `prefill_flops_ratio`: operations of a prompt, 1 for one term everywhere."""

    kl_nats: float = Field(description="mean KL(float || this) per token on calibration windows, in FP32 arithmetic")
    measured: bool
    weight_bytes: int
    cache_bytes: int = Field(description="for each position of a sequence")
    prefill_flops_ratio: float
    weight_rounding: str
    kv_cache: KvCache
    wide_cache: int = Field(default=0, description="layers whose cache stays wide beside others in FP8")
    tail: int = Field(default=0, description="GEMMs")
    two_terms: int = Field(description="GEMMs")
    weights_alone: int = Field(default=0, description="GEMMs")
    bf16: int = Field(description="GEMMs, beside those that the run keeps in BF16 already")

    @classmethod
    def of(cls, shape: Shape, mix: Mix, kl_nats: float, measured: bool, **others: object) -> Self:
        """Describe the cost of `mix` and its loss, with the `others` of a derived class."""
        cost = shape.cost(mix)
        fields: dict[str, object] = {
            "kl_nats": kl_nats,
            "measured": measured,
            "weight_bytes": cost.weight_bytes,
            "cache_bytes": cost.cache_bytes,
            "prefill_flops_ratio": cost.prefill_operations / shape.plain.prefill_operations,
            "weight_rounding": mix.rounding,
            "kv_cache": mix.kv_cache,
            "wide_cache": len(mix.wide_cache),
            **{form: len(members(shape.groups, mix, form)) for form in COUNTED},
        }
        return cls.model_validate(fields | others)


class Step(Point):
    """A point of the frontier, and its changes from the point before; the first point's are from the run."""

    changes: list[Change]


class Interval(Strict):
    """The rise of perplexity, a fraction, and its 95 % interval, where there are several windows."""

    increase: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def around(cls, rise_nats: float, half: float) -> "Interval":
        """The interval of `half` on either side of a rise of NLL; `half` is infinite or NaN for a single window."""
        if not isfinite(half):
            return cls(increase=expm1(rise_nats))
        return cls(increase=expm1(rise_nats), low=expm1(rise_nats - half), high=expm1(rise_nats + half))


class Windows(Strict):
    """The numbers of calibration windows that weights were rounded by, the mix chosen by, and the prediction checked
    by: none are shared.
    """

    rounding: int
    choosing: int
    held_out: int


class Recipe(Strict):
    """The options of `fp8q scales` for the mix, besides the run's: `--apply` uses them."""

    tail: list[str] = Field(default_factory=list)
    two_terms: list[str]
    bf16_input: list[str] = Field(default_factory=list)
    skip: list[str]
    kv_cache: KvCache
    kv_skip: list[str] = Field(default_factory=list)
    weight_rounding: str

    @classmethod
    def from_mix(cls, groups: Sequence[Group], mix: Mix) -> "Recipe":
        """Make the recipe of a mix."""
        return cls(
            tail=members(groups, mix, "tail"),
            two_terms=members(groups, mix, "two_terms"),
            bf16_input=members(groups, mix, "weights_alone"),
            skip=members(groups, mix, "bf16"),
            kv_cache=mix.kv_cache,
            kv_skip=list(mix.wide_cache),
            weight_rounding=mix.rounding,
        )

    def over(self, before: ScaleOptions) -> ScaleOptions:
        """The options that `fp8q scales` would be given on a run that was made with `before`, with the tail of it."""
        return replace(
            before.in_one_form(ONE),
            two_terms=tuple(self.two_terms),
            bf16_input=tuple(self.bf16_input),
            tail=tuple(self.tail),
            exact_tail=before.tail_length if self.tail else DEFAULT_EXACT_TAIL,
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

    schema_: FirstSchema = 1
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

    @property
    def budget(self) -> str:
        """The budget and the server, as options."""
        server = "" if self.server == "tensorrt" else f" --for {self.server}"
        if self.max_kl is not None:
            return f"--max-kl {self.max_kl:g}{server}"
        return f"--max-ppl-increase {100 * (self.max_ppl_increase or 0.0):g}%{server}"

    @field_validator("chosen")
    @classmethod
    def _for_a_budget(cls, chosen: Chosen | None, others: ValidationInfo) -> Chosen | None:
        if chosen is not None and others.data.get("max_kl") is None and others.data.get("max_ppl_increase") is None:
            raise PydanticCustomError(PLAIN, "must be null without max_kl or max_ppl_increase")
        return chosen


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


@dataclass(frozen=True)
class PointRow:
    """A mix, and its description."""

    what: str
    point: Point


@dataclass(frozen=True)
class LossRow:
    """The loss of the chosen mix on one text: `increase` of perplexity, its interval."""

    where: str
    kl_nats: float
    increase: float | None = None
    low: float | None = None
    high: float | None = None


def point_rows(tuning: Tuning) -> list[PointRow]:
    """Some of the frontier, evenly, then the run and the mix that was chosen."""
    points = tuning.frontier
    last = len(tuning.frontier) - 1
    taken = sorted({round(index * last / (SHOWN - 1)) for index in range(SHOWN)}) if last > 0 else range(last + 1)
    rows = [PointRow("could be", points[index]) for index in taken] + [PointRow("the run", tuning.run)]
    return rows + ([PointRow("chosen", tuning.chosen)] if tuning.chosen else [])


def point_table(tuning: Tuning) -> Table[PointRow]:
    """KL against cost."""
    columns = (
        text_column("mix", "what"),
        number_column("KL", nats, "point.kl_nats"),
        number_column("weights", size, "point.weight_bytes"),
        number_column("cache", count, "point.cache_bytes"),
        number_column("prefill", "{:.2f}".format, "point.prefill_flops_ratio"),
        text_column("rounding", "point.weight_rounding"),
        Column[PointRow]("kv", lambda row: _cache(row.point), numeric=False),
        number_column("tail", count, "point.tail"),
        number_column("two", count, "point.two_terms"),
        number_column("alone", count, "point.weights_alone"),
        number_column("bf16", count, "point.bf16"),
    )
    return Table("KL against cost", point_rows(tuning), columns, "Nothing is quantized.")


def _cache(point: Point) -> str:
    """Name the form of the cache: `fp8`, or `fp8 but 2` where two layers stay in BF16."""
    if point.wide_cache:
        return f"{point.kv_cache} but {point.wide_cache}"
    return point.kv_cache


def change_table(tuning: Tuning) -> Table[Change]:
    """Tabulate the changes."""
    columns = (
        Column[Change]("module", _modules, numeric=False),
        Column[Change]("becomes", lambda row: row.choice.replace("_", " "), numeric=False),
    )
    return Table("What changes", tuning.changes, columns, "Nothing: the run is the cheapest mix for this budget.")


def _modules(change: Change) -> str:
    """Name the modules of a change: the first in full, the others of its group by what differs."""
    if change.module == "*":
        return "all"
    parent = change.module.rpartition(".")[0]
    return ", ".join([change.module, *(name.removeprefix(f"{parent}.") for name in change.members[1:])])


def conclusion(tuning: Tuning, run: str) -> str:
    """State in a sentence the loss and the cost of the chosen mix and how to apply it; without a budget, how to give
    one.

    `run`: the run directory, for the command.
    """
    if (chosen := tuning.chosen) is None:
        server = "" if tuning.server == "tensorrt" else f" --for {tuning.server}"
        example = f"fp8q tune {run} --max-kl {tuning.run.kl_nats / 2:.2g}{server}"
        return f"No budget was given. For the cheapest mix that loses half of what the run does: {example}"
    if tuning.max_kl is not None:
        loss = f"a KL of {nats(chosen.measured_kl_nats)} nats"
    else:
        loss = f"{increase(chosen.measured_increase.increase)} perplexity"
    before = tuning.run
    second = chosen.tail + chosen.two_terms
    # a model without cached keys and values of which anything was measured has no bytes of a cache
    cache = f"{chosen.cache_bytes / before.cache_bytes:.2f} times its cache, " if before.cache_bytes else ""
    cost = (
        f"This mix has {loss} on the evaluation text, {chosen.weight_bytes / before.weight_bytes:.2f} times the run's "
        f"bytes of weights, {cache}and {chosen.prefill_flops_ratio:.2f} times "
        "the operations of a prompt with one code an activation."
    )
    sentences = [cost]
    if before.kv_cache != "off" and (before.kv_cache, before.wide_cache) != (chosen.kv_cache, chosen.wide_cache):
        sentences.append(f"The cache, --kv-cache {_cache(before)} in the run, becomes {_cache(chosen)}.")
    if second and tuning.server == "tensorrt":
        sentences.append(
            f"{second} GEMMs take second codes, which vLLM computes with fp8q-vllm alone; for other servers give "
            "--for vllm."
        )
    if tuning.met:
        sentences.append(f"Apply it: fp8q tune {run} {tuning.budget} --apply")
    return " ".join(sentences)


def outcome_table(tuning: Tuning) -> Table[LossRow]:
    """Tabulate the predicted loss and the measured ones."""
    rows = list[LossRow]()
    if (chosen := tuning.chosen) is not None:
        rows = [
            LossRow("predicted, on windows chosen by", chosen.kl_nats, **chosen.predicted_increase.model_dump()),
            LossRow("measured, on windows held out", chosen.held_out_kl_nats),
            LossRow(
                "measured, on the evaluation text", chosen.measured_kl_nats, **chosen.measured_increase.model_dump()
            ),
        ]
    columns = (
        text_column("what it loses", "where"),
        number_column("KL", nats, "kl_nats"),
        number_column("perplexity", increase, "increase"),
        number_column("from", increase, "low"),
        number_column("to", increase, "high"),
    )
    return Table("Predicted and measured", rows, columns, "No budget: nothing was chosen.")
