"""An adapter's files are read as PEFT reads them, and what is not plain LoRA is refused by name."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fp8q.calibrate.checkpoint.adapter import LoraConfig, check_names, open_adapter
from fp8q.calibrate.model.adapter_base import adapter_remarks, with_adapters
from fp8q.calibrate.model.source import Source, open_source
from fp8q.core.errors import InputError

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
A = f"base_model.model.{Q}.lora_A.weight"
MERGE = "merge it with PEFT's merge_and_unload, save the result with save_pretrained, and give that"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter of two of the demo's GEMMs, written by hand as PEFT writes them."""
    folder = tmp_path / "style"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "megatron_core": "megatron.core"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {}
    for module, (out, width) in {Q: (256, 256), DOWN: (256, 704)}.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.full((2, width), 0.5)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.full((out, 2), 0.25)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def tensors(adapter: Path) -> Callable[[Callable[[dict[str, torch.Tensor]], object]], None]:
    """`tensors(change)`: change the adapter's tensors in place."""

    def changing(change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        found = {name: tensor.clone() for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
        change(found)
        save_file({name: tensor.clone() for name, tensor in found.items()}, adapter / "adapter_model.safetensors")

    return changing


def refusal(adapter: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_adapter(adapter)
    return str(caught.value)


def unfit(source: Source, adapter: Path) -> str:
    with pytest.raises(InputError) as caught:
        with_adapters(source, [adapter], "merge")
    return str(caught.value)


def test_an_adapter_is_its_modules_their_ranks_and_its_sum(adapter: Path) -> None:
    found = open_adapter(adapter)
    assert (found.name, set(found.parts)) == ("style", {Q, DOWN})
    assert (found.parts[Q].rank, found.parts[Q].scale) == (2, 2.0)
    # 2 (s) x 2 (ranks) x 0.25 x 0.5
    torch.testing.assert_close(found.added(DOWN), torch.full((256, 704), 0.5))


def test_other_bytes_are_another_fingerprint(
    adapter: Path, tensors: Callable[..., None], changed: Callable[..., None]
) -> None:
    before = open_adapter(adapter).fingerprint
    tensors(lambda found: found[A].fill_(0.75))
    other = open_adapter(adapter).fingerprint
    changed(adapter / "adapter_config.json", lora_alpha=8)
    assert len({before, other, open_adapter(adapter).fingerprint}) == 3


@pytest.mark.parametrize(
    ("fields", "module", "rank", "scale"),
    [
        ({}, Q, 8, 2.0),
        ({"use_rslora": True}, Q, 8, 16 / 8**0.5),
        ({"rank_pattern": {"q_proj": 4}}, Q, 4, 4.0),
        ({"rank_pattern": {"q_proj": 4}}, DOWN, 8, 2.0),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 4}}, Q, 8, 0.5),
        ({"alpha_pattern": {"^q_proj": 4}}, Q, 8, 2.0),
        ({"rank_pattern": {r".*\.0\..*": 2}, "use_rslora": True}, Q, 2, 16 / 2**0.5),
    ],
)
def test_ranks_and_scales_of_modules(fields: dict[str, Any], module: str, rank: int, scale: float) -> None:
    config = LoraConfig(r=8, lora_alpha=16, **fields)
    assert config.rank(module) == rank
    assert config.scale(module) == pytest.approx(scale)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("use_dora", True, "DoRA (use_dora), which divides by the norms of the merged weights' rows"),
        ("lora_bias", True, "a bias of B (lora_bias)"),
        ("bias", "lora_only", "biases of its own (bias is 'lora_only')"),
        ("modules_to_save", ["lm_head"], "whole modules of its own (modules_to_save)"),
        ("trainable_token_indices", [1, 2], "embeddings of single tokens (trainable_token_indices)"),
        ("target_parameters", ["w"], "parameters that are no module's weight (target_parameters)"),
        ("layer_replication", [[0, 2], [1, 4]], "layers of the base taken several times (layer_replication)"),
        ("alora_invocation_tokens", [5], "an activation by tokens (alora_invocation_tokens)"),
        ("use_qalora", True, "pooled inputs (use_qalora)"),
        ("use_bdlora", {"x": 1}, "block-diagonal matrices (use_bdlora)"),
        ("kasa_config", {"beta": 1}, "kasa_config, which is not known here"),
    ],
)
def test_what_makes_it_another_sum_is_refused_by_name(
    adapter: Path, changed: Callable[..., None], field: str, value: object, what: str
) -> None:
    changed(adapter / "adapter_config.json", **{field: value})
    assert refusal(adapter) == (
        f"{adapter}/adapter_config.json: asks for {what}, and plain LoRA alone is read; {MERGE}"
    )


