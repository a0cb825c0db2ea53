"""Measure what vLLM loses with fp8q-vllm and without it, and what a decode step takes, on a CPU.

    python benchmarks/vllm_plugin.py [MODEL=CALIBRATION,EVALUATION …] --vllm PYTHON [--windows 8] [--context 256]
        [--samples 256] [--tail 64] [--steps 64] [--save vllm_plugin]
    python benchmarks/vllm_plugin.py … --prepare FOLDER      the checkpoints and jobs, for vLLM on another machine
    python benchmarks/vllm_plugin.py … --answers FOLDER      and what it answered there, judged

`--vllm`: the interpreter of an environment with vLLM for CPUs, as `make test-elsewhere` leaves one in `.venv/vllm`.
Mean KL(FP32 || vLLM) × 10⁶ of every token of the windows, four in a batch, in BF16 arithmetic: the source in BF16, one
term with GPTQ, two terms with the plugin and without it, and a tail with it; beside them our reference's in BF16
arithmetic. A step is one token of one answer behind a window, in processor time of one thread. On a CPU vLLM emulates
FP8 products, so its times say nothing of a GPU. Prints one JSON line; exit status 1 where two terms or a tail lose more
than 1.15 times what the reference loses.

A GPU host needs vLLM, `vllm_losses.py` and a prepared folder, nothing of fp8q but the plugin. There, in the folder of
each model, `python vllm_losses.py < jobs.jsonl > answers.jsonl` with VLLM_PLUGINS=none, and the same of
`plugin-jobs.jsonl` and `plugin-answers.jsonl` with the plugin.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from models import ModelTexts, model_arguments, small_models
from result import ROOT, described, publish
from vllm_jobs import ask, installed_plugin, job, log_probabilities, mean_kl
from vllm_server import CACHE_BYTES

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
#: The file that says what was prepared.
PREPARED = "prepared.json"
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
    made: dict[Terms | None, Path] = {None: folder / "source"}
    shutil.copytree(texts.directory, made[None])
    for name, (terms, _) in FORMS.items():
        if terms not in made:
            more = {"exact_tail": tail} if terms == "tail" else {}
            scales(run.root, RescaleOptions(activation_terms=terms, **more))
            made[terms] = folder / f"terms-{terms}"
            shutil.copytree(run.model, made[terms])
        yield name, made[terms]


@dataclass(frozen=True)
class Prepared:
    """The checkpoints of a model's forms in a folder, and what the reference loses on the same windows."""

    folder: Path
    forms: tuple[str, ...]
    reference_kl: dict[str, float]

    def jobs(self, with_plugin: bool) -> list[dict[str, Any]]:
        """The jobs of `vllm_losses.py`, of which paths are relative to the folder, with the plugin or without it."""
        name = "plugin-jobs.jsonl" if with_plugin else "jobs.jsonl"
        return [json.loads(line) for line in (self.folder / name).read_text(encoding="utf-8").splitlines()]

    def forms_with(self, plugin: bool) -> list[str]:
        """The forms that are asked for with the plugin, or without it, in the order of their jobs."""
        return [name for name in self.forms if FORMS[name][1] is plugin]


def prepare(texts: ModelTexts, folder: Path, options: argparse.Namespace) -> Prepared:
    """Write a checkpoint of each form, FP32's log-probabilities and the jobs into `folder`."""
    with tempfile.TemporaryDirectory() as directory:
        chosen = CalibrateOptions(samples=options.samples, seq_len=options.context, weight_rounding="gptq")
        run = calibrate(texts.directory, texts.data, Path(directory) / "run", texts.eval_data, chosen)
        ids = load_tokens(run, run.evaluation).ravel()[: options.windows * options.context].reshape(-1, options.context)
        with torch.inference_mode():
            exact = log_probabilities(float_model(source_of(run), torch.float32, "cpu")(ids))
        np.save(folder / "exact.npy", exact)
        paths = dict(checkpoints(run, texts, options.tail, folder))
    batches = {"max_num_seqs": BATCH, "max_num_batched_tokens": BATCH * options.context}
    batches["kv_cache_memory_bytes"] = CACHE_BYTES
    for name, with_plugin in (("jobs.jsonl", False), ("plugin-jobs.jsonl", True)):
        jobs = [
            job(path.relative_to(folder), ids, Path("exact.npy"), engine=batches, steps=options.steps)
            for form, path in paths.items()
            if FORMS[form][1] is with_plugin
        ]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in jobs), encoding="utf-8")
    kl = {name: round(reference_kl(paths[name], ids, exact) * 1e6, 1) for name in (TWO, TAIL)}
    (folder / PREPARED).write_text(json.dumps({"forms": [*paths], "reference_kl": kl}), encoding="utf-8")
    return Prepared(folder, tuple(paths), kl)


