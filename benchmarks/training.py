"""Training in FP8 as a log shows it: gradients that die and gradients that live, an outlier, a learning rate too high,
and what watching costs.

    python benchmarks/training.py [--steps 300] [--rounds 12]

A Llama of three layers and width 64 with random weights learns the bytes of the demo's text, 16 windows of 64 a step,
with Adam: once in FP32, and in each of `WAYS` with products that lose as in FP8 (`emulation`):
inputs and weights in E4M3, gradients in E5M2 or in E4M3, scaled by the amax of 16 steps before or not at all. Every
tenth step is recorded. Printed: the mean loss of the last 20 steps, which the FP32 run bounds; the log's verdict, and
the worst entry of each check that is not good. Cost: processor time of ten steps of which one is recorded over that of
ten unwatched ones, alternately, the median of `--rounds`, for two widths; limit: 1.1. Prints one JSON line; exit status
1 when the limit is missed, or a verdict is not that of `WAYS`.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emulation import Emulation, emulate
from result import ROOT, arguments, described, publish
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fp8q.api import WatchOptions, inspect_training, watch
from fp8q.options import GradientFormat, Scaling
from fp8q.quantize.training.watch import watched_modules

TEXT = ROOT / "examples" / "demo" / "calibration.txt"
WINDOWS, LENGTH, EVERY = 16, 64, 10
LAST = 20
COST_LIMIT = 1.1
#: The layer whose input has an outlier, and how many times the largest amax before it.
OUTLIER_LAYER, TIMES = "model.layers.1.mlp.down_proj", 10.0


@dataclass(frozen=True)
class Way:
    """A training: its gradients (None: all in FP32), where scales come from, its learning rate, the share of the steps
    after which an outlier comes, and the verdict that its log is to have.
    """

    gradients: GradientFormat | None = "e5m2"
    scaling: Scaling = "delayed"
    learning_rate: float = 1e-3
    outlier_after: float | None = None
    checks: tuple[str, ...] = ()


#: Name -> the training, and the checks that are to be bad in its log.
WAYS = {
    "FP32": Way(None),
    "gradients in E5M2, scaled": Way(),
    "gradients in E4M3, scaled": Way("e4m3"),
    "gradients in E5M2, not scaled": Way(scaling="none"),
    "gradients in E4M3, not scaled": Way("e4m3", "none", checks=("underflow",)),
    "an outlier of ten times the history": Way(outlier_after=2 / 3, checks=("training_jumps",)),
    "a learning rate of 0.3": Way(learning_rate=0.3, checks=("underflow",)),
}


def new_model(width: int, layers: int = 3) -> LlamaForCausalLM:
    """A Llama of bytes with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches(seed: int = 0) -> Iterator[torch.Tensor]:
    """Windows of the text, int64 [WINDOWS, LENGTH], without end."""
    text, draw = np.frombuffer(TEXT.read_bytes(), np.uint8).astype(np.int64), np.random.default_rng(seed)
    while True:
        starts = draw.integers(0, len(text) - LENGTH, WINDOWS)
        yield torch.from_numpy(np.stack([text[start : start + LENGTH] for start in starts]))


@contextmanager
def outlier(model: nn.Module, at: int) -> Iterator[list[int]]:
    """Let the first token of step `at` have an outlier in the input of `OUTLIER_LAYER`; the list has the step."""
    largest, step = [0.0], [0]

    def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        (x,) = inputs
        if step[0] != at:
            largest[0] = max(largest[0], float(x.detach().abs().amax()))
            return (x,)
        changed = x.clone()
        changed[0, 0, 0] = TIMES * largest[0]
        return (changed,)

    with ExitStack() as stack:
        stack.callback(model.get_submodule(OUTLIER_LAYER).register_forward_pre_hook(hook).remove)
        yield step


def trained(way: Way, steps: int, folder: Path) -> dict[str, Any]:
    """Train in one way; the loss at the end, and what the log says."""
    model = new_model(64)
    names = list(watched_modules(model))
    if way.gradients:
        fixed = 1.0 if way.scaling == "none" else None
        emulate(model, names, Emulation(way.gradients, fixed_gradient_scale=fixed))
    modules = {name: model.get_submodule(name) for name in names}
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=way.learning_rate), []
    at = -1 if way.outlier_after is None else EVERY * round(way.outlier_after * steps / EVERY)
    with (
        outlier(model, at) as step,
        watch(model, folder, WatchOptions(every=EVERY, scaling=way.scaling), modules=modules) as log,
    ):
        for step[0], ids in zip(range(steps), batches(), strict=False):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            log.step(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    checkup = inspect_training(folder, way.gradients or "e5m2").checkup
    worst = {each.check: each for each in reversed(checkup.checks) if each.verdict in ("bad", "watch")}
    return {
        "loss": round(statistics.mean(losses[-LAST:]), 4),
        "verdict": checkup.verdict,
        "checks": {
            name: {"verdict": each.verdict, "tensor": each.module, "found": each.said} for name, each in worst.items()
        },
        "expected_bad": list(way.checks),
        "as_expected": {name for name, each in worst.items() if each.verdict == "bad"} >= {*way.checks},
    }


def cost(width: int, rounds: int) -> dict[str, float]:
    """Processor time of `EVERY` steps of which one is recorded, over that of as many that are not watched."""
    model, text = new_model(width), batches()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def ten(log: Any) -> float:
        begun = time.process_time()
        for _, ids in zip(range(EVERY), text, strict=False):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            if log is not None:
                log.step(loss)
            optimizer.step()
            optimizer.zero_grad()
        return time.process_time() - begun

    ratios, plain = [], []
    ten(None)
    for number in range(rounds):
        unwatched = ten(None)
        with tempfile.TemporaryDirectory() as folder, watch(model, Path(folder), WatchOptions(every=EVERY)) as log:
            watched = ten(log)
        if number:  # the first of both warms up
            ratios.append(watched / unwatched)
            plain.append(unwatched / EVERY)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "parameters": parameters,
        "step_s": round(statistics.median(plain), 4),
        "ratio": round(statistics.median(ratios), 4),
        "least": round(min(ratios), 4),
        "most": round(max(ratios), 4),
    }


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    head, results = described("training"), {}
    torch.set_num_threads(1)
    for name, way in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            results[name] = trained(way, options.steps, Path(folder))
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    costs = {str(width): cost(width, options.rounds) for width in (128, 512)}
    print(costs, file=sys.stderr, flush=True)
    missed = [f"{name}: {way.checks} is not bad" for name, way in WAYS.items() if not results[name]["as_expected"]]
    missed += [
        f"width {width}: {each['ratio']:.3f} of an unwatched step (at most {COST_LIMIT:g})"
        for width, each in costs.items() if each["ratio"] > COST_LIMIT
    ]  # fmt: skip
    figures = {"steps": options.steps, "every": EVERY, "results": results, "cost": costs, "cost_limit": COST_LIMIT}
    return publish(head, {**figures, "missed": missed, "passed": not missed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
