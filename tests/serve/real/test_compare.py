"""`fp8q compare` on a real Triton server, which gives text alone: its likeliest tokens are the validated model's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from fp8q import api
from fp8q.core.run import Run

if TYPE_CHECKING:
    from tritonserver import Server


def test_triton_answers_as_the_validated_model(triton: Server, demo_model: str, demo_run: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    found = api.compare(run.root, api.CompareOptions(url=triton.http, served=demo_model))
    assert (found.verdict, found.form) == ("validated", "generate")
    assert found.runtimes[0].runtime == "onnxruntime"
    assert found.runtimes[0].flips.mean < 0.05 < found.runtimes[-1].flips.mean
    assert found.sentence.endswith("an arithmetic that the run does not have cannot be told from these")
