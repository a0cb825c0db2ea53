"""Each rule of checkpoints against a good checkpoint of each form with one thing wrong in it; and good ones that
others export.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fp8q import api
from fp8q.core.run import Run
from fp8q.quantize.lint.check import RULES, checkpoint_findings
from fp8q.quantize.lint.rules_values import LEAST_IN_FP16
from fp8q.quantize.lint.rules_weights import count_nan

from ..reading import fp8_checkpoints
from .conftest import FORMS, Damaged

Q, K, V, O = (f"model.layers.1.self_attn.{name}_proj" for name in "qkvo")  # noqa: E741
GATE, UP, DOWN = (f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down"))
EXPERTS = "model.layers.1.block_sparse_moe.experts"
STATIC = ("compressed-tensors", "modelopt", "fp8 tensor")
IGNORE = {"compressed-tensors": "ignore", "modelopt": "exclude_modules", "fp8": "modules_to_not_convert"}


@dataclass(frozen=True)
class Case:
    """What breaks a rule in the `forms`, at which tensor or file (the first of them), and what else finds it."""

    number: str
    damage: Callable[[Damaged], None]
    place: Callable[[Damaged], str]
    forms: tuple[str, ...] = FORMS
    also: frozenset[str] = frozenset()


def widen(it: Damaged, module: str) -> None:
    """A module back in BF16, without its scales."""
    it.tensors[f"{module}.weight"] = it.tensors[f"{module}.weight"].bfloat16()
    for name in (it.scale(module), it.input_scale(module)):
        it.tensors.pop(name, None)


def leave_out(it: Damaged, *modules: str) -> None:
    """Modules that the configuration is to leave out."""
    if it.form == "modelopt":
        path = it.folder / "hf_quant_config.json"
        said = json.loads(path.read_text())
        said["quantization"]["exclude_modules"] += modules
        path.write_text(json.dumps(said))
        it.quantization["ignore"] += modules
    else:
        it.quantization[IGNORE[it.form.partition(" ")[0]]] += modules


def leave_modelopts_file(it: Damaged) -> None:
    """ModelOpt's file beside another form."""
    (it.folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')


def say_per_token(it: Damaged) -> None:
    """Both files say a scale for each channel and token, of a checkpoint with static ones."""
    path = it.folder / "hf_quant_config.json"
    said = json.loads(path.read_text())
    for place in (said["quantization"], it.quantization):
        place["quant_algo"] = "FP8_PER_CHANNEL_PER_TOKEN"
    path.write_text(json.dumps(said))


def leave_wide(it: Damaged, module: str) -> None:
    """Both."""
    widen(it, module)
    leave_out(it, module)


def multiply(it: Damaged, names: list[str], by: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Other values for some scales, of the type they had."""
    for name in names:
        it.tensors[name] = by(it.tensors[name].float()).to(it.tensors[name].dtype)


def inputs(it: Damaged) -> list[str]:
    """All scales of inputs."""
    return sorted(name for name in it.tensors if name.endswith(("input_scale", "activation_scale")))


def drop(it: Damaged, name: str) -> None:
    """Take a tensor out."""
    del it.tensors[name]


def rename(it: Damaged, old: str, new: str) -> None:
    """Another name for a tensor."""
    it.tensors[new] = it.tensors.pop(old)


def experts(it: Damaged, *scales: float) -> None:
    """Experts beside the layer's own projections, with these input scales."""
    for number, scale in enumerate(scales):
        expert = f"model.layers.1.mlp.experts.{number}.down_proj"
        for name, last in ((f"{DOWN}.weight", "weight"), (it.scale(DOWN), it.scale("x")[2:])):
            it.tensors[f"{expert}.{last}"] = it.tensors[name].clone()
        kept = it.tensors[it.input_scale(DOWN)]
        it.tensors[it.input_scale(expert)] = torch.full_like(kept, scale)


def wide_experts(it: Damaged, *wide: int, parts: tuple[str, ...] = ("w1", "w2", "w3")) -> None:
    """Four experts of three GEMMs in a layer, of which `wide` have `parts` in BF16, and are left out."""
    for number, part in product(range(4), ("w1", "w2", "w3")):
        expert = f"model.layers.1.block_sparse_moe.experts.{number}.{part}"
        for name in [name for name in it.tensors if name.startswith(f"{DOWN}.")]:
            it.tensors[expert + name.removeprefix(DOWN)] = it.tensors[name].clone()
        if number in wide and part in parts:
            leave_wide(it, expert)


def cache(it: Damaged, key: float, value: float | None = 0.05) -> None:
    """The scales of a layer's cache, as the form calls them."""
    parent = "model.layers.1.self_attn"
    names = (f"{parent}.k_proj.k_scale", f"{parent}.v_proj.v_scale")
    names = names if it.form == "modelopt" else (f"{parent}.k_scale", f"{parent}.v_scale")
    it.tensors.pop(names[1], None)
    it.tensors |= {name: torch.tensor([number]) for name, number in zip(names, (key, value), strict=True) if number}


def one_wide_layer(it: Damaged) -> None:
    it.config["fp8q"] = {"wide_cache": ["model.layers.1.self_attn"]}


def cache_by_head(it: Damaged, heads: int = 2, strategy: str = "attn_head") -> None:
    """The scales of so many heads in every layer, as `--kv-scale head` writes them; the demo has two heads."""
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    it.quantization["kv_cache_scheme"] = scheme
    layers = {name.rpartition(".k_proj.")[0] for name in it.tensors if ".k_proj." in name}
    it.tensors |= {f"{layer}.{part}_scale": torch.full([heads, 1, 1], 0.05) for layer in layers for part in "kv"}


def cache_of_a_block(it: Damaged) -> None:
    it.tensors["model.layers.1.mlp.k_scale"] = torch.tensor([0.05])


def latent_cache(it: Damaged) -> None:
    cache(it, 0.05)
    it.tensors["model.layers.1.self_attn.kv_b_proj.weight"] = torch.ones(4, 4, dtype=torch.bfloat16)


def own_cache_file(it: Damaged) -> None:
    save_file({"model.layers.1.self_attn.v_scale": torch.tensor([0.05])}, it.folder / "kv_cache.safetensors")


def cut(it: Damaged) -> None:
    it.save()
    os.truncate(it.folder / fp8_checkpoints.SINGLE, 3_000_000)


def head_in_codes(it: Damaged) -> None:
    it.tensors |= {f"lm_head.{name[len(O) + 1 :]}": it.tensors[name].clone() for name in [*it.tensors] if O in name}
    it.config["vocab_size"] = it.tensors["lm_head.weight"].shape[0]


def another_head(it: Damaged) -> None:
    it.tensors["lm_head.weight"] = 2 * it.tensors["model.embed_tokens.weight"]


def head_alone(it: Damaged) -> None:
    it.tensors["lm_head.weight"] = it.tensors.pop("model.embed_tokens.weight")


def all_wide(it: Damaged) -> None:
    for name in [*it.tensors]:
        if name.endswith("_proj.weight"):
            widen(it, name.removesuffix(".weight"))


def odd_blocks(it: Damaged) -> None:
    it.tensors[f"{DOWN}.weight"] = it.tensors[f"{DOWN}.weight"][:192]


def name_no_down_projection(it: Damaged) -> None:
    (group,) = it.quantization["config_groups"].values()
    group["targets"] = ["re:.*self_attn.*", "re:.*(gate|up)_proj$"]


def rotate_while_running(it: Damaged) -> None:
    place = {"targets": ["re:.*o_proj$"], "location": "input"}
    back = place | {"location": "weight_input", "inverse": True}
    it.quantization["transform_config"] = {"config_groups": {"R4": {"type": "hadamard", "apply": [place, back]}}}


def set_one(name: str, value: float) -> Callable[[Damaged], None]:
    """The first value of a module's scale (`weight` or `input`) of the module O."""

    def damage(it: Damaged) -> None:
        it.tensors[it.scale(O) if name == "weight" else it.input_scale(O)].view(-1)[0] = value

    return damage


def set_code(row: int, column: int, byte: int) -> Callable[[Damaged], None]:
    """Another code in the weight of O."""

    def damage(it: Damaged) -> None:
        it.tensors[f"{O}.weight"].view(torch.uint8)[row, column] = byte

    return damage


def setting(name: str, shape: list[int]) -> Callable[[Damaged], None]:
    """Another shape for the scale of O."""

    def damage(it: Damaged) -> None:
        at = it.scale(O) if name == "weight" else it.input_scale(O)
        it.tensors[at] = torch.full(shape, 0.01)

    return damage


def of(what: Callable[[Damaged], str] | str) -> Callable[[Damaged], str]:
    return what if callable(what) else lambda it: what


CASES = {
    "a file cut short": Case("C101", cut, of(fp8_checkpoints.SINGLE), also=frozenset()),
    "codes in E5M2": Case("C102", lambda it: it.tensors.update(
        {f"{O}.weight": it.tensors[f"{O}.weight"].float().to(torch.float8_e5m2)}), of(f"{O}.weight")),
    "codes as bytes": Case("C102", lambda it: it.tensors.update(
        {f"{O}.weight": it.tensors[f"{O}.weight"].view(torch.uint8)}), of(f"{O}.weight")),
    "no codes": Case("C103", all_wide, lambda it: (
        "hf_quant_config.json" if it.form == "modelopt" else "config.json"), also=frozenset()),
    "no scale of a weight": Case("C104", lambda it: drop(it, it.scale(O)), of(f"{O}.weight")),
    "no scale of an input": Case("C104", lambda it: drop(it, it.input_scale(O)), of(f"{O}.weight"),
                                 STATIC),
    "a name nobody reads": Case("C105", lambda it: rename(it, it.scale(O), f"{O}.weight_scaling_factor"),
                                of(f"{O}.weight_scaling_factor"), also=frozenset({"C104"})),
    "the name of another form": Case("C105", lambda it: rename(it, it.scale(O), f"{O}.weight_scale_inv"),
                                     of(f"{O}.weight_scale_inv"), STATIC[:2], frozenset({"C104"})),
    "weight_scale of blocks": Case("C105", lambda it: rename(it, it.scale(O), f"{O}.weight_scale"),
                                   of(f"{O}.weight_scale"), ("fp8",)),
    "vLLM's name of a weight's scale": Case("C106", lambda it: rename(it, it.scale(O), f"{O}.weight_scale"),
                                            of(f"{O}.weight_scale"), ("fp8 tensor",)),
    "vLLM's name of an input's": Case("C106", lambda it: rename(it, it.input_scale(O), f"{O}.input_scale"),
                                      of(f"{O}.input_scale"), ("fp8 tensor",)),
    "FP64": Case("C107", lambda it: it.tensors.update({it.scale(O): it.tensors[it.scale(O)].double()}),
                 lambda it: it.scale(O)),
    "bytes": Case("C107", lambda it: it.tensors.update(
        {it.scale(O): torch.full_like(it.tensors[it.scale(O)], 118, dtype=torch.uint8)}), lambda it: it.scale(O)),
    "channels where one is said": Case("C108", setting("weight", [256, 1]), lambda it: it.scale(O)),
    "no shape at all": Case("C108", setting("weight", [7, 3]), lambda it: it.scale(O), STATIC),
    "two numbers for an input": Case("C108", setting("input", [2]), lambda it: it.input_scale(O), STATIC),
    "blocks that do not tile": Case("C109", setting("weight", [3, 2]), lambda it: it.scale(O), ("fp8",)),
    "blocks that transformers takes wrong": Case("C110", odd_blocks, of(f"{DOWN}.weight"), ("fp8",),
                                                  frozenset({"C125"})),
    "NaN": Case("C111", set_one("weight", math.nan), lambda it: it.scale(O)),
    "zero": Case("C111", set_one("weight", 0), lambda it: it.scale(O)),
    "negative": Case("C111", set_one("input", -0.5), lambda it: it.input_scale(O), STATIC),
    "infinite": Case("C111", set_one("input", math.inf), lambda it: it.input_scale(O), STATIC),
    "a cache of NaN": Case("C111", lambda it: cache(it, math.nan), lambda it: (
        f"model.layers.1.self_attn.{'k_proj.' if it.form == 'modelopt' else ''}k_scale"),
        ("modelopt", "fp8")),
    "1.0 of a weight": Case("C112", lambda it: multiply(it, [it.scale(O)], torch.ones_like), lambda it: it.scale(O)),
    "1.0 of all inputs": Case("C112", lambda it: multiply(it, inputs(it), torch.ones_like), lambda it: inputs(it)[0],
                              STATIC),
    "the reciprocal of a weight's": Case("C113", lambda it: multiply(it, [it.scale(O)], torch.reciprocal),
                                         lambda it: it.scale(O)),
    "the reciprocals of inputs": Case("C113", lambda it: multiply(it, inputs(it), torch.reciprocal),
                                      lambda it: inputs(it)[0], STATIC),
    "an expert of 1.0": Case("C114", lambda it: experts(it, 0.02, 0.03, 1.0, 0.02), lambda it: it.input_scale(
        "model.layers.1.mlp.experts.2.down_proj"), STATIC),
    "an expert of 0.5": Case("C114", lambda it: experts(it, 0.02, 0.03, 0.5, 0.02), lambda it: it.input_scale(
        "model.layers.1.mlp.experts.2.down_proj"), STATIC),
    "an expert far from the others": Case("C115", lambda it: experts(it, 0.02, 0.0003, 0.025, 0.02), lambda it:
        it.input_scale("model.layers.1.mlp.experts.1.down_proj"), STATIC),
    "a value in BF16": Case("C116", lambda it: leave_wide(it, V), of(f"{V}.weight")),
    "an up projection in BF16": Case("C116", lambda it: leave_wide(it, UP),
                                     of(f"{UP}.weight")),
    "an expert in BF16": Case("C116", lambda it: wide_experts(it, 3), of(f"{EXPERTS}.3.w1.weight")),
    "the first expert in BF16": Case("C116", lambda it: wide_experts(it, 0), of(f"{EXPERTS}.0.w1.weight")),
    "one GEMM of an expert in BF16": Case("C116", lambda it: wide_experts(it, 2, parts=("w3",)),
                                             of(f"{EXPERTS}.2.w3.weight")),
    "experts' last GEMMs in BF16": Case("C116", lambda it: wide_experts(it, 0, 1, 2, 3, parts=("w2",)),
                                           of(f"{EXPERTS}.0.w2.weight")),
    "another scale of the same input": Case("C117", lambda it: multiply(it, [it.input_scale(K)], lambda x: 2 * x),
                                            lambda it: it.input_scale(K), STATIC),
    "a tied head": Case("C118", head_in_codes, of("lm_head.weight"), also=frozenset({"C121"})),
    "a head that is not the embedding": Case("C129", another_head, of("lm_head.weight")),
    "a head without the embedding": Case("C129", head_alone, of("lm_head.weight")),
    "a cache of 1.0": Case("C119", lambda it: cache(it, 1.0), lambda it: (
        f"model.layers.1.self_attn.{'k_proj.' if it.form == 'modelopt' else ''}k_scale"), ("modelopt", "fp8")),
    "keys without values": Case("C120", lambda it: cache(it, 0.05, None), of("model.layers.1.self_attn"),
                                ("modelopt",)),
    "a cache nobody announced": Case("C120", lambda it: cache(it, 0.05), of("model.layers.1.self_attn.k_scale"),
                                     ("compressed-tensors",)),
    "a wide layer among others in FP8": Case("C126", one_wide_layer, of("config.json"), ("modelopt",)),
    "a cache of a module without a place": Case("C126", cache_of_a_block, of("model.layers.1.mlp.k_scale"),
                                                ("fp8",)),
    "a cache of latent attention": Case("C126", latent_cache, of("model.layers.1.self_attn.k_scale"), ("fp8",)),
    "a cache by head": Case("C127", cache_by_head, of("config.json"), ("compressed-tensors",)),
    "scales of other heads": Case("C108", lambda it: cache_by_head(it, 3), of("model.layers.0.self_attn.k_scale"),
                                  ("compressed-tensors",), frozenset({"C127"})),
    "one scale for all heads": Case("C108", lambda it: cache_by_head(it, 1), of("model.layers.0.self_attn.k_scale"),
                                    ("compressed-tensors",), frozenset({"C127"})),
    "scales of heads nobody announced": Case("C108", lambda it: cache_by_head(it, strategy="tensor"),
                                             of("model.layers.0.self_attn.k_scale"), ("compressed-tensors",)),
    "a count of drafts that are not there": Case("C128", lambda it: it.config.update(num_nextn_predict_layers=1),
                                         of("config.json")),
    "values alone in fp8q's file": Case("C126", own_cache_file, of("kv_cache.safetensors"), ("compressed-tensors",)),
    "left out, and in codes": Case("C121", lambda it: leave_out(it, O), of(f"{O}.weight")),
    "in BF16, and not left out": Case("C122", lambda it: widen(it, O), of(f"{O}.weight")),
    "a code of NaN": Case("C123", set_code(3, 5, 0x7F), of(f"{O}.weight")),
    "a code of NaN with its sign": Case("C123", set_code(-1, -1, 0xFF), of(f"{O}.weight")),
    "a scale without its weight": Case("C124", lambda it: drop(it, f"{O}.weight"), lambda it: it.scale(O)),
    "codes that no target names": Case("C130", name_no_down_projection, of("model.layers.0.mlp.down_proj.weight"),
                                       ("compressed-tensors",)),
    "a field that nobody knows": Case("C131", lambda it: it.quantization.update(weight_rotation="hadamard"),
                                      of("config.json"), ("fp8",)),
    "rotations while it runs": Case("C132", rotate_while_running, of("config.json"), ("compressed-tensors",)),
    "two files that differ": Case("C133", lambda it: it.quantization.update(quant_algo="FP8_PER_CHANNEL_PER_TOKEN"),
                                  of("config.json"), ("modelopt",)),
    "two layouts": Case("C133", leave_modelopts_file, of("config.json"), ("compressed-tensors",)),
    "two scales of the same keys": Case("C133", lambda it: it.tensors.update(
        {"model.layers.1.self_attn.k_scale": torch.tensor(0.07)}), of("model.layers.1.self_attn.k_proj.k_scale"),
                                        ("modelopt",)),
    "static scales of inputs that are scaled later": Case("C133", say_per_token, lambda it: it.input_scale(
        "model.layers.0.mlp.down_proj"), ("modelopt",), also=frozenset({"C108"})),
    "a scale that FP16 does not have": Case("C134", lambda it: it.tensors.update(
        {f"{O}.weight_scale": torch.tensor(1.9 * 2.0**-20)}), of(f"{O}.weight_scale"), ("modelopt",)),
    "a weight cut off": Case("C125", lambda it: it.tensors.update(
        {f"{O}.weight": it.tensors[f"{O}.weight"][:64, :100]}), of(f"{O}.weight"), STATIC),
}  # fmt: skip


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, case in CASES.items() for form in case.forms])
def test_a_damaged_checkpoint_breaks_that_rule_and_no_other(
    name: str, form: str, damaged: Callable[[str], Damaged]
) -> None:
    case, it = CASES[name], damaged(form)
    case.damage(it)
    if not it.saved:
        it.save()
    _, found = checkpoint_findings(it.folder)
    assert {finding.rule for finding in found} == {case.number} | case.also
    first = next(finding for finding in found if finding.rule == case.number)
    assert first.node == case.place(it)
    assert first.severity == RULES[case.number].severity
    assert first.message.count("; ") >= 1


