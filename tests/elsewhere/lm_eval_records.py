"""Write what lm-eval says of the demo's tasks, for the tests of `validate.tasks`, which have no lm-eval.

    PYTHONPATH=… python tests/elsewhere/lm_eval_records.py RUN [--questions 40]

Made in lm-eval's environment, of BF16 and FP8 of RUN: `tests/validate/tasks/records.json`, which is task -> model ->
the results of one task, as lm-eval returns them, without the documents. RUN is the demo with scales that saturate, so
that answers flip: `fp8q scales RUN --method percentile --percentile 97`.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from fp8q import api
from fp8q.calibrate.model.source import load_model
from fp8q.core.run import Run
from fp8q.examples.demo.tasks import HERE, write_tasks
from fp8q.stages.shared.sources import source_of
from fp8q.validate.tasks.harness import quiet_harness
from fp8q.validate.tasks.models import local_model

OUT = Path(__file__).parents[1] / "validate" / "tasks" / "records.json"
LEFT_OUT = ("doc", "arguments", "target", "resps", "doc_hash", "target_hash")
PARTS = ("results", "versions", "n-shot", "higher_is_better", "samples")


def records(run: Run, questions: int) -> dict[str, dict[str, Any]]:
    """The results of each task and model."""
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    models = {"bf16": load_model(source_of(run), torch.bfloat16), "fp8": api.load(run.root)}
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder), (HERE / "evaluation.txt").read_text(encoding="utf-8"), questions)
        for name in ("next_line", "word"):
            for runtime, model in models.items():
                loaded = TaskManager(include_path=folder).load([name])
                with quiet_harness():
                    results: Any = evaluate(lm=local_model(model, tokenizer, 8), task_dict=loaded, bootstrap_iters=0)
                for each in results["samples"][name]:
                    for part in LEFT_OUT:
                        each.pop(part)
                found.setdefault(name, {})[runtime] = {part: results[part] for part in PARTS}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--questions", type=int, default=40)
    options = parser.parse_args()
    written = records(Run(options.run), options.questions)
    OUT.write_text(json.dumps(written, default=str) + "\n", encoding="utf-8")
