"""The form `block` of `fp8q calibrate`: weights in blocks of 128 x 128, inputs in groups of 128 values of a token."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.calibrate.model.source import Source
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import BLOCK, DYNAMIC, ConvertOptions, DistillOptions, ScaleGrid, ScaleOptions
from fp8q.quantize.codes.blocks import block_values, group_values, spread_scales, weight_blocks
from fp8q.quantize.lint.check import checkpoint_findings
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.reference.linear import BlockLinear
from fp8q.quantize.scales.clip import powers_of_two
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.weights.channels import WeightMethod, block_scales, quantize_scaled
from fp8q.quantize.weights.gptq import compensation, gptq_codes
from fp8q.quantize.weights.sequential import gemm_input
from fp8q.stages import distill as distill_stage
from fp8q.stages.convert import convert
from fp8q.stages.corpus import load_tokens
from fp8q.stages.export import why_no_graph
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared import sources
from fp8q.validate.report.report import render
from fp8q.validate.report.rows import module_rows

from ..reading.fp8_checkpoints import rounded_again

LAYER = "model.layers.0"
#: The fixture `rescaled_layer`.
RescaledLayer = Callable[..., Run]


@pytest.fixture(scope="module")
def notes() -> Notes:
    return Notes(SILENT)


@pytest.fixture(scope="module")
def nearest(rescaled_layer: RescaledLayer, notes: Notes) -> Run:
    """The first layer in block form, rounded to nearest under the amax of each block."""
    return rescaled_layer(notes=notes, form=("block",), weight_rounding="nearest", weight_method="amax")


@pytest.fixture(scope="module")
def block(rescaled_layer: RescaledLayer) -> Run:
    """The first layer in block form by GPTQ, under scales of least squared error."""
    return rescaled_layer(form=("block",))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    (shard,) = folder.glob("*.safetensors")
    return load_file(shard)


def group_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    group: dict[str, Any] = config["quantization_config"]["config_groups"]["group_0"]
    return group


def log_p(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids).logits.float()
    return logits.log_softmax(-1)


def test_groups_and_blocks_at_the_end_of_a_side_are_smaller() -> None:
    x = torch.zeros(1, 200)
    x[0, 0], x[0, 1], x[0, 130] = 448.0, 0.3, 0.01
    found = group_values(x, powers=False)
    # 0.3 under a scale of 1: codes of 2^-5 near it
    assert found[0, [0, 1]].tolist() == [448.0, 0.3125]
    torch.testing.assert_close(found[0, 130], torch.tensor(0.01))
    assert group_values(x[:0], powers=False).shape == (0, 200)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    spread_scale = spread_scales(scale, slice(127, 129), 130)
    assert spread_scale[:, [0, 127, 128, 129]].tolist() == [[1, 1, 2, 2], [3, 3, 4, 4]]
    codes = torch.ones(130, 130).to(torch.float8_e4m3fn)
    assert block_values(codes, scale)[[0, 129], [129, 0]].tolist() == [2.0, 3.0]
    assert weight_blocks(torch.ones(130, 130)).sum(1).tolist() == [128 * 128, 128 * 2, 2 * 128, 4]


def test_scales_of_groups_are_rounded_up_to_powers_of_two() -> None:
    x = torch.zeros(3, 130)
    x[0, 0], x[0, 1], x[1, 0], x[2, 129] = 449.0, 0.3, 448.0, 1.75 * 2.0**-9
    found = group_values(x, powers=True)
    # 449 under a scale of 2: 224.5, rounded to even among 208, 224, 240; 0.15 lies between codes 2^-6 apart
    assert found[0, [0, 1]].tolist() == [448.0, 0.3125]
    assert found[1, 0] == 448.0
    assert found[2, 129] == 1.75 * 2.0**-9
    assert group_values(torch.zeros(1, 4), powers=True).tolist() == [[0.0] * 4]


@given(
    st.lists(st.floats(-(2.0**20), 2.0**20, width=32), min_size=1, max_size=8).filter(any),
    st.integers(-30, 30),
)
def test_a_group_is_what_its_values_round_to_under_the_least_power_that_saturates_none(
    values: list[float], exponent: int
) -> None:
    x = torch.tensor([values]) * 2.0**exponent
    amax = max(float(x.abs().max()), 1e-10)
    power = 2.0 ** math.ceil(math.log2(amax / 448))
    while amax > 448 * power:  # log2 rounds
        power *= 2
    while amax <= 448 * power / 2:
        power /= 2
    oracle = (x[0].numpy().astype(np.float64) / power).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * power
    assert group_values(x, powers=True)[0].double().tolist() == oracle.tolist()


@pytest.mark.parametrize("method", ["amax", "mse"])
def test_servers_round_blocks_under_powers_of_two_no_second_time(method: WeightMethod) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(300, 260) * torch.logspace(-3, 0, 260)).bfloat16()
    grids: dict[ScaleGrid, bool] = {"power-of-two": True, "bf16": False}
    for grid, alike in grids.items():
        scale = block_scales(weight, method, grid)
        assert scale is not None
        assert powers_of_two(scale.numpy()) == alike
        values = quantize_scaled(weight, scale, method).values  # type: ignore[union-attr]
        assert torch.equal(rounded_again(values), values) == alike


def test_a_layer_whose_weight_has_powers_of_two_takes_them_for_its_input() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(130, 200).bfloat16(), torch.randn(2, 200)
    grids: dict[ScaleGrid, bool] = {"power-of-two": True, "bf16": False}
    for grid, powers in grids.items():
        scale = block_scales(weight, "mse", grid)
        assert scale is not None
        made = quantize_scaled(weight, scale, "mse")
        layer = BlockLinear(made.codes, scale, None, "exact")  # type: ignore[union-attr]
        expected = group_values(x, powers).double() @ made.values.double().T  # type: ignore[union-attr]
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_layer_sums_code_times_scale() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(130, 200).bfloat16(), torch.randn(2, 3, 200)
    scale = block_scales(weight, "amax", "bf16")
    assert scale is not None
    made = quantize_scaled(weight, scale, "amax")
    layer = BlockLinear(made.codes, scale, torch.ones(130), "fast")  # type: ignore[union-attr]
    expected = group_values(x, powers=False).double() @ made.values.double().T + 1  # type: ignore[union-attr]
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_nearest_codes_and_scales_are_those_of_convert_bit_for_bit(
    nearest: Run, demo_checkpoint: Path, tmp_path: Path
) -> None:
    convert(
        str(demo_checkpoint), tmp_path / "converted", ConvertOptions(form="block", layout="compressed-tensors"), SILENT
    )
    ours, theirs = tensors_of(nearest.model), tensors_of(tmp_path / "converted")
    for module in load_scales(nearest).weights:
        for part in ("weight", "weight_scale"):
            mine, other = ours[f"{module}.{part}"], theirs[f"{module}.{part}"]
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8)), f"{module}.{part}"
    configs = [
        json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]["config_groups"][
            "group_0"
        ]
        for folder in (nearest.model, tmp_path / "converted")
    ]
    assert all(
        configs[0][side][field] == value
        for side in ("weights", "input_activations")
        for field, value in configs[1][side].items()
    )


def test_the_files_and_documents_say_so(nearest: Run, block: Run, notes: Notes) -> None:
    scales = load_scales(block)
    assert set(scales.forms.values()) == {BLOCK}
    assert scales.in_form(BLOCK) == [*scales.weights]
    assert (scales.in_form(DYNAMIC), scales.static_inputs) == ([], {})
    down = scales.weights[f"{LAYER}.mlp.down_proj"]
    assert (down.granularity, down.blocks, down.channels, down.stored, down.rounding) == ("block", 12, 256, 12, "gptq")
    assert not [name for name in tensors_of(block.model) if name.endswith("input_scale")]
    assert json.loads((block.model / "config.json").read_text())["fp8q"] == {"block_inputs": scales.in_form(BLOCK)}
    card = (block.model / "README.md").read_text(encoding="utf-8")
    assert "E4M3 weights with one scale per block of 128 x 128, E4M3 activations with one\nscale per 128 values" in card
    assert "**In blocks**: the weights of every FP8 GEMM have a scale for each block of 128 x 128" in card
    assert checkpoint_findings(block.model)[1] == []
    row = next(row for row in module_rows(block) if row.reason is None)
    assert (row.block, row.scale, row.sqnr_db) == (True, None, None)
    assert "blocks of 128" in render(block)
    recorded = nearest.record().stages["quantize"].notes
    assert (
        f"--form block: {LAYER}.mlp.down_proj read 704 values, no multiple of 128: the reference has a smaller group "
        "at the end, and servers refuse one; --form 'PATTERN=dynamic' gives such modules a scale for each token"
    ) in recorded


def test_one_form_again_gives_back_the_files_of_before(
    first_layer: Run, block: Run, rescaled_layer: RescaledLayer
) -> None:
    again = rescaled_layer(block, form=("one",))
    for path in (*first_layer.model.rglob("*"), first_layer.scales):
        assert (again.root / path.relative_to(first_layer.root)).read_bytes() == path.read_bytes(), path.name


def test_the_loss_stands_where_it_is_expected(
    first_layer: Run, block: Run, rescaled_layer: RescaledLayer, data: Path, demo_checkpoint: Path
) -> None:
    ids = torch.from_numpy(load_tokens(first_layer, first_layer.calibration).astype("int64"))
    float_model = log_p(AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32), ids)

    def kl(run: Run) -> float:
        found = log_p(load_reference(run.model, "exact", torch.float32).model, ids)
        return float((float_model.exp() * (float_model - found)).sum(-1).mean())

    nearest = rescaled_layer(block, form=("block",), weight_rounding="nearest")
    assert kl(block) < kl(nearest)
    assert kl(block) < 1.2 * kl(first_layer)


def test_patterns_mix_it_with_other_forms_and_transformers_loads_them(
    first_layer: Run, rescaled_layer: RescaledLayer
) -> None:
    # transformers computes groups under FP32 scales
    run = rescaled_layer(form=("block", "*.down_proj=dynamic"), block_scale_grid="bf16")
    scales = load_scales(run)
    assert scales.forms[f"{LAYER}.mlp.down_proj"] == DYNAMIC
    assert scales.forms[f"{LAYER}.mlp.up_proj"] == BLOCK
    assert tensors_of(run.model)[f"{LAYER}.mlp.down_proj.weight_scale"].shape == (256, 1)
    ids = torch.arange(3, 131).reshape(2, 64)
    found = log_p(load_reference(run.model, "exact", torch.float32).model, ids)
    loaded = log_p(AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32), ids)
    one = log_p(load_reference(first_layer.model, "exact", torch.float32).model, ids)
    assert (loaded - found).abs().mean() < 0.5 * (one - found).abs().mean()


def test_gptq_under_blocks_lowers_the_error_of_the_gemm_and_is_nearest_without_correlation() -> None:
    torch.manual_seed(0)
    weight = torch.randn(150, 300).mul_(torch.logspace(-2, 0, 300)).bfloat16()
    x = torch.randn(2000, 300) @ torch.randn(300, 300)
    scale = block_scales(weight, "mse", "power-of-two")
    assert scale is not None
    by_gptq = block_values(gptq_codes(weight, scale, compensation(x.T @ x)), scale)
    by_nearest = quantize_scaled(weight, scale, "mse").values  # type: ignore[union-attr]

    def error(values: torch.Tensor) -> float:
        return float(((values - weight.float()) @ x.T).square().sum())

    assert error(by_gptq) < 0.7 * error(by_nearest)
    alone = gptq_codes(weight, scale, compensation(torch.eye(300)))
    assert torch.equal(block_values(alone, scale), by_nearest)


def test_sensitivity_and_sequential_rounding_see_the_same_values(block: Run) -> None:
    x = torch.randn(2, 5, 256)
    scale = next(iter(load_scales(block).activations.values()))
    assert scale.group_grid == "power-of-two"
    assert torch.equal(gemm_input(x, scale), group_values(x, powers=True))
    assert torch.equal(gemm_input(x, scale.model_copy(update={"group_grid": None})), group_values(x, powers=False))


def test_what_has_no_form_of_it_is_refused(block: Run, source: Source) -> None:
    no_graph = (
        "--form block gives each 128 values of a token a scale at run time, and each block of a weight its own, for "
        "which TensorRT has no FP8 GEMM (`fp8q scales RUN --form one` takes static scales, which the run has too)"
    )
    assert why_no_graph(block) == no_graph
    assert sources.gemms_of(source, ScaleOptions(form=("block",))).no_graph == no_graph
    with pytest.raises(InputError, match="has no ONNX graph, since --form block gives each 128 values"):
        api.export(block.root)
    with pytest.raises(InputError) as refused:
        api.tune(block.root)
    assert str(refused.value) == (
        f"{block.root}: has GEMMs in block form, which `fp8q tune` has no candidates of; `fp8q scales {block.root} "
        "--form one` gives them static scales, to be tuned"
    )
    with pytest.raises(InputError) as refused:
        distill_stage.distill(block, Notes(SILENT), None, DistillOptions())
    assert str(refused.value) == (
        f"{block.root}: has GEMMs in block form, of which nothing is learned; `fp8q scales {block.root} --form "
        "dynamic` gives each output channel a scale"
    )
    with pytest.raises(InputError) as refused:
        load_reference(block.model, "exact", torch.float32).sum_in("fp22")
    assert str(refused.value).startswith(f"--accumulator fp22: {LAYER}.")
    for options in (ScaleOptions, ConvertOptions):
        with pytest.raises(InputError) as refused:
            options(block_scale_grid="bf16")
        assert str(refused.value) == (
            "--block-scale-grid bf16: is for blocks, and no module is in them; leave it out, or give --form block"
        )
    with pytest.raises(InputError) as refused:
        ScaleOptions(form=("block",), weight_scale="tensor")
    assert str(refused.value) == (
        "--weight-scale tensor: --form block gives weights a scale for each block; leave one of them out"
    )