def answered(prepared: Prepared, python: Path, plugin: Path) -> dict[str, dict[str, Any]]:
    """Form -> the answer of vLLM here."""
    return {
        form: answer
        for folder in (None, plugin)
        for form, answer in zip(
            prepared.forms_with(plugin=folder is not None),
            ask(python, prepared.jobs(folder is not None), folder, prepared.folder),
            strict=True,
        )
    }


def answers_in(folder: Path) -> tuple[Prepared, dict[str, dict[str, Any]]]:
    """What was prepared in `folder`, and form -> the answer that vLLM gave elsewhere."""
    stored = json.loads((folder / PREPARED).read_text(encoding="utf-8"))
    prepared = Prepared(folder, tuple(stored["forms"]), stored["reference_kl"])
    answers: dict[str, dict[str, Any]] = {}
    for name, with_plugin in (("answers.jsonl", False), ("plugin-answers.jsonl", True)):
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        answers |= zip(prepared.forms_with(with_plugin), map(json.loads, lines), strict=True)
    return prepared, answers


def judged(model: str, prepared: Prepared, answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Form -> KL × 10⁶ in vLLM and of the reference, and milliseconds of a step."""
    rows: dict[str, Any] = {}
    for name in prepared.forms:
        if error := answers[name].get("error"):
            raise SystemExit(f"{model}: {name}: {error}")
        kl, step_ms = answers[name]["kl_nats"], answers[name]["step_ms"]
        row = {"kl": round(float(np.mean(kl)) * 1e6, 1), "step_ms": step_ms and round(step_ms, 2)}
        if name in prepared.reference_kl:
            row["reference_kl"] = prepared.reference_kl[name]
        rows[name] = row
        print(f"{model}: {name}: {row}", file=sys.stderr, flush=True)
    return rows


def version_of(python: Path) -> str:
    """The version of vLLM that `python` has."""
    code = "import vllm; print(vllm.__version__)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def measure(models: Sequence[ModelTexts], options: argparse.Namespace) -> dict[str, Any]:
    """Prepare each model, ask the vLLM that is here, and judge its answers."""
    with tempfile.TemporaryDirectory() as directory:
        plugin = installed_plugin(options.vllm, Path(directory))
        results = {}
        for texts in models:
            (folder := Path(directory) / texts.name).mkdir()
            prepared = prepare(texts, folder, options)
            results[texts.name] = judged(texts.name, prepared, answered(prepared, options.vllm, plugin))
    return {"vllm": version_of(options.vllm), "results": results}


def main() -> int:
    """Measure, judge, print."""
    parser = model_arguments(__doc__, windows=8, context=256, samples=256, tail=64, steps=64)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--vllm", type=Path, metavar="PYTHON", help="the interpreter that has vLLM")
    how.add_argument("--prepare", type=Path, metavar="FOLDER", help="write checkpoints and jobs there alone")
    how.add_argument("--answers", type=Path, metavar="FOLDER", help="judge the answers that lie there")
    options = parser.parse_args()
    head = described("vllm_plugin")
    os.environ["OMP_NUM_THREADS"] = "1"  # threads that wait would count as work
    models = options.models or small_models("demo", "llama", "qwen2", "gemma", "opt")
    if options.prepare:
        for texts in models:
            (folder := options.prepare / texts.name).mkdir(parents=True)
            prepare(texts, folder, options)
        return 0
    if options.answers:
        about = json.loads((options.answers / "host.json").read_text(encoding="utf-8"))
        folders = [path.parent for path in sorted(options.answers.glob(f"*/{PREPARED}"))]
        results = {folder.name: judged(folder.name, *answers_in(folder)) for folder in folders}
        measured = {**about, "results": results}
    else:
        measured = measure(models, options)
    passed = all(
        row["kl"] <= LIMIT * row["reference_kl"]
        for rows in measured["results"].values()
        for row in (rows[TWO], rows[TAIL])
    )
    figures = {name: getattr(options, name) for name in ("samples", "windows", "context", "tail", "steps")}
    return publish(head, {**figures, "limit": LIMIT, **measured, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