def test_a_layer_whose_experts_are_split_is_told_of_once_and_one_all_of_whose_experts_are_wide_is_not(
    damaged: Callable[[str], Damaged],
) -> None:
    it = damaged("modelopt")
    wide_experts(it, 1, 3)
    it.save()
    _, found = checkpoint_findings(it.folder)
    (finding,) = found
    assert (finding.rule, finding.node) == ("C116", f"{EXPERTS}.1.w1.weight")
    assert finding.message == (
        "is BF16, as 5 more of the 12 GEMMs of its layer's experts, and the rest FP8 with one scale a tensor; "
        "quantize all of them alike"
    )
    for name in (name for name in [*it.tensors] if name.startswith(EXPERTS) and name.endswith(".weight")):
        if it.tensors[name].dtype != torch.bfloat16:
            leave_wide(it, name.removesuffix(".weight"))
    it.save()
    assert checkpoint_findings(it.folder)[1] == []


def test_a_small_scale_that_fp16_has_is_not_told_of(damaged: Callable[[str], Damaged]) -> None:
    it = damaged("modelopt")
    it.tensors[f"{O}.weight_scale"] = torch.tensor(116 * 2.0**-24)
    it.save()
    assert "C134" not in {finding.rule for finding in checkpoint_findings(it.folder)[1]}


