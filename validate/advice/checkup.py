"""The result of a check: verdict, module, value, and a command as remedy."""

from collections.abc import Callable, Sequence
from math import isfinite, isnan
from typing import Annotated, Literal

from pydantic import Field

from ...core.errors import GateError
from ...core.files import Strict
from .criteria import Criterion, Limit

Verdict = Literal["good", "watch", "bad", "unknown"]
#: The worst first.
ORDER: tuple[Verdict, ...] = ("bad", "watch", "unknown", "good")


class AtDepth(Strict):
    """The value of one module, in the order of the model; null where it is not finite."""

    module: str
    value: float | None


class Check(Strict):
    """One verdict. `value` is null where nothing was measured, or no finite number was; `said` tells it in words."""

    check: str
    verdict: Verdict
    module: str | None = None
    value: float | None = None
    what: str = Field(description="what the value is, with its unit")
    said: str
    remedy: str | None = Field(default=None, description="null where nothing is to be done")
    by_depth: list[AtDepth] = Field(default=[], description="the same value of all modules, on the worst entry alone")


class Checkup(Strict):
    """All that `fp8q doctor RUN` says, the worst first."""

    schema_: Annotated[int, Field(alias="schema", ge=1, le=1)] = 1
    windows: int
    tokens: int
    checks: list[Check]


def verdict_of(value: float, limit: Limit) -> Verdict:
    """Return the verdict of `limit` on a value; no number is bad."""
    if isnan(value) or value > limit.bad:
        return "bad"
    return "watch" if value > limit.watch else "good"


def unknown(criterion: Criterion, why: str, remedy: str | None = None) -> Check:
    """The entry of a check that has no value, because of `why`."""
    return Check(check=criterion.check, verdict="unknown", what=criterion.what, said=why, remedy=remedy)


def graded(
    criterion: Criterion,
    values: Sequence[tuple[str, float]],
    said: Callable[[float], str],
    remedy: Callable[[str, float], str],
) -> list[Check]:
    """An entry for each module beyond the limit, the worst first, or one for the worst module where none is.

    `values`: module and value, in the order of the model; the check is unknown where there are none. `said` puts a
    value into words, and `remedy` gives the command that helps a module.
    """
    if not values:
        return [unknown(criterion, criterion.nothing)]
    check, what, limit = criterion.check, criterion.what, criterion.limit
    worst_first = sorted(values, key=lambda found: -found[1] if not isnan(found[1]) else float("-inf"))
    beyond = [found for found in worst_first if verdict_of(found[1], limit) != "good"]
    entries = [
        Check(
            check=check,
            verdict=(verdict := verdict_of(value, limit)),
            module=module,
            value=finite(value),
            what=what,
            said=said(value),
            remedy=None if verdict == "good" else remedy(module, value),
        )
        for module, value in beyond or worst_first[:1]
    ]
    depth = [AtDepth(module=module, value=finite(value)) for module, value in values]
    return [entries[0].model_copy(update={"by_depth": depth}), *entries[1:]]


def finite(value: float) -> float | None:
    """The value as JSON has it."""
    return value if isfinite(value) else None


def worst_first(checks: Sequence[Check]) -> list[Check]:
    """The worst first, otherwise in the order they were made."""
    return sorted(checks, key=lambda each: ORDER.index(each.verdict))


def refuse_bad(found: Checkup) -> None:
    """Raise GateError, naming the first, where a check is bad."""
    bad = [each for each in found.checks if each.verdict == "bad"]
    if bad:
        names = sorted({each.check for each in bad})
        first = bad[0]
        raise GateError(
            "",
            f"{len(names)} of {len({each.check for each in found.checks})} checks are bad ({', '.join(names)}); "
            f"{first.module or 'the model'}: {first.what} {first.said}",
            f"{first.remedy}",
        )
