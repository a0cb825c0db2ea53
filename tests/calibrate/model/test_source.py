"""The opened tensors are those that transformers would load."""

import hashlib
import logging
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from published_classes import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MptConfig,
)
from transformers.core_model_loading import GLOBAL_WORKERS

from fp8q.calibrate.checkpoint.weights import Weights, check_finite
from fp8q.calibrate.model.architecture import max_positions
from fp8q.calibrate.model.bf16_gemms import gemms_in_fp32
from fp8q.calibrate.model.classes import auto_class
from fp8q.calibrate.model.source import Source, load_model, meta_model, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer

from .damage import configure, rewrite


def test_the_demo_is_opened(demo: Source, demo_checkpoint: Path) -> None:
    assert (demo.path, demo.name, demo.revision) == (demo_checkpoint, str(demo_checkpoint), None)
    assert demo.architecture == "LlamaForCausalLM"
    assert demo.weight_files == (demo_checkpoint / "model.safetensors",)
    assert demo.max_positions == demo.config.max_position_embeddings == 512
    assert demo.text_config is demo.config


@pytest.mark.parametrize("name", ["gemma", "gpt2", "llama", "opt", "qwen2", "stories260k"])
def test_the_other_checkpoints_are_opened_and_finite(name: str, shared_checkpoint: Callable[[str], Path]) -> None:
    source = open_source(str(shared_checkpoint(name)))
    check_finite(source.weights())
    assert source.max_positions == 512
    assert source.architecture == {
        "gpt2": "GPT2LMHeadModel",
        "stories260k": "LlamaForCausalLM",
        "opt": "OPTForCausalLM",
    }.get(name, f"{name.title()}ForCausalLM")


def test_the_fingerprint_is_that_of_config_and_weights(demo: Source, demo_checkpoint: Path) -> None:
    lines = []
    for name in ("config.json", "model.safetensors"):
        content = (demo_checkpoint / name).read_bytes()
        pieces = [content[start : start + 4_194_304] for start in range(0, len(content), 4_194_304)]
        lines.append(
            f"{name} {hashlib.sha256(b''.join(hashlib.sha256(piece).digest() for piece in pieces)).hexdigest()}\n"
        )
    assert len(pieces) == 2
    assert demo.fingerprint == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_the_fingerprint_goes_with_the_bytes_and_not_with_the_place(demo: Source, damaged: Path) -> None:
    (damaged / "README.md").write_text("another place", encoding="utf-8")
    assert open_source(str(damaged)).fingerprint == demo.fingerprint
    rewrite(damaged, lambda tensors: tensors["model.norm.weight"][0].mul_(-1))
    assert open_source(str(damaged)).fingerprint != demo.fingerprint


def test_the_tokenizer_has_a_fingerprint_of_its_own(demo: Source, demo_checkpoint: Path, damaged: Path) -> None:
    digest = hashlib.sha256((demo_checkpoint / "tokenizer.json").read_bytes()).hexdigest()
    assert demo.tokenizer_fingerprint == hashlib.sha256(f"tokenizer.json {digest}\n".encode()).hexdigest()
    (damaged / "vocab.json").write_text("{}", encoding="utf-8")
    assert open_source(str(damaged)).tokenizer_fingerprint == demo.tokenizer_fingerprint
    (damaged / "tokenizer.json").unlink()
    assert (
        open_source(str(damaged)).tokenizer_fingerprint
        == hashlib.sha256(f"vocab.json {hashlib.sha256(b'{}').hexdigest()}\n".encode()).hexdigest()
    )


def test_shards_are_opened_as_one_file_is(demo: Source, damaged: Path) -> None:
    load_model(demo, torch.bfloat16).save_pretrained(damaged / "shards", max_shard_size="3MB")
    shutil.copy(damaged / "tokenizer.json", damaged / "shards")
    source = open_source(str(damaged / "shards"))
    assert [file.name for file in source.weight_files] == [
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    ]
    ids = torch.arange(64).reshape(1, 64)
    with torch.inference_mode():
        assert torch.equal(load_model(source, torch.bfloat16)(ids).logits, load_model(demo, torch.bfloat16)(ids).logits)