def test_every_rule_has_a_case_in_every_form_that_can_break_it() -> None:
    assert {case.number for case in CASES.values()} == set(RULES)


@pytest.mark.parametrize("form", FORMS)
def test_a_good_checkpoint_has_no_findings(form: str, goods: dict[str, Path]) -> None:
    assert api.lint(goods[form]).findings == []


@pytest.mark.parametrize("strategy", ["channel", "block"])
def test_none_of_compressed_tensors_other_ways_has(strategy: str, demo_checkpoint: Path, tmp_path: Path) -> None:
    assert api.lint(fp8_checkpoints.compressed(demo_checkpoint, tmp_path / "made", strategy)).findings == []


@pytest.mark.parametrize("configuration", ["FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"])
def test_none_of_modelopts_other_ways_has(configuration: str, demo_checkpoint: Path, tmp_path: Path) -> None:
    assert api.lint(fp8_checkpoints.modelopt(demo_checkpoint, tmp_path / "made", configuration)).findings == []


def test_our_own_checkpoint_has_none(demo_run: Run) -> None:
    assert api.lint(demo_run.model).findings == []


def test_a_layer_of_another_width_throughout_is_no_fault(damaged: Callable[[str], Damaged]) -> None:
    it = damaged("modelopt")
    for module, side in ((GATE, 0), (UP, 0), (DOWN, 1)):
        it.tensors[f"{module}.weight"] = it.tensors[f"{module}.weight"].narrow(side, 0, 512).contiguous()
    it.save()
    assert checkpoint_findings(it.folder)[1] == []


