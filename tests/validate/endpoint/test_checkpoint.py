"""Checkpoints in the place of a server: damaged ones are refused in one line, before any token is run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8q.core.errors import BackendError, InputError
from fp8q.core.reporter import SILENT
from fp8q.validate.endpoint.checkpoint import run_checkpoint
from fp8q.validate.endpoint.prompts import Prompt
from fp8q.validate.endpoint.transformers_loader import TransformersLoader


@pytest.fixture
def copy(demo_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_checkpoint, tmp_path / "model"))


def config(**fields: Any) -> Callable[[Path], None]:
    """Set fields of config.json."""

    def change(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def text(content: str) -> Callable[[Path], None]:
    """Set the text of config.json."""

    def change(directory: Path) -> None:
        (directory / "config.json").write_text(content)

    return change


def cut(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])


def garbled(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 4096)


def empty(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut weights": cut,
    "garbled weights": garbled,
    "empty weights": empty,
    "layers a text": config(num_hidden_layers="two"),
    "layers null": config(num_hidden_layers=None),
    "layers a list": config(num_hidden_layers=[2]),
    "heads 0": config(num_attention_heads=0),
    "width negative": config(hidden_size=-64),
    "vocabulary of 10^30": config(vocab_size=10**30),
    "type a number": config(model_type=5),
    "type unknown": config(model_type="nobody"),
    "activation unknown": config(hidden_act="nothing"),
    "dtype unknown": config(dtype="float7"),
    "dtype a list": config(dtype=[1]),
    "rope a text": config(rope_parameters="x", rope_scaling="x"),
    "quantization a text": config(quantization_config="fp8"),
    "a list": text("[]"),
    "no JSON": text("{"),
    "no config": lambda directory: (directory / "config.json").unlink(),
    "no weights": lambda directory: (directory / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_refused_in_one_line(case: str, copy: Path) -> None:
    DAMAGE[case](copy)
    with pytest.raises(InputError) as refused:
        TransformersLoader(copy, "--model ", "cpu").load()
    message = str(refused.value)
    assert message.startswith(f"--model {copy}: transformers cannot load it (")
    assert message.endswith("); copy or download it again, or name another directory")
    assert "\n" not in message


@pytest.mark.parametrize("method", ["gptq", "hqq", "torchao"])
def test_a_quantizer_that_is_not_installed_is_missing(method: str, copy: Path) -> None:
    config(quantization_config={"quant_method": method, "bits": 4})(copy)
    with pytest.raises(BackendError) as refused:
        TransformersLoader(copy, "--model ", "cpu").load()
    assert str(refused.value).startswith(f"--model {copy}: needs what is not installed here (")


def test_a_tensor_that_is_missing_is_named(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError) as refused:
        TransformersLoader(copy, "--model ", "cpu").load()
    assert str(refused.value) == (
        f"--model {copy}: has no model.layers.1.mlp.down_proj.weight, nor 2 more tensors, and would run with random "
        "weights; copy or download it again, or name another directory"
    )


def test_weights_that_are_not_finite_are_refused(copy: Path, demo_checkpoint: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    prompt = Prompt(0, (0, 5, 6, 7), np.array([2, 3]), np.array([0, 1]))
    with pytest.raises(BackendError) as refused:
        run_checkpoint(copy, demo_checkpoint, [prompt], "cpu", SILENT)
    assert str(refused.value) == (
        f"{copy}: gives log-probabilities that no model can (nan at position 0 is no log-probability); mend its weights"
    )
    answers = run_checkpoint(demo_checkpoint, demo_checkpoint, [prompt], "cpu", SILENT)
    assert np.isfinite(answers.nll).all()
