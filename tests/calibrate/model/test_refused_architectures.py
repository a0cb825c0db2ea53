"""Architectures that are refused, and code of a checkpoint's own, which is not run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

from fp8q.calibrate.input.untrusted import AGAIN
from fp8q.calibrate.model.source import load_model, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.core.errors import InputError

from .damage import configure, refusal, rewrite

VERSION = transformers.__version__


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("bert", "BertForMaskedLM"),
        ("bert", "BertLMHeadModel"),
        ("t5", "T5ForConditionalGeneration"),
        ("bart", "BartForCausalLM"),
        ("llama", "LlamaForSequenceClassification"),
        ("vit", "ViTModel"),
        ("diffusion_gemma", "DiffusionGemmaForBlockDiffusion"),
    ],
)
def test_what_is_no_causal_language_model(damaged: Path, model_type: str, architecture: str) -> None:
    AutoConfig.for_model(model_type, architectures=[architecture]).save_pretrained(damaged)
    assert (
        refusal(damaged)
        == f"{damaged}: {architecture} is not a causal language model, and fp8q does no other; give a decoder-only one"
    )


@pytest.mark.parametrize(
    ("config", "architecture", "done"),
    [
        ("Gemma3Config", "Gemma3Model", "Gemma3ForConditionalGeneration"),
        ("CLIPConfig", "CLIPModel", "those that transformers lets answer with text"),
    ],
)
def test_a_model_that_sees_and_does_not_answer(damaged: Path, config: str, architecture: str, done: str) -> None:
    getattr(transformers, config)(architectures=[architecture]).save_pretrained(damaged)
    assert refusal(damaged) == (
        f"{damaged}: {architecture} is not a text-only model (its configuration has vision_config), and of others fp8q "
        f"does {done}; give the language model saved on its own"
    )


def test_a_model_that_sees_and_whose_language_model_has_an_encoder(damaged: Path) -> None:
    transformers.Florence2Config(architectures=["Florence2ForConditionalGeneration"]).save_pretrained(damaged)
    assert refusal(damaged) == (
        f"{damaged}: Florence2ForConditionalGeneration is not a causal language model, and fp8q does no other; give a "
        "decoder-only one"
    )


def test_a_model_of_which_two_parts_read_text(damaged: Path) -> None:
    """transformers will not say which of them is the language model."""
    parts = {"text_encoder": "t5", "audio_encoder": "encodec", "decoder": "musicgen_decoder"}
    config: dict[str, Any] = {"model_type": "musicgen", "architectures": ["MusicgenForCausalLM"]}
    config |= {key: {"model_type": kind} for key, kind in parts.items()}
    (damaged / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert refusal(damaged) == (
        f"{damaged}: MusicgenForCausalLM is not a causal language model, and fp8q does no other; give a decoder-only "
        "one"
    )


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_size", "wide"), ("num_hidden_layers", 0), ("max_position_embeddings", 64.5)]
)
def test_what_config_json_says_of_the_language_model_inside_is_looked_at(
    damaged: Path, field: str, value: object
) -> None:
    transformers.Gemma3Config(architectures=["Gemma3ForConditionalGeneration"]).save_pretrained(damaged)
    file = damaged / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["text_config"][field] = value
    file.write_text(json.dumps(config), encoding="utf-8")
    assert refusal(damaged) == (
        f"{file}: {field} is {value!r}, and not a whole number from 1 to 2,147,483,647; {AGAIN}"
    )


def test_a_hybrid_with_a_cache_of_its_own(damaged: Path) -> None:
    transformers.MiniMaxConfig(num_hidden_layers=2, architectures=["MiniMaxForCausalLM"]).save_pretrained(damaged)
    assert refusal(damaged) == (
        f"{damaged}: MiniMaxForCausalLM keeps its recurrent state in a cache of its own in transformers {VERSION}, "
        "which fp8q does not do for now; give another model, or use `fp8q convert`"
    )


def test_an_indexer_whose_cache_is_its_classs_own(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers 5.4, where a general cache has no layers with an indexer's keys."""
    monkeypatch.setattr("fp8q.calibrate.model.architecture.attention_indices", lambda config: None)
    transformers.DeepseekV32Config(num_hidden_layers=2, architectures=["DeepseekV32ForCausalLM"]).save_pretrained(
        damaged
    )
    assert refusal(damaged) == (
        f"{damaged}: DeepseekV32ForCausalLM keeps the keys of its indexer in a cache of its own in transformers "
        f"{VERSION}, which fp8q does not do for now; give another model, or use `fp8q convert`"
    )


