"""Checkpoints of a comparison are refused before a model is made of their configuration."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.validate.pair.models import check_directory, identify

from .damaged import as_modelopt, edit_json, quantized


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


def test_the_file_in_which_modelopt_declares_its_codes_is_part_of_the_identity(
    demo_checkpoint: Path, tmp_path: Path
) -> None:
    """A comparison whose candidate's inputs are scaled otherwise is another one."""
    path = quantized(demo_checkpoint, tmp_path / "candidate", as_modelopt)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    before = identify(path, config, SILENT)
    assert identify(path, config, SILENT) == before
    edit_json(path / "hf_quant_config.json", lambda said: said["quantization"].update(quant_algo="FP8_PB_WO"))
    assert identify(path, config, SILENT).sha256 != before.sha256