@pytest.mark.parametrize("size", [0, 7, 8, 1000, 1003])
def test_nan_codes_are_counted_at_every_place(size: int) -> None:
    codes = np.arange(size, dtype=np.uint8)
    expected = int(torch.from_numpy(codes).view(torch.float8_e4m3fn).float().isnan().sum())
    assert count_nan(codes) == expected == sum(byte in (127, 255) for byte in codes.tolist())
    for place in range(min(size, 20)):
        codes = np.zeros(size, np.uint8)
        codes[place] = 0xFF
        assert count_nan(codes) == 1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gemma"}, "gemma ties both where config.json says nothing"),
        ({"model_type": "gpt2"}, "gpt2 ties both where config.json says nothing"),
        ({"model_type": "gemma", "tie_word_embeddings": False}, None),
        ({"model_type": "llama"}, None),
        ({"model_type": "llama", "tie_word_embeddings": True}, "config.json ties both"),
        ({"model_type": "gemma3", "text_config": {}}, "gemma3 ties both where config.json says nothing"),
        ({"model_type": "gemma3", "text_config": {"tie_word_embeddings": False}}, None),
    ],
)
def test_a_head_in_fp8_is_lost_where_the_class_ties_it(
    damaged: Callable[[str], Damaged], config: dict[str, Any], said: str | None
) -> None:
    it = damaged("compressed-tensors")
    it.config.pop("tie_word_embeddings")
    it.config |= config
    head = torch.zeros(2048, 256).to(torch.float8_e4m3fn)
    it.tensors |= {"lm_head.weight": head, "lm_head.weight_scale": torch.tensor([0.001])}
    it.save()
    tied = [str(finding) for finding in checkpoint_findings(it.folder)[1] if finding.rule == "C118"]
    if said is None:
        assert tied == []
    else:
        assert tied == [f"C118 tied-head: lm_head.weight: is a head in FP8, and {said}; leave it in BF16"]


