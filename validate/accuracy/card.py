"""Write what `fp8q validate` measured as the table of a model card: perplexity, KL and flips with their intervals, the
protocol, and the command by which whoever has the checkpoint repeats it.
"""

from math import isfinite

import numpy as np
import numpy.typing as npt

from ...core.columns import increase, nats
from .bootstrap import Bootstrap, increase_interval
from .decision import interval_text
from .document import Accuracy, ByToken, RuntimeAccuracy
from .limits import BF16
from .share_interval import share_interval


def card_table(accuracy: Accuracy, nll: ByToken, kl: ByToken) -> str | None:
    """The table of the runtime that decided, in Markdown; None where no runtime was compared with BF16.

    `nll`, `kl`: runtime -> nats, float32 [windows, context], NaN where not scored.
    """
    name = accuracy.verdict.runtime if accuracy.verdict else None
    row, bf16 = accuracy.runtimes.get(name or ""), accuracy.runtimes.get(BF16)
    if name is None or row is None or bf16 is None or not isfinite(row.perplexity):
        return None
    lines = [f"| FP8 ({name}) against BF16 | |", "|---|---|", f"| perplexity | {_perplexity(name, row, bf16, nll)} |"]
    if row.kl_mean_nats is not None:
        lines.append(f"| KL(BF16 ‖ FP8), nats a token | {_divergence(row, kl.get(name))} |")
    if row.top1_agreement is not None:
        flips, tokens = 1 - row.top1_agreement, accuracy.protocol.tokens
        low, high = share_interval(round(flips * tokens), tokens)
        between = f"({100 * low:.2f} to {100 * high:.2f} %, 95 %)"
        lines.append(f"| flips: tokens of which another is the likeliest | {100 * flips:.2f} % {between} |")
    if bf16.kl_fp32_nats is not None:
        lines.append(f"| noise floor: KL(FP32 ‖ BF16) | {nats(bf16.kl_fp32_nats)} |")
    return "\n".join(lines)


def _perplexity(name: str, row: RuntimeAccuracy, bf16: RuntimeAccuracy, nll: ByToken) -> str:
    change = "" if row.perplexity_increase is None else f", {increase(row.perplexity_increase)}"
    if {BF16, name} <= nll.keys():
        low, high = increase_interval(nll[BF16], nll[name])
        change += f" ({interval_text((low, high))}, 95 %)" if low is not None and high is not None else ""
    return f"{bf16.perplexity:.4f} in BF16, {row.perplexity:.4f}{change}"


def _divergence(row: RuntimeAccuracy, values: npt.NDArray[np.float32] | None) -> str:
    assert row.kl_mean_nats is not None, "the caller looked"
    text = f"mean {nats(row.kl_mean_nats)}"
    if values is not None and np.isfinite(values).any():
        windows, _ = np.nonzero(np.isfinite(values))
        interval = Bootstrap(windows).interval(values[np.isfinite(values)].astype(np.float64))
        text += f" ({nats(interval.low)} to {nats(interval.high)}, 95 % over windows)"
    return text + ("" if row.kl_p99_nats is None else f", 99th percentile {nats(row.kl_p99_nats)}")


def repeating_command(accuracy: Accuracy) -> str:
    """The command that repeats the comparison for whoever has the original, the checkpoint and the text."""
    protocol = accuracy.protocol
    most = f" --max-tokens {protocol.tokens}" if protocol.of_tokens is not None else ""
    return f"fp8q compare ORIGINAL --model DIRECTORY --data TEXT --out OUT --context {protocol.context}{most}"
