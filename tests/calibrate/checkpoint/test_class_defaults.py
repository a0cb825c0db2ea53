"""Fields that config.json leaves out are its class's defaults: by hand, and as transformers' own classes have them."""

import json
from typing import Any

import pytest
from class_defaults import declared_types
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fp8q.calibrate.checkpoint import class_defaults
from fp8q.calibrate.checkpoint.class_defaults import (
    FIELDS,
    TABLE,
    config_field,
    declared_fields,
    ties_embeddings,
)
from fp8q.calibrate.model.architecture import max_positions

TABLED: dict[str, Any] = json.loads(TABLE.read_bytes())
BIG_BIRD = {"model_type": "bigbird_pegasus"}


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        ({"model_type": "gemma"}, "tie_word_embeddings", True),
        ({"model_type": "llama"}, "tie_word_embeddings", False),
        ({"model_type": "gemma", "tie_word_embeddings": False}, "tie_word_embeddings", False),
        ({"model_type": "gemma", "hidden_size": 64, "num_attention_heads": 4}, "head_dim", 256),
        ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}, "head_dim", 16),
        ({"model_type": "qwen3_next", "hidden_size": 64, "num_attention_heads": 4}, "num_key_value_heads", 2),
        ({"model_type": "llama", "num_attention_heads": 4}, "num_key_value_heads", 4),
        ({"model_type": "mixtral", "num_attention_heads": 4}, "num_key_value_heads", 8),
        ({"model_type": "mixtral", "num_attention_heads": 4, "num_key_value_heads": None}, "num_key_value_heads", 4),
        ({"model_type": "gpt2"}, "max_position_embeddings", 1024),
        ({"model_type": "gpt2", "n_positions": 64}, "max_position_embeddings", 64),
        ({"model_type": "gpt2", "n_head": 3, "n_embd": 48}, "head_dim", 16),
        ({"model_type": "bloom"}, "max_position_embeddings", None),
        ({"model_type": "gemma3", "text_config": {"num_attention_heads": 2}}, "head_dim", 256),
        ({"model_type": "gemma3", "text_config": {"head_dim": 32}, "head_dim": 8}, "head_dim", 32),
        # latent attention: its heads are of several sizes
        ({"model_type": "deepseek_v3", "num_attention_heads": 4, "hidden_size": 64}, "head_dim", None),
        ({"model_type": "glm4_moe"}, "num_nextn_predict_layers", 1),
        ({"model_type": "none of these", "vocab_size": 7}, "vocab_size", 7),
        ({"model_type": "none of these"}, "vocab_size", None),
        ({"model_type": ["llama"]}, "vocab_size", None),
        ({}, "tie_word_embeddings", None),
        ({"num_attention_heads": 0, "hidden_size": 8}, "head_dim", None),
    ],
)
def test_a_field_is_what_is_stated_or_the_default_of_the_class(config: dict[str, Any], name: str, value: Any) -> None:
    assert config_field(config, name) == value


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"model_type": "gemma2"}, True),
        ({"model_type": "qwen2"}, False),
        ({"model_type": "gemma3", "text_config": {}}, True),
        ({"model_type": "gemma3", "text_config": {"tie_word_embeddings": False}}, False),
        ({"model_type": "qwen3_vl", "text_config": {"tie_word_embeddings": True}}, True),
        # Mistral 3 ties by its own class, and not by its language model's: vLLM makes that alone
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}}, False),
        ({}, False),
        # transformers' class names no tied weights, and the other of its type does
        ({"architectures": ["BigBirdPegasusForCausalLM"], "tie_word_embeddings": True} | BIG_BIRD, False),
        ({"architectures": ["BigBirdPegasusForConditionalGeneration"]} | BIG_BIRD, True),
        ({"architectures": "BigBirdPegasusForCausalLM"} | BIG_BIRD, True),
    ],
)
def test_a_head_is_tied_as_stated_or_where_every_class_of_it_ties(config: dict[str, Any], tied: bool) -> None:
    assert ties_embeddings(config) == tied


def test_the_table_is_that_of_the_installed_transformers() -> None:
    assert declared_types() == TABLED, "python benchmarks/class_defaults.py --write"
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() <= TABLED.keys()


@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_an_empty_file_gives_what_transformers_makes_of_it(kind: str) -> None:
    try:
        made = CONFIG_MAPPING[kind]()
        text = made.get_text_config()
    except Exception as error:  # noqa: BLE001 - of a class that wants a field, or a library that is not here
        pytest.skip(f"makes no configuration of nothing: {error}")
    if text is not made or made.is_encoder_decoder:
        pytest.skip("its language model is a part of it")
    held = vars(made)
    for name in FIELDS:
        under = made.attribute_map.get(name, name)
        value = config_field({"model_type": kind}, name)
        unknown = value is None and name in ("head_dim", "num_key_value_heads")
        if held.get(under) is not None and not unknown:
            assert value == held[under], name


def test_a_type_that_the_table_does_not_know_is_asked_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    declared_fields.cache_clear()
    monkeypatch.setattr(class_defaults, "_table", dict)
    assert ties_embeddings({"model_type": "gemma"})
    declared_fields.cache_clear()
    monkeypatch.setattr(class_defaults, "find_spec", lambda name: None)
    assert not ties_embeddings({"model_type": "gemma"})
    declared_fields.cache_clear()


def test_positions_that_are_left_out_are_the_classes() -> None:
    assert max_positions({"model_type": "gemma"}) == 8192
    assert max_positions({"model_type": "gpt2", "n_positions": 128}) == 128
    assert max_positions({"model_type": "bloom"}) is None
