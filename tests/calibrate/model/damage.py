"""Damage to a checkpoint, and what is said of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8q.calibrate.model.source import open_source
from fp8q.core.errors import InputError


def configure(path: Path, **changes: object) -> None:
    """Change config.json; None takes a key out."""
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}), encoding="utf-8")


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a copy."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
    change(tensors)
    (path / "model.safetensors").unlink()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def refusal(model: Path | str, **options: Any) -> str:
    with pytest.raises(InputError) as refused:
        open_source(str(model), **options)
    return str(refused.value)


def demo_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}