@pytest.mark.parametrize("kind", ["IA3", "PREFIX_TUNING", "ADALORA", None])
def test_another_kind_of_adapter(adapter: Path, changed: Callable[..., None], kind: str | None) -> None:
    changed(adapter / "adapter_config.json", peft_type=kind)
    assert refusal(adapter) == (f"{adapter}/adapter_config.json: peft_type is {kind}, and LORA alone is read; {MERGE}")


def test_an_adapter_begun_from_the_bases_weights(adapter: Path, changed: Callable[..., None]) -> None:
    changed(adapter / "adapter_config.json", init_lora_weights="pissa_niter_4")
    assert refusal(adapter) == (
        f"{adapter}/adapter_config.json: was begun from the base's weights (init_lora_weights is 'pissa_niter_4'), "
        f"which changes them too; convert it with PEFT's path_initial_model_for_weight_conversion, or {MERGE}"
    )


def test_values_of_the_wrong_kind(adapter: Path, changed: Callable[..., None]) -> None:
    file = adapter / "adapter_config.json"
    changed(file, r=0)
    assert refusal(adapter) == (f"{file}: r must be at least 1, not '0'; copy or download it again")
    changed(file, r=2, rank_pattern={"(": 4})
    assert refusal(adapter) == (
        f"{file}: has the pattern '(', which is not read (missing ), unterminated subpattern at position 0); name the "
        "modules plainly"
    )


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_never_ends_is_refused(adapter: Path, changed: Callable[..., None], field: str) -> None:
    file = adapter / "adapter_config.json"
    changed(file, r=2, **{field: {"((((.+)+)+)+)+=": 4}})
    assert refusal(adapter) == (
        f"{file}: has the pattern '((((.+)+)+)+)+=', which is not read (it repeats too much to be tried); name the "
        "modules plainly"
    )


@pytest.mark.parametrize("field", ["corda_config", "eva_config", "lora_dropout", "exclude_modules", "runtime_config"])
def test_what_belongs_to_training_alone_is_passed_over(adapter: Path, changed: Callable[..., None], field: str) -> None:
    changed(adapter / "adapter_config.json", **{field: 0.5})
    assert set(open_adapter(adapter).parts) == {Q, DOWN}


def test_a_path_that_holds_none(adapter: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert refusal(gone) == (
        f"--adapter {gone}: there is no such directory; give the one that PEFT's save_pretrained wrote"
    )
    file = adapter / "adapter_config.json"
    assert refusal(file) == f"--adapter {file}: is no directory; give the one that PEFT's save_pretrained wrote"
    assert refusal(tmp_path) == (
        f"--adapter {tmp_path}: has no adapter_config.json; give the directory that PEFT's save_pretrained wrote"
    )


def test_pickled_weights_are_refused_and_not_opened(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    again = "load it with PEFT where you trust it, and save_pretrained"
    assert refusal(adapter) == f"--adapter {adapter}: has no adapter_model.safetensors; {again}"
    (adapter / "adapter_model.bin").write_bytes(b"no pickle")
    assert refusal(adapter) == (
        f"--adapter {adapter}: has no adapter_model.safetensors but adapter_model.bin, which can run code when read; "
        f"{again}"
    )


def test_tensors_of_other_kinds_are_refused(adapter: Path, tensors: Callable[..., None]) -> None:
    file = adapter / "adapter_model.safetensors"
    only = f"and plain LoRA alone is read; {MERGE}"
    tensors(lambda found: found.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2, 4)}))
    assert refusal(adapter) == (
        f"{file}: base_model.model.model.embed_tokens.lora_embedding_A is an embedding's, {only}"
    )
    tensors(lambda found: found.pop("base_model.model.model.embed_tokens.lora_embedding_A"))
    norm = "base_model.model.model.norm.bias"
    tensors(lambda found: found.update({norm: torch.zeros(2, 4)}))
    assert refusal(adapter) == (f"{file}: {norm} is none of a linear layer's A and B, {only}")


