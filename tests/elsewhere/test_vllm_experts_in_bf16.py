"""vLLM runs gpt_oss whose experts stay in BF16, which is what is advised for it: its class renames tensors of experts,
and entries of `ignore` with them.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from published_classes import IDS, SAME, checkpoint, log_probabilities
from vllm_jobs import Vllm, job

from fp8q import api

from ..conftest import WithoutGraphs

NAME = "GptOssForCausalLM"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("gpt_oss") / "model", NAME)


def calibrated(model: Path, texts: Path, folder: Path) -> Path:
    """The checkpoint of a run that leaves out experts."""
    options = api.CalibrateOptions(samples=2, seq_len=48, batch_size=2, skip=("*.experts.*",))
    return api.calibrate(str(model), str(texts), folder / "run", options=options).model


def converted(model: Path, _: Path, folder: Path) -> Path:
    """What `convert` writes, which cuts no stacks of this class."""
    api.convert(str(model), folder / "fp8")
    return folder / "fp8"


@pytest.mark.parametrize("quantized", [calibrated, converted])
def test_it_loads_and_its_answers_are_near_the_originals(
    quantized: Callable[[Path, Path, Path], Path], vllm_python: Path, model: Path, tmp_path: Path,
    without_graphs: WithoutGraphs,
) -> None:  # fmt: skip
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a model with many experts. " * 200, encoding="utf-8")
    with without_graphs():
        path = quantized(model, text, tmp_path)
    original = getattr(transformers, NAME).from_pretrained(model, dtype=torch.float32)
    exact = tmp_path / "exact.npy"
    np.save(exact, log_probabilities(original)[:, :-1].float().numpy())
    with Vllm(vllm_python) as vllm:
        answer = vllm.ask(job(path, IDS.numpy(), exact))
    assert "error" not in answer, answer["error"]
    assert 0 < np.mean(answer["kl_nats"]) < SAME / 10
