"""Checkpoints of a comparison are refused before a model is made of their configuration."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8q.core.errors import InputError
from fp8q.validate.pair.models import check_directory


def test_more_layers_than_tensors(shared_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(shared_checkpoint("llama"), path := tmp_path / "llama")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    assert check_directory(path, "--model ") == config
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}), encoding="utf-8")
    with pytest.raises(InputError) as refused:
        check_directory(path, "--model ")
    assert str(refused.value) == (
        f"{path}/config.json: num_hidden_layers is 1,000,000,000, and the weights hold 56 tensors; copy or download it "
        "again"
    )
