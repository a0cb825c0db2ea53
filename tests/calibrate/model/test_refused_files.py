"""A directory and its files that are no checkpoint, refused before any work."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from fp8q.calibrate.checkpoint.weights import check_finite
from fp8q.calibrate.model.architecture import unknown_rotary
from fp8q.calibrate.model.source import Source, load_model, meta_model, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.core.errors import InputError

from .damage import configure, refusal, rewrite


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert refusal(missing) == f"{missing}: there is no such directory, and it is no hub name either; check the path"
    assert refusal("./none") == "./none: there is no such directory, and it is no hub name either; check the path"
    assert refusal("a/b/c") == "a/b/c: there is no such directory, and it is no hub name either; check the path"


def test_gguf_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "llama-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    remedy = "a GGUF file, whose weights are quantized already; give the checkpoint that it was made from"
    assert refusal(file) == f"{file}: is {remedy}"
    assert refusal(tmp_path) == f"{tmp_path}: holds llama-Q4_K_M.gguf, {remedy}"


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
def test_a_config_that_does_not_read(damaged: Path, content: bytes, why: str) -> None:
    (damaged / "config.json").write_bytes(content)
    assert refusal(damaged) == f"{damaged}/config.json: {why}"


def test_a_config_whose_values_make_no_model(damaged: Path) -> None:
    configure(damaged, attention_bias="four")
    found = refusal(damaged)
    assert found.startswith(f"{damaged}/config.json: does not make a llama configuration: ")
    assert found.endswith("; copy or download it again")
    assert "attention_bias" in found
    assert "\n" not in found


def test_rotary_frequencies_that_transformers_does_not_know_are_named(damaged: Path) -> None:
    """Of all layers, or of a kind of them."""
    foo = {"rope_type": "foo", "rope_theta": 10000.0, "factor": 2.0}
    configure(damaged, rope_parameters=foo)
    with pytest.raises(InputError) as refused:
        meta_model(open_source(str(damaged)))
    assert str(refused.value) == (
        f"{damaged}/config.json: its rope_type foo is unknown to transformers {transformers.__version__}; a newer "
        "transformers may know it"
    )
    kinds: tuple[object, ...] = ([[]], {}, None, 5)
    for kind in kinds:
        odd = transformers.LlamaConfig()
        odd.rope_parameters = foo | {"rope_type": kind}
        assert unknown_rotary(odd) == str(kind)
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    for sliding, unknown in ((foo, "foo"), (plain, None)):
        config = transformers.Gemma3TextConfig(
            rope_parameters={
                "full_attention": plain | {"rope_type": "linear", "factor": 2.0},
                "sliding_attention": sliding,
            }
        )
        assert unknown_rotary(config) == unknown


def test_no_weights(damaged: Path) -> None:
    (damaged / "model.safetensors").unlink()
    assert refusal(damaged) == (
        f"{damaged}: has no safetensors weights: neither model.safetensors nor model.safetensors.index.json, and "
        "pickled ones are not read; save the model with save_pretrained"
    )


def test_pickled_weights_are_never_opened_and_the_remedy_works(
    demo: Source, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(load_file(damaged / "model.safetensors"), damaged / "pytorch_model.bin")
    (damaged / "model.safetensors").unlink()
    found = refusal(damaged)
    prefix = (
        f"{damaged}: has only pickled weights (pytorch_model.bin), which can run code when read and are refused; "
        'convert them where you trust them with `python -c "'
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


def test_damaged_weights(damaged: Path) -> None:
    content = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").unlink()
    (damaged / "model.safetensors").write_bytes(content[:1_000_000])
    assert refusal(damaged) == (
        f"{damaged}/model.safetensors: is damaged or cut short (Error while deserializing header: incomplete metadata, "
        "file not fully covered); copy or download it again"
    )


def test_no_tokenizer(damaged: Path) -> None:
    (damaged / "tokenizer.json").unlink()
    assert refusal(damaged) == (
        f"{damaged}: has no tokenizer (no tokenizer.json, tokenizer.model or vocab.json); copy the files of the one "
        "it was trained with beside config.json"
    )


def test_a_damaged_tokenizer(damaged: Path) -> None:
    (damaged / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError) as refused:
        load_tokenizer(open_source(str(damaged)))
    assert str(refused.value).startswith(f"{damaged}: its tokenizer does not load: ")
    assert str(refused.value).endswith("; copy the files of the tokenizer it was trained with beside config.json")
    assert "\n" not in str(refused.value)


def misfit(path: Path, what: str) -> str:
    return f"{path}: the weights are not those of this LlamaForCausalLM: {what}; copy or download the checkpoint again"


def test_tensors_that_the_model_lacks_misses_or_has_otherwise(damaged: Path) -> None:
    first = "model.layers.0.mlp.down_proj.weight"
    rewrite(damaged, lambda tensors: tensors.update(extra=torch.ones(2)))
    assert refusal(damaged) == misfit(damaged, "extra is unknown to the model")
    rewrite(damaged, lambda tensors: tensors.pop(first))
    assert refusal(damaged) == misfit(damaged, f"{first} is missing (and 1 more do not fit)")
    rewrite(damaged, lambda tensors: tensors.update({first: torch.ones(4, 8)}))
    assert refusal(damaged) == misfit(
        damaged, f"{first} has shape [4, 8] where the model has [256, 704] (and 1 more do not fit)"
    )


@pytest.mark.parametrize(
    ("dtype", "spelled"), [(torch.bool, "BOOL"), (torch.uint8, "U8"), (torch.int64, "I64"), (torch.complex64, "C64")]
)
def test_a_weight_that_is_stored_as_no_float(damaged: Path, dtype: torch.dtype, spelled: str) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    rewrite(damaged, lambda tensors: tensors.update({name: torch.ones(tensors[name].shape, dtype=dtype)}))
    assert refusal(damaged) == (
        f"{damaged}: {name} is stored as {spelled}, and weights are of F64, F32, F16, BF16; copy or download the "
        "checkpoint again"
    )


def test_nan_in_a_weight(damaged: Path) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"
    rewrite(damaged, lambda tensors: tensors[name][5, 7:9].fill_(float("nan")))
    with pytest.raises(InputError) as refused:
        check_finite(open_source(str(damaged)).weights())
    assert str(refused.value) == (
        f"{name}: holds 2 NaN among 65,536 values, in {damaged}/model.safetensors; take an earlier checkpoint of the "
        "training, or copy or download the file again"
    )
