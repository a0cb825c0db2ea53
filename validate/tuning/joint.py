"""Measure the loss of mixes: KL from the float model and the rise of the text's NLL, all in FP32 arithmetic.

A model that is right about its text has E[log p - log q] = KL over the text's own tokens, since they are drawn from p:
perplexity rises by exp(KL) - 1, but for chance. How a text differs from this is one ratio, rise over KL. It is taken
for 1 unless the windows contradict it: chance alone moves the mean rise by sqrt(2 KL / tokens), which is a fifth of a
KL of 0.003 on 16,000 tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
import torch

from ...calibrate.measure.scoring import divergences, log_softmax, losses
from ...calibrate.text.evaluation import prompt_of
from ...core.reporter import Reporter
from ...quantize.reference.fp8_model import Reference

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


def measure_mix(
    exact: Runner, runner: Runner, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], report: Reporter, what: str
) -> Measured:
    """Measure the loss of a mix, by its `runner`, on `batches` of (ids int64 [windows, seq_len], which of them are
    scored, bool of the same shape) against the `exact` model; `what` names the mix to the user.
    """
    measured = Measured()
    with report.track(f"Measuring {what}", 2 * len(batches), "passes") as advance, torch.inference_mode():
        for ids, scored in batches:
            log_p = log_softmax(exact(ids)[:, :-1])
            advance(1)
            _add(measured, log_p, log_softmax(runner(ids)[:, :-1]), ids, scored[:, 1:])
            advance(1)
    return measured


def reference_runner(reference: Reference, as_served: bool = True) -> Runner:
    """Token ids int64 [windows, seq_len] to the logits of the FP8 `reference`, whose tokens behind the prompt stand for
    decoded ones; without `as_served` none do.
    """

    def run(ids: torch.Tensor) -> torch.Tensor:
        decoded = ids.shape[1] - prompt_of(ids.shape[1]) if as_served else 0
        with reference.answering(decoded):
            logits: torch.Tensor = reference.model(
                input_ids=ids, past_key_values=reference.new_cache(), use_cache=True
            ).logits
        return logits

    return run


def _add(measured: Measured, log_p: torch.Tensor, log_q: torch.Tensor, ids: torch.Tensor, scored: torch.Tensor) -> None:
    kl = divergences(log_p, log_q) * scored
    rise = (losses(log_q, ids[:, 1:]) - losses(log_p, ids[:, 1:])) * scored
    measured.tokens += scored.sum(1).tolist()
    measured.kl += kl.sum(1, dtype=torch.float64).tolist()
    measured.rise += rise.sum(1, dtype=torch.float64).tolist()
