"""The rule of what is quantized where no class says so, and of what is kept, on names of published architectures."""

from pathlib import Path
from typing import Any

import pytest

from fp8q.core.errors import InputError
from fp8q.quantize.conversion.name_tensors import NamedTensors
from fp8q.quantize.conversion.rules import RULES, load_rules
from fp8q.quantize.conversion.selection import Selection, expert_block, select_tensors

from .families import headers

SIDE = (64, 64)
#: No class of transformers; matrices of `SIDE` are as wide as the model.
NAMELESS = {"model_type": "new_model", "hidden_size": 64, "vocab_size": 256, "kv_lora_rank": 64}


def selected(*names: str, config: dict[str, Any] | None = None, **how: Any) -> Selection:
    shapes = {f"{name}.weight": SIDE for name in names}
    return select_tensors(load_rules(), NAMELESS | (config or {}), headers(shapes), **how)


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
    "transformer.blocks.0.norm_attn_norm.attn.Wqkv",  # DBRX, whose attention is in a module called a norm
    "encoder.block.0.layer.0.SelfAttention.q",  # T5
    "blocks.0.att.key",  # RWKV
)
#: Modules that are kept, and the beginning of the reason.
KEPT = {
    "model.embed_tokens": "embedding",
    "model.language_model.embed_tokens_per_layer": "embedding",
    "transformer.wte": "embedding",
    "transformer.wpe": "embedding",
    "shared": "embedding",  # T5, BART
    "emb": "embedding",  # RWKV
    "vte": "embedding",  # Ovis
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": "embedding",
    "lm_head": "output head",
    "output": "output head",
    "fc": "input of a draft",  # EAGLE
    "model.embed_proj": "outside of the layers",
    "model.layers.0.mlp.mystery": "not known to be a linear layer, by its name and its shape",
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
    names = ("transformer.h.0.attn.c_attn", "transformer.h.0.q_proj")
    found = selected(*names, config={"model_type": "gpt2", "architectures": ["NewModel"]})
    assert found.matrices == ("transformer.h.0.q_proj.weight",)
    assert "Conv1D" in found.unquantized["transformer.h.0.attn.c_attn.weight"]


def test_what_is_no_matrix_of_a_module_is_not_looked_at() -> None:
    shapes = {
        "model.layers.0.up_proj.weight": SIDE, "model.layers.0.mixer.A_log": SIDE,
        "model.layers.0.conv1d.weight": (64, 1, 4), "model.layers.0.norm.weight": (64,),
    }  # fmt: skip
    found = select_tensors(load_rules(), NAMELESS, headers(shapes))
    assert (found.matrices, dict(found.unquantized)) == (("model.layers.0.up_proj.weight",), {})


@pytest.mark.parametrize("dtype", ["F64", "I64", "I8", "BOOL"])
def test_matrices_of_other_types_are_listed_and_declared(dtype: str) -> None:
    tensors = headers({"layers.0.up_proj.weight": SIDE}) | headers({"layers.0.down_proj.weight": SIDE}, dtype)
    found = select_tensors(load_rules(), NAMELESS, tensors)
    assert found.unquantized == {"layers.0.down_proj.weight": f"stored as {dtype}, which is not quantized"}
    assert found.declared == {"layers.0.down_proj"}


def test_what_has_the_vocabularys_rows_is_never_quantized() -> None:
    shapes = {"layers.0.q_proj.weight": SIDE, "q_proj.weight": (256, 64), "tokens_table.weight": (256, 64)}
    found = select_tensors(load_rules(), NAMELESS, headers(shapes))
    assert found.matrices == ("layers.0.q_proj.weight",)
    reason = "output head or embedding: it has the vocabulary's 256 rows"
    assert found.unquantized == dict.fromkeys(("q_proj.weight", "tokens_table.weight"), reason)
    assert found.declared == {"q_proj", "tokens_table"}


def test_a_linear_layers_name_is_not_enough_without_its_shape() -> None:
    shapes = {
        "layers.0.q_proj.weight": (96, 64), "layers.0.o_proj.weight": (64, 96), "layers.0.kv_b_proj.weight": (160, 64),
        "layers.0.down_proj.weight": (96, 96), "layers.0.k_proj.weight": (64, 32), "layers.0.q_b_proj.weight": (64, 80),
    }  # fmt: skip
    found = select_tensors(load_rules(), NAMELESS, headers(shapes))
    assert found.matrices == tuple(f"layers.0.{name}_proj.weight" for name in ("q", "o", "kv_b"))


def test_a_square_weight_has_the_axes_that_others_of_its_layer_show() -> None:
    shapes = {f"layers.{layer}.attn.c_proj.weight": SIDE for layer in (0, 1)}
    shapes |= {"layers.0.attn.c_attn.weight": (64, 192), "layers.1.attn.c_attn.weight": (192, 64)}
    found = select_tensors(load_rules(), NAMELESS, headers(shapes))
    assert found.matrices == ("layers.1.attn.c_proj.weight", "layers.1.attn.c_attn.weight")
    reason = "square, and layers.0.attn.c_attn of its layer is stored [in, out]"
    assert found.unquantized["layers.0.attn.c_proj.weight"] == reason


def test_the_width_is_that_of_the_embedding_where_config_json_has_none() -> None:
    shapes = {"layers.0.q_proj.weight": SIDE, "embed_tokens.weight": (300, 64)}
    found = select_tensors(load_rules(), {"model_type": "new_model"}, headers(shapes))
    assert found.matrices == ("layers.0.q_proj.weight",)


@pytest.mark.parametrize(
    ("tensors", "block"),
    [
        # Granite, Step-3.5 and Aria, as their files have them
        ({"block_sparse_moe.input_linear.weight": (4, 256, 64), "block_sparse_moe.output_linear.weight": (4, 64, 128)},
         "block_sparse_moe.experts"),
        ({"moe.gate_proj.weight": (4, 128, 64), "moe.down_proj.weight": (4, 64, 128)}, "moe.experts"),
        ({"mlp.experts.fc1.weight": (4, 64, 256), "mlp.experts.fc2.weight": (4, 128, 64)}, "mlp.experts"),
        # DBRX: all experts in one matrix, without `.weight`
        ({"ffn.experts.mlp.w1": (512, 64)}, "ffn.experts"),
    ],
)  # fmt: skip
def test_kept_stacks_are_listed_and_declared_under_vllms_names(tensors: dict[str, tuple[int, ...]], block: str) -> None:
    shapes = {f"model.layers.0.{name}": shape for name, shape in tensors.items()}
    found = select_tensors(load_rules(), NAMELESS, headers(shapes | {"model.layers.0.q_proj.weight": SIDE}))
    assert list(found.unquantized) == list(shapes)
    declared = {f"model.layers.0.{block}.0.{part}" for part in ("gate_proj", "up_proj", "down_proj")}
    assert declared | {name.removesuffix(".weight") for name in shapes} <= found.declared


def test_experts_are_called_as_vllm_calls_them() -> None:
    assert expert_block("model.layers.0.mlp.experts.3.w1.weight") == "model.layers.0.mlp.experts"
    assert expert_block("model.layers.0.moe.gate_proj.weight") == "model.layers.0.moe.experts"


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
    found = select_tensors(load_rules(), NAMELESS, headers({"a.up_proj.weight": SIDE, "b.up_proj.weight": (8, 64)}))
    assert found.unquantized == {"b.up_proj.weight": "a side of 8, smaller than 16"}


def test_another_rule_takes_the_place_of_the_packages(tmp_path: Path) -> None:
    """Of linear layers and stacks it takes what the package knows, unless it has its own."""
    file = tmp_path / "rules.toml"
    file.write_text('[[keep]]\nreason = "mine"\nends = ["up_proj"]\n', encoding="utf-8")
    shapes = {"a.up_proj.weight": SIDE, "a.gate.weight": SIDE, "a.q_proj.weight": SIDE}
    found = select_tensors(load_rules(file), NAMELESS, headers(shapes))
    assert found.matrices == ("a.q_proj.weight",)
    assert found.unquantized["a.up_proj.weight"] == "mine"
    with open(file, "a", encoding="utf-8") as more:
        more.write('[[linear]]\nwidth = "in"\nends = ["gate"]\n')
    assert select_tensors(load_rules(file), NAMELESS, headers(shapes)).matrices == ("a.gate.weight",)


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


def stacked(up: tuple[int, ...], down: tuple[int, ...], **config: Any) -> list[tuple[str, ...] | str]:
    """What names tell of two stacks of a layer, gate and up first."""
    start = "model.layers.0.mlp.experts"
    tensors = headers({f"{start}.gate_up_proj": up, f"{start}.down_proj": down})
    named = NamedTensors(load_rules(), {"hidden_size": 64} | config, tensors)
    return [named.stack(name) for name in tensors]


def test_stacks_are_split_where_their_rows_are_outputs() -> None:
    turned, split = "a stack of experts stored [experts, in, out]", [("gate_proj", "up_proj"), ("down_proj",)]
    assert stacked((4, 96, 64), (4, 64, 48)) == split
    assert stacked((4, 64, 96), (4, 48, 64)) == [turned, turned]
    assert stacked((4, 64, 64), (4, 64, 32)) == split  # the other stack shows the axes
    assert stacked((4, 64, 64), (4, 32, 64)) == [turned, turned]
    assert stacked((4, 64, 64), (4, 64, 64)) == ["a stack of experts whose axes no size tells"] * 2
    alternating = "a stack of experts whose projections alternate, row by row"
    assert stacked((4, 96, 64), (4, 64, 48), model_type="gpt_oss")[0] == alternating


def test_stacks_of_a_layer_are_cut_together_or_not_at_all() -> None:
    start = "model.layers.0.mlp.experts"
    shapes = {f"{start}.gate_up_proj": (4, 96, 64), f"{start}.down_proj": (4, 64, 8), "q_proj.weight": SIDE}
    found = select_tensors(load_rules(), NAMELESS, headers(shapes))
    assert not found.stacks
    assert found.unquantized == {
        f"{start}.down_proj": "a side of 8, smaller than 16",
        f"{start}.gate_up_proj": "a stack of experts of a layer whose other stack is kept",
    }


def test_the_rule_of_the_package_says_a_reason_of_each_entry() -> None:
    assert RULES.name == "rules.toml"
    assert all(each.reason for each in load_rules().keep)
