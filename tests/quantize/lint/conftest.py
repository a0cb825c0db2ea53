"""Good checkpoints of each form, to be damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ...conftest import MadeOnce
from ..reading import fp8_checkpoints

Tensors = dict[str, torch.Tensor]
#: The goods: ModelOpt's with an FP8 cache, fp8 in blocks and with one scale a weight.
FORMS = ("compressed-tensors", "modelopt", "fp8", "fp8 tensor")
#: The original, which servers are held against too.
ORIGINAL = "bf16"


class Damaged:
    """A copy of a good checkpoint: change `tensors` and `config`, and `save`."""

    def __init__(self, good: Path, folder: Path, form: str):
        """Copy what is no weight to `folder`."""
        self.folder, self.form, self.saved = folder, form, False
        shutil.copytree(good, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        self.tensors: Tensors = load_file(good / fp8_checkpoints.SINGLE)
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())

    @property
    def quantization(self) -> dict[str, Any]:
        """What config.json says of it."""
        found: dict[str, Any] = self.config["quantization_config"]
        return found

    def scale(self, module: str) -> str:
        """The name of a weight's scale."""
        return f"{module}.{'weight_scale_inv' if self.form.startswith('fp8') else 'weight_scale'}"

    def input_scale(self, module: str) -> str:
        """The name of an input's scale."""
        return f"{module}.{'activation_scale' if self.form.startswith('fp8') else 'input_scale'}"

    def save(self) -> None:
        """Write it, as it is now."""
        save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors.items()}, self.folder / fp8_checkpoints.SINGLE
        )
        (self.folder / "config.json").write_text(json.dumps(self.config))
        self.saved = True


@pytest.fixture(scope="session")
def goods(made_once: MadeOnce, demo_checkpoint: Path) -> dict[str, Path]:
    """Form -> a good checkpoint; nothing is changed in them."""
    return {
        ORIGINAL: demo_checkpoint,
        "compressed-tensors": made_once(
            "lint-compressed", lambda folder: fp8_checkpoints.compressed(demo_checkpoint, folder)
        ),
        "modelopt": made_once(
            "lint-modelopt", lambda folder: fp8_checkpoints.modelopt(demo_checkpoint, folder, cache=True)
        ),
        "fp8": made_once(
            "lint-fp8-powers", lambda folder: fp8_checkpoints.fine_grained(demo_checkpoint, folder, powers=True)
        ),
        "fp8 tensor": made_once(
            "lint-fp8-tensor", lambda folder: fp8_checkpoints.fine_grained(demo_checkpoint, folder, None)
        ),
    }


@pytest.fixture
def damaged(goods: dict[str, Path], tmp_path: Path) -> Callable[[str], Damaged]:
    """`damaged(form)`: a copy of the good one that a test may damage."""
    return lambda form: Damaged(goods[form], tmp_path / "checkpoint", form)
