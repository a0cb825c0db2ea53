"""Attention outside transformers' interface, replaced in the graph: what transformers computes itself is the oracle."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig, LlamaConfig, PreTrainedModel

from fp8q.calibrate.model.gemms import cache_shapes
from fp8q.export.modules.replaced_attention import alibi_slopes, bias, replace, replaceable, restore

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def unseen() -> ModuleType:
    return importlib.import_module("unseen_architectures")


@pytest.mark.parametrize(
    "config",
    [
        "BloomConfig",
        "BloomConfig-6",
        "FalconConfig",
        "FalconConfig-alibi",
        "FalconConfig-new",
        "GPTJConfig",
        "CodeGenConfig",
    ],
)
def test_the_graph_says_what_transformers_says(config: str, unseen: ModuleType, tmp_path: Path) -> None:
    """Every position of a prompt, and of twenty decoded from a buffer."""
    assert unseen.graph_alone(config, tmp_path)["graph_difference"] < unseen.LIMIT


def added(config: object, keys: list[int]) -> torch.Tensor | None:
    """What is added to the scores of keys at these positions."""
    model = model_of(config)
    return bias(model, alibi_slopes(model), torch.tensor([keys]))


def model_of(config: object) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


def test_alibi_is_the_slope_times_the_keys_position() -> None:
    """Four heads: a quarter, and each next a quarter of that (Press, Smith and Lewis 2022, section 3)."""
    found = added(BloomConfig(**SMALL), [0, 1, 2, 7])
    assert found is not None
    assert torch.equal(
        found[0, :, 0], torch.tensor([[0, 1, 2, 7]]) * torch.tensor([[4**-1], [4**-2], [4**-3], [4**-4]])
    )


def test_falcons_alibi_is_rounded_to_bf16_and_scaled() -> None:
    """Position 257 has nine bits, and is 256 or 258 there."""
    found = added(FalconConfig(**SMALL, alibi=True), [256, 257, 259])
    assert found is not None
    assert found[0, 0, 0].tolist() == [16.0, 16.0, 16.25]


@pytest.mark.parametrize("config", [FalconConfig(**SMALL), LlamaConfig(**SMALL, intermediate_size=64)])
def test_without_alibi_nothing_is_added(config: object) -> None:
    assert added(config, [0, 1]) is None


def test_what_was_replaced_is_restored() -> None:
    model, ids = model_of(BloomConfig(**SMALL)), torch.arange(5)[None]
    before, name = model(input_ids=ids).logits, model.config._attn_implementation
    assert replaceable(model)
    replace(model, "fp8q")
    assert model.config._attn_implementation == "fp8q"
    restore(model, name)
    assert model.config._attn_implementation == name
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"multi_query": True}, 1),
        ({"multi_query": False}, 4),
    ],
    ids=["shared", "one", "all"],
)
def test_falcons_cache_has_each_key_head_once(fields: dict[str, Any], heads: int) -> None:
    """transformers writes those that are shared once for each query head."""
    assert cache_shapes(FalconConfig(**SMALL, **fields)) == ((heads, 16), (heads, 16))
