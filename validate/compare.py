"""The same tokens through every runtime, in step, each compared with BF16.

KL(bf16 || other) = Σ p (log p - log q) over the vocabulary, in nats, for each scored token: it sees what perplexity,
which looks at one token's probability, averages away. Logits live for one batch of windows only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ..reporter import Reporter
from .accuracy import Accuracy, RuntimeAccuracy
from .perplexity import Evaluation

#: Logits of a batch of windows: int64 [windows, context] -> float tensor [windows, context, vocabulary].
Forward = Callable[[npt.NDArray[np.int64]], torch.Tensor]
BASELINE = "bf16"
#: What other sums of the same codes are held against, beside the baseline.
EXACT_SUMS = "reference-fp32"
#: Largest float32 logits of one runtime held at a time, in bytes.
LOGITS_BYTES = 128 << 20


@dataclass
class Tally:
    """What is kept of one runtime: per scored token, in evaluation order."""

    nll: list[npt.NDArray[np.float32]] = field(default_factory=list)
    kl: list[npt.NDArray[np.float32]] = field(default_factory=list)
    agrees: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    kl_sums: list[npt.NDArray[np.float32]] = field(default_factory=list)

    def summary(self, baseline: "Tally | None") -> RuntimeAccuracy:
        """Means and quantiles, compared with `baseline` where it is another."""
        nll = float(np.concatenate(self.nll).mean(dtype=np.float64))
        kl_sums = float(np.concatenate(self.kl_sums).mean(dtype=np.float64)) if self.kl_sums else None
        if baseline is None or baseline is self:
            return RuntimeAccuracy(perplexity=float(np.exp(nll)), nll_nats=nll, kl_sums_nats=kl_sums)
        base = float(np.concatenate(baseline.nll).mean(dtype=np.float64))
        kl = np.concatenate(self.kl)
        return RuntimeAccuracy(
            perplexity=float(np.exp(nll)),
            nll_nats=nll,
            perplexity_increase=float(np.expm1(nll - base)),
            kl_mean_nats=float(kl.mean(dtype=np.float64)),
            kl_p99_nats=float(np.quantile(kl, 0.99)),
            top1_agreement=float(np.concatenate(self.agrees).mean()),
            kl_sums_nats=kl_sums,
        )


def compare(
    evaluation: Evaluation, runtimes: Mapping[str, Forward], vocabulary: int, report: Reporter
) -> tuple[Accuracy, dict[str, npt.NDArray[np.float32]]]:
    """Run `evaluation` through `runtimes` (the one named "bf16" is what the others are compared with).

    Returns the summary and, for each runtime, the negative log-likelihood in nats, float32 [windows, context], NaN
    where not scored.
    """
    windows, context = evaluation.ids.shape
    batch = max(1, LOGITS_BYTES // (context * vocabulary * 4))
    tallies = {name: Tally() for name in runtimes}
    with (
        report.track(f"Evaluating {', '.join(runtimes)}", windows * len(runtimes), "windows") as advance,
        torch.inference_mode(),
    ):
        for start in range(0, windows, batch):
            part = slice(start, start + batch)
            ids, scored = evaluation.ids[part], evaluation.scored[part]
            base: torch.Tensor | None = None
            exact: torch.Tensor | None = None
            for name in sorted(runtimes, key=lambda name: (name != BASELINE, name != EXACT_SUMS)):
                log_q = torch.log_softmax(_scored_logits(runtimes[name](ids), scored), dim=-1)
                base = log_q if name == BASELINE else base
                _add(tallies[name], log_q, torch.from_numpy(ids[scored]), base)
                if exact is not None:
                    tallies[name].kl_sums.append(_divergence(exact, log_q))
                exact = log_q if name == EXACT_SUMS else exact
                advance(len(ids))
    accuracy = Accuracy(
        protocol=evaluation.protocol,
        runtimes={name: tally.summary(tallies.get(BASELINE)) for name, tally in tallies.items()},
    )
    nll = {}
    for name, tally in tallies.items():
        nll[name] = np.full((windows, context), np.nan, np.float32)
        nll[name][evaluation.scored] = np.concatenate(tally.nll)
    return accuracy, nll


def _scored_logits(logits: torch.Tensor, scored: npt.NDArray[np.bool_]) -> torch.Tensor:
    """The logits that predict the scored tokens, float32 [scored tokens, vocabulary]."""
    return logits[:, :-1][torch.from_numpy(scored[:, 1:]).to(logits.device)].float().cpu()


def _add(tally: Tally, log_q: torch.Tensor, targets: torch.Tensor, log_p: torch.Tensor | None) -> None:
    tally.nll.append(-log_q.gather(1, targets[:, None])[:, 0].numpy())
    if log_p is not None and log_p is not log_q:
        tally.kl.append(_divergence(log_p, log_q))
        tally.agrees.append((log_p.argmax(-1) == log_q.argmax(-1)).numpy())


def _divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> npt.NDArray[np.float32]:
    """KL(p || q) in nats for each row of two [scored tokens, vocabulary]."""
    divergence: npt.NDArray[np.float32] = (log_p.exp() * (log_p - log_q)).sum(-1).clamp_(min=0).numpy()
    return divergence
