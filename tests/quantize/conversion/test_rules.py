"""The rule of what is kept, on the names of published architectures."""

from pathlib import Path
from typing import Any

import pytest

from fp8q.calibrate.checkpoint.weights import TensorHeader
from fp8q.core.errors import InputError
from fp8q.quantize.conversion.rules import RULES, Selection, load_rules, select_tensors, stack_split

SIDE = (64, 64)


def headers(*names: str, **others: tuple[int, ...]) -> dict[str, TensorHeader]:
    shapes = dict.fromkeys(names, SIDE) | others
    return {name: TensorHeader(Path("model.safetensors"), "BF16", shape) for name, shape in shapes.items()}


def selected(*names: str, config: dict[str, Any] | None = None, **how: Any) -> Selection:
    return select_tensors(load_rules(), config or {}, headers(*(f"{name}.weight" for name in names)), **how)


#: Of each family, GEMMs that are quantized.
QUANTIZED = (
    "model.layers.0.self_attn.q_proj",  # Llama, Qwen3
    "model.layers.0.self_attn.qkv_proj",  # Phi-3
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.gate_up_proj",
    "model.layers.0.self_attn.kv_a_proj_with_mqa",  # DeepSeek-V3
    "model.layers.0.self_attn.kv_b_proj",
    "model.layers.3.mlp.experts.7.down_proj",
    "model.layers.3.mlp.shared_experts.up_proj",
    "model.layers.0.block_sparse_moe.experts.0.w1",  # Mixtral, MiniMax-M2
    "model.language_model.layers.0.linear_attn.in_proj_qkv",  # Qwen3.5
    "model.language_model.layers.0.linear_attn.in_proj_z",
    "model.language_model.layers.0.linear_attn.out_proj",
    "backbone.layers.0.mixer.in_proj",  # Nemotron-H
    "model.layers.0.conv.in_proj",  # LFM2, whose convolution is conv.conv
    "transformer.h.0.attn.c_attn",  # GPT-BigCode, of linear layers
)
#: Modules that are kept, and the beginning of the reason.
KEPT = {
    "model.embed_tokens": "embedding",
    "model.language_model.embed_tokens_per_layer": "embedding",
    "transformer.wte": "embedding",
    "lm_head": "output head",
    "output": "output head",
    "model.layers.3.mlp.gate": "router",
    "model.layers.3.block_sparse_moe.gate": "router",
    "model.layers.3.mlp.gate.wg": "router",  # Hunyuan
    "model.layers.3.mlp.shared_expert_gate": "router",
    "model.layers.3.feed_forward.router": "router",  # Llama 4
    "model.layers.0.router.proj": "router",  # Gemma 4
    "model.layers.0.linear_attn.in_proj_a": "recurrent gate",
    "model.layers.0.linear_attn.in_proj_b": "recurrent gate",
    "model.layers.0.linear_attn.in_proj_ba": "recurrent gate",  # Qwen3-Next
    "model.layers.0.mamba.dt_proj": "recurrent gate",
    "model.layers.0.mamba.x_proj": "recurrent gate",
    "model.layers.0.self_attn.f_a_proj": "recurrent gate",  # Kimi Linear
    "model.layers.0.self_attn.forget_gate.f_proj": "recurrent gate",  # Bailing's hybrids
    "model.layers.0.conv.conv": "convolution",
    "model.layers.0.self_attn.indexer.wq_b": "indexer",  # DeepSeek-V3.2, GLM-5
    "model.visual.blocks.0.attn.qkv": "tower",
    "vision_tower.encoder.layers.0.mlp.fc1": "tower",
    "model.audio_tower.layers.0.fc1": "tower",
    "multi_modal_projector.linear_1": "tower",
}


def test_products_are_quantized_and_the_rest_kept_with_its_reason() -> None:
    found = selected(*QUANTIZED, *KEPT)
    assert [name.removesuffix(".weight") for name in found.matrices] == list(QUANTIZED)
    assert {
        name.removesuffix(".weight"): reason.partition(":")[0] for name, reason in found.unquantized.items()
    } == KEPT


