"""Tables of a tuning: the frontier, what changes, and what was predicted beside what was measured."""

from dataclasses import dataclass

from ...core.columns import Column, Table, count, increase, nats, number_column, size, text_column
from .document import Change, Point, Tuning

#: Points of the frontier that are shown; `--json` and `tune.json` have all.
SHOWN = 12


@dataclass(frozen=True)
class PointRow:
    """A mix, and what it is."""

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


def point_rows(found: Tuning) -> list[PointRow]:
    """Some of the frontier, evenly, then the run and the mix that was chosen."""
    points, last = found.frontier, len(found.frontier) - 1
    taken = sorted({round(index * last / (SHOWN - 1)) for index in range(SHOWN)}) if last > 0 else range(last + 1)
    rows = [PointRow("could be", points[index]) for index in taken] + [PointRow("the run", found.run)]
    return rows + ([PointRow("chosen", found.chosen)] if found.chosen else [])


def point_table(found: Tuning) -> Table[PointRow]:
    """KL against cost."""
    columns = (
        text_column("mix", "what"),
        Column[PointRow]("KL", lambda row: row.point.kl_nats, nats),
        Column[PointRow]("weights", lambda row: row.point.weight_bytes, size),
        Column[PointRow]("cache", lambda row: row.point.cache_bytes, count),
        Column[PointRow]("prefill", lambda row: row.point.prefill_flops_ratio, "{:.2f}".format),
        Column[PointRow]("rounding", lambda row: row.point.weight_rounding, numeric=False),
        Column[PointRow]("kv", lambda row: _cache(row.point), numeric=False),
        Column[PointRow]("tail", lambda row: row.point.tail, count),
        Column[PointRow]("two", lambda row: row.point.two_terms, count),
        Column[PointRow]("alone", lambda row: row.point.weights_alone, count),
        Column[PointRow]("bf16", lambda row: row.point.bf16, count),
    )
    return Table("KL against cost", point_rows(found), columns, "Nothing is quantized.")


def _cache(point: Point) -> str:
    """The form of the cache: `fp8`, or `fp8 but 2` where two layers stay wide."""
    return f"{point.kv_cache} but {point.wide_cache}" if point.wide_cache else point.kv_cache


def change_table(found: Tuning) -> Table[Change]:
    """Tabulate the changes."""
    columns = (
        Column[Change]("module", _modules, numeric=False),
        Column[Change]("becomes", lambda row: row.choice.replace("_", " "), numeric=False),
    )
    return Table("What changes", found.changes, columns, "Nothing: the run is the cheapest mix for this budget.")


def _modules(change: Change) -> str:
    """Name the modules of a change: the first in full, the others of its group by what differs."""
    if change.module == "*":
        return "all"
    parent = change.module.rpartition(".")[0]
    return ", ".join([change.module, *(name.removeprefix(f"{parent}.") for name in change.members[1:])])


def conclusion(found: Tuning, run: str) -> str:
    """Say in a sentence what the chosen mix loses and costs and how to apply it; without a budget, how to give one.

    `run`: the run directory, for the command.
    """
    server = "" if found.server == "tensorrt" else f" --for {found.server}"
    if (its := found.chosen) is None:
        example = f"fp8q tune {run} --max-kl {found.run.kl_nats / 2:.2g}{server}"
        return f"No budget was given. For the cheapest mix that loses half of what the run does: {example}"
    if found.max_kl is not None:
        loss, budget = f"a KL of {nats(its.measured_kl_nats)} nats", f"--max-kl {found.max_kl:g}"
    else:
        assert found.max_ppl_increase is not None, "one of the two is the budget"
        loss = f"{increase(its.measured_increase.increase)} perplexity"
        budget = f"--max-ppl-increase {100 * found.max_ppl_increase:g}%"
    own, second = found.run, its.tail + its.two_terms
    # a model without cached keys and values of which anything was measured has no bytes of a cache
    cache = f"{its.cache_bytes / own.cache_bytes:.2f} times its cache, " if own.cache_bytes else ""
    cost = (
        f"This mix has {loss} on the evaluation text, {its.weight_bytes / own.weight_bytes:.2f} times the run's bytes "
        f"of weights, {cache}and {its.prefill_flops_ratio:.2f} times "
        "the operations of a prompt with one code an activation."
    )
    said = [cost]
    if own.kv_cache != "off" and (own.kv_cache, own.wide_cache) != (its.kv_cache, its.wide_cache):
        said.append(f"The cache, --kv-cache {_cache(own)} in the run, becomes {_cache(its)}.")
    if second and found.server == "tensorrt":
        said.append(
            f"{second} products take second codes, which vLLM computes with fp8q-vllm alone; for other servers give "
            "--for vllm."
        )
    if found.met:
        said.append(f"Apply it: fp8q tune {run} {budget}{server} --apply")
    return " ".join(said)


def outcome_table(found: Tuning) -> Table[LossRow]:
    """Tabulate the predicted loss beside the measured ones."""
    rows = list[LossRow]()
    if (its := found.chosen) is not None:
        rows = [
            LossRow("predicted, on windows chosen by", its.kl_nats, **its.predicted_increase.model_dump()),
            LossRow("measured, on windows held out", its.held_out_kl_nats),
            LossRow("measured, on the evaluation text", its.measured_kl_nats, **its.measured_increase.model_dump()),
        ]
    columns = (
        text_column("what it loses", "where"),
        number_column("KL", nats, "kl_nats"),
        number_column("perplexity", increase, "increase"),
        number_column("from", increase, "low"),
        number_column("to", increase, "high"),
    )
    return Table("Predicted and measured", rows, columns, "No budget: nothing was chosen.")
