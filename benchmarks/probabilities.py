"""What attention in FP8 loses of its probabilities, with one code for each and with two, and below 2^-14.

    python benchmarks/probabilities.py [MODEL=CALIBRATION,EVALUATION …] [--windows 12] [--context 512]

Two codes under the scale 2^-8 hold a probability to eight significant bits down to 2^-14, and to within 2^-22 below.
The FP32 model, nothing else of it quantized, at the longest context that it was trained for (or `--context`): the share
of the probabilities that are below 2^-14, and of their sum; the error of attention's output, root mean square over that
of the output, all layers; mean KL(FP32 || model). Of one term, of two, and of two where only what is below 2^-14 is
rounded. Prints one JSON line.
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loaded_runtimes import compare_runtimes
from models import ModelTexts, main_of
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from fp8q.calibrate.text.evaluation import cut
from fp8q.core.reporter import SILENT
from fp8q.quantize.codes.encoding import encode, encode_two
from fp8q.quantize.codes.formats import TWO_TERMS
from fp8q.quantize.scales.decisions import PROBABILITY_SCALES
from fp8q.validate.accuracy.compare import BASELINE, Forward

#: The least probability that two terms hold to eight significant bits.
EXACT_FROM = 2.0**-14
Rounding = Callable[[torch.Tensor], torch.Tensor]


def one_term(p: torch.Tensor) -> torch.Tensor:
    """`p` as one code each stands for it."""
    scale = torch.tensor(PROBABILITY_SCALES[1])
    return encode(p, scale).float() * scale


def two_terms(p: torch.Tensor) -> torch.Tensor:
    """`p` as two codes each stand for it."""
    scale = torch.tensor(PROBABILITY_SCALES[2])
    first, second = (code.float() for code in encode_two(p, scale))
    return (first + second / TWO_TERMS.divisor) * scale


def two_terms_below(p: torch.Tensor) -> torch.Tensor:
    """The same of what is below `EXACT_FROM`; the rest as it is."""
    return torch.where(p < EXACT_FROM, two_terms(p), p)


ROUNDINGS: dict[str, Rounding] = {
    "one term": one_term,
    "two terms": two_terms,
    "two terms, only below": two_terms_below,
}


class Attention:
    """Grouped-query attention in FP32 whose probabilities are rounded as `rounding` says; without one it counts."""

    def __init__(self) -> None:
        self.rounding: Rounding | None = None
        self.sums: dict[str, float] = defaultdict(float)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """As transformers calls it: [batch, heads, length, size]; `attention_mask` is added to the scores."""
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        p = (query @ key.transpose(-1, -2) * factor + attention_mask).softmax(-1)
        out = (p if self.rounding is None else self.rounding(p)) @ value
        if self.rounding is None:
            self.count(p, value, out, (attention_mask == 0).expand(p.shape))
        return out.transpose(1, 2).contiguous(), None

    def count(self, p: torch.Tensor, value: torch.Tensor, out: torch.Tensor, seen: torch.Tensor) -> None:
        """Add up how many of the probabilities that a token has of those it sees are small, and what rounding makes."""
        small = seen & (p < EXACT_FROM)
        self.sums["seen"] += int(seen.sum())
        self.sums["small"] += int(small.sum())
        self.sums["mass"] += float(p.double().sum())
        self.sums["small mass"] += float(p[small].double().sum())
        self.sums["out"] += float(out.double().square().sum())
        for name, rounding in ROUNDINGS.items():
            self.sums[name] += float((rounding(p) @ value - out).double().square().sum())


def measure(texts: ModelTexts, windows: int, context: int) -> dict[str, Any]:
    """The shares, and for each rounding the error of the output and KL × 10⁶."""
    attention = Attention()
    AttentionInterface.register("probabilities", attention)
    AttentionMaskInterface.register("probabilities", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model = AutoModelForCausalLM.from_pretrained(texts.directory, dtype=torch.float32).eval()
    model.set_attn_implementation("probabilities")
    context = min(context, model.config.max_position_embeddings)
    text = Path(texts.eval_data).read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(texts.directory)(text, return_tensors="np")["input_ids"].ravel()
    evaluation = cut(ids[: windows * context].astype(np.int64), Path(texts.eval_data).name, context, context)

    def rounded(rounding: Rounding | None) -> Forward:
        def forward(tokens: np.ndarray) -> torch.Tensor:
            attention.rounding = rounding
            logits: torch.Tensor = model(input_ids=torch.from_numpy(tokens), use_cache=False).logits
            return logits

        return forward

    forwards = {BASELINE: rounded(None)} | {name: rounded(each) for name, each in ROUNDINGS.items()}
    accuracy, _ = compare_runtimes(evaluation, forwards, model.config.vocab_size, SILENT)
    sums, runtimes = attention.sums, accuracy.runtimes
    return {
        "context": context,
        "share_below": sums["small"] / sums["seen"],
        "mass_below": sums["small mass"] / sums["mass"],
        "output_error": {name: (sums[name] / sums["out"]) ** 0.5 for name in ROUNDINGS},
        "kl_mean_nats_times_1e6": {name: 1e6 * (runtimes[name].kl_mean_nats or 0.0) for name in ROUNDINGS},
    }


if __name__ == "__main__":
    sys.exit(
        main_of("probabilities", __doc__, measure, "demo", "llama", "qwen2", "gemma", "opt", windows=12, context=512)
    )
