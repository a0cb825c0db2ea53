"""Random models of any architecture, small enough to stream in a second."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel


@pytest.fixture
def tiny(tmp_path: Path, demo_checkpoint: Path) -> Callable[..., Path]:
    """`tiny("PhiConfig", {…})`: the directory of a small random checkpoint of that configuration, in BF16, with the
    demo's tokenizer.
    """

    def make(config: str, fields: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Path:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        path = tmp_path / "model"
        torch.nn.Module.to(model, dtype).save_pretrained(path)
        shutil.copyfile(demo_checkpoint / "tokenizer.json", path / "tokenizer.json")
        return path

    return make