def untied(path: Path, demo_checkpoint: Path) -> Source:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    shutil.copyfile(demo_checkpoint / "tokenizer.json", path / "tokenizer.json")
    return open_source(str(path))


def test_the_base_weight_that_peft_saves_beside_an_adapted_head_is_left_aside(
    tmp_path: Path, demo_checkpoint: Path, made_adapter: Callable[..., Path]
) -> None:
    source, targets = untied(tmp_path / "base", demo_checkpoint), ["q_proj", "lm_head"]
    with pytest.warns(UserWarning, match="Setting `save_embedding_layers` to `True`"):
        path = made_adapter(tmp_path / "base", tmp_path / "style", r=2, lora_alpha=4, target_modules=targets)
    copy = "base_model.model.lm_head.base_layer.weight"
    assert copy in load_file(path / "adapter_model.safetensors")
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32), path
    )
    merged = theirs.merge_and_unload().state_dict()["lm_head.weight"].bfloat16()
    assert torch.equal(with_adapters(source, [path], "merge").weights().tensor("lm_head.weight"), merged)
    (remark,) = adapter_remarks(with_adapters(source, [path], "beside"))
    assert remark == (
        f"--adapter {path}: holds the base's lm_head too, for which vLLM refuses it; save it with PEFT's "
        "save_pretrained(…, save_embedding_layers=False) for vLLM"
    )

    file = path / "adapter_model.safetensors"
    save_file({**load_file(file), copy: torch.zeros(2048, 32, dtype=torch.bfloat16)}, file)
    assert unfit(source, path) == (
        f"{file}: {copy} [2048, 32] is not the weight of lm_head [2048, 32] in {source.name}, so that the "
        f"adapter has a whole module of its own; {MERGE}"
    )
    renamed = copy.replace("lm_head", "score")
    save_file({renamed if name == copy else name: tensor for name, tensor in load_file(file).items()}, file)
    assert unfit(source, path) == (
        f"{file}: {renamed} is none of a linear layer's A and B, and plain LoRA alone is read; {MERGE}"
    )


def test_an_a_without_its_b_and_another_rank_than_the_configurations(
    adapter: Path, tensors: Callable[..., None]
) -> None:
    file, b = adapter / "adapter_model.safetensors", A.replace("lora_A", "lora_B")
    tensors(lambda found: found.update({b: torch.zeros(256, 3)}))
    assert refusal(adapter) == (
        f"{file}: {Q} has A [2, 256] and B [256, 3], and adapter_config.json gives it the rank 2; copy or download "
        "both files again"
    )
    tensors(lambda found: found.pop(b))
    assert refusal(adapter) == f"{file}: has no {b}, whose other half is there; copy or download it again"


def test_values_that_are_not_finite(adapter: Path, tensors: Callable[..., None]) -> None:
    def spoil(found: dict[str, torch.Tensor]) -> None:
        found[A][0, 0], found[A][1, 7], found[A][1, 8] = torch.nan, torch.inf, 3.4e38

    tensors(spoil)
    assert refusal(adapter) == (
        f"{adapter}/adapter_model.safetensors: {A} holds 3 values of 512 that are not finite in BF16; take an earlier "
        "checkpoint of its training"
    )


