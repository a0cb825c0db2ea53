"""Configurations compared field by field: what changes an answer is said, and what an FP8 export changes is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8q.calibrate.model.architecture import load_config, read_config
from fp8q.validate.pair.document import Cause
from fp8q.validate.pair.served_fields import ConfigFile, config_differences, generation_differences

Change = dict[str, Any]
SIZES: Change = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "intermediate_size": 96,
}
LLAMA: Change = SIZES | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 4, "bos_token_id": 1,
    "eos_token_id": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
YARN: Change = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
GEMMA: Change = SIZES | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 16,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16,
    "sliding_window": 128, "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
GRANITE: Change = SIZES | {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "embedding_multiplier": 12.0,
    "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
}  # fmt: skip
MIXTRAL: Change = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2,
    "num_local_experts": 4, "head_dim": None,
}  # fmt: skip
PHI: Change = SIZES | {
    "architectures": ["PhiForCausalLM"], "model_type": "phi",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
GPT2: Change = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 4,
    "n_positions": 512, "vocab_size": 512, "n_inner": None,
}  # fmt: skip
GEMMA3: Change = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "text_config": SIZES | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 128},
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "image_size": 64, "patch_size": 16,
    },
}  # fmt: skip


def read(folder: Path, fields: Change, generation: Change | None) -> ConfigFile:
    """Write the files of a checkpoint, and read its configuration."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    raw = read_config(folder, str(folder))
    return ConfigFile("config.json", raw, load_config(folder, str(folder), raw)[0])


@pytest.fixture
def differences(tmp_path: Path) -> Callable[..., list[Cause]]:
    """Compare a configuration with one in which some fields are others; a value that is `...` is left out."""

    def compare(
        fields: Change, change: Change, generation: Change | None = None, other: Change | None = None
    ) -> list[Cause]:
        changed = {key: value for key, value in (fields | change).items() if value is not ...}
        paths = tmp_path / "original", tmp_path / "candidate"
        files = read(paths[0], fields, generation), read(paths[1], changed, other)
        return [*config_differences(*files), *generation_differences(*files, paths)]

    return compare


@pytest.mark.parametrize(
    ("fields", "change", "said"),
    [
        (
            LLAMA,
            {"max_position_embeddings": 128},
            (
                "config.json: max_position_embeddings: is 128, and the original has 512: servers take texts of another "
                "length; write the original's value"
            ),
        ),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}},
            (
                "config.json: rope_parameters.factor: is 8.0, and the original has none: positions are "
                "rotated otherwise, beyond these windows too; write the original's value"
            ),
        ),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10500.0}},
            (
                "config.json: rope_parameters.rope_theta: is 10500.0, and the original has 10000.0: positions are "
                "rotated otherwise, beyond these windows too; write the original's value"
            ),
        ),
        (
            LLAMA | {"rope_theta": 10000.0},
            {"rope_theta": 10500.0},
            (
                "config.json: rope_theta: is 10500.0, and the original has 10000.0: positions are "
                "rotated otherwise, beyond these windows too; write the original's value"
            ),
        ),
        (
            LLAMA,
            {"rms_norm_eps": 1e-4},
            (
                "config.json: rms_norm_eps: is 0.0001, and the original has 1e-05: it is computed otherwise; write the "
                "original's value"
            ),
        ),
        (
            LLAMA,
            {"bos_token_id": 77},
            (
                "config.json: bos_token_id: is 77, and the original has 1: texts begin, or answers end, with other "
                "tokens; write the original's value"
            ),
        ),
        (
            LLAMA,
            {"sliding_window": 128},
            (
                "config.json: sliding_window: is 128, and the original has none: attention reaches other positions; "
                "write the original's value"
            ),
        ),
        (
            MIXTRAL,
            {"num_experts_per_tok": 3},
            (
                "config.json: num_experts_per_tok: is 3, and the original has 2: it is computed otherwise; write the "
                "original's value"
            ),
        ),
    ],
)
def test_a_difference_is_said_with_both_values(
    differences: Callable[..., list[Cause]], fields: Change, change: Change, said: str
) -> None:
    causes = differences(fields, change)
    assert said in [str(cause) for cause in causes]
    assert {cause.severity for cause in causes} == {"error"}


