"""The result of a check (verdict, module, value), the command that helps, and the tables that show both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan
from shlex import quote
from typing import Literal

from pydantic import Field

from ...core.columns import Table, text_column
from ...core.errors import GateError
from ...core.files import FirstSchema, Strict
from ...options import ScaleOptions
from ...quantize.scales.decisions import TensorScale
from .criteria import Criterion, Limit

Verdict = Literal["good", "watch", "bad", "unknown"]
#: The worst first.
ORDER: tuple[Verdict, ...] = ("bad", "watch", "unknown", "good")
#: Entries of one check that are shown; the rest are counted.
LISTED = 6


class AtDepth(Strict):
    """The value of one module, in the order of the model; null where it is not finite."""

    module: str
    value: float | None


class Check(Strict):
    """One verdict. `value` is null where nothing was measured, or no finite number was; `said` writes it in words."""

    check: str
    verdict: Verdict
    module: str | None = None
    value: float | None = None
    what: str = Field(description="what the value is, with its unit")
    said: str
    remedy: str | None = Field(default=None, description="null where nothing is to be done")
    by_depth: list[AtDepth] = Field(default=[], description="the same value of all modules, on the worst entry alone")


class Checkup(Strict):
    """The result of `fp8q doctor RUN`: all checks, the worst first."""

    schema_: FirstSchema = 1
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
    check = criterion.check
    what = criterion.what
    limit = criterion.limit
    worst_first = sorted(values, key=lambda pair: -pair[1] if not isnan(pair[1]) else float("-inf"))
    beyond = [pair for pair in worst_first if verdict_of(pair[1], limit) != "good"]
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
    """Return the value as JSON has it: null unless it is finite."""
    return value if isfinite(value) else None


def worst_first(checks: Sequence[Check]) -> list[Check]:
    """Sort checks, the worst verdict first and otherwise in the order they were made."""
    return sorted(checks, key=lambda check: ORDER.index(check.verdict))


def refuse_bad(checkup: Checkup) -> None:
    """Raise GateError, naming the first, where a check is bad."""
    bad = [check for check in checkup.checks if check.verdict == "bad"]
    if bad:
        names = sorted({check.check for check in bad})
        first = bad[0]
        raise GateError(
            "",
            f"{len(names)} of {len({check.check for check in checkup.checks})} checks are bad ({', '.join(names)}); "
            f"{first.module or 'the model'}: {first.what} {first.said}",
            f"{first.remedy}",
        )


def shown_entries(checks: Sequence[Check]) -> list[Check]:
    """The entries that are shown, the worst first: of one check and verdict the first few."""
    counts: dict[tuple[str, str], int] = {}
    shown = []
    for check in checks:
        key = (check.check, check.verdict)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= LISTED:
            shown.append(check)
    return shown


def check_table(checks: Sequence[Check], ran: str) -> Table[Check]:
    """Tabulate every check, the worst last; the title has the measured text, `ran`."""
    columns = (
        text_column("verdict"),
        text_column("check"),
        text_column("module"),
        text_column("found", "said"),
    )
    left = len(checks) - len(shown_entries(checks))
    title = f"Checklist ({ran}{f'; {left} more entries with --json' if left else ''})"
    return Table(title, shown_entries(checks)[::-1], columns, "Nothing to check.")


def remedies(checks: Sequence[Check]) -> list[str]:
    """List what helps, a line each, the worst last."""
    lines: dict[str, None] = {}
    for check in shown_entries(checks):
        if check.remedy:
            lines.setdefault(f"{check.verdict}: {check.module or check.check}: {check.remedy}")
    return [*lines][::-1]


@dataclass(frozen=True)
class Remedies:
    """Make the commands of remedies.

    `run`: the run's directory. `chosen`: its options of scales. `cached`: the attention modules whose cache is codes.

    An option with several patterns replaces the run's, so the run's patterns are repeated.
    """

    run: str
    model: str
    data: str
    samples: int
    chosen: ScaleOptions = field(default_factory=ScaleOptions)
    cached: tuple[str, ...] = ()

    def scales(self, *words: str) -> str:
        """`fp8q scales RUN` with those options."""
        return self._command("scales", quote(self.run), *words)

    def two(self, pattern: str) -> str:
        """Take two terms for modules that match `pattern`, and for those that have them already."""
        if self.chosen.form:
            return self.scales(*_repeated("--form", (*self.chosen.form, f"{pattern}=two")))
        return self.scales(*_repeated("--two-terms", (*self.chosen.two_terms, pattern)))

    def in_bf16(self, tensor: str) -> str:
        """Keep a tensor in BF16: a module by --skip; keys and values with their layer by --kv-skip, or by the option of
        the cache where no other layer is in codes.
        """
        module, _, part = tensor.rpartition(".")
        if part in ("k", "v"):
            if module in self.cached and len(self.cached) > 1:
                return self.scales(*_repeated("--kv-skip", (*self.chosen.kv_skip, module)))
            return self.scales("--kv-cache", "v" if part == "k" else "off")
        return self.scales(*_repeated("--skip", (*self.chosen.skip, tensor)))

    def better(self, tensor: str, scale: TensorScale | None = None) -> str:
        """The next better form of a tensor with this `scale` (None: of one term): two terms for one, BF16 for two.

        A cache has no two terms.
        """
        exact = scale is not None and scale.grid.by_value
        if exact or tensor.endswith((".k", ".v")):
            return self.in_bf16(tensor)
        return self.two(tensor)

    def again(self) -> str:
        """Choose all scales again by the same options, where the files differ from that choice."""
        return f"`rm {quote(f'{self.run}/scales.json')}`, then {self.scales()}"

    def more_text(self) -> str:
        """Calibrate on twice the windows."""
        samples = str(2 * self.samples)
        return self._command(
            "calibrate", quote(self.model), "--data", quote(self.data), "--out", "OTHER", "--samples", samples
        )

    def located(self) -> str:
        """Let `fp8q sensitivity` find the tensors that lose most, and what is worth changing."""
        return self._command("sensitivity", quote(self.run))

    def bf16_graph(self) -> str:
        """Export the graphs in BF16 instead of FP16."""
        return self._command("export", quote(self.run), "--dtype", "bf16")

    def restored(self) -> str:
        """Name the remedy for a source that is gone."""
        return f"put the model back at {self.model}, or calibrate again"

    @staticmethod
    def _command(*words: str) -> str:
        return f"`fp8q {' '.join(words)}`"


def _repeated(option: str, patterns: tuple[str, ...]) -> list[str]:
    return [word for pattern in dict.fromkeys(patterns) for word in (option, quote(pattern))]
