"""vLLM's own reader of ModelOpt's layout, `modelopt`: it computes of such files what it computes of the other layout.

The second of each pair is read by another class of vLLM's, `CompressedTensorsConfig`. Of static scales vLLM's CPU build
cannot be asked: its operator `static_scaled_fp8_quant` is declared there without a body.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_jobs import ask, job

from fp8q import api
from fp8q.options.scales import Layout
from fp8q.stages.corpus import load_tokens

from ..conftest import Texts, WithoutGraphs

LAYOUTS: tuple[Layout, ...] = ("modelopt", "compressed-tensors")
#: A scale for each channel and token.
FORMS: dict[str, dict[str, Any]] = {"dynamic": {"form": ("dynamic",)}}
WINDOWS, CONTEXT = 2, 32


@pytest.fixture(scope="module")
def losses(
    vllm_python: Path, demo_checkpoint: Path, demo_texts: Texts, without_graphs: WithoutGraphs,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], list[float]]:  # fmt: skip
    """`losses("dynamic", "modelopt")`: vLLM's losses in nats of the demo's evaluation text."""
    jobs = dict[tuple[str, str], dict[str, Any]]()
    texts = str(demo_texts.calibration), str(demo_texts.evaluation)
    for form, options in FORMS.items():
        for layout in LAYOUTS:
            out = tmp_path_factory.mktemp(f"{form}-{layout}") / "run"
            with without_graphs():
                chosen = api.CalibrateOptions(samples=8, seq_len=CONTEXT, layout=layout, **options)
                run = api.calibrate(str(demo_checkpoint), texts[0], out, texts[1], chosen)
            ids: np.ndarray = load_tokens(run, run.evaluation).ravel()
            jobs[form, layout] = job(run.model, ids[: WINDOWS * CONTEXT].reshape(WINDOWS, CONTEXT))
    answers = dict(zip(jobs, ask(vllm_python, list(jobs.values())), strict=True))

    def answered(form: str, layout: str) -> list[float]:
        answer = answers[form, layout]
        assert "error" not in answer, answer["error"]
        found: list[float] = answer["nll_nats"]
        return found

    return answered


@pytest.mark.parametrize("form", FORMS)
def test_either_layout_is_one_model_to_vllm(form: str, losses: Callable[[str, str], list[float]]) -> None:
    by_layout = [losses(form, layout) for layout in LAYOUTS]
    assert len(by_layout[0]) == WINDOWS * (CONTEXT - 1)
    assert by_layout[0] == by_layout[1]
