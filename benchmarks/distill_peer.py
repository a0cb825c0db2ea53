"""NVIDIA ModelOpt's quantization-aware distillation and `fp8q distill`, from the same text.

    python benchmarks/distill_peer.py [MODEL=CALIBRATION,EVALUATION …] [--windows 20] [--context 512] [--learned 160]
        [--small demo …]

Each learns one pass over the same windows of text of the domain (`distill.py`), of which one in ten is held out.
ModelOpt begins at its own nearest rounding, E4M3 with a scale a channel of weights and a static scale of each input;
its quantizers pass gradients straight through, its `LogitsDistillationLoss` is the forward KL, and AdamW moves all
parameters with warm-up and a cosine, at each of `RATES`: the rate with the least held-out KL counts. fp8q begins at
`sequential` rounding, with inputs in one code and in two. So the two begin at different models, and the figures do not
say which of them learns better: each is to be read as before and after.

KL(FP32 || FP8) on the evaluation text, which none of them learned from, in nats × 10⁶. Limit: after is not above before
by more than 2 %. Prints one JSON line; exit status 1 when that is not met.
"""

import argparse
import copy
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accuracy import kl, logits_of
from distill import FORMS, LIMIT_RATIO, calibrated, divergences, domain_text, evaluations
from models import ModelTexts, model_arguments, small_models
from result import described, publish
from torch import nn
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from fp8q import api
from fp8q.calibrate.text.evaluation import Evaluation
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import DistillOptions
from fp8q.quantize.learning.divergence import forward_kl
from fp8q.stages.corpus import load_tokens
from fp8q.stages.distill import learning_text
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared import sources
from fp8q.stages.shared.texts import LearningText

#: AdamW's peak learning rates that are tried, and the share of steps in which it rises.
RATES, WARM_UP = (1e-6, 1e-5, 1e-4), 0.05
BATCH = 4
FP8: Mapping[str, Any] = {"num_bits": (4, 3)}
QUANTIZERS = [
    {"quantizer_name": "*", "enable": False},
    {"quantizer_name": "*weight_quantizer", "parent_class": "nn.Linear", "cfg": {**FP8, "axis": 0}},
    {"quantizer_name": "*input_quantizer", "parent_class": "nn.Linear", "cfg": {**FP8, "axis": None}},
    {"quantizer_name": "*lm_head*", "enable": False},
]


def rounded(directory: str, windows: torch.Tensor) -> nn.Module:
    """ModelOpt's FP8 model in FP32 arithmetic, its weights rounded to nearest, calibrated on `windows`."""
    import modelopt.torch.quantization as mtq

    model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def calibrated(model: nn.Module) -> None:
        for ids in windows.split(8):
            model(input_ids=ids, use_cache=False)

    with torch.no_grad():
        mtq.quantize(model, {"quant_cfg": QUANTIZERS, "algorithm": "max"}, calibrated)
    return model


def held_out_kl(teacher: nn.Module, student: nn.Module, windows: torch.Tensor) -> float:
    """KL(teacher || student) on `windows`, nats × 10⁶."""
    with torch.no_grad():
        each = [
            float(forward_kl(teacher(input_ids=ids).logits, student(input_ids=ids).logits)) for ids in windows.split(1)
        ]
    return round(1e6 * sum(each) / len(each), 1)


def learn(teacher: nn.Module, student: nn.Module, windows: torch.Tensor, rate: float) -> None:
    """One pass of ModelOpt's distillation over `windows` in random order, in place."""
    from modelopt.torch.distill import LogitsDistillationLoss

    steps = math.ceil(len(windows) / BATCH)
    divergence = LogitsDistillationLoss(temperature=1.0, reduction="none")
    optimizer = torch.optim.AdamW(student.parameters(), lr=rate, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(WARM_UP * steps), steps)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    for ids in windows[order].split(BATCH):
        with torch.no_grad():
            wanted = teacher(input_ids=ids, use_cache=False).logits
        divergence(student(input_ids=ids, use_cache=False).logits, wanted).mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def peer(directory: str, run: Run, text: LearningText, evaluation: Evaluation) -> dict[str, Any]:
    """KL of ModelOpt's model before and after learning, at the rate whose held-out KL is the least."""
    teacher = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().requires_grad_(False)
    start = rounded(directory, torch.from_numpy(load_tokens(run, run.calibration)))
    train, held_out = torch.from_numpy(text.windows), torch.from_numpy(text.held_out)
    size, begun = teacher.config.vocab_size, time.monotonic()
    models, scored = {0.0: start}, {0.0: held_out_kl(teacher, start, held_out)}
    for rate in RATES:
        models[rate] = copy.deepcopy(start)
        learn(teacher, models[rate], train, rate)
        scored[rate] = held_out_kl(teacher, models[rate], held_out)
        print("ModelOpt", rate, scored, file=sys.stderr, flush=True)
    best = min(RATES, key=lambda rate: scored[rate])
    learned = {"before": logits_of(start), "after": logits_of(models[best])}
    return {
        **kl(evaluation, logits_of(teacher), learned, size),
        "held_out": {str(rate): each for rate, each in scored.items()},
        "rate": best,
        "tokens": text.windows.size,
        "seconds": round((time.monotonic() - begun) / len(RATES)),
    }


def measure(model: ModelTexts, asked: argparse.Namespace) -> dict[str, Any]:
    """KL before and after learning: fp8q's by form, and ModelOpt's."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), dict[str, Any]()
        texts, data = {"own": evaluations(model, asked)["own"]}, domain_text(model, folder)
        options = DistillOptions(samples=asked.learned, epochs=1.0, batch_size=BATCH)
        for form in FORMS:
            run = calibrated(model, form, asked, folder)
            before, begun = divergences(run, texts)["own"], time.monotonic()
            learned = api.distill(run.root, data, options, SILENT)
            seconds = round(time.monotonic() - begun)
            after = divergences(run, texts)["own"]
            found[f"fp8q, {form}"] = {
                "before": before, "after": after, "tokens": learned.tokens, "seconds": seconds,
                "held_out": [(moment.step, round(1e6 * moment.kl, 1)) for moment in learned.moments],
            }  # fmt: skip
            print(form, found, file=sys.stderr, flush=True)
        text = learning_text(run, sources.source_of(run), data, options, Notes(SILENT))
        found["ModelOpt, one code"] = peer(model.directory, run, text, texts["own"])
    return found


def missed(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The limits that are not met."""
    return [
        f"{model}, {name}: {found['after']} from {found['before']}"
        for model, learners in results.items()
        for name, found in learners.items()
        if found["after"] > LIMIT_RATIO * found["before"]
    ]


def main() -> int:
    """Run, print, judge."""
    parser = model_arguments(__doc__, windows=20, context=512, learned=160)
    parser.add_argument("--small", nargs="+", default=["demo"], help="names of small models, where none is given")
    options = parser.parse_args()
    head = described("distill_peer")
    results = {model.name: measure(model, options) for model in options.models or small_models(*options.small)}
    over = missed(results)
    figures = {"windows": options.windows, "context": options.context, "results": results}
    return publish(head, {**figures, "missed": over, "passed": not over}, options.save)


if __name__ == "__main__":
    sys.exit(main())
