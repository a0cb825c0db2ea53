"""Latent attention: keys and values of two sizes, as transformers writes them to its cache."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

from fp8q.calibrate.model.gemms import cache_shapes
from fp8q.export.modules.graph_model import GraphPlan, QuantizedAttention


@pytest.fixture(scope="module")
def unseen() -> ModuleType:
    return importlib.import_module("unseen_architectures")


@pytest.mark.parametrize("config", ["YoutuConfig", "MiniCPM3Config", "DeepseekV2Config", "DeepseekV3Config"])
def test_the_graph_says_what_eager_attention_says(config: str, unseen: ModuleType, tmp_path: Path) -> None:
    """Of DeepSeek's, with dense layers alone."""
    made = getattr(transformers, config)(**unseen.CONFIGURATIONS[config])
    assert cache_shapes(made) == ((4, 16 + 16), (4, 24))
    assert unseen.graph_alone(config, tmp_path)["graph_difference"] < unseen.LIMIT


def test_attention_in_fp8_gives_values_of_their_own_size() -> None:
    module = QuantizedAttention(GraphPlan({}, (), torch.float32, attention=1))
    for part in "qkvp":
        module.get_submodule(part).scale = torch.tensor(2.0**-7)
    query, key, value = torch.ones(1, 2, 3, 8), torch.ones(1, 1, 5, 8), torch.full((1, 1, 5, 4), 0.5)
    found = module(query, key, value, torch.ones(1, 1, 3, 5, dtype=torch.bool), 1.0)
    assert torch.allclose(found, torch.full((1, 2, 3, 4), 0.5), rtol=0.07)
