"""`fp8q lint --for SERVER` as its users meet it: versions, exit codes, JSON, checkpoints of any form; and public cases,
rebuilt small.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.options import CheckpointServer
from fp8q.quantize.lint.check import SERVER_RULES, checkpoint_findings, open_served
from fp8q.quantize.lint.servers import READ, parse_version
from fp8q.quantize.reading.quantization_config import MODELOPT_CONFIG

from ..reading import fp8_checkpoints
from .conftest import Damaged

Fp8q = Callable[..., Any]
HEADS = 64


def found(it: Damaged, server: Any, version: str | None = None) -> list[str]:
    """The numbers of the rules that the damaged checkpoint breaks on a server."""
    if not it.saved:
        it.save()
    return [finding.rule for finding in SERVER_RULES.findings(open_served(it.folder, server, version))]


def with_cache(it: Damaged, architecture: str = "LlamaForCausalLM", strategy: str = "tensor") -> Damaged:
    """Scales of a cache in every layer, as llm-compressor writes them."""
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    it.quantization["kv_cache_scheme"] = scheme
    it.config |= {"architectures": [architecture], "head_dim": HEADS}
    for name in [name for name in it.tensors if name.endswith("self_attn.k_proj.weight")]:
        parent = name.removesuffix(".k_proj.weight")
        it.tensors |= {f"{parent}.{part}_scale": torch.tensor([0.05]) for part in "kv"}
        for part in "qkv":  # as llm-compressor's preset has them, one of all three
            it.tensors[f"{parent}.{part}_proj.weight_scale"].fill_(0.001)
    for name in [name for name in it.tensors if name.endswith(("gate_proj.weight_scale", "up_proj.weight_scale"))]:
        it.tensors[name].fill_(0.001)
    return it


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.32", (0, 32)), ("v0.5.23", (0, 5, 23)), ("1.3.0rc2", (1, 3)), ("0.33.0.dev1+g5", (0, 33)), ("5", (5,))],
)
def test_versions_are_read_as_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_version(text) == numbers


@pytest.mark.parametrize("text", ["", "new", "1..2", "-1", "1.2.3.4.5", "0.32 beta"])
def test_other_texts_are_no_version(text: str) -> None:
    with pytest.raises(InputError, match="is no version; give one such as 0.32.0, or leave it out"):
        parse_version(text)


def test_a_good_checkpoint_of_each_form_has_nothing_that_is_wrong(damaged: Callable[[str], Damaged]) -> None:
    it = with_cache(damaged("compressed-tensors"))
    assert found(it, "vllm") == []
    assert found(it, "sglang") == []
    assert found(it, "transformers", "5.23.0") == []
    assert found(it, "transformers") == ["S121"]


def test_sglang_takes_static_scales_of_modelopts_form_alone(demo_checkpoint: Path, tmp_path: Path) -> None:
    dynamic = fp8_checkpoints.modelopt(demo_checkpoint, tmp_path / "dynamic", "FP8_PER_CHANNEL_PER_TOKEN_CFG")
    (finding,) = SERVER_RULES.findings(open_served(dynamic, "sglang", None))
    assert str(finding) == (
        "S111 form-refused: hf_quant_config.json: says a scale a channel and --form dynamic, which SGLang refuses in "
        "this form; write it by --layout compressed-tensors of fp8q scales or convert"
    )
    static = fp8_checkpoints.modelopt(demo_checkpoint, tmp_path / "static")
    taken: list[tuple[Path, CheckpointServer]] = [
        (dynamic, "vllm"), (dynamic, "tensorrt-llm"), (static, "sglang"), (static, "tensorrt-llm"),
    ]  # fmt: skip
    for folder, server in taken:
        findings = SERVER_RULES.findings(open_served(folder, server, None))
        assert {finding.rule for finding in findings} <= {"S151"}  # ModelOpt's gate and up have scales of their own


def test_modelopts_form_without_an_algorithm_is_refused_for_vllm(damaged: Callable[[str], Damaged]) -> None:
    it = damaged("modelopt")
    assert "S111" not in found(it, "vllm")
    del it.quantization["quant_algo"]
    it.save()
    file = it.folder / MODELOPT_CONFIG
    held = json.loads(file.read_text())
    del held["quantization"]["quant_algo"]
    file.write_text(json.dumps(held))
    assert "S111" in found(it, "vllm")


def test_an_error_is_exit_3_and_json_has_it(fp8q: Fp8q, damaged: Callable[[str], Damaged]) -> None:
    it = with_cache(damaged("compressed-tensors"))
    it.save()
    result = fp8q("lint", it.folder, "--for", "tensorrt-llm")
    told = (
        "S111 form-refused: config.json config_groups.group_0: has one scale a tensor: TensorRT-LLM ends with "
        "`Unsupported weights_quant_strategy: tensor`; quantize as channel weights with inputs per token, or blocks "
        "with groups of 128 (or in ModelOpt's layout, --layout modelopt)"
    )
    assert result.code == 3
    assert result.err == f"fp8q: {it.folder}: {told}\n"
    what = "a checkpoint in the form compressed-tensors, as TensorRT-LLM 1.3 loads it (LlamaForCausalLM)"
    assert result.out.splitlines()[:2] == [f"{it.folder}: {what}", f"error   {told}"]
    shown = json.loads(fp8q("lint", it.folder, "--for", "tensorrt-llm", "--json").out)["findings"]
    assert [(entry["rule"], entry["severity"]) for entry in shown] == [("S111", "error"), ("S121", "warning")]


def test_a_server_and_its_version_go_together(fp8q: Fp8q, demo_checkpoint: Path, tmp_path: Path) -> None:
    assert fp8q("lint", demo_checkpoint, "--version", "0.32").complaint() == (
        "--version 0.32: is of a server, and none is named; name it with --for"
    )
    assert fp8q("lint", demo_checkpoint, "--for", "vllm", "--version", "newest").complaint() == (
        "--version newest: is no version; give one such as 0.32.0, or leave it out"
    )
    assert fp8q("lint", tmp_path, "--for", "vllm").complaint() == (
        f"--for vllm: is for checkpoints, and {tmp_path} has no config.json; name a checkpoint or a run"
    )
    assert fp8q("lint", demo_checkpoint, "--for", "mistral.rs").code == 2


def test_a_checkpoint_in_bf16_is_taken_too(fp8q: Fp8q, demo_checkpoint: Path) -> None:
    result = fp8q("lint", demo_checkpoint, "--for", "sglang")
    what = f"a checkpoint in no FP8, as SGLang {READ['sglang'][1]} loads it (LlamaForCausalLM)"
    assert (result.code, result.out) == (0, f"{demo_checkpoint}: {what}\nno findings\n")


def test_a_version_that_was_not_read_is_told_with_the_nearest_rules(fp8q: Fp8q, demo_checkpoint: Path) -> None:
    result = fp8q("lint", demo_checkpoint, "--for", "vllm", "--version", "0.34.0")
    assert result.code == 0
    assert "note    S101 server-version: the source of vLLM 0.34.0 was not read, but of 0.27.1 to 0.33.0" in result.out


def test_of_a_run_the_checkpoint_is_taken(demo_run: Run) -> None:
    linted = api.lint(demo_run.root, options=api.LintOptions("transformers"))
    assert linted.path == demo_run.model
    assert [finding.rule for finding in linted.findings if finding.severity == "error"] == []
    refused = api.lint(demo_run.root, options=api.LintOptions("tensorrt-llm"))
    assert [finding.rule for finding in refused.findings if finding.severity == "error"] == ["S111"]


def test_it_needs_the_base_install_alone(
    base_install: Callable[..., subprocess.CompletedProcess[str]], goods: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(goods["modelopt"], tmp_path / "checkpoint"))
    shown = base_install("lint", folder, "--for", "transformers")
    assert shown.returncode == 3
    assert "error   S112 form-misread: config.json: is ModelOpt's form" in shown.stdout


@pytest.mark.parametrize(
    ("server", "version", "architecture", "reads"),
    [
        ("vllm", None, "Qwen3_5ForCausalLM", True),  # vllm 54623 says it is not; 0.32 loads 0.37 and 0.21 as stored
        ("vllm", None, "Lfm2ForCausalLM", False),
        ("sglang", None, "LlamaForCausalLM", True),
        ("sglang", "0.5.18", "LlamaForCausalLM", False),
        ("sglang", None, "Qwen3ForCausalLM", False),
        ("sglang", None, "MixtralForCausalLM", False),  # sglang 39942
        ("tensorrt-llm", None, "LlamaForCausalLM", False),
        ("transformers", "5.23.0", "LlamaForCausalLM", True),
        ("transformers", None, "LlamaForCausalLM", False),
    ],
)
def test_cache_scales_that_a_class_never_loads_are_told(
    server: str, version: str | None, architecture: str, reads: bool, damaged: Callable[[str], Damaged]
) -> None:
    numbers = found(with_cache(damaged("compressed-tensors"), architecture), server, version)
    assert ("S121" not in numbers) == reads


def test_drafts_that_a_list_of_projections_leaves_out_are_dropped_by_sglang(damaged: Callable[[str], Damaged]) -> None:
    it = with_cache(damaged("compressed-tensors"), "Qwen3_5ForCausalLM")  # sglang 35797
    it.config["model_type"] = "qwen3_5_text"
    modules = [f"mtp.layers.0.self_attn.{part}_proj" for part in "qkv"]
    it.tensors |= {f"{module}.weight": torch.zeros(64, 128, dtype=torch.bfloat16) for module in modules}
    it.quantization["ignore"] += modules
    assert "S141" in found(it, "sglang", "0.5.20")
    assert "S141" not in found(it, "sglang", "0.5.21")
    assert "S141" not in found(it, "vllm")
    it.quantization["ignore"] = ["lm_head", "re:^mtp.*"]
    it.save()
    assert "S141" not in found(it, "sglang", "0.5.20")
    assert found(it, "transformers", "5.23") == ["S142"]


def test_a_draft_that_vllm_calls_otherwise_is_looked_for_under_that_name(damaged: Callable[[str], Damaged]) -> None:
    it = damaged("compressed-tensors")  # ERNIE 4.5, of whose drafts vLLM accepted none
    it.config["num_nextn_predict_layers"] = 1
    it.tensors["model.mtp_block.0.mlp.up_proj.weight"] = torch.zeros(64, 128, dtype=torch.bfloat16)
    it.quantization["ignore"] += ["model.mtp_block.0.mlp.up_proj"]
    assert "S162" in found(it, "vllm")
    assert "S162" not in found(it, "sglang")
    it.quantization["ignore"] += ["model.layers.4.mlp.up_proj"]
    it.save()
    assert not {"S161", "S162"}.intersection(found(it, "vllm"))


@pytest.mark.parametrize(("inner", "number"), [("language_model.language_model.", "S131"), ("language_model.", "S132")])
def test_names_that_a_server_does_not_look_for_are_told(
    inner: str, number: str, damaged: Callable[[str], Damaged]
) -> None:
    it = damaged("fp8")  # llm-compressor 2568 and 3159
    for name in [name for name in it.tensors if name.startswith("model.layers.")]:
        it.tensors[name.replace("model.", f"model.{inner}", 1)] = it.tensors.pop(name)
    assert found(it, "vllm") == [number]
    assert found(it, "sglang") == [number]


def test_a_language_model_of_several_modalities_is_looked_for_inside(damaged: Callable[[str], Damaged]) -> None:
    it = damaged("fp8")
    it.config["architectures"] = ["Qwen3_5ForConditionalGeneration"]
    assert found(it, "vllm") == ["S132"]
    assert found(it, "sglang") == []  # it takes both names


def test_each_server_matches_the_list_in_its_own_way(damaged: Callable[[str], Damaged]) -> None:
    it = damaged("fp8")
    name = "model.layers.1.mlp.down_proj"
    it.tensors[f"{name}.weight"] = it.tensors[f"{name}.weight"].bfloat16()
    del it.tensors[it.scale(name)]
    it.quantization["modules_to_not_convert"] += ["layers.1.mlp.down_proj"]
    assert found(it, "vllm") == ["S161", "S162"]  # whole names alone
    assert found(it, "sglang") == []
    assert found(it, "transformers") == []
    it.quantization["modules_to_not_convert"] = ["lm_head", name]
    it.save()
    assert found(it, "vllm") == []


def test_before_0_5_18_sglang_took_parts_of_names(damaged: Callable[[str], Damaged]) -> None:
    it = with_cache(damaged("compressed-tensors"))
    it.quantization["ignore"] += ["layers.1.mlp.down_proj"]
    assert [number for number in found(it, "sglang", "0.5.16") if number != "S121"] == ["S162"]
    assert found(it, "vllm") == ["S161"]


@pytest.mark.parametrize(
    ("weights", "inputs", "refused"),
    [
        ({"strategy": "channel"}, {"strategy": "token", "dynamic": True}, False),
        ({"strategy": "block"}, {"strategy": "group", "dynamic": True, "group_size": 128}, False),
        ({"strategy": "block"}, {"strategy": "group", "dynamic": True, "group_size": 64}, True),
        ({"strategy": "channel"}, {"strategy": "tensor", "dynamic": False}, True),
        ({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}, True),
        ({"strategy": "channel"}, None, True),
    ],
)
def test_tensorrt_llm_takes_two_pairs(
    weights: dict[str, Any], inputs: dict[str, Any] | None, refused: bool, damaged: Callable[[str], Damaged]
) -> None:
    it = damaged("compressed-tensors")
    group = it.quantization["config_groups"]["group_0"]
    group["weights"] |= weights
    group["input_activations"] = inputs and group["input_activations"] | inputs
    assert ("S111" in found(it, "tensorrt-llm")) == refused


def test_vllm_and_sglang_want_the_scheme_of_activations(damaged: Callable[[str], Damaged]) -> None:
    it = damaged("fp8")
    del it.quantization["activation_scheme"]
    assert found(it, "vllm") == ["S111"]
    assert found(it, "sglang") == ["S111"]
    it.quantization["activation_scheme"] = "static"
    it.save()
    assert "S111" in found(it, "vllm")
    assert "S111" not in found(it, "transformers")


@pytest.mark.parametrize(("size", "told"), [(16, True), (48, True), (80, True), (64, False), (128, False), (96, False)])
def test_heads_without_a_kernel_for_an_fp8_cache_are_told(
    size: int, told: bool, damaged: Callable[[str], Damaged]
) -> None:
    it = with_cache(damaged("compressed-tensors"))
    it.config["head_dim"] = size
    assert ("S123" in found(it, "vllm")) == told


def test_a_layer_without_weights_is_told(damaged: Callable[[str], Damaged]) -> None:
    it = damaged("fp8")
    it.config["num_hidden_layers"] += 1
    assert found(it, "vllm") == ["S133"]


def test_autofp8s_files_are_right_for_the_servers_that_read_them(damaged: Callable[[str], Damaged]) -> None:
    it = damaged("fp8 tensor")
    for name in list(it.tensors):
        under = name.replace("weight_scale_inv", "weight_scale").replace("activation_scale", "input_scale")
        it.tensors[under] = it.tensors.pop(name)
        if under.endswith(".weight_scale"):
            it.tensors[under].fill_(0.001)
    it.config |= {"architectures": ["LlamaForCausalLM"], "head_dim": HEADS}
    it.config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["lm_head"],
        "kv_cache_scheme": "static",
    }
    it.tensors |= {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.05) for layer in range(4)}
    assert found(it, "vllm") == []
    assert found(it, "sglang") == []
    assert found(it, "transformers") == ["S116", "S121"]
    assert [finding.rule for finding in checkpoint_findings(it.folder)[1]] == ["C106"]


@pytest.mark.parametrize(
    ("targets", "ignore", "server", "version", "wrong"),
    [
        (["Linear"], [], "sglang", None, True),
        (["Linear"], [], "vllm", None, True),
        (["Linear"], [], "transformers", None, False),
        (["Linear", "re:.*lm_head"], [], "sglang", None, False),
        (["Linear", "re:.*lm_head"], [], "sglang", "0.5.18", True),
        (["Linear", "lm_head"], [], "vllm", None, False),
        (["Linear", "lm_head"], ["lm_head"], "vllm", None, True),
        (["Linear"], [], "tensorrt-llm", None, False),
        (["Linear"], ["lm_head"], "tensorrt-llm", None, True),
    ],
)
def test_a_head_in_codes_is_one_where_the_server_finds_its_name(
    damaged: Callable[[str], Damaged],
    targets: list[str],
    ignore: list[str],
    server: Any,
    version: str | None,
    wrong: bool,
) -> None:
    it = damaged("compressed-tensors")
    it.quantization["ignore"] = ignore
    it.quantization["config_groups"]["group_0"]["targets"] = targets
    it.config["tie_word_embeddings"] = False
    it.tensors["lm_head.weight"] = torch.zeros(2048, 256).to(torch.float8_e4m3fn)
    it.tensors["lm_head.weight_scale"] = torch.tensor([0.001])
    assert ("S163" in found(it, server, version)) == wrong


@pytest.mark.parametrize(
    ("change", "server", "words"),
    [
        ({"architectures": ["Qwen3_5ForCausalLM"]}, "tensorrt-llm", "and TensorRT-LLM makes it in BF16"),
        ({}, "tensorrt-llm", None),
        ({}, "sglang", None),
        ({"blocks": True}, "sglang", "in blocks, over which SGLang ends with an error, or copies the codes"),
    ],
)
def test_heads_that_a_server_takes_otherwise_are_named(
    damaged: Callable[[str], Damaged], change: dict[str, Any], server: Any, words: str | None
) -> None:
    it = damaged("compressed-tensors")
    it.quantization["ignore"] = []
    it.quantization["config_groups"]["group_0"]["targets"] = ["Linear", "lm_head"]
    it.config |= {"tie_word_embeddings": False, **change}
    it.tensors["lm_head.weight"] = torch.zeros(2048, 256).to(torch.float8_e4m3fn)
    it.tensors["lm_head.weight_scale"] = torch.full((16, 2) if it.config.pop("blocks", False) else (1,), 0.001)
    it.save()
    said = [each.message for each in SERVER_RULES.findings(open_served(it.folder, server, None)) if each.rule == "S163"]
    assert len(said) == (words is not None)
    assert all(str(words) in message for message in said)


def codes_of_vllm(scale: float) -> torch.Tensor:
    """Tell of all finite codes whether they are themselves again: times the scale in FP16, and coded again by vLLM."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[codes.float().isfinite()]
    half = finite.to(torch.float16) * torch.tensor(scale)
    return (half.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() == finite.float()


@pytest.mark.parametrize("scale", [2.0**-15, 1.003 * 2.0**-15, 1.7 * 2.0**-14, 1e-3, 1.0])
def test_from_the_least_scale_on_codes_pass_through_fp16(scale: float) -> None:
    assert codes_of_vllm(scale).all()


@pytest.mark.parametrize("scale", [0.9 * 2.0**-15, 0.7 * 2.0**-15, 2.0**-17])
def test_below_the_least_scale_some_codes_become_others(scale: float) -> None:
    assert not codes_of_vllm(scale).all()


def test_a_small_scale_of_weights_alone_is_multiplied_in_no_fp16(damaged: Callable[[str], Damaged]) -> None:
    it = damaged("compressed-tensors")
    for name, scale in it.tensors.items():
        if name.endswith("weight_scale"):
            scale.fill_(2.0**-17)
    assert "S155" in found(it, "vllm")
    it.quantization["config_groups"]["group_0"]["input_activations"] = None
    it.tensors = {name: tensor for name, tensor in it.tensors.items() if not name.endswith("input_scale")}
    it.save()
    assert "S155" not in found(it, "vllm")


@pytest.mark.parametrize(
    ("server", "wrong"), [("vllm", True), ("sglang", True), ("tensorrt-llm", True), ("transformers", True)]
)
def test_an_embedding_in_codes_is_none_to_any_server(
    damaged: Callable[[str], Damaged], server: Any, wrong: bool
) -> None:
    it = damaged("compressed-tensors")
    it.config["tie_word_embeddings"] = False
    it.tensors["model.embed_tokens.weight"] = torch.zeros(2048, 256).to(torch.float8_e4m3fn)
    it.tensors["model.embed_tokens.weight_scale"] = torch.tensor([0.001])
    assert ("S163" in found(it, server)) == wrong
    assert "C130" in [finding.rule for finding in checkpoint_findings(it.folder)[1]]


@pytest.mark.parametrize(
    ("location", "server", "wrong"),
    [
        ("input", "vllm", False),
        ("k_cache", "vllm", True),
        ("q_attn", "transformers", True),
        ("output", "sglang", True),
        ("weight_input", "sglang", False),
    ],
)
def test_transforms_are_computed_by_vllm_at_linear_layers_alone(
    damaged: Callable[[str], Damaged], location: str, server: Any, wrong: bool
) -> None:
    it = damaged("compressed-tensors")
    apply = [{"targets": ["Linear"], "location": location}]
    it.quantization["transform_config"] = {"config_groups": {"R": {"type": "hadamard", "apply": apply}}}
    assert ("S114" in found(it, server)) == wrong