def test_layers_of_multi_token_prediction_are_kept_unless_asked_for() -> None:
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    names = ("model.layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj", "mtp.layers.0.mlp.up_proj")
    assert selected(*names, config=config).matrices == ("model.layers.1.mlp.up_proj.weight",)
    assert len(selected(*names, config=config, mtp=True).matrices) == 3


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("model.layers.2.eh_proj", "input of a draft"),  # DeepSeek-V3, GLM-4.5
        ("model.layers.2.shared_head.head", "output head"),
        ("model.layers.2.embed_tokens", "embedding"),
        ("model.mtp_linear_proj.0", "input of a draft"),  # ERNIE 4.5
        ("mtp.fc", "input of a draft"),  # Qwen3-Next, Qwen3.5
        ("model.mtp_layers.0.input_proj", "input of a draft"),  # MiMo
    ],
)
def test_what_servers_read_of_a_draft_in_bf16_alone_is_kept(module: str, reason: str) -> None:
    """vLLM or SGLang makes plain layers of these, without a place for scales, and accepts codes as values."""
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    found = selected("model.layers.2.mlp.up_proj", module, config=config, mtp=True)
    assert found.matrices == ("model.layers.2.mlp.up_proj.weight",)
    assert found.unquantized[f"{module}.weight"].partition(":")[0] == reason


def test_conv1d_modules_are_kept_by_the_type_of_the_model() -> None:
    names = ("transformer.h.0.attn.c_attn", "transformer.h.0.new_proj")
    found = selected(*names, config={"model_type": "gpt2"})
    assert found.matrices == ("transformer.h.0.new_proj.weight",)
    assert "Conv1D" in found.unquantized["transformer.h.0.attn.c_attn.weight"]


def test_what_is_no_matrix_of_a_module_is_not_looked_at() -> None:
    tensors = headers(
        "model.layers.0.up_proj.weight",
        "model.layers.0.mixer.A_log",
        **{"model.layers.0.conv1d.weight": (64, 1, 4), "model.layers.0.norm.weight": (64,)},
    )
    found = select_tensors(load_rules(), {}, tensors)
    assert (found.matrices, dict(found.unquantized)) == (("model.layers.0.up_proj.weight",), {})


def test_a_pattern_adds_to_the_rule_and_must_match() -> None:
    found = selected("a.up_proj", "b.up_proj", skip=("b.*",))
    assert (found.matrices, dict(found.unquantized)) == (
        ("a.up_proj.weight",),
        {"b.up_proj.weight": "stays in BF16 (--skip b.*)"},
    )
    with pytest.raises(InputError, match=r"^--skip c\.\*: matches no matrix of the checkpoint; "):
        selected("a.up_proj", skip=("c.*",))
    with pytest.raises(InputError, match="^all 1 matrices of the checkpoint stay as they are"):
        selected("a.up_proj", skip=("*",))


def test_a_small_side_is_kept() -> None:
    tensors = headers("a.up_proj.weight", **{"b.up_proj.weight": (8, 64)})
    found = select_tensors(load_rules(), {}, tensors)
    assert found.unquantized == {"b.up_proj.weight": "a side of 8, smaller than 16"}


def test_another_rule_takes_the_place_of_the_packages(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('[[keep]]\nreason = "mine"\nends = ["up_proj"]\n', encoding="utf-8")
    found = select_tensors(load_rules(file), {}, headers("a.up_proj.weight", "lm_head.weight"))
    assert (found.matrices, dict(found.unquantized)) == (("lm_head.weight",), {"a.up_proj.weight": "mine"})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("keep = 3", "keep"),
        ("[[keep]]\nends = ['a']", "keep.0.reason"),
        ("[[keep]]\nreason = 'a'\nend = ['a']", "keep.0.end"),
        ("x = [", "is no TOML"),
    ],
)
def test_a_rule_that_does_not_read_names_the_field(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as refused:
        load_rules(file)
    assert str(refused.value).startswith(f"{file}: {told}")


def test_stacks_are_split_where_their_rows_are_outputs() -> None:
    rules, config = load_rules(), {"model_type": "qwen3_5_moe", "text_config": {"hidden_size": 64}}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert stack_split(rules, config, name, (4, 96, 64)) == ("gate_proj", "up_proj")
    assert stack_split(rules, config, name.replace("gate_up", "down"), (4, 64, 48)) == ("down_proj",)
    turned = "a stack of experts stored [experts, in, out]"
    assert stack_split(rules, config, name, (4, 64, 96)) == turned
    assert stack_split(rules, config, name.replace("gate_up", "down"), (4, 48, 64)) == turned
    assert stack_split(rules, {"hidden_size": 64, "model_type": "llama4"}, name, (4, 64, 64)) == turned
    told = "a stack of experts whose projections alternate, row by row"
    assert stack_split(rules, {"hidden_size": 64, "model_type": "gpt_oss"}, name, (4, 96, 64)) == told


def test_the_rule_of_the_package_says_a_reason_of_each_entry() -> None:
    assert RULES.name == "rules.toml"
    assert all(each.reason for each in load_rules().keep)