@pytest.mark.parametrize(
    ("fields", "change", "field"),
    [
        (GEMMA, {"attn_logit_softcapping": 20.0}, "attn_logit_softcapping"),
        (GEMMA, {"final_logit_softcapping": None}, "final_logit_softcapping"),
        (GEMMA, {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar"),
        (GEMMA, {"sliding_window": 64}, "sliding_window"),
        (GEMMA, {"layer_types": ["full_attention"] * 4}, "layer_types"),
        (GRANITE, {"embedding_multiplier": 11.0}, "embedding_multiplier"),
        (GRANITE, {"logits_scaling": 7.0}, "logits_scaling"),
        (GRANITE, {"residual_multiplier": ...}, "residual_multiplier"),
        (
            PHI,
            {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
            "rope_parameters.partial_rotary_factor",
        ),
        (LLAMA | {"rope_parameters": YARN}, {"rope_parameters": YARN | {"beta_fast": 16}}, "rope_parameters.beta_fast"),
        (
            LLAMA | {"rope_parameters": YARN},
            {"rope_parameters": YARN | {"attention_factor": 2.0}},
            "rope_parameters.attention_factor",
        ),
        (LLAMA, {"tie_word_embeddings": True}, "tie_word_embeddings"),
        (LLAMA, {"eos_token_id": [2, 5]}, "eos_token_id"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (LLAMA, {"architectures": ["MistralForCausalLM"]}, "architectures"),
        (LLAMA, {"model_type": "mistral"}, "model_type"),
        (GPT2, {"n_positions": 256}, "n_positions"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GEMMA3, {"text_config": GEMMA3["text_config"] | {"sliding_window": 64}}, "text_config.sliding_window"),
        (GEMMA3, {"vision_config": GEMMA3["vision_config"] | {"layer_norm_eps": 1e-3}}, "vision_config.layer_norm_eps"),
    ],
)
def test_any_field_that_the_model_is_computed_by_is_an_error(
    differences: Callable[..., list[Cause]], fields: Change, change: Change, field: str
) -> None:
    causes = differences(fields, change)
    assert f"config.json: {field}" in {cause.subject for cause in causes if cause.severity == "error"}


ROPE_APART: Change = {"rope_parameters": ..., "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        (LLAMA, {}),
        (LLAMA, {"quantization_config": {"quant_method": "compressed-tensors"}, "fp8q": {"two_terms": ["a"]}}),
        (LLAMA, {"torch_dtype": "float16", "dtype": ..., "transformers_version": "4.57.1", "_name_or_path": "a/b"}),
        (LLAMA, {"use_cache": False, "pretraining_tp": 2, "attention_dropout": 0.1, "initializer_range": 0.5}),
        (LLAMA, {"pad_token_id": 2, "output_attentions": True, "_attn_implementation": "eager"}),
        (LLAMA, {"eos_token_id": [2]}),
        (LLAMA, ROPE_APART),
        (LLAMA, {"rope_theta": 10000.0}),
        (
            LLAMA | ROPE_APART | {"rope_parameters": None},
            {"rope_theta": ..., "rope_parameters": LLAMA["rope_parameters"]},
        ),
        (LLAMA, {"num_key_value_heads": ..., "head_dim": 16, "attention_bias": False, "mlp_bias": False}),
        (LLAMA, {"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}),
        (LLAMA | {"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
        (
            LLAMA | {"architectures": ["MistralForCausalLM", "LlamaForCausalLM"]},
            {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]},
        ),
        (
            LLAMA | {"rope_parameters": YARN},
            {"rope_parameters": YARN | {"beta_fast": 32, "beta_slow": 1, "type": "yarn"}},
        ),
        (LLAMA, {"rope_scaling": None}),
        (MIXTRAL, {"head_dim": 16}),
        (GPT2, {"n_inner": 256, "max_position_embeddings": 512, "num_key_value_heads": 4}),
        (GEMMA, {"tie_word_embeddings": True}),
        (
            GEMMA3,
            {
                "text_config": GEMMA3["text_config"] | {"dtype": "bfloat16", "num_key_value_heads": 4},
                "dtype": "bfloat16",
            },
        ),
    ],
)
def test_what_an_export_to_fp8_changes_is_no_difference(
    differences: Callable[..., list[Cause]], fields: Change, change: Change
) -> None:
    assert differences(fields, change) == []


def test_a_field_that_no_class_has_is_a_warning(differences: Callable[..., list[Cause]]) -> None:
    (cause,) = differences(LLAMA, {"written_by_somebody": "x"})
    assert (cause.severity, cause.subject) == ("warning", "config.json: written_by_somebody")


IDS = {"bos_token_id": 1, "eos_token_id": 2}
UNSET_THERE = (
    "generation_config.json: {}: is {}, and the original has none: requests that do not set it are answered otherwise; "
    "write the original's value"
)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (
            IDS,
            IDS | {"temperature": 5.0},
            (
                "generation_config.json: temperature: is 5.0, and the original has none: requests that do not set "
                "it are answered otherwise; write the original's value"
            ),
        ),
        (
            IDS | {"temperature": 0.6},
            None,
            (
                "generation_config.json: temperature: is not set, and the original has 0.6: requests that do not set "
                "it are answered otherwise; write the original's value"
            ),
        ),
        *(
            (IDS, IDS | {name: value}, UNSET_THERE.format(name, repr(value)))
            for name, value in {
                "repetition_penalty": 3.0,
                "suppress_tokens": [10, 11],
                "top_p": 0.5,
                "top_k": 3,
                "typical_p": 0.2,
                "min_p": 0.1,
                "no_repeat_ngram_size": 2,
                "forced_bos_token_id": 7,
                "max_new_tokens": 5,
                "do_sample": True,
                "stop_strings": ["a"],
                "num_beams": 4,
            }.items()
        ),
    ],
)
def test_a_default_of_sampling_is_said(
    differences: Callable[..., list[Cause]], ours: Change | None, theirs: Change | None, said: str
) -> None:
    (cause,) = differences(LLAMA, {}, ours, theirs)
    assert str(cause) == said
    assert cause.severity == "error"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (IDS, None),
        (None, IDS | {"_from_model_config": True, "transformers_version": "5.1.0", "use_cache": True}),
        (IDS, IDS | {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "do_sample": False, "repetition_penalty": None}),
        (IDS, IDS | {"pad_token_id": 2, "output_attentions": False, "cache_implementation": None}),
    ],
)
def test_settings_that_are_as_if_unset_are_no_difference(
    differences: Callable[..., list[Cause]], ours: Change | None, theirs: Change | None
) -> None:
    assert differences(LLAMA, {}, ours, theirs) == []
