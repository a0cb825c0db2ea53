"""The figures of the rows of `input_mixes.py` and `weight_levers.py`, each beside BF16's own, and beside another row's
by the same windows.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from real_models import Tokens, asked_of, ratio, summary
from real_rows import BF16, bf16_model
from result import described, publish
from rounded_runs import CALIBRATION_CONTEXT, RoundedRuns, rounded_runs, runs_argument
from torch import nn

from fp8q.stages.shared.sources import source_of


class RowFigures:
    """What is found of each token of a model's rows, and their figures."""

    def __init__(self, runs: RoundedRuns, base: str, called: str):
        """Begin with BF16; `base`: the first row, by whose KL that of all is divided; `called`: so in figures."""
        self.runs = runs
        self.base = base
        self.called = called
        self.source = source_of(runs.run)
        self.tokens: dict[str, Tokens] = {BF16: runs.tokens(BF16, lambda: bf16_model(self.source))}
        self.rows: dict[str, dict[str, Any]] = {BF16: summary(self.tokens[BF16])}

    def judge(self, row: str, model: Callable[[], nn.Module], stored: str | None = None) -> dict[str, Any]:
        """The figures of `row`, to be added to; `stored`: under which name its tokens lie, where that is another."""
        self.tokens[row] = self.runs.tokens(stored or row, model)
        figures: dict[str, Any] = summary(self.tokens[row])
        figures["kl_over_bf16"] = round(float(self.tokens[row].kl.mean() / self.tokens[BF16].kl.mean()), 2)
        over, interval = ratio(self.tokens[row], self.tokens[self.base])
        figures |= {f"kl_over_{self.called}": over, "ratio_interval": interval}
        self.rows[row] = figures
        return figures

    def show(self, row: str) -> None:
        """Print the figures of `row`."""
        print(f"{self.runs.name}: {row}: {self.rows[row]}", file=sys.stderr, flush=True)

    def document(self) -> dict[str, Any]:
        """All rows, and the sizes of the windows."""
        contexts = {"context": self.runs.context, "calibration_context": CALIBRATION_CONTEXT}
        return {**contexts, "evaluation_tokens": self.runs.windows * self.runs.context, "rows": self.rows}


def publish_rows(benchmark: str, parser: argparse.ArgumentParser, measure: Callable[[RoundedRuns], RowFigures]) -> int:
    """Measure the rows of every model that is asked for, and print them; `parser`: has the options of the benchmark."""
    asked = asked_of(runs_argument(parser))
    head = described(benchmark)
    results = {}
    for name in asked.models:
        with rounded_runs(name, asked) as runs:
            results[name] = measure(runs).document()
    return publish(head, {"samples": asked.samples, "results": results}, asked.save)
