"""Measure the loss of mixes: KL from the float model and the rise of the text's NLL, all in FP32 arithmetic.

A model that is right about its text has E[log p - log q] = KL over the text's own tokens, since they are drawn from p:
perplexity rises by exp(KL) - 1, but for chance. How a text differs from this is one ratio, rise over KL. It is taken
for 1 unless the windows contradict it: chance alone moves the mean rise by sqrt(2 KL / tokens), which is a fifth of a
KL of 0.003 on 16,000 tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
import torch

from ...calibrate.measure.scoring import divergences, log_softmax, losses
from ...core.reporter import Reporter

Runner = Callable[[torch.Tensor], torch.Tensor]
#: The standard errors of a normal deviate that hold 95 %.
WITHIN = 1.96


@dataclass
class Measured:
    """The scored tokens of each window, and the sums over them of KL(float || mix) and of the rise of NLL, in nats."""

    tokens: list[int] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    rise: list[float] = field(default_factory=list)

    @property
    def kl_nats(self) -> float:
        """Mean for each token."""
        return sum(self.kl) / sum(self.tokens)

    @property
    def rise_nats(self) -> float:
        """Mean for each token: perplexity rises by its exponential, less 1."""
        return sum(self.rise) / sum(self.tokens)

    def rise_within(self, expected: float, windows: int | None = None) -> float:
        """Half of the 95 % interval of the mean rise over as many `windows`, by default these: by how much windows
        depart from the rise `expected` for each token.
        """
        apart = np.array(self.rise) - expected * np.array(self.tokens)
        deviation = float(apart.std(ddof=1)) if len(apart) > 1 else float("nan")
        return WITHIN * deviation / sqrt(windows or len(apart)) / float(np.mean(self.tokens))


def ratio(measured: Measured) -> tuple[float, float]:
    """Rise over KL on these windows, and half of its 95 % interval."""
    kl = np.array(measured.kl)
    rise = np.array(measured.rise)
    rise_over_kl = float(rise.sum() / kl.sum())
    error = (
        float((rise - rise_over_kl * kl).std(ddof=1)) * sqrt(len(kl)) / float(kl.sum()) if len(kl) > 1 else float("inf")
    )
    return rise_over_kl, WITHIN * error


def believed(rise_over_kl: float, within: float) -> float:
    """Return 1 where it lies within the interval of `rise_over_kl`, else `rise_over_kl`."""
    if abs(rise_over_kl - 1) <= within:
        return 1.0
    return rise_over_kl


def measure_mixes(
    exact: Runner, mixes: Mapping[str, Runner], batches: Sequence[tuple[torch.Tensor, torch.Tensor]], report: Reporter
) -> dict[str, Measured]:
    """Measure the loss of each of `mixes` on `batches` of (ids int64 [windows, seq_len], which of them are scored, bool
    of the same shape) against the `exact` model.
    """
    by_mix = {name: Measured() for name in mixes}
    passes = len(batches) * (len(mixes) + 1)
    with report.track(f"Measuring {', '.join(mixes)}", passes, "passes") as advance, torch.inference_mode():
        for ids, scored in batches:
            log_p = log_softmax(exact(ids)[:, :-1])
            advance(1)
            for name, runner in mixes.items():
                _add(by_mix[name], log_p, log_softmax(runner(ids)[:, :-1]), ids, scored[:, 1:])
                advance(1)
    return by_mix


def _add(measured: Measured, log_p: torch.Tensor, log_q: torch.Tensor, ids: torch.Tensor, scored: torch.Tensor) -> None:
    kl = divergences(log_p, log_q) * scored
    rise = (losses(log_q, ids[:, 1:]) - losses(log_p, ids[:, 1:])) * scored
    measured.tokens += scored.sum(1).tolist()
    measured.kl += kl.sum(1, dtype=torch.float64).tolist()
    measured.rise += rise.sum(1, dtype=torch.float64).tolist()
