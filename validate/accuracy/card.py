"""Write what `fp8q validate` measured as the table of a model card: perplexity, KL and flips with their intervals, the
protocol, and the command that repeats it on the run.

Of the checkpoint alone it cannot be repeated: stock loaders compute one code where two were validated, and read whole
windows where tokens were decoded behind prompts.
"""

from math import isfinite

import numpy as np
import numpy.typing as npt

from ...calibrate.text.evaluation import most_tokens
from ...core.columns import increase, nats
from ...options import LEAST_WINDOWS, VerdictLimits
from .bootstrap import Bootstrap, increase_interval
from .decision import interval_text
from .document import Accuracy, ByToken, RuntimeAccuracy
from .limits import BF16
from .share_interval import share_interval

#: The runtime that `fp8q validate` adds to `bf16` by itself.
ORIGINAL = "original"


def card_table(accuracy: Accuracy, nll: ByToken, kl: ByToken) -> str | None:
    """The table of the runtime that decided, in Markdown; None where no runtime was compared with BF16.

    `nll`, `kl`: runtime -> nats, float32 [windows, context], NaN where not scored.
    """
    name = accuracy.verdict.runtime if accuracy.verdict else None
    row = accuracy.runtimes.get(name or "")
    bf16 = accuracy.runtimes.get(BF16)
    if name is None or row is None or bf16 is None or not isfinite(row.perplexity):
        return None
    lines = [f"| FP8 ({name}) against BF16 | |", "|---|---|", f"| perplexity | {_perplexity(name, row, bf16, nll)} |"]
    if row.kl_mean_nats is not None:
        lines.append(f"| KL(BF16 ‖ FP8), nats a token | {_divergence(row, kl.get(name))} |")
    if row.top1_agreement is not None:
        flips = 1 - row.top1_agreement
        tokens = accuracy.protocol.tokens
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
        if len(np.unique(windows)) >= LEAST_WINDOWS:
            interval = Bootstrap(windows).interval(values[np.isfinite(values)].astype(np.float64))
            text += f" ({nats(interval.low)} to {nats(interval.high)}, 95 % over windows)"
    return text + ("" if row.kl_p99_nats is None else f", 99th percentile {nats(row.kl_p99_nats)}")


def repeating_command(accuracy: Accuracy, windows: int, asked: VerdictLimits, own_text: bool) -> str:
    """The command that repeats the evaluation of so many `windows` on the run, with the limits that were `asked` for.

    `own_text`: the tokens are those that the run holds for evaluation; else a text was given.
    """
    protocol = accuracy.protocol
    # what another host added is held against these; `original` comes with bf16 by itself
    runtimes = [
        name for name, row in accuracy.runtimes.items() if not row.sampled and row.stored is None and name != ORIGINAL
    ]
    words = ["fp8q validate RUN", *([] if own_text else ["--data TEXT"]), f"--runtimes {','.join(runtimes)}"]
    words.append(f"--context {protocol.context}")
    if protocol.stride != protocol.context - len(protocol.prefix):
        words.append(f"--stride {protocol.stride}")
    if protocol.prompt is not None:
        words.append(f"--as-served {protocol.prompt}")
    words.append(f"--max-tokens {most_tokens(protocol, windows)}")
    if protocol.overlap and not own_text:
        words.append("--allow-overlap")
    return " ".join([*words, *_limit_words(asked)])


def _limit_words(asked: VerdictLimits) -> list[str]:
    """The limits that were asked for, as options."""
    rise = asked.max_ppl_increase
    kl = asked.max_kl
    flips = asked.max_flips
    words = [] if rise is None else [f"--max-ppl-increase {100 * rise:.10g}%"]
    words += [] if kl is None else [f"--max-kl {kl:.10g}"]
    return words + ([] if flips is None else [f"--max-flips {100 * flips:.10g}%"])
