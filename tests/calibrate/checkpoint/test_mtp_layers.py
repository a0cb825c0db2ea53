"""Which tensors of a checkpoint are of multi-token prediction, by the names that families give them."""

import pytest

from fp8q.calibrate.checkpoint.mtp_layers import mtp_layers, mtp_prefixes, vllm_name

DEEPSEEK = {"num_hidden_layers": 61, "num_nextn_predict_layers": 1}


@pytest.mark.parametrize(
    ("config", "names", "prefixes"),
    [
        (DEEPSEEK, ["model.layers.60.mlp.gate.weight", "model.layers.61.eh_proj.weight"], ["model.layers.61."]),
        (DEEPSEEK | {"num_nextn_predict_layers": 2}, ["layers.61.a", "layers.62.a", "layers.63.a"],
         ["layers.61.", "layers.62."]),
        ({"num_hidden_layers": 61}, ["model.layers.61.eh_proj.weight"], []),
        ({"text_config": DEEPSEEK}, ["model.language_model.layers.61.enorm.weight"],
         ["model.language_model.layers.61."]),
        ({}, ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "lm_head.weight"], ["mtp."]),
        ({}, ["model.mtp.layers.0.mlp.up_proj.weight"], ["model.mtp."]),
        ({}, ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_linear_proj.0.weight"],
         ["model.mtp_block.", "model.mtp_linear_proj."]),
        ({}, ["model.layers.0.mlp.up_proj.weight", "mtp", "model.smtp.weight", "model.mtpx.weight"], []),
    ],
)  # fmt: skip
def test_names(config: dict[str, object], names: list[str], prefixes: list[str]) -> None:
    assert mtp_prefixes(config, names) == tuple(prefixes)


def test_a_count_is_a_number_of_any_of_its_fields() -> None:
    assert mtp_layers(DEEPSEEK) == 1
    assert mtp_layers({"text_config": {"mtp_num_hidden_layers": 2}}) == 2
    assert mtp_layers({"num_nextn_predict_layers": None}) == mtp_layers({"num_mtp_layers": "one"}) == 0


def test_vllm_has_another_name_for_the_block_of_ernie() -> None:
    config = {"num_hidden_layers": 28, "num_nextn_predict_layers": 1}
    assert vllm_name(config, "model.mtp_block.0.self_attn.q_proj") == "model.layers.28.self_attn.q_proj"
    same = ("model.mtp_linear_proj.0", "model.layers.28.mlp.up_proj", "mtp.layers.0.mlp.up_proj")
    assert tuple(vllm_name(config, name) for name in same) == same
    assert vllm_name({}, "model.mtp_block.0.mlp.up_proj") == "model.mtp_block.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("model.layers.44.mlp.up_proj", "model.layers.44.mlp.up_proj"),
        ("model.layers.45.mlp.up_proj.weight", "model.layers.45.mtp_block.mlp.up_proj.weight"),
        ("model.layers.45.self_attn.q_proj", "model.layers.45.mtp_block.self_attn.q_proj"),
        ("model.layers.45.eh_proj.weight", "model.layers.45.eh_proj.weight"),
        ("model.layers.45.shared_head.output", "model.layers.45.shared_head.output"),
    ],
)
def test_vllm_has_the_decoder_layer_of_a_step_draft_in_a_block(name: str, other: str) -> None:
    """vLLM 0.32, `models/step3p5_mtp.py`, `_rewrite_spec_layer_name`."""
    config = {"model_type": "step3p5", "num_hidden_layers": 45, "num_nextn_predict_layers": 3}
    assert vllm_name(config, name) == vllm_name({"text_config": config}, name) == other
    assert vllm_name(config | {"model_type": "glm4_moe"}, name) == name


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("model.mtp.layers.0.eh_proj.weight", "eh_proj.weight"),
        ("model.mtp.layers.0.self_attn.o_proj", "model.layers.56.self_attn.o_proj"),
        ("model.mtp.layers.0.transformer_layer.mlp.up_proj", "model.layers.56.mlp.up_proj"),
        ("model.layers.3.mlps.0.up_proj", "model.layers.3.mlps.0.up_proj"),
    ],
)
def test_vllm_has_longcat_s_draft_after_the_halves_of_its_layers(name: str, other: str) -> None:
    """vLLM 0.32, `models/longcat_flash_mtp.py`, `mtp_start_layer_idx` and `load_weights`."""
    assert vllm_name({"model_type": "longcat_flash", "num_layers": 28}, name) == other
