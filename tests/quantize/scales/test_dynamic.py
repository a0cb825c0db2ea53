"""The dynamic form: a scale for each token. The oracles are compressed-tensors' own functions and transformers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.calibrate.model.source import Source
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.options import DYNAMIC, ONE, ScaleOptions
from fp8q.quantize.codes.encoding import SMALLEST_TOKEN_SCALE, code_values, token_scales
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.reference.linear import FP8Linear
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.policy import ModelGemms, check_dynamic
from fp8q.quantize.weights.sequential import gemm_input
from fp8q.stages.export import why_no_graph
from fp8q.stages.shared import sources
from fp8q.validate.report.report import render
from fp8q.validate.report.rows import module_rows
from fp8q.validate.report.run_comparison import terms
from fp8q.validate.report.tables import module_table

#: The fixture `rescaled_layer`.
RescaledLayer = Callable[..., Run]
#: compressed-tensors' description of a scale for each token.
TOKENS = QuantizationArgs(num_bits=8, type="float", strategy="token", symmetric=True, dynamic=True)
NO_GRAPH = (
    "--form dynamic gives each token a scale at run time, for which TensorRT has no FP8 GEMM (`fp8q scales RUN "
    "--form one` takes the static scales, which the run has too)"
)


@pytest.fixture(scope="module")
def dynamic(rescaled_layer: RescaledLayer) -> Run:
    """The first layer in dynamic form."""
    return rescaled_layer(form=("dynamic",))


def tensors_of(run: Run) -> dict[str, torch.Tensor]:
    (shard,) = run.model.glob("*.safetensors")
    return load_file(shard)


def groups_of(run: Run) -> dict[str, Any]:
    config = json.loads((run.model / "config.json").read_text(encoding="utf-8"))
    groups: dict[str, Any] = config["quantization_config"]["config_groups"]
    return groups


def test_a_token_s_scale_is_its_amax_over_448() -> None:
    x = torch.tensor([[1.0, -448.0], [0.0, 0.0], [2.0**-20, 0.0]])
    least = 1 / (448 * 512)
    assert least == SMALLEST_TOKEN_SCALE
    assert token_scales(x).tolist() == torch.tensor([[1.0], [least], [least]]).tolist()
    assert token_scales(x[:0]).shape == (0, 1)


def test_scales_and_values_are_compressed_tensors_own_in_fp32_and_near_them_in_bf16() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 64, 256) * torch.logspace(-3, 2, 64)[:, None]  # no amax below that of the smallest scale
    theirs, zero = compute_dynamic_scales_and_zp(x, TOKENS, torch.nn.Identity())
    assert torch.equal(token_scales(x), theirs)
    assert torch.equal(code_values(x, theirs) * theirs, fake_quantize(x, theirs, zero, TOKENS))
    half = x.bfloat16()
    rounded, _ = compute_dynamic_scales_and_zp(half, TOKENS, torch.nn.Identity())
    assert rounded.dtype == torch.bfloat16
    apart = (rounded.float() / token_scales(half) - 1).abs().max()
    assert 2**-9 < apart <= 2**-8


def test_a_layer_multiplies_the_codes_of_each_row_by_its_own_scale() -> None:
    codes = torch.tensor([[1.0, 2.0], [-4.0, 0.5]]).to(torch.float8_e4m3fn)
    layer = FP8Linear(codes, torch.tensor([0.5, 2.0]), None, torch.tensor([0.0, 1.0]), "exact")
    layer.run_time_scales = token_scales
    # rows of amax 448 and 4.48: scales 1 and 0.01, codes [448, 1] and [448, 100 -> 104 on the grid of 8]
    x = torch.tensor([[[448.0, 1.0], [4.48, 1.0]]])
    first, second = (448 * 1 + 1 * 2) * 0.5, (448 * -4 + 1 * 0.5) * 2 + 1
    third, fourth = (448 * 1 + 96 * 2) * 0.01 * 0.5, (448 * -4 + 96 * 0.5) * 0.01 * 2 + 1
    torch.testing.assert_close(layer(x), torch.tensor([[[first, second], [third, fourth]]]))
    assert layer(x[:, :0]).shape == (1, 0, 2)


def test_the_files_have_no_input_scales_and_the_codes_of_the_static_form(first_layer: Run, dynamic: Run) -> None:
    before, after = tensors_of(first_layer), tensors_of(dynamic)
    scales = load_scales(dynamic)
    gone = {f"{module}.input_scale" for module in scales.weights}
    assert before.keys() - after.keys() == gone
    assert after.keys() - before.keys() == set()
    assert all(torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)) for name in after)
    (group,) = groups_of(dynamic).values()
    assert group["targets"] == ["Linear"]
    assert group["weights"]["strategy"] == "channel"
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("token", True)
    assert json.loads((dynamic.model / "config.json").read_text())["fp8q"] == {
        "dynamic_inputs": scales.in_form(DYNAMIC)
    }
    assert scales.in_form(DYNAMIC) == [*scales.weights] == scales.fp8_gemms
    assert scales.static_inputs == {}
    assert set(scales.forms.values()) == {DYNAMIC}
    kept = {name: scale.model_copy(update={"dynamic": None}) for name, scale in scales.activations.items()}
    assert kept == load_scales(first_layer).activations
    assert terms(scales) == "dynamic"
    card = (dynamic.model / "README.md").read_text(encoding="utf-8")
    assert "E4M3 activations with one\nscale per token, the KV cache in the compute type." in card
    assert "**Per token**: the input of every FP8 GEMM gets a scale for each token" in card


@pytest.mark.slow
def test_one_form_again_gives_back_the_files_of_before(
    first_layer: Run, dynamic: Run, rescaled_layer: RescaledLayer
) -> None:
    again = rescaled_layer(dynamic, form=("one",))
    assert load_scales(again).forms == dict.fromkeys(load_scales(first_layer).weights, ONE)
    assert again.scales.read_bytes() == first_layer.scales.read_bytes()
    for path in first_layer.model.rglob("*"):
        assert (again.model / path.relative_to(first_layer.model)).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_patterns_mix_it_with_other_forms(rescaled_layer: RescaledLayer) -> None:
    run = rescaled_layer(form=("*.down_proj=dynamic", "*.o_proj=bf16"))
    layer, groups = "model.layers.0", groups_of(run)
    assert groups["dynamic"]["targets"] == load_scales(run).in_form(DYNAMIC) == [f"{layer}.mlp.down_proj"]
    assert groups["weights_alone"]["targets"] == [f"{layer}.self_attn.o_proj"]
    assert groups["group_0"]["input_activations"]["strategy"] == "tensor"
    assert terms(load_scales(run)) == "dynamic in 1 of 7, weights alone in FP8 in 1 of 7"
    loaded = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    inputs = {
        name: (scheme := module.quantization_scheme.input_activations) and scheme.dynamic
        for name, module in loaded.named_modules()
        if hasattr(module, "quantization_scheme") and name.startswith(layer)
    }
    named = {f"{layer}.mlp.down_proj": True, f"{layer}.self_attn.o_proj": None}
    assert inputs == dict.fromkeys(load_scales(run).weights, False) | named
    run = rescaled_layer(run, form=("dynamic", "*.o_proj=bf16"))
    assert {name: group.get("input_activations", {}).get("strategy") for name, group in groups_of(run).items()} == {
        "group_0": "token",
        "weights_alone": None,
    }


def test_the_reference_computes_what_compressed_tensors_does(
    dynamic: Run, first_layer: Run, demo_checkpoint: Path
) -> None:
    """Of the source model: weights are codes × scales in FP32, and inputs rounded by compressed-tensors."""
    tensors, modules = tensors_of(dynamic), load_scales(dynamic).weights
    oracle = AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32)
    weights = {
        f"{name}.weight": tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"] for name in modules
    }
    oracle.load_state_dict(weights, strict=False)

    def rounded(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        scales, zero = compute_dynamic_scales_and_zp(given[0], TOKENS, module)
        return (fake_quantize(given[0], scales, zero, TOKENS),)

    for name in modules:
        oracle.get_submodule(name).register_forward_pre_hook(rounded)
    ids = torch.arange(3, 131).reshape(2, 64)

    def log_p(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=ids).logits.float()
        return logits.log_softmax(-1)

    right, found = log_p(oracle), log_p(load_reference(dynamic.model, "exact", torch.float32).model)
    loaded = log_p(AutoModelForCausalLM.from_pretrained(dynamic.model, dtype=torch.float32))
    one = log_p(load_reference(first_layer.model, "exact", torch.float32).model)
    # two kernels' sums differ in their last bits, so that an input beside two codes' midpoint rounds up in one of them
    assert (right - found).abs().mean() < 0.005 * (one - found).abs().mean()
    # transformers rounds dequantized weights to BF16
    assert (loaded - found).abs().mean() < 0.5 * (one - found).abs().mean()
    fast = log_p(load_reference(dynamic.model, "fast", torch.bfloat16).model)
    assert (fast - found).abs().mean() < 0.1


def test_sensitivity_and_sequential_rounding_see_the_same_values(dynamic: Run) -> None:
    x = torch.randn(2, 5, 256)
    scale = next(iter(load_scales(dynamic).activations.values()))
    theirs, zero = compute_dynamic_scales_and_zp(x, TOKENS, torch.nn.Identity())
    assert torch.equal(gemm_input(x, scale), fake_quantize(x, theirs, zero, TOKENS))


def test_the_report_says_nothing_of_the_scale_that_it_would_have(dynamic: Run) -> None:
    row = next(row for row in module_rows(dynamic) if row.reason is None)
    assert (row.dynamic, row.scale, row.clip, row.saturation, row.sqnr_db) == (True, None, None, None, None)
    assert row.amax is not None
    table = module_table([row])
    shown = {column.title: column.value(row) for column in table.all_columns}
    assert (shown["terms"], shown["scale"], shown["input dB"]) == ("dynamic", None, None)
    assert "dynamic" in render(dynamic)


def test_it_has_no_graph_and_says_so_before_and_after(dynamic: Run, first_layer: Run, source: Source) -> None:
    assert why_no_graph(dynamic) == NO_GRAPH
    assert why_no_graph(first_layer) is None
    assert sources.gemms_of(source, ScaleOptions(form=("dynamic",))).no_graph == NO_GRAPH
    with pytest.raises(InputError) as refused:
        api.export(dynamic.root)
    assert str(refused.value).startswith(f"{dynamic.root}: has no ONNX graph, since --form dynamic gives each token a ")


def test_tune_is_refused(dynamic: Run) -> None:
    with pytest.raises(InputError) as refused:
        api.tune(dynamic.root)
    assert str(refused.value) == (
        f"{dynamic.root}: has inputs in dynamic form, which `fp8q tune` has no candidates of; `fp8q scales "
        f"{dynamic.root} --form one` gives them static scales, to be tuned"
    )


def test_a_conv1d_has_no_dynamic_form() -> None:
    products = ModelGemms(("h.0.attn.c_attn", "lm_head"), "lm_head", {})
    check_dynamic(ScaleOptions(form=("two",)), products, ["h.0.attn.c_attn"], ["h.0.attn.c_attn"])
    for forms in (("dynamic",), ("*.c_attn=dynamic",)):
        with pytest.raises(InputError) as refused:
            check_dynamic(ScaleOptions(form=forms), products, ["h.0.attn.c_attn"], ["h.0.attn.c_attn"])
        assert str(refused.value) == (
            "--form dynamic: h.0.attn.c_attn is a Conv1D, of which transformers and vLLM load no FP8 weights, and "
            "graphs take static scales; give --form one"
        )


def test_it_contradicts_inherited_scales() -> None:
    with pytest.raises(InputError, match=r"^--inherit: takes codes and scales as they were given, and --form dynamic "):
        replace(ScaleOptions(inherit=True), form=("dynamic",))


@pytest.mark.parametrize("form", ["one", "dynamic", "tail:16"])
def test_inputs_that_a_server_leaves_in_bf16_are_those_of_weights_alone(
    rescaled_layer: RescaledLayer, form: str
) -> None:
    ids = torch.arange(2, 50)[None]

    def logits(form: str, *, left: bool) -> torch.Tensor:
        run = rescaled_layer(form=(form,), weight_rounding="nearest")
        loaded = load_reference(run.model, "fast", torch.bfloat16)
        if left:
            loaded.leave_inputs()
        with torch.inference_mode():
            return torch.as_tensor(loaded.model(input_ids=ids, use_cache=False).logits)

    alone = logits("bf16", left=False)
    assert torch.equal(logits(form, left=True), alone)
    assert not torch.equal(logits(form, left=False), alone)