def image_encoder(it: Damaged) -> None:
    """Janus: an attention inside its encoder of images ends in a `proj_out`, and the head is the embedding."""
    it.tensors["model.vqmodel.encoder.mid.attn_1.proj_out.weight"] = torch.ones(512, 512, dtype=torch.bfloat16)


def longer_embedding(it: Damaged) -> None:
    """CPM-Ant: the embedding has another name, and rows for prompts besides those of the head."""
    head = it.tensors.pop("model.embed_tokens.weight")
    it.tensors |= {"cpmant.input_embedding.weight": torch.cat([head, head[:64]]), "lm_head.weight": head}
    it.config |= {"model_type": "cpmant", "architectures": ["CpmAntForCausalLM"]}


def head_of_another_name(it: Damaged) -> None:
    it.tensors["shared.weight"] = it.tensors.pop("model.embed_tokens.weight")
    it.tensors["lm_head.weight"] = 2 * it.tensors["shared.weight"]


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (image_encoder, []),
        (longer_embedding, []),
        (
            head_of_another_name,
            [
                (
                    "C129 head-beside-tie: lm_head.weight: is not shared.weight, and config.json ties both; "
                    "say tie_word_embeddings false, or leave one out"
                )
            ],
        ),
    ],
)
def test_a_head_has_a_row_for_each_token(
    damaged: Callable[[str], Damaged], change: Callable[[Damaged], None], lines: list[str]
) -> None:
    it = damaged("compressed-tensors")
    it.config["tie_word_embeddings"] = True
    change(it)
    it.save()
    assert [str(finding) for finding in checkpoint_findings(it.folder)[1] if finding.rule in ("C118", "C129")] == lines


