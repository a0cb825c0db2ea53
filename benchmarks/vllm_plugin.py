"""Measure what vLLM loses with fp8q-vllm and without it, and what a decode step takes, on a CPU.

    python benchmarks/vllm_plugin.py [MODEL=CALIBRATION,EVALUATION …] --vllm PYTHON [--windows 8] [--context 256]
        [--samples 256] [--tail 64] [--steps 64] [--save vllm_plugin]

`--vllm`: the interpreter of an environment with vLLM for CPUs, as `make test-elsewhere` leaves one in `.venv/vllm`.
Mean KL(FP32 || vLLM) × 10⁶ of every token of the windows, four in a batch, in BF16 arithmetic: the source in BF16, one
term with GPTQ, two terms with the plugin and without it, and a tail with it; beside them our reference's in BF16
arithmetic. A step is one token of one answer behind a window, in processor time of one thread. On a CPU vLLM emulates
FP8 products, so its times say nothing of a GPU. Prints one JSON line; exit status 1 where two terms or a tail lose more
than 1.15 times what the reference loses.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from models import ModelTexts, model_arguments, small_models
from result import ROOT, described, publish
from vllm_jobs import ask, installed_plugin, job, log_probabilities, mean_kl

from fp8q.api import CalibrateOptions, RescaleOptions, calibrate, scales
from fp8q.core.run import Run
from fp8q.options import Terms
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import source_of
from fp8q.validate.accuracy.runtimes import float_model

LIMIT = 1.15
#: The windows in a batch: as many as have whole tails.
BATCH = 4
#: What vLLM runs: a name, and the terms of the checkpoint (None: the source), and whether with the plugin.
BF16, ONE, ALONE, TWO, TAIL = "BF16", "one term", "two terms, no plugin", "two terms", "tail"
FORMS: dict[str, tuple[Terms | None, bool]] = {
    BF16: (None, False), ONE: (1, False), ALONE: (2, False), TWO: (2, True), TAIL: ("tail", True),
}  # fmt: skip


def reference_kl(model: Path, ids: npt.NDArray[np.int64], exact: npt.NDArray[np.float32]) -> float:
    """The reference's mean KL in nats, each window one prompt."""
    loaded = load_reference(model, "fast", torch.bfloat16)
    with torch.inference_mode():
        logits = loaded.model(
            input_ids=torch.from_numpy(ids), past_key_values=loaded.new_cache(), use_cache=True
        ).logits
    return mean_kl(exact, logits)


def checkpoints(run: Run, texts: ModelTexts, tail: int, folder: Path) -> Iterator[tuple[str, Path]]:
    """What each form of `FORMS` loads: the source, or a copy of what the run's model was with these terms."""
    made: dict[Terms | None, Path] = {None: Path(texts.directory)}
    for name, (terms, _) in FORMS.items():
        if terms not in made:
            more = {"exact_tail": tail} if terms == "tail" else {}
            scales(run.root, RescaleOptions(activation_terms=terms, **more))
            made[terms] = folder / f"terms-{terms}"
            shutil.copytree(run.model, made[terms])
        yield name, made[terms]


def measure(texts: ModelTexts, plugin: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Form -> KL × 10⁶ in vLLM and of the reference, and milliseconds of a step."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        chosen = CalibrateOptions(samples=options.samples, seq_len=options.context, weight_rounding="gptq")
        run = calibrate(texts.directory, texts.data, folder / "run", texts.eval_data, chosen)
        ids = load_tokens(run, run.evaluation).ravel()[: options.windows * options.context].reshape(-1, options.context)
        with torch.inference_mode():
            exact = log_probabilities(float_model(source_of(run), torch.float32, "cpu")(ids))
        np.save(folder / "exact.npy", exact)
        where = dict(checkpoints(run, texts, options.tail, folder))
        found: dict[str, Any] = {}
        for name, model in where.items():
            batches = {"max_num_seqs": BATCH, "max_num_batched_tokens": BATCH * options.context}
            asked = job(model, ids, folder / "exact.npy", engine=batches, steps=options.steps)
            (answer,) = ask(options.vllm, [asked], plugin if FORMS[name][1] else None)
            if "error" in answer:
                raise SystemExit(f"{texts.name}: {name}: {answer['error']}")
            row = {"kl": round(float(np.mean(answer["kl_nats"])) * 1e6, 1), "step_ms": round(answer["step_ms"], 2)}
            if name in (TWO, TAIL):
                row["reference_kl"] = round(reference_kl(model, ids, exact) * 1e6, 1)
            found[name] = row
            print(f"{texts.name}: {name}: {row}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Measure, judge, print."""
    parser = model_arguments(__doc__, windows=8, context=256, samples=256, tail=64, steps=64)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", required=True, help="the interpreter that has vLLM")
    options = parser.parse_args()
    head = described("vllm_plugin")
    os.environ["OMP_NUM_THREADS"] = "1"  # threads that wait would count as work
    with tempfile.TemporaryDirectory() as directory:
        plugin = installed_plugin(options.vllm, Path(directory))
        models = options.models or small_models("demo", "llama", "qwen2", "gemma", "opt")
        results = {texts.name: measure(texts, plugin, options) for texts in models}
    passed = all(
        row["kl"] <= LIMIT * row["reference_kl"] for rows in results.values() for row in (rows[TWO], rows[TAIL])
    )
    tried = subprocess.run(
        [options.vllm, "-c", "import vllm; print(vllm.__version__)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout.strip()
    figures = {name: getattr(options, name) for name in ("samples", "windows", "context", "tail", "steps")}
    return publish(head, {**figures, "vllm": tried, "limit": LIMIT, "results": results, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
