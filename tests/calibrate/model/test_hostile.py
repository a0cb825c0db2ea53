"""Model directories that somebody damaged or made to deceive: one line that names the file, before any work."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8q.calibrate.checkpoint.config_fields import check_fields
from fp8q.calibrate.model.source import load_model, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.core.errors import InputError

AGAIN = "copy or download it again"
TOKENIZER = "copy the files of the tokenizer it was trained with beside config.json"


def refusal(path: Path, read: bool = False) -> str:
    with pytest.raises(InputError) as refused:
        source = open_source(str(path), fingerprinted=False)
        assert read, "it should not have been opened"
        load_tokenizer(source)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# Which files are the weights


def test_the_weights_that_config_names_are_measured_hashed_and_streamed(
    damaged: Path, changed: Callable[..., None]
) -> None:
    before = open_source(str(damaged))
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]
    save_file(tensors, damaged / "other.safetensors", metadata={"format": "pt"})
    changed(damaged / "config.json", transformers_weights="other.safetensors")
    source = open_source(str(damaged))
    assert source.weight_files == (damaged / "other.safetensors",)
    assert source.fingerprint != before.fingerprint
    loaded = load_model(source, torch.bfloat16).state_dict()
    assert torch.equal(loaded["model.norm.weight"], tensors["model.norm.weight"])


@pytest.mark.parametrize("named", ["../other.safetensors", "pytorch_model.bin", "/etc/passwd"])
def test_weights_that_config_names_elsewhere(damaged: Path, changed: Callable[..., None], named: str) -> None:
    changed(damaged / "config.json", transformers_weights=named)
    assert refusal(damaged) == (
        f"{damaged}/config.json: transformers_weights is {named!r}, and not a file of safetensors beside it; the "
        "checkpoint is damaged or not to be trusted"
    )


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("configuration_files", "has transformers read another file in its place"),
        ("fusion_config", "has transformers replace parts of the model"),
    ],
)
def test_words_that_have_other_files_loaded(damaged: Path, changed: Callable[..., None], key: str, why: str) -> None:
    changed(damaged / "config.json", **{key: ["config.4.0.0.json"]})
    assert refusal(damaged) == (
        f"{damaged}/config.json: {key} {why}, which fp8q does not do; take it out, or give another model"
    )


def test_an_adapter_beside_the_weights(damaged: Path) -> None:
    (damaged / "adapter_config.json").write_text("{}", encoding="utf-8")
    assert refusal(damaged) == (
        f"{damaged}: holds an adapter (adapter_config.json) beside its weights; move the adapter's files to "
        "a directory of their own, and give that with --adapter"
    )


def test_another_tokenizer_than_tokenizer_json(damaged: Path, changed: Callable[..., None]) -> None:
    changed(damaged / "tokenizer_config.json", fast_tokenizer_files=["tokenizer.4.0.0.json"])
    assert refusal(damaged) == (
        f"{damaged}/tokenizer_config.json: fast_tokenizer_files has transformers read another file than "
        "tokenizer.json; take it out"
    )


# What is no file


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "chat_template.jinja",
        "LICENSE",
    ],
)
def test_a_fifo_or_a_dangling_link_in_the_place_of_a_file(damaged: Path, name: str) -> None:
    (damaged / name).unlink(missing_ok=True)
    os.mkfifo(damaged / name)
    assert refusal(damaged) == f"{damaged / name}: is a pipe; copy or download it again"
    (damaged / name).unlink()
    (damaged / name).symlink_to("gone")
    assert refusal(damaged) == f"{damaged / name}: is a link to a file that is not there; {AGAIN}"
    (damaged / name).unlink()
    (damaged / name).mkdir()
    if "." in name:  # a folder `LICENSE` is let be
        assert refusal(damaged) == f"{damaged / name}: is a directory; copy or download it again"


def test_names_of_models_and_shards_that_no_file_can_have(damaged: Path) -> None:
    assert refusal(Path("x" * 300)) == (
        f"{'x' * 60 + '…'!r}: is no name that a file can have (File name too long); give another"
    )
    (damaged / "model.safetensors").unlink()
    index = {"weight_map": {"w": "x" * 300 + ".safetensors"}}
    (damaged / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert refusal(damaged).endswith(": is no name that a file can have (File name too long); give another")


# Values of config.json

WHOLE = "a whole number from 1 to 2,147,483,647"


def test_a_number_of_positions_may_be_a_whole_float() -> None:
    """transformers writes so what it takes from a rotary base (MusicFlamingo)."""
    check_fields(Path("config.json"), {"max_position_embeddings": 1200.0})


def test_a_smoothing_of_labels_may_be_none() -> None:
    """ProphetNet calls it `eps`, as others call what a norm adds."""
    check_fields(Path("config.json"), {"eps": 0.0})


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("architectures", 1000000000, "a list of names"),
        ("architectures", [["LlamaForCausalLM"]], "a list of names"),
        ("layer_types", "full_attention", "a list of names"),
        ("sliding_window", "x", WHOLE),
        ("sliding_window", -1, WHOLE),
        ("num_hidden_layers", 4.0, WHOLE),
        ("num_hidden_layers", True, WHOLE),
        ("num_attention_heads", 0, WHOLE),
        ("hidden_size", [256], WHOLE),
        ("vocab_size", 10**12, WHOLE),
        ("max_position_embeddings", "512", WHOLE),
        ("max_position_embeddings", 1200.5, WHOLE),
        ("max_position_embeddings", 1e12, WHOLE),
        ("eos_token_id", {"a": 1}, "a token id or a list of them"),
        ("pad_token_id", [[0]], "a token id or a list of them"),
        ("rope_parameters", 10000.0, "an object"),
        ("auto_map", "x.y", "an object"),
        ("rms_norm_eps", -1e-6, "a number between 0 and 1"),
        ("rms_norm_eps", "1e-6", "a number between 0 and 1"),
        ("transformers_weights", 7, "the name of a file"),
    ],
)
def test_a_value_of_the_wrong_kind(
    damaged: Path, changed: Callable[..., None], key: str, value: object, kind: str
) -> None:
    changed(damaged / "config.json", **{key: value})
    assert refusal(damaged) == f"{damaged}/config.json: {key} is {value!r}, and not {kind}; {AGAIN}"


def test_a_window_of_none_is_one_that_no_layer_has(damaged: Path, changed: Callable[..., None]) -> None:
    changed(damaged / "config.json", sliding_window=0, layer_types=["full_attention"] * 4)
    open_source(str(damaged))
    for layer_types in (["full_attention"] * 3 + ["sliding_attention"], None):
        changed(damaged / "config.json", layer_types=layer_types)
        assert refusal(damaged) == f"{damaged}/config.json: sliding_window is 0, and not {WHOLE}; {AGAIN}"


def test_numbers_that_are_none(damaged: Path, changed: Callable[..., None]) -> None:
    changed(damaged / "config.json", rms_norm_eps=float("nan"))
    assert refusal(damaged) == f"{damaged}/config.json: rms_norm_eps is nan, which is no finite number; {AGAIN}"
    changed(damaged / "config.json", rms_norm_eps=1e-6, rope_parameters={"rope_theta": float("inf")})
    assert refusal(damaged).startswith(f"{damaged}/config.json: rope_parameters.rope_theta is inf, which is no finite")


def test_numbers_of_which_no_frequencies_can_be_made(damaged: Path, changed: Callable[..., None]) -> None:
    changed(damaged / "config.json", rope_parameters={"rope_type": "default", "rope_theta": -10000.0})
    assert refusal(damaged) == (
        f"{damaged}/config.json: makes model.rotary_emb.inv_freq of numbers that are not finite; {AGAIN}"
    )


@pytest.mark.parametrize(
    ("key", "held"),
    [
        ("num_hidden_layers", "hold 38 tensors"),
        ("vocab_size", "hold 3,475,712 values"),
        ("hidden_size", "hold 3,475,712 values"),
        ("num_key_value_heads", "hold 3,475,712 values"),
        ("num_local_experts", "are not those of so many"),
    ],
)
def test_a_billion_of_what_the_weights_hold_few_of(
    damaged: Path, changed: Callable[..., None], key: str, held: str
) -> None:
    changed(damaged / "config.json", **{key: 10**9})
    assert refusal(damaged) == f"{damaged}/config.json: {key} is 1,000,000,000, and the weights {held}; {AGAIN}"


# The tokenizer


def tokenizer_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    change(content)
    (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def test_a_tokenizer_that_panics_is_one_line(damaged: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer_json(damaged, lambda content: content["model"].update(continuing_subword_prefix="##########"))
    found = refusal(damaged, read=True)
    assert found.startswith(f"{damaged}: its tokenizer does not load: ")
    assert re.search(
        "byte index 10 is out of bounds of `|out of range for slice of length", found
    )  # tokenizers 0.22; 0.23
    assert found.endswith(TOKENIZER)
    assert capfd.readouterr() == ("", "")


def test_token_ids_far_beyond_the_embedding(damaged: Path, changed: Callable[..., None]) -> None:
    wrong = f"the id 1,000,000,000, and the model's embedding ends at 2,047; {TOKENIZER}"
    (damaged / "added_tokens.json").write_text('{"<x>": 1000000000}', encoding="utf-8")
    assert refusal(damaged) == f"{damaged}/added_tokens.json: gives '<x>' {wrong}"
    (damaged / "added_tokens.json").unlink()
    tokenizer_json(damaged, lambda content: content["added_tokens"].append({"id": 10**9, "content": "<y>"}))
    assert refusal(damaged) == f"{damaged}/tokenizer.json: gives '<y>' {wrong}"
    tokenizer_json(damaged, lambda content: content.update(added_tokens=[]))
    tokenizer_json(damaged, lambda content: content["model"]["vocab"].update({"<z>": 10**9}))
    assert refusal(damaged) == f"{damaged}/tokenizer.json: gives '<z>' {wrong}"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "generation_config.json"])
def test_json_without_an_end_or_without_an_object(damaged: Path, name: str) -> None:
    (damaged / name).write_text("[" * 100_000, encoding="utf-8")
    assert refusal(damaged).startswith(f"{damaged / name}: does not parse: maximum recursion depth exceeded")
    (damaged / name).write_text("[]", encoding="utf-8")
    assert refusal(damaged) == f"{damaged / name}: holds no JSON object but []; {TOKENIZER}"


@pytest.mark.parametrize("change", [{"tokenizer_class": 5}, {"bos_token": 7}, {"added_tokens_decoder": [1]}])
def test_a_tokenizers_options_of_the_wrong_type(
    damaged: Path, changed: Callable[..., None], change: dict[str, object]
) -> None:
    changed(damaged / "tokenizer_config.json", **change)
    assert refusal(damaged, read=True).startswith(f"{damaged}: its tokenizer does not load: ")
