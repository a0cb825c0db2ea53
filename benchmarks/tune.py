"""Whether `fp8q tune` reaches a third of the default's KL at no more weight bytes, and how well it predicts.

    python benchmarks/tune.py [MODEL=CALIBRATION,EVALUATION …] [--context 256] [--samples 96] [--windows 24]
        [--evaluation 40]

Each model is calibrated by the defaults (one term, nearest, a cache in BF16). The budget is three tenths of its KL on
the evaluation text, so that a third leaves room for what texts differ by; `--apply` makes the run anew. Held against
each other: what was predicted, what other calibration windows give, what the evaluation text gives of the mix, of the
checkpoint that was written, and of the default. Everything in FP32 arithmetic, of the tokens behind a prompt of half a
window. The ceiling beside it: a third of the
default's KL. Prints one JSON line; exit status 1 when a limit is missed.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from models import ModelTexts, cut_text, model_arguments, small_models
from result import described, publish

from fp8q.api import CalibrateOptions, TuneOptions, ValidateOptions, calibrate, tune
from fp8q.calibrate.text.evaluation import prompt_of
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.stages.corpus import load_tokens
from fp8q.stages.other_text import evaluation
from fp8q.stages.shared.sources import source_of
from fp8q.stages.tune import batches_of
from fp8q.validate.accuracy.runtimes import float_model
from fp8q.validate.tuning.joint import measure_mix, reference_runner

#: Of the mix's KL on the evaluation text over the default's, and of the prediction over the windows held out.
LIMITS = {"kl_over_default": 1 / 3, "prediction_off": 0.2}
#: The share of the default's KL that is asked for.
ASKED = 0.3
JUDGED = ("demo", "llama", "qwen2", "gemma", "opt")


def kl_of(run: Run) -> float:
    """KL from FP32 of the run's checkpoint in FP32, on its evaluation text behind prompts of half a window."""
    prompt = prompt_of(load_tokens(run, run.calibration).shape[1])
    text = evaluation(run, None, ValidateOptions(as_served=prompt), SILENT)
    exact, reference = (
        float_model(source_of(run), torch.float32, "cpu"),
        load_reference(run.model, "exact", torch.float32),
    )

    batches = batches_of(text.ids, text.scored)
    return measure_mix(lambda ids: exact(ids.numpy()), reference_runner(reference), batches, SILENT, "run").kl_nats


def benchmark(texts: ModelTexts, options: argparse.Namespace) -> dict[str, Any]:
    """One model."""
    with tempfile.TemporaryDirectory() as folder:
        asked = CalibrateOptions(samples=options.samples, seq_len=options.context)
        text = cut_text(texts, options.evaluation * options.context, Path(folder))
        run = calibrate(texts.directory, texts.data, Path(folder) / "run", str(text), asked)
        default = kl_of(run)
        begun = time.process_time()
        budget = TuneOptions(windows=options.windows, max_kl=ASKED * default)
        found = tune(run.root, budget)
        seconds = time.process_time() - begun
        tune(run.root, budget, apply=True)
        applied = kl_of(run) if found.met else None
    assert found.chosen is not None, "there is a budget"
    last = found.frontier[-1]  # which has none in one term
    return {
        "default_kl_nats": default,
        "default_kl_on_windows": found.run.kl_nats,
        "predicted_kl_nats": found.chosen.kl_nats,
        "held_out_kl_nats": found.chosen.held_out_kl_nats,
        "measured_kl_nats": found.chosen.measured_kl_nats,
        "applied_kl_nats": applied,
        "predicted_increase": found.chosen.predicted_increase.model_dump(),
        "measured_increase": found.chosen.measured_increase.model_dump(),
        "kl_over_default": round(found.chosen.measured_kl_nats / default, 3),
        "predicted_over_held_out": round(found.chosen.kl_nats / found.chosen.held_out_kl_nats, 3),
        "weight_bytes_over_default": found.chosen.weight_bytes / found.run.weight_bytes,
        "prefill_flops_ratio": round(found.chosen.prefill_flops_ratio, 3),
        "weight_rounding": found.chosen.weight_rounding,
        "kv_cache": found.chosen.kv_cache,
        "tail": found.chosen.tail,
        "two_terms": found.chosen.two_terms,
        "products": sum((last.bf16, last.tail, last.two_terms, last.weights_alone)),
        "rise_over_kl": round(found.rise_over_kl, 3),
        "processor_s": round(seconds, 1),
    }


def meets(found: dict[str, Any]) -> bool:
    """Whether a model meets the limits."""
    return bool(
        found["kl_over_default"] <= LIMITS["kl_over_default"]
        and found["weight_bytes_over_default"] <= 1
        and abs(found["predicted_over_held_out"] - 1) <= LIMITS["prediction_off"]
    )


def main() -> int:
    """Run, print, judge."""
    options = model_arguments(__doc__, windows=24, samples=96, evaluation=40).parse_args()
    head, results = described("tune"), {}
    for texts in options.models or small_models(*JUDGED):
        results[texts.name] = benchmark(texts, options)
        print(texts.name, results[texts.name], file=sys.stderr, flush=True)
    passed = all(meets(found) for name, found in results.items() if name in JUDGED)
    names = ("windows", "context", "samples", "evaluation")
    protocol = {name: getattr(options, name) for name in names}
    return publish(head, {**protocol, "limits": LIMITS, "results": results, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
