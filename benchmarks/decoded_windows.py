"""How many steps and how much processor time windows of a large vocabulary take, decoded as served.

    python benchmarks/decoded_windows.py [--vocabulary 151936] [--context 512] [--prompt 256] [--windows 8]
        [--together N]

Makes a Llama of random weights whose output head is most of it, as in models of half a billion parameters, and compares
it in BF16 and FP32 on random tokens (`compare_in_turn`): the windows together, and `--together` windows at a time.
Counts the calls of the model and their largest logits, and measures the processor time and the peak of anonymous memory
above what loading took. Equal windows, so equal losses but for BF16's rounding: `difference_nats` is the largest
difference of a token's loss in FP32. Prints one JSON line; exit status 1 where that is above 1e-4.
"""

import argparse
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result import arguments, described, publish
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from fp8q.calibrate.text.evaluation import Evaluation, cut
from fp8q.core.reporter import SILENT
from fp8q.validate.accuracy import compare
from fp8q.validate.accuracy.as_served import served, torch_start

SAME = 1e-4


@dataclass
class Calls:
    """The calls of the models, and the bytes of the largest logits."""

    count: int = 0
    largest: int = 0


def model_of(vocabulary: int, dtype: torch.dtype, calls: Calls) -> PreTrainedModel:
    """Return a model of random weights in `dtype`, whose calls are counted."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.05,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval()
    model.to(dtype)

    def count(module: Any, inputs: Any, output: Any) -> None:
        calls.count += 1
        calls.largest = max(calls.largest, output.logits.nbytes)

    model.register_forward_hook(count)
    counted: PreTrainedModel = model
    return counted


def measured(evaluation: Evaluation, vocabulary: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Compare the model in BF16 and FP32; return what that took, and the losses by runtime."""
    calls = Calls()
    prompt = evaluation.protocol.prompt
    assert prompt is not None
    openers = {
        name: lambda dtype=dtype: served(torch_start(model_of(vocabulary, dtype, calls)), prompt)
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    }
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        outcome = compare.compare_in_turn(compare.Turns(evaluation, openers, vocabulary, Path(folder) / "work"), SILENT)
    figures = {
        "calls": calls.count,
        "largest_logits_bytes": calls.largest,
        "processor_seconds": round(time.process_time() - begun, 2),
        "peak_resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    return figures, outcome.nll


def main() -> int:
    """Measure, print, and say by the exit status whether the losses are the same."""
    parser = arguments(__doc__)
    for option, default in (("--vocabulary", 151_936), ("--context", 512), ("--prompt", 256), ("--windows", 8)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--together", type=int, default=1, metavar="N", help="compare with N windows at a time")
    asked: argparse.Namespace = parser.parse_args()
    head = described("decoded_windows")
    ids = np.random.default_rng(0).integers(0, asked.vocabulary, asked.windows * asked.context)
    evaluation = cut(ids, "random tokens", asked.context, asked.context, prompt=asked.prompt)
    results: dict[str, Any] = {}
    losses = []
    # fewest windows first: the peak of memory is the process's
    for size in (asked.together, compare.windows_at_once(asked.context, asked.prompt, asked.vocabulary)):
        compare.windows_at_once = lambda *_, size=size: size
        results[str(min(size, asked.windows))], nll = measured(evaluation, asked.vocabulary)
        losses.append(nll["fp32"][evaluation.scored])
    difference = float(np.abs(losses[0] - losses[-1]).max())
    options = {name: getattr(asked, name) for name in ("vocabulary", "context", "prompt", "windows")}
    result = {**options, "by_windows_together": results, "difference_nats": difference, "passed": difference < SAME}
    return publish(head, result, asked.save)


if __name__ == "__main__":
    sys.exit(main())