def test_an_adapter_of_another_base(demo: Source, adapter: Path, tensors: Callable[..., None]) -> None:
    other = f"it is of another base than {demo.name}; give that one"
    file = adapter / "adapter_model.safetensors"
    renamed = A.replace("q_proj", "qkv_proj")
    tensors(lambda found: found.update({renamed: found[A], renamed.replace("_A", "_B"): torch.zeros(256, 2)}))
    assert unfit(demo, adapter) == (
        f"{file}: adapts model.layers.0.self_attn.qkv_proj, and LlamaForCausalLM has no such linear layer: {other}"
    )
    tensors(lambda found: [found.pop(renamed), found.pop(renamed.replace("_A", "_B"))])
    tensors(lambda found: found.update({A: torch.zeros(2, 512)}))
    assert unfit(demo, adapter) == (
        f"{file}: adapts {Q} of 512 inputs and 256 outputs, which here has 256 and 256: {other}"
    )


def test_a_tied_head_is_the_embedding_too(demo: Source, adapter: Path, tensors: Callable[..., None]) -> None:
    vocabulary = demo.text_config.vocab_size
    head = {
        "base_model.model.lm_head.lora_A.weight": torch.zeros(2, 256),
        "base_model.model.lm_head.lora_B.weight": torch.zeros(vocabulary, 2),
    }
    tensors(lambda found: found.update(head))
    assert unfit(demo, adapter) == (
        f"{adapter}/adapter_model.safetensors: adapts lm_head, whose weight is the embedding's too; untie them in the "
        "base first"
    )


def test_one_is_merged_and_several_lie_beside(demo: Source, adapter: Path, tmp_path: Path) -> None:
    second = Path(shutil.copytree(adapter, tmp_path / "second"))
    with pytest.raises(InputError, match=re.escape(f"--adapter {second}: is the second, and one is merged; give")):
        with_adapters(demo, [adapter, second], "merge")
    beside = with_adapters(demo, [adapter, second], "beside")
    assert [variant.on.name if variant.on else None for variant in beside.variants] == [None, "style", "second"]
    assert beside.fingerprint == demo.fingerprint
    assert with_adapters(demo, [adapter], "merge").fingerprint != demo.fingerprint


@pytest.mark.parametrize("name", ["fp32", "a.fp32", "a b", ".hidden", "é"])
def test_a_name_that_no_graph_can_have(adapter: Path, name: str) -> None:
    renamed = adapter.rename(adapter.parent / name)
    with pytest.raises(InputError) as caught:
        check_names([open_adapter(renamed)])
    assert str(caught.value) == (
        f"--adapter {renamed}: its graph is called after the directory, and {name!r} is no name for one; rename it, "
        "with up to 100 letters, digits, '.', '_' and '-', and no fp32 at its end"
    )


def test_two_of_one_name(adapter: Path, tmp_path: Path) -> None:
    again = Path(shutil.copytree(adapter, tmp_path / "elsewhere" / "style"))
    with pytest.raises(InputError) as caught:
        check_names([open_adapter(adapter), open_adapter(again)])
    assert str(caught.value) == (f"--adapter {again}: is called style, as {adapter} is; rename one of the directories")


def test_what_the_user_should_know(demo: Source, adapter: Path, changed: Callable[..., None]) -> None:
    assert adapter_remarks(with_adapters(demo, [adapter], "beside")) == []
    changed(adapter / "adapter_config.json", base_model_name_or_path="org/Other", alpha_pattern={"q_proj": 1})
    other = (
        f"--adapter {adapter}: says that it was trained on org/Other; its modules and sizes fit {demo.name}, and "
        "whether that is the same model is yours to know"
    )
    patterns = (
        f"--adapter {adapter}: gives single modules a rank or an alpha of their own, which vLLM does not read: there "
        "some would be scaled by another factor"
    )
    assert adapter_remarks(with_adapters(demo, [adapter], "beside")) == [other, patterns]
    assert adapter_remarks(with_adapters(demo, [adapter], "merge")) == [other]
    changed(adapter / "adapter_config.json", base_model_name_or_path=f"elsewhere/{demo.path.name}/", alpha_pattern={})
    assert adapter_remarks(with_adapters(demo, [adapter], "merge")) == []
