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
