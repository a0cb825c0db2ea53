"""Run lm-eval on the model that `fp8q.api.load` gives, in lm-eval's environment.

    python lm_eval_loaded.py RUN MAX_LENGTH TASKS INCLUDE_PATH OUT

`TASKS`: names, separated by commas; `OUT`: the JSON file for what `lm_eval --log_samples` would write to several:
`{"results": task -> metric -> value, "samples": task -> documents}`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from fp8q import api


def main(run: Path, max_length: int, tasks: list[str], include_path: str) -> dict[str, Any]:
    """Evaluate the model of `run`."""
    lm = HFLM(
        pretrained=api.load(run),
        tokenizer=AutoTokenizer.from_pretrained(run / "model"),
        max_length=max_length,
        batch_size=8,
        softmax_dtype=torch.float32,
    )
    found: dict[str, Any] = simple_evaluate(
        model=lm, tasks=tasks, task_manager=TaskManager(include_path=include_path), log_samples=True
    )
    return {name: found[name] for name in ("results", "samples")}


if __name__ == "__main__":
    evaluated = main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), sys.argv[4])
    Path(sys.argv[5]).write_text(json.dumps(evaluated, default=str), encoding="utf-8")
