"""What a class of transformers says of a checkpoint's tensors: exact lists, for a dozen families."""

from typing import Any

import pytest

from fp8q.core.errors import InputError
from fp8q.quantize.conversion.model_class import NoClassError, class_model
from fp8q.quantize.conversion.rules import load_rules
from fp8q.quantize.conversion.selection import Selection, select_tensors

from .families import FAMILIES, SMALL, configuration, family_headers, headers


def selected(family: str, **how: Any) -> Selection:
    found = select_tensors(load_rules(), configuration(family), family_headers(family), **how)
    assert found.decided_by.startswith(f"{family} of transformers ")
    return found


def under(start: str, *ends: str) -> list[str]:
    return [f"{start}.{end}" for end in ends]


def modules(names: Any) -> list[str]:
    return sorted(name.removesuffix(".weight") for name in names)


ATTENTION = ("self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj")
OUT = ("self_attn.k_proj", "self_attn.out_proj", "self_attn.q_proj", "self_attn.v_proj")
CROSS = tuple(name.replace("self_attn", "encoder_attn") for name in OUT)
BERT = (
    "attention.output.dense", "attention.self.key", "attention.self.query", "attention.self.value",
    "intermediate.dense", "output.dense",
)  # fmt: skip
SEQ2SEQ = [
    *under("model.decoder.layers.0", *CROSS, "fc1", "fc2", *OUT),
    *under("model.encoder.layers.0", "fc1", "fc2", *OUT),
]
#: Family -> the modules in codes, but for single experts, and those that are declared.
EXPECTED: dict[str, tuple[list[str], list[str]]] = {
    "LlamaForCausalLM": (
        under("model.layers.0", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", *ATTENTION),
        ["lm_head"],
    ),
    "T5ForConditionalGeneration": (
        [
            *under("decoder.block.0.layer.0.SelfAttention", "k", "o", "q", "v"),
            *under("decoder.block.0.layer.1.EncDecAttention", "k", "o", "q", "v"),
            *under("decoder.block.0.layer.2.DenseReluDense", "wi", "wo"),
            *under("encoder.block.0.layer.0.SelfAttention", "k", "o", "q", "v"),
            *under("encoder.block.0.layer.1.DenseReluDense", "wi", "wo"),
        ],
        ["lm_head"],
    ),
    "BartForConditionalGeneration": (SEQ2SEQ, ["lm_head"]),
    "WhisperForConditionalGeneration": (SEQ2SEQ, ["proj_out"]),
    "ModernBertDecoderForCausalLM": (
        under("model.layers.0", "attn.Wo", "attn.k_proj", "attn.q_proj", "attn.v_proj", "mlp.Wi", "mlp.Wo"),
        ["decoder", "lm_head.dense"],
    ),
    "BertLMHeadModel": (
        under("bert.encoder.layer.0", *BERT),
        ["cls.predictions.decoder", "cls.predictions.transform.dense"],
    ),
    "RoFormerForCausalLM": (
        under("roformer.encoder.layer.0", *BERT),
        ["cls.predictions.decoder", "cls.predictions.transform.dense", "roformer.embeddings_project"],
    ),
    "CTRLLMHeadModel": (
        under(
            "transformer.h.0", "ffn.0", "ffn.2", "multi_head_attention.Wk", "multi_head_attention.Wq",
            "multi_head_attention.Wv", "multi_head_attention.dense",
        ),
        ["lm_head"],
    ),
    "OPTForCausalLM": (
        under("model.decoder.layers.0", "fc1", "fc2", *OUT),
        ["lm_head", "model.decoder.project_in", "model.decoder.project_out"],
    ),
    "GraniteMoeForCausalLM": (
        under("model.layers.0", *ATTENTION),
        [
            "lm_head",
            *under(
                "model.layers.0.block_sparse_moe", "experts", "experts.0.down_proj", "experts.0.gate_proj",
                "experts.0.up_proj", "experts.down_proj", "experts.gate_up_proj", "router",
            ),
        ],
    ),
    "GptOssForCausalLM": (
        under("model.layers.0", *ATTENTION),
        [
            "lm_head",
            *under(
                "model.layers.0.mlp", "experts", "experts.0.down_proj", "experts.0.gate_proj", "experts.0.up_proj",
                "experts.down_proj", "experts.gate_up_proj", "router",
            ),
        ],
    ),
    "Llama4ForCausalLM": (
        [
            *under("model.layers.0.feed_forward.shared_expert", "down_proj", "gate_proj", "up_proj"),
            *under("model.layers.0", *ATTENTION),
        ],
        ["lm_head", "model.layers.0.feed_forward.router"],
    ),
    "DbrxForCausalLM": (
        under("transformer.blocks.0.norm_attn_norm.attn", "Wqkv", "out_proj"),
        [
            "lm_head",
            *under(
                "transformer.blocks.0.ffn", "experts.0.down_proj", "experts.0.gate_proj", "experts.0.up_proj",
                "experts.mlp.v1", "experts.mlp.w1", "experts.mlp.w2", "router.layer",
            ),
        ],
    ),
    "Qwen3MoeForCausalLM": (under("model.layers.0", *ATTENTION), ["lm_head", "model.layers.0.mlp.gate"]),
    "RwkvForCausalLM": (
        [
            *under("rwkv.blocks.0.attention", "key", "output", "receptance", "value"),
            *under("rwkv.blocks.0.feed_forward", "key", "receptance", "value"),
        ],
        ["head"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_layers_of_the_class_are_coded_and_all_others_declared(family: str) -> None:
    found = selected(family)
    coded, declared = EXPECTED[family]
    assert modules(found.matrices) == coded
    assert sorted(found.declared) == declared


def test_an_embedding_to_which_the_head_is_tied_is_kept_for_the_sake_of_the_logits() -> None:
    tied, alone = (
        selected(family).unquantized["model.embed_tokens.weight"]
        for family in ("LlamaForCausalLM", "GptOssForCausalLM")
    )
    assert tied == "embedding: the output head is tied to it, and its error would go straight into the logits"
    assert alone == "embedding: its rows are read one by one, and multiplied by nothing"


def test_experts_are_cut_where_transformers_reads_them_apart() -> None:
    experts = "model.layers.0.mlp.experts"
    found = selected("Qwen3MoeForCausalLM").stacks
    assert found.keys() == {f"{experts}.gate_up_proj", f"{experts}.down_proj"}
    pairs = [f"{experts}.{number}.{part}" for number in range(4) for part in ("gate_proj", "up_proj")]
    assert list(found[f"{experts}.gate_up_proj"].modules) == pairs
    assert not found[f"{experts}.gate_up_proj"].turned


def test_experts_that_transformers_replaces_by_modules_are_cut_and_turned() -> None:
    """transformers makes modules of Llama 4's experts where a checkpoint is quantized: a stack would not load."""
    found = selected("Llama4ForCausalLM").stacks["model.layers.0.feed_forward.experts.down_proj"]
    assert found.turned
    assert list(found.modules) == [f"model.layers.0.feed_forward.experts.{number}.down_proj" for number in range(4)]


def test_files_with_single_experts_are_read_by_the_names_of_files() -> None:
    config = SMALL | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2}
    block = "model.layers.0.block_sparse_moe"
    shapes = {"w1": (96, 64), "w2": (64, 96), "w3": (96, 64)}
    stored = {f"{block}.experts.{number}.{part}.weight": shape for number in (0, 1) for part, shape in shapes.items()}
    found = select_tensors(load_rules(), config, headers(stored | {f"{block}.gate.weight": (2, 64)}))
    assert found.matrices == tuple(stored)
    assert f"{block}.gate" in found.declared
    whole = {
        "model.layers.0.mlp.experts.gate_up_proj": (2, 192, 64),
        "model.layers.0.mlp.experts.down_proj": (2, 64, 96),
    }
    cut = select_tensors(load_rules(), config, headers(whole | {"model.layers.0.mlp.gate.weight": (2, 64)}))
    assert cut.stacks["model.layers.0.mlp.experts.gate_up_proj"].modules[:2] == tuple(
        f"{block}.experts.0.{part}" for part in ("w1", "w3")
    )
    assert {f"{block}.gate", "model.layers.0.mlp.gate"} <= cut.declared
    assert cut.renamed == {"model.layers.0.mlp.gate.weight": f"{block}.gate.weight"}


def test_single_experts_that_are_kept_are_declared_under_vllms_names() -> None:
    config = SMALL | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 1}
    block = "model.layers.0.block_sparse_moe.experts"
    shapes = {f"{block}.0.{part}.weight": (96, 64) for part in ("w1", "w3")} | {f"{block}.0.w2.weight": (64, 96)}
    attention = {"model.layers.0.self_attn.q_proj.weight": (64, 64)}
    found = select_tensors(load_rules(), config, headers(shapes | attention), skip=("*.experts.*",))
    assert {f"{block}.0.{part}" for part in ("w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")} <= found.declared


def test_a_model_of_conv1d_alone_is_refused() -> None:
    config = {
        "model_type": "openai-gpt",
        "architectures": ["OpenAIGPTLMHeadModel"],
        "n_embd": 64,
        "n_layer": 1,
        "n_head": 4,
    }
    shapes = {"tokens_embed.weight": (256, 64), "h.0.attn.c_attn.weight": (64, 192), "h.0.mlp.c_fc.weight": (64, 256)}
    with pytest.raises(InputError, match="^all 3 matrices of the checkpoint stay as they are"):
        select_tensors(load_rules(), config | {"vocab_size": 256}, headers(shapes))


def test_a_shape_that_is_not_the_classs_leaves_it_to_the_name() -> None:
    shapes = {"model.layers.0.self_attn.q_proj.weight": (128, 64), "model.layers.0.self_attn.k_proj.weight": (64, 128)}
    config = configuration("LlamaForCausalLM")
    found = select_tensors(load_rules(), config, headers(shapes))
    assert found.matrices == ("model.layers.0.self_attn.q_proj.weight",)
    reason = "not known to be a linear layer, by its name and its shape"
    assert found.unquantized == {"model.layers.0.self_attn.k_proj.weight": reason}


def test_a_class_whose_weights_are_cut_when_it_is_loaded_says_that_it_cannot_be() -> None:
    config = SMALL | {
        "model_type": "hrm_text", "architectures": ["HrmTextForCausalLM"], "head_dim": 16, "num_key_value_heads": 4,
        "num_layers_per_stack": 1,
    }  # fmt: skip
    layer = "model.H_module.layers.0"
    shapes = {f"{layer}.mlp.gate_up_proj.weight": (192, 64), f"{layer}.mlp.down_proj.weight": (64, 96)}
    found = select_tensors(load_rules(), config, headers(shapes))
    assert found.matrices == (f"{layer}.mlp.down_proj.weight",)
    assert found.unloadable == (
        f"{found.decided_by} loads no FP8 checkpoint, whatever is quantized: it makes mlp.gate_proj.weight and "
        "mlp.up_proj.weight of mlp.gate_up_proj.weight, and its quantizers take no such conversion; servers with a "
        "class of their own do not ask it"
    )
    assert selected("LlamaForCausalLM").unloadable is None


def test_a_class_whose_experts_are_divided_among_two_modules_says_that_it_cannot_be_loaded() -> None:
    """transformers' quantizers ask the conversion of ERNIE 4.5 VL's experts for scales that no file has."""
    config = {
        "model_type": "ernie4_5_vl_moe", "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
        "text_config": SMALL | {"model_type": "ernie4_5_vl_moe_text", "moe_num_experts": 2, "moe_k": 1,
                                "moe_intermediate_size": [96, 64], "mlp_layer_types": ["sparse"],
                                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                    "mrope_section": [3, 3, 2]}},
    }  # fmt: skip
    expert = "model.layers.0.mlp.experts.0"
    shapes = {f"{expert}.gate_proj.weight": (96, 64), f"{expert}.down_proj.weight": (64, 96)}
    found = select_tensors(load_rules(), config, headers(shapes))
    assert found.matrices == tuple(shapes)
    assert "it makes text_moe.experts.down_proj and vision_moe.experts.down_proj of experts.*.down_proj.weight" in str(
        found.unloadable
    )


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "has no class LlamaForCausalLMEagle3"),
        ({"model_type": "new_model"}, "has no class for new_model"),
        (
            {"model_type": "llama", "architectures": ["T5ForConditionalGeneration"]},
            "is no class for the model_type llama",
        ),
        (
            {"model_type": "llama", "num_hidden_layers": 10**8},
            "num_hidden_layers is 100,000,000, and the weights hold 1 ",
        ),
        (
            {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 0},
            "LlamaForCausalLM cannot be made of it: ",
        ),
    ],
)
def test_where_there_is_no_class_the_reason_says_so(config: dict[str, Any], why: str) -> None:
    with pytest.raises(NoClassError, match=why):
        class_model(config, [(64, 64)])
    shapes = {"layers.0.self_attn.q_proj.weight": (64, 64)}
    found = select_tensors(load_rules(), config | {"hidden_size": 64}, headers(shapes))
    assert found.decided_by.startswith("names and shapes (")
    assert why in found.decided_by
