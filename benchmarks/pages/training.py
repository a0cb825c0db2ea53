"""The tables of docs/training.md: what a log says of seven ways to train, and what watching costs."""

from markdown import load, table

from fp8q.validate.advice.criteria import (
    ENERGY_LOST,
    GRADIENT_NORM,
    LOSS,
    NOT_FINITE,
    SATURATION,
    TRAINING_JUMPS,
    UNDERFLOW,
    VANISHING,
    Criterion,
)


def limit(value: float) -> str:
    """A limit of a check, as the page has it."""
    if value < 1 and value:
        return f"{100 * value:g} %"
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def training_checks() -> str:
    """Each check with its limits."""
    criteria: tuple[Criterion, ...] = (
        NOT_FINITE, LOSS, GRADIENT_NORM, SATURATION, UNDERFLOW, ENERGY_LOST, TRAINING_JUMPS, VANISHING,
    )  # fmt: skip
    rows = [[f"`{each.check}`", each.what, limit(each.limit.watch), limit(each.limit.bad)] for each in criteria]
    return table(["check of a log", "value", "watch above", "bad above"], rows)


def training() -> str:
    """Seven ways to train one model: the loss at the end, and the checks that are not good, the worst entry of each."""
    rows = []
    for name, found in load("training")["results"].items():
        bad = [
            f"`{check}` of {entry['tensor'] or 'all'}: {entry['found']}"
            for check, entry in found["checks"].items() if entry["verdict"] == "bad"
        ]  # fmt: skip
        rows.append([name, f"{found['loss']:.2f}", found["verdict"], "; ".join(bad)])
    return table(["training", "loss at the end", "verdict", "what is bad"], rows)


def training_cost() -> str:
    """The time of ten steps with one record over that of ten without."""
    rows = [
        [f"{each['parameters'] / 1e6:.1f} million", f"{1e3 * each['step_s']:.0f} ms", f"{each['ratio']:.2f}"]
        for each in load("training")["cost"].values()
    ]
    return table(["parameters", "a step", "ten steps, one recorded, over ten unwatched ones"], rows)


TABLES = (training_checks, training_cost)
DECISION_TABLES = (training,)
