"""Measure what FP8 changes in answers to tasks, beside what BF16 changes itself.

    python benchmarks/tasks.py [MODEL=CALIBRATION,EVALUATION …] --lm-eval PYTHON [--questions 300] [--samples 256]
        [--context 256] [--forms PATTERN] [--save tasks]

`--lm-eval`: the interpreter of an environment with lm-eval, as `make test-elsewhere` leaves one in `.venv/lm-eval`. The
tasks are those of `examples/demo/tasks.py`, made of each model's evaluation text: which of four lines comes next, and
the rest of a word, generated greedily. `fp8q evaluate --noise-floor` asks one term, and two terms with GPTQ, and with
`--forms .` both with an FP8 cache too; the float models' answers are the same for all runs and asked for once. Prints
one JSON line; exit status 1 where two terms have flips that are not chance by McNemar's test (p < 0.01), of any metric.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from models import ModelTexts, model_arguments, small_models
from result import ROOT, described, publish

from fp8q.api import CalibrateOptions, calibrate
from fp8q.core.run import Run
from fp8q.examples.demo.tasks import write_tasks

TASKS = ("next_line", "word")
LEAST_P = 0.01
#: The form whose flips are judged.
EXACT = "two terms, GPTQ"
#: The runs: a name, and the options of `fp8q calibrate`.
FORMS: dict[str, dict[str, Any]] = {
    "one term": {},
    EXACT: {"activation_terms": 2, "weight_rounding": "gptq"},
    "one term, FP8 cache": {"kv_cache": "fp8"},
    f"{EXACT}, FP8 cache": {"activation_terms": 2, "weight_rounding": "gptq", "kv_cache": "fp8"},
}


def evaluated(run: Run, folder: Path, python: Path, batch_size: int) -> dict[str, Any]:
    """What `fp8q evaluate` says of `run`, in the environment of `python`, without a network."""
    if not (path := folder / "path").is_dir():
        path.mkdir()
        (path / "fp8q").symlink_to(ROOT)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    command = [str(python), "-m", "fp8q", "evaluate", str(run.root), "--tasks", ",".join(TASKS), "--include-path"]
    command += [str(folder / "tasks"), "--noise-floor", "--batch-size", str(batch_size), "--json"]
    environment = os.environ | offline | {"PYTHONPATH": str(path)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=folder, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(texts: ModelTexts, options: argparse.Namespace) -> dict[str, Any]:
    """Form -> the results of its tasks."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        write_tasks(folder / "tasks", Path(texts.eval_data).read_text(encoding="utf-8"), options.questions)
        found, before = dict[str, Any](), None
        for name, form in FORMS.items():
            if not re.search(options.forms, name):
                continue
            chosen = CalibrateOptions(samples=options.samples, seq_len=options.context, **form)
            run = calibrate(texts.directory, texts.data, folder / name, texts.eval_data, chosen)
            if before is not None:  # the float models' answers count, whose keys say that they are of the same model
                shutil.copytree(before.answers, run.answers)
            found[name] = evaluated(run, folder, options.lm_eval, options.batch_size)["results"]
            before = run
            print(f"{texts.name}: {name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Measure, judge, print."""
    parser = model_arguments(__doc__, context=256, samples=256, questions=300, batch_size=8)
    parser.add_argument(
        "--lm-eval", type=Path, metavar="PYTHON", required=True, help="the interpreter that has lm-eval"
    )
    parser.add_argument("--forms", default="^(one term|two terms, GPTQ)$", metavar="PATTERN", help="forms to run")
    options = parser.parse_args()
    options.lm_eval = options.lm_eval.absolute()
    head = described("tasks")
    results = {texts.name: measure(texts, options) for texts in options.models or small_models("demo", "llama")}
    exact = [row for rows in results.values() for row in rows.get(EXACT, [])]
    passed = all(row["paired"]["mcnemar_p"] >= LEAST_P for row in exact)
    figures = {name: getattr(options, name) for name in ("samples", "context", "questions", "batch_size")}
    version = subprocess.run(
        [options.lm_eval, "-c", "from importlib.metadata import version; print(version('lm_eval'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return publish(
        head, {**figures, "lm_eval": version, "least_p": LEAST_P, "results": results, "passed": passed}, options.save
    )


if __name__ == "__main__":
    sys.exit(main())
