"""Whether `fp8q doctor RUN` is quiet where nothing is wrong, and names the module where one is damaged.

    python benchmarks/doctor.py [MODEL=CALIBRATION,EVALUATION …] [--windows 64] [--context 256]

Each model is calibrated with an FP8 cache, as it is and with outlier channels in what one module of a middle layer
reads; copies of the first run get a scale ten times too small there, and keys of that layer that saturate (`culprits`).
Of each the verdicts are told, and what is bad: the damaged module (one of those that read the same tensor; of hidden
states, its layer) and nothing else. The values of the healthy runs are those that the limits leave room above. Prints
one JSON line; exit status 1 where a healthy run is bad, or a damage is not found, or something else is blamed.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from culprits import rescale_outliers, saturating_k, scale_too_small
from models import ModelTexts, model_arguments, small_models
from result import described, publish

from fp8q.api import CalibrateOptions, DoctorOptions, calibrate, doctor
from fp8q.calibrate.measure.statistics import load_record
from fp8q.core.run import Run
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages import export as export_stage
from fp8q.validate.advice.checkup import Checkup

MODELS = ("demo", "llama", "qwen2", "gemma", "gpt2", "opt", "stories260k")


def calibrated(directory: str, texts: ModelTexts, options: argparse.Namespace, out: Path) -> Run:
    """A run of the checkpoint in `directory`."""
    asked = CalibrateOptions(samples=options.windows, seq_len=options.context, kv_cache="fp8")
    with patch.object(export_stage, "export"):  # tracing a graph is most of the time, and no check reads one
        return calibrate(directory, texts.data, out, texts.eval_data, asked)


def victims(run: Run) -> tuple[str, str]:
    """A product that reads a norm's output, of a middle layer, and the attention of that layer."""
    keys = [name.removesuffix(".k") for name in load_scales(run).kv_cache if name.endswith(".k")]
    attention = sorted(keys, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()])[len(keys) // 2]
    first = next(first for first in load_record(run).groups if first.startswith(f"{attention}."))
    return first, attention


def layer_name(module: str) -> str:
    """The decoder layer that a module is in: all up to the first number in its name."""
    parts = module.split(".")
    return ".".join(parts[: next(index for index, part in enumerate(parts) if part.isdigit()) + 1])


def blame(found: Checkup, guilty: set[str]) -> dict[str, Any]:
    """What is bad: the checks that name one of the `guilty`, and the modules blamed that are none of them."""
    bad = [check for check in found.checks if check.verdict == "bad"]
    layers = {layer_name(name) for name in guilty}
    named = [each for each in bad if each.module in (layers if each.check == "hidden_states" else guilty)]
    others = sorted({str(each.module) for each in bad if each not in named})
    return {"found_by": sorted({each.check for each in named}), "others_blamed": others}


def damages(texts: ModelTexts, healthy: Run, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What is said of each damage."""
    module, attention = victims(healthy)
    asked, found = DoctorOptions(), {}
    checkpoint = folder / "checkpoint"
    group = set(rescale_outliers(Path(texts.directory), checkpoint, module))
    run = calibrated(str(checkpoint), texts, options, folder / "outliers")
    found["outliers"] = blame(doctor(run.root, asked), group)
    run = Run(Path(shutil.copytree(healthy.root, folder / "scale")))
    guilty = set(scale_too_small(run, module))
    found["scale"] = blame(doctor(run.root, asked), guilty)
    run = Run(Path(shutil.copytree(healthy.root, folder / "keys")))
    name = saturating_k(run, attention)
    found["keys"] = blame(doctor(run.root, asked), {name})
    return {"module": module, "attention": attention, "damages": found}


def benchmark(texts: ModelTexts, options: argparse.Namespace) -> dict[str, Any]:
    """One model."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run = calibrated(texts.directory, texts, options, folder / "healthy")
        begun = time.process_time()
        found = doctor(run.root, DoctorOptions())
        seconds = time.process_time() - begun
        checks: dict[str, Any] = {}
        for check in found.checks:  # the worst comes first
            checks.setdefault(check.check, {"verdict": check.verdict, "value": check.value, "module": check.module})
        return {"processor_s": round(seconds, 1), "checks": checks} | damages(texts, run, options, folder)


def passed(results: dict[str, Any]) -> bool:
    """Whether every healthy run is without a bad check, and every damage is found and nothing else blamed."""
    quiet = all(check["verdict"] != "bad" for found in results.values() for check in found["checks"].values())
    hits = [damage for found in results.values() for damage in found["damages"].values()]
    return quiet and all(damage["found_by"] and not damage["others_blamed"] for damage in hits)


def main() -> int:
    """Run, print, judge."""
    options = model_arguments(__doc__, windows=64).parse_args()
    head, results = described("doctor"), {}
    for texts in options.models or small_models(*MODELS):
        results[texts.name] = benchmark(texts, options)
        print(texts.name, results[texts.name], file=sys.stderr, flush=True)
    protocol = {"windows": options.windows, "context": options.context}
    return publish(head, {**protocol, "results": results, "passed": passed(results)}, options.save)


if __name__ == "__main__":
    sys.exit(main())