@pytest.mark.parametrize(("rows", "rules"), [(2048, ["C118"]), (2047, [])])
def test_codes_of_a_projection_that_is_called_as_a_head_are_none(
    damaged: Callable[[str], Damaged], rows: int, rules: list[str]
) -> None:
    it = damaged("compressed-tensors")
    it.config["tie_word_embeddings"] = True
    it.quantization["ignore"] = []
    it.tensors["encoder.mid.proj_out.weight"] = torch.zeros(rows, 256).to(torch.float8_e4m3fn)
    it.tensors["encoder.mid.proj_out.weight_scale"] = torch.tensor([0.001])
    it.save()
    assert [finding.rule for finding in checkpoint_findings(it.folder)[1] if finding.rule == "C118"] == rules


def test_from_that_scale_on_fp16_has_every_bf16_number_and_under_it_not() -> None:
    numbers = torch.arange(1, 0x7F80).short().view(torch.bfloat16).float()  # all that are positive and finite
    in_fp16 = numbers.half().float() == numbers
    assert in_fp16[(numbers >= LEAST_IN_FP16) & (numbers <= 65_504)].all()
    assert not in_fp16[numbers < LEAST_IN_FP16][-1]
    assert float(numbers[numbers.half() == 0].max()) == 2.0**-25