def test_a_recurrent_model(damaged: Path) -> None:
    transformers.MambaConfig(architectures=["MambaForCausalLM"]).save_pretrained(damaged)
    assert refusal(damaged) == (
        f"{damaged}: MambaForCausalLM has no attention that caches keys and values (a state-space or linear-attention "
        "model alone), which fp8q does not do for now; give a transformer or a hybrid, or use `fp8q convert`"
    )


def test_gpt_neox_is_causal_though_its_config_says_no_decoder(damaged: Path) -> None:
    config = transformers.GPTNeoXConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=64, vocab_size=64
    )
    assert config.is_decoder is False
    AutoModelForCausalLM.from_config(config).save_pretrained(damaged)
    assert open_source(str(damaged)).architecture == "GPTNeoXForCausalLM"


def test_a_quantized_checkpoint(damaged: Path) -> None:
    configure(damaged, quantization_config={"quant_method": "gptq", "bits": 4})
    assert (
        refusal(damaged)
        == f"{damaged}: is quantized already (gptq); give the checkpoint it was made from, in BF16, FP16 or FP32"
    )


def test_codes_that_config_json_does_not_speak_of(damaged: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(damaged, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    assert refusal(damaged) == (
        f"{damaged / 'model.safetensors'}: {name} is F8_E4M3, so the checkpoint is quantized already; give the one it "
        "was made from, in BF16, FP16 or FP32"
    )


def test_an_unknown_model_type(damaged: Path) -> None:
    configure(damaged, model_type="llama9", architectures=["Llama9ForCausalLM"])
    assert (
        refusal(damaged)
        == f"{damaged}: model_type llama9 is unknown to transformers {VERSION}; a newer transformers may know it"
    )


def test_an_attention_kernel_that_is_not_installed_is_not_asked_for(damaged: Path) -> None:
    configure(damaged, attn_implementation="flash_attention_2")
    assert load_model(open_source(str(damaged)), torch.bfloat16).config._attn_implementation == "sdpa"


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()

class HouseConfig(LlamaConfig):
    model_type = "house"

class HouseForCausalLM(LlamaForCausalLM):
    config_class = HouseConfig

class HouseTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def house(damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo as a checkpoint with code of its own, which leaves the file `ran` when it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    (damaged / "house.py").write_text(CODE.format(marker=str(tmp_path / "ran")), encoding="utf-8")
    configure(
        damaged,
        model_type="house",
        architectures=["HouseForCausalLM"],
        auto_map={"AutoConfig": "house.HouseConfig", "AutoModelForCausalLM": "house.HouseForCausalLM"},
    )
    return damaged


@pytest.mark.parametrize("trusted", [False, True])
def test_a_models_own_code_is_never_run(house: Path, tmp_path: Path, trusted: bool) -> None:
    with pytest.raises(InputError) as refused:
        open_source(str(house), trust_remote_code=trusted)
    assert str(refused.value) == (
        f"{house}: wants code of its own (HouseForCausalLM, not in transformers {VERSION}), which fp8q runs for "
        "tokenizers only; give a model whose class transformers has"
    )
    assert not (tmp_path / "ran").exists()


def test_code_beside_an_architecture_that_transformers_knows_is_left_alone(house: Path, tmp_path: Path) -> None:
    configure(house, model_type="llama", architectures=["LlamaForCausalLM"])
    for trusted in (False, True):
        source = open_source(str(house), trust_remote_code=trusted)
        assert source.architecture == "LlamaForCausalLM"
        assert type(load_model(source, torch.bfloat16)).__module__ == "transformers.models.llama.modeling_llama"
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_with_code_of_its_own(house: Path, tmp_path: Path) -> None:
    configure(house, model_type="llama", architectures=["LlamaForCausalLM"], auto_map=None)
    file = house / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {
        "tokenizer_class": "HouseTokenizer",
        "auto_map": {"AutoTokenizer": [None, "house.HouseTokenizer"]},
    }
    file.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InputError) as refused:
        load_tokenizer(open_source(str(house)))
    assert str(refused.value) == (
        f"{house}: its tokenizer wants code of its own; read it, and if you trust it, run it with --trust-remote-code"
    )
    assert not (tmp_path / "ran").exists()
    assert type(load_tokenizer(open_source(str(house), trust_remote_code=True))).__name__ == "HouseTokenizer"
    assert (tmp_path / "ran").exists()