def test_the_model_is_the_one_transformers_loads(
    demo: Source, demo_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ids = torch.arange(128).reshape(2, 64)
    for dtype in (torch.bfloat16, torch.float32):
        model, plain = load_model(demo, dtype), AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=dtype)
        capfd.readouterr()
        assert (model.dtype, model.training, model.config.use_cache, model.config._attn_implementation) == (
            dtype,
            False,
            False,
            "sdpa",
        )
        with torch.inference_mode(), gemms_in_fp32():
            assert torch.equal(model(ids).logits, plain(ids).logits)
    load_tokenizer(open_source(demo.name))
    load_model(demo, torch.bfloat16)
    assert capfd.readouterr() == ("", "")


def test_a_class_that_transformers_lists_among_those_that_see_is_made_by_the_auto_class_of_these(
    tmp_path: Path,
) -> None:
    """Mistral 4's causal language model was "not a causal language model"."""
    path = checkpoint(tmp_path / "model", "Mistral4ForCausalLM")
    source = open_source(str(path))
    assert source.architecture == "Mistral4ForCausalLM"
    assert auto_class(source.config) is transformers.AutoModelForMultimodalLM
    ids = torch.arange(3, 51)[None]
    with torch.inference_mode():
        ours = load_model(source, torch.float32)(ids).logits
        theirs = transformers.Mistral4ForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_no_tensor_of_a_file_is_held_beside_its_copy(demo: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    held: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    counts = []
    read = Weights.tensor

    def counted(self: Weights, name: str) -> torch.Tensor:
        tensor = read(self, name)
        held.add(tensor)
        counts.append(len(held))
        return tensor

    monkeypatch.setattr(Weights, "tensor", counted)
    load_model(demo, torch.float32)
    assert len(counts) == len(demo.weights().names()) > 30
    assert max(counts) <= 2 * GLOBAL_WORKERS


def test_what_was_silenced_speaks_again(demo: Source) -> None:
    transformers.utils.logging.set_verbosity_info()
    try:
        load_tokenizer(demo)
        assert transformers.utils.logging.get_verbosity() == logging.INFO
        assert transformers.utils.logging.is_progress_bar_enabled()
    finally:
        transformers.utils.logging.set_verbosity_warning()


def test_the_meta_model_has_all_shapes_and_no_values(demo: Source) -> None:
    model = meta_model(demo)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == {
        name: parameter.shape for name, parameter in load_model(demo, torch.bfloat16).named_parameters()
    }
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_configuration_keeps_the_stored_type(damaged: Path) -> None:
    rewrite(damaged, lambda tensors: tensors.update({name: tensor.float() for name, tensor in tensors.items()}))
    configure(damaged, dtype="float32")
    source = open_source(str(damaged))
    meta_model(source)
    load_model(source, torch.bfloat16)
    assert (source.config.dtype, source.config.use_cache) == (torch.float32, True)


def test_the_tokenizer_is_the_checkpoints_own(demo: Source, demo_checkpoint: Path) -> None:
    text = "def main() -> None:\n"
    assert load_tokenizer(demo)(text)["input_ids"] == AutoTokenizer.from_pretrained(demo_checkpoint)(text)["input_ids"]


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (LlamaConfig(max_position_embeddings=131072), 131072),
        (GPT2Config(n_positions=1024), 1024),
        (MptConfig(max_seq_len=4096), 4096),
        (MistralConfig(max_position_embeddings=32768, sliding_window=4096), 32768),
        (BloomConfig(), None),
    ],
)
def test_positions_go_by_many_names(config: transformers.PreTrainedConfig, positions: int | None) -> None:
    assert max_positions(config.to_dict()) == positions
