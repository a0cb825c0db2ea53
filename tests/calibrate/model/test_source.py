"""The source checkpoint: what is refused, before any work, and what is opened is what transformers would load."""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MptConfig,
)

from fp8q.calibrate.model.architecture import max_positions
from fp8q.calibrate.model.source import Source, load_model, meta_model, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.model.weights import check_finite
from fp8q.errors import InputError

if TYPE_CHECKING:
    from tests.calibrate.conftest import Hub

VERSION = transformers.__version__


@pytest.fixture(scope="module")
def demo(demo_checkpoint: Path) -> Source:
    return open_source(str(demo_checkpoint))


@pytest.fixture
def copy(demo_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the demo to damage; its weights are a link, to be replaced and not written to."""
    path = tmp_path / "copy"
    shutil.copytree(demo_checkpoint, path, ignore=shutil.ignore_patterns("*.safetensors"))
    (path / "model.safetensors").symlink_to(demo_checkpoint / "model.safetensors")
    return path


def configure(path: Path, **changes: object) -> None:
    """Change config.json; None takes a key out."""
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}), encoding="utf-8")


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a copy."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
    change(tensors)
    (path / "model.safetensors").unlink()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def refusal(model: Path | str, **options: Any) -> str:
    with pytest.raises(InputError) as refused:
        open_source(str(model), **options)
    return str(refused.value)


# What is opened


def test_the_demo_is_opened(demo: Source, demo_checkpoint: Path) -> None:
    assert (demo.path, demo.name, demo.revision) == (demo_checkpoint, str(demo_checkpoint), None)
    assert demo.architecture == "LlamaForCausalLM"
    assert demo.weight_files == (demo_checkpoint / "model.safetensors",)
    assert demo.max_positions == demo.config.max_position_embeddings == 512
    assert demo.text_config is demo.config


@pytest.mark.parametrize("name", ["gemma", "gpt2", "llama", "opt", "qwen2", "stories260k"])
def test_the_other_checkpoints_are_opened_and_finite(name: str, shared_checkpoint: Callable[[str], Path]) -> None:
    source = open_source(str(shared_checkpoint(name)))
    check_finite(source.weight_files)
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


def test_the_fingerprint_goes_with_the_bytes_and_not_with_the_place(demo: Source, copy: Path) -> None:
    (copy / "README.md").write_text("another place", encoding="utf-8")
    assert open_source(str(copy)).fingerprint == demo.fingerprint
    rewrite(copy, lambda tensors: tensors["model.norm.weight"][0].mul_(-1))
    assert open_source(str(copy)).fingerprint != demo.fingerprint


def test_the_tokenizer_has_a_fingerprint_of_its_own(demo: Source, demo_checkpoint: Path, copy: Path) -> None:
    digest = hashlib.sha256((demo_checkpoint / "tokenizer.json").read_bytes()).hexdigest()
    assert demo.tokenizer_fingerprint == hashlib.sha256(f"tokenizer.json {digest}\n".encode()).hexdigest()
    (copy / "vocab.json").write_text("{}", encoding="utf-8")
    assert open_source(str(copy)).tokenizer_fingerprint == demo.tokenizer_fingerprint
    (copy / "tokenizer.json").unlink()
    assert (
        open_source(str(copy)).tokenizer_fingerprint
        == hashlib.sha256(f"vocab.json {hashlib.sha256(b'{}').hexdigest()}\n".encode()).hexdigest()
    )


def test_shards_are_opened_as_one_file_is(demo: Source, copy: Path) -> None:
    load_model(demo, torch.bfloat16).save_pretrained(copy / "shards", max_shard_size="3MB")
    shutil.copy(copy / "tokenizer.json", copy / "shards")
    source = open_source(str(copy / "shards"))
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
        with torch.inference_mode():
            assert torch.equal(model(ids).logits, plain(ids).logits)
    load_tokenizer(open_source(demo.name))
    load_model(demo, torch.bfloat16)
    assert capfd.readouterr() == ("", "")


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


def test_the_configuration_keeps_the_stored_type(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.update({name: tensor.float() for name, tensor in tensors.items()}))
    configure(copy, dtype="float32")
    source = open_source(str(copy))
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


# What is refused: the directory and its files


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert refusal(missing) == f"{missing}: there is no such directory, and it is no hub name either; check the path"
    assert refusal("./none") == "./none: there is no such directory, and it is no hub name either; check the path"
    assert refusal("a/b/c") == "a/b/c: there is no such directory, and it is no hub name either; check the path"


def test_a_file_is_no_model(demo_checkpoint: Path) -> None:
    file = demo_checkpoint / "model.safetensors"
    assert (
        refusal(file)
        == f"{file}: is a file; MODEL is the directory that holds config.json and the weights, or a hub name"
    )


def test_a_revision_is_for_hub_names(demo_checkpoint: Path) -> None:
    assert (
        refusal(demo_checkpoint, revision="main")
        == f"--revision main: is for hub names, and {demo_checkpoint} is a directory; leave it out"
    )


def test_a_directory_without_config(tmp_path: Path) -> None:
    assert (
        refusal(tmp_path)
        == f"{tmp_path}: is no checkpoint: there is no config.json; give the directory that save_pretrained wrote"
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            b'{"model_type" "llama"}',
            "does not parse: Expecting ':' delimiter at line 1, column 15; copy or download it again",
        ),
        (b"", "does not parse: Expecting value at line 1, column 1; copy or download it again"),
        (b'{"model_type": "\xff"}', "does not parse: it is not UTF-8; copy or download it again"),
        (
            b"[]",
            (
                "names no model_type, so it is no transformers configuration; give the directory that save_pretrained "
                "wrote"
            ),
        ),
        (
            b'{"hidden_size": 64}',
            (
                "names no model_type, so it is no transformers configuration; give the directory that save_pretrained "
                "wrote"
            ),
        ),
    ],
)
def test_a_config_that_does_not_read(copy: Path, content: bytes, why: str) -> None:
    (copy / "config.json").write_bytes(content)
    assert refusal(copy) == f"{copy}/config.json: {why}"


def test_a_config_whose_values_make_no_model(copy: Path) -> None:
    configure(copy, attention_bias="four")
    found = refusal(copy)
    assert found.startswith(f"{copy}/config.json: does not make a llama configuration: ")
    assert found.endswith("; copy or download it again")
    assert "attention_bias" in found
    assert "\n" not in found


def test_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert refusal(copy) == (
        f"{copy}: has no safetensors weights: neither model.safetensors nor model.safetensors.index.json, and pickled "
        "ones are not read; save the model with save_pretrained"
    )


def test_pickled_weights_are_never_opened_and_the_remedy_works(
    demo: Source, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    found = refusal(copy)
    prefix = (
        f"{copy}: has only pickled weights (pytorch_model.bin), which can run code when read and are refused; convert "
        'them where you trust them with `python -c "'
    )
    assert found.startswith(prefix)
    assert found.endswith('"` and give NEW')
    monkeypatch.chdir(tmp_path)
    exec(found.removeprefix(prefix).removesuffix('"` and give NEW'), {})  # the very line the user is told to run
    converted = open_source("NEW")
    ids = torch.arange(64).reshape(1, 64)
    with torch.inference_mode():
        assert torch.equal(
            load_model(converted, torch.bfloat16)(ids).logits, load_model(demo, torch.bfloat16)(ids).logits
        )


def test_damaged_weights(copy: Path) -> None:
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").write_bytes(content[:1_000_000])
    assert refusal(copy) == (
        f"{copy}/model.safetensors: is damaged or cut short (Error while deserializing header: incomplete metadata, "
        "file not fully covered); copy or download it again"
    )


def test_no_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    assert refusal(copy) == (
        f"{copy}: has no tokenizer (no tokenizer.json, tokenizer.model or vocab.json); copy the files of the one "
        "it was trained with beside config.json"
    )


def test_a_damaged_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError) as refused:
        load_tokenizer(open_source(str(copy)))
    assert str(refused.value).startswith(f"{copy}: its tokenizer does not load: ")
    assert str(refused.value).endswith("; copy the files of the tokenizer it was trained with beside config.json")
    assert "\n" not in str(refused.value)


def misfit(path: Path, what: str) -> str:
    return f"{path}: the weights are not those of this LlamaForCausalLM: {what}; copy or download the checkpoint again"


def test_tensors_that_the_model_lacks_misses_or_has_otherwise(copy: Path) -> None:
    first = "model.layers.0.mlp.down_proj.weight"
    rewrite(copy, lambda tensors: tensors.update(extra=torch.ones(2)))
    assert refusal(copy) == misfit(copy, "extra is unknown to the model")
    rewrite(copy, lambda tensors: tensors.pop(first))
    assert refusal(copy) == misfit(copy, f"{first} is missing (and 1 more do not fit)")
    rewrite(copy, lambda tensors: tensors.update({first: torch.ones(4, 8)}))
    assert refusal(copy) == misfit(
        copy, f"{first} has shape [4, 8] where the model has [256, 704] (and 1 more do not fit)"
    )


def test_nan_in_a_weight(copy: Path) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"
    rewrite(copy, lambda tensors: tensors[name][5, 7:9].fill_(float("nan")))
    with pytest.raises(InputError) as refused:
        check_finite(open_source(str(copy)).weight_files)
    assert str(refused.value) == (
        f"{name}: holds 2 NaN among 65,536 values, in {copy}/model.safetensors; take an earlier checkpoint of the "
        "training, or copy or download the file again"
    )


# What is refused: architectures


def test_a_mixture_of_experts(shared_checkpoint: Callable[[str], Path]) -> None:
    path = shared_checkpoint("mixtral")
    assert refusal(path) == (
        f"{path}: MixtralForCausalLM is a mixture of experts (model.layers.0.mlp.experts), which fp8q does not do "
        "for now; give a dense model"
    )


@pytest.mark.parametrize(
    ("model_type", "architecture", "module"),
    [
        ("mixtral", "MixtralForCausalLM", "model.layers.0.mlp.experts"),
        ("qwen3_moe", "Qwen3MoeForCausalLM", "model.layers.0.mlp.experts"),
        ("gpt_oss", "GptOssForCausalLM", "model.layers.0.mlp.experts"),
        ("granitemoe", "GraniteMoeForCausalLM", "model.layers.0.block_sparse_moe.experts"),
        ("deepseek_v2", "DeepseekV2ForCausalLM", "model.layers.0.mlp.experts"),
    ],
)
def test_mixtures_of_experts_are_told_by_their_modules(
    copy: Path, model_type: str, architecture: str, module: str
) -> None:
    AutoConfig.for_model(model_type, num_hidden_layers=2, architectures=[architecture]).save_pretrained(copy)
    assert refusal(copy) == (
        f"{copy}: {architecture} is a mixture of experts ({module}), which fp8q does not do for now; give a dense model"
    )


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("bert", "BertForMaskedLM"),
        ("bert", "BertLMHeadModel"),
        ("t5", "T5ForConditionalGeneration"),
        ("bart", "BartForCausalLM"),
        ("llama", "LlamaForSequenceClassification"),
        ("vit", "ViTModel"),
    ],
)
def test_what_is_no_causal_language_model(copy: Path, model_type: str, architecture: str) -> None:
    AutoConfig.for_model(model_type, architectures=[architecture]).save_pretrained(copy)
    assert (
        refusal(copy)
        == f"{copy}: {architecture} is not a causal language model, and fp8q does no other; give a decoder-only one"
    )


def test_a_model_that_also_sees(copy: Path) -> None:
    transformers.Gemma3Config(architectures=["Gemma3ForConditionalGeneration"]).save_pretrained(copy)
    assert refusal(copy) == (
        f"{copy}: Gemma3ForConditionalGeneration is not a text-only model (its configuration has vision_config), and "
        "fp8q does no other; give the language model saved on its own"
    )


def test_a_recurrent_model(copy: Path) -> None:
    transformers.MambaConfig(architectures=["MambaForCausalLM"]).save_pretrained(copy)
    assert refusal(copy) == (
        f"{copy}: MambaForCausalLM keeps a recurrent state (a state-space or linear-attention model), which fp8q "
        "does not do for now; give a transformer"
    )


def test_gpt_neox_is_causal_though_its_config_says_no_decoder(copy: Path) -> None:
    config = transformers.GPTNeoXConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=64, vocab_size=64
    )
    assert config.is_decoder is False
    AutoModelForCausalLM.from_config(config).save_pretrained(copy)
    assert open_source(str(copy)).architecture == "GPTNeoXForCausalLM"


def test_a_quantized_checkpoint(copy: Path) -> None:
    configure(copy, quantization_config={"quant_method": "gptq", "bits": 4})
    assert (
        refusal(copy)
        == f"{copy}: is quantized already (gptq); give the checkpoint it was made from, in BF16, FP16 or FP32"
    )


def test_an_unknown_model_type(copy: Path) -> None:
    configure(copy, model_type="llama9", architectures=["Llama9ForCausalLM"])
    assert (
        refusal(copy)
        == f"{copy}: model_type llama9 is unknown to transformers {VERSION}; a newer transformers may know it"
    )


def test_an_attention_kernel_that_is_not_installed_is_not_asked_for(copy: Path) -> None:
    configure(copy, attn_implementation="flash_attention_2")
    assert load_model(open_source(str(copy)), torch.bfloat16).config._attn_implementation == "sdpa"


# Code of the checkpoint's own

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
def house(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo as a checkpoint with code of its own, which leaves the file `ran` when it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    (copy / "house.py").write_text(CODE.format(marker=str(tmp_path / "ran")), encoding="utf-8")
    configure(
        copy,
        model_type="house",
        architectures=["HouseForCausalLM"],
        auto_map={"AutoConfig": "house.HouseConfig", "AutoModelForCausalLM": "house.HouseForCausalLM"},
    )
    return copy


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


# The hub


def demo_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_hub_model_is_downloaded_once(
    hub: "Hub", demo: Source, demo_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.add(
        "acme/tiny",
        demo_files(demo_checkpoint)
        | {"pytorch_model.bin": b"never asked for", "original/model.safetensors": b"nor this", "run.py": b"nor this"},
    )
    source = open_source("acme/tiny")
    assert (source.name, source.revision, source.fingerprint) == (
        "acme/tiny",
        "0123456789abcdef0123456789abcdef01234567",
        demo.fingerprint,
    )
    assert sorted(file.name for file in source.path.iterdir()) == sorted(demo_files(demo_checkpoint))
    assert [
        request for request in hub.asked if request.startswith("GET") and request.endswith("model.safetensors")
    ] == [f"GET /acme/tiny/resolve/{source.revision}/model.safetensors"]
    hub.asked.clear()
    assert open_source("acme/tiny", revision=source.revision).fingerprint == demo.fingerprint
    assert not [request for request in hub.asked if "/resolve/" in request]
    assert capfd.readouterr() == ("", "")


def test_a_hub_model_in_the_cache_needs_no_network(
    hub: "Hub", demo: Source, demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("acme/tiny", demo_files(demo_checkpoint))
    open_source("acme/tiny")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    assert open_source("acme/tiny").fingerprint == demo.fingerprint


def test_without_a_network_a_hub_name_is_an_error_with_a_remedy(hub: "Hub", monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = (
        "acme/tiny: there is no such file or directory, and the hub cannot be reached to look for a model of that "
        "name; "
        "connect, or download it elsewhere and give the directory as MODEL"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refusal("acme/tiny") == unreachable
    assert hub.asked == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert refusal("acme/tiny") == unreachable


def test_names_and_revisions_that_the_hub_does_not_have(hub: "Hub", demo_checkpoint: Path) -> None:
    hub.add("acme/tiny", demo_files(demo_checkpoint))
    assert refusal("acme/tyni") == (
        "acme/tyni: there is no such file or directory, and no model of that name on the hub; check the spelling, "
        "or `hf auth login` if it is private"
    )
    assert (
        refusal("acme/tiny", revision="v9")
        == "acme/tiny: has no revision v9 on the hub; name a branch, tag or commit that it has with --revision"
    )


def test_a_gated_hub_model(hub: "Hub", demo_checkpoint: Path) -> None:
    hub.add("acme/tiny", demo_files(demo_checkpoint))
    hub.gated.add("acme/tiny")
    assert (
        refusal("acme/tiny")
        == "acme/tiny: the model is gated on the hub; accept its terms there and log in with `hf auth login`"
    )


def test_a_hub_model_with_pickled_weights_only(hub: "Hub", demo_checkpoint: Path) -> None:
    files = demo_files(demo_checkpoint)
    hub.add("acme/tiny", files | {"pytorch_model.bin": files.pop("model.safetensors")})
    assert refusal("acme/tiny") == (
        "acme/tiny: has no safetensors weights: neither model.safetensors nor model.safetensors.index.json, and "
        "pickled ones are not read; save the model with save_pretrained"
    )
    assert not [request for request in hub.asked if request.endswith("pytorch_model.bin")]
