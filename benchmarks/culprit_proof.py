"""Whether a damaged module is found and repaired: `fp8q sensitivity` ranks it first, `fp8q tune` touches it alone.

    python benchmarks/culprit_proof.py [MODEL=CALIBRATION,EVALUATION …] [--windows 24] [--context 256] [--evaluation 8]
        [--choosing 4]

The damages are those of `culprits`, and what is calibrated is what `doctor` (the benchmark) has: each model with an FP8
cache, as it is and damaged. Of each damage: the rank of the damaged tensor, the KL that it costs alone and that of the
next, whether `fp8q doctor` calls it bad, what `fp8q tune` changes for a budget of twice what the healthy run loses on
the evaluation text, and KL there before and after `--apply`, in FP32 arithmetic, of the checkpoints themselves. Prints
one JSON line; exit status 1 where the damaged tensor is not first, is not named, or where another module is changed or
the budget is not met.
"""

import argparse
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from culprits import rescale_outliers, saturating_k, scale_too_small
from doctor import blame, calibrated, victims
from models import ModelTexts, cut_text, model_arguments, small_models
from result import described, publish
from tune import kl_of

from fp8q.api import DoctorOptions, SensitivityOptions, TuneOptions, doctor, sensitivity, tune
from fp8q.core.run import Run
from fp8q.stages import tune as tune_stage

MODELS = ("demo", "llama", "qwen2", "gemma", "opt")
#: The budget, in what the healthy run loses.
ALLOWED = 2


def proof(run: Run, guilty: set[str], kind: str, budget: float, options: argparse.Namespace) -> dict[str, Any]:
    """What is found of a damaged `run`, and what becomes of it; `guilty`: the tensor, by the names of its readers."""
    damaged = kl_of(run)
    ranked = sensitivity(run.root, SensitivityOptions(windows=options.choosing)).modules
    rank = next(at for at, each in enumerate(ranked, 1) if each.kind == kind and each.module in guilty)
    named = blame(doctor(run.root, DoctorOptions()), guilty)
    # no KL is of a graph
    with patch.object(tune_stage, "export_or_note"):
        found = tune(run.root, TuneOptions(windows=options.choosing, max_kl=budget), apply=True)
    return {
        "module": ranked[rank - 1].module,
        "rank": rank,
        "alone_kl_nats": ranked[rank - 1].kl_nats,
        "next_kl_nats": next(each.kl_nats for each in ranked if each is not ranked[rank - 1]),
        **named,
        "damaged_kl_nats": damaged,
        "changes": [change.model_dump() for change in found.changes],
        "touches_it_alone": {change.module for change in found.changes} <= guilty,
        "met": found.met,
        "predicted_kl_nats": found.predicted_kl_nats,
        "measured_kl_nats": found.measured_kl_nats,
        "repaired_kl_nats": kl_of(run),
    }


def benchmark(texts: ModelTexts, options: argparse.Namespace) -> dict[str, Any]:
    """One model."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        texts = replace(texts, eval_data=str(cut_text(texts, options.evaluation * options.context, folder)))
        healthy = calibrated(texts.directory, texts, options, folder / "healthy")
        module, attention = victims(healthy)
        loss = kl_of(healthy)
        budget = ALLOWED * loss
        group = set(rescale_outliers(Path(texts.directory), folder / "checkpoint", module))
        run = calibrated(str(folder / "checkpoint"), texts, options, folder / "outliers")
        found = {"outliers": proof(run, group, "activation", budget, options)}
        run = Run(Path(shutil.copytree(healthy.root, folder / "scale")))
        found["scale"] = proof(run, set(scale_too_small(run, module)), "activation", budget, options)
        run = Run(Path(shutil.copytree(healthy.root, folder / "keys")))
        found["keys"] = proof(run, {saturating_k(run, attention)}, "kv_cache", budget, options)
    return {"healthy_kl_nats": loss, "budget_kl_nats": budget, "damages": found}


def holds(damage: dict[str, Any], budget: float) -> bool:
    """Whether the culprit was found, by both, and repaired by itself. Loops are of the whole model, and blame none."""
    found = damage["rank"] == 1 and damage["found_by"] and {*damage["others_blamed"]} <= {"None"}
    return bool(found and damage["touches_it_alone"] and damage["met"] and damage["repaired_kl_nats"] <= budget)


def main() -> int:
    """Run, print, judge."""
    options = model_arguments(__doc__, windows=24, evaluation=8, choosing=4).parse_args()
    head, results = described("culprit_proof"), dict[str, Any]()
    for texts in options.models or small_models(*MODELS):
        results[texts.name] = benchmark(texts, options)
        print(texts.name, results[texts.name], file=sys.stderr, flush=True)
    protocol = {name: getattr(options, name) for name in ("windows", "context", "evaluation", "choosing")}
    passed = all(holds(each, of["budget_kl_nats"]) for of in results.values() for each in of["damages"].values())
    return publish(head, {**protocol, "allowed": ALLOWED, "results": results, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
