"""Rounding a weight mixes no devices and waits for none: every step runs on a device that has no numbers to wait for.

torch raises where an operator mixes the device with the host, and where Python asks for a number of the device. Where a
GPU stands, its codes are held to the CPU's.
"""

from collections.abc import Callable

import pytest
import torch
from fake_device import Counted, fake_device, numbers
from torch._subclasses.fake_tensor import DataDependentOutputException

from fp8q.options import WeightMethod
from fp8q.quantize.codes.encoding import scales_of
from fp8q.quantize.codes.formats import E4M3, INT8
from fp8q.quantize.scales.decisions import WeightScales
from fp8q.quantize.sensitivity.gptq_prediction import Unexplained, share_left
from fp8q.quantize.weights.channels import (
    QuantizedWeight,
    WeightScaling,
    best_on_held_out,
    block_scales,
    channel_scales,
    nearest_codes,
    weight_facts,
)
from fp8q.quantize.weights.gptq import BLOCK, PASSES, Compensation, compensation, gptq_codes, reversed_as
from fp8q.quantize.weights.mse import mse_scale, mse_scales
from fp8q.quantize.weights.no_waiting import factor_in_place
from fp8q.quantize.weights.ridge_target import MomentSums, ridge_targets

WIDTH, OUTPUTS = BLOCK + 16, 48


def weight() -> torch.Tensor:
    return numbers(OUTPUTS, WIDTH, dtype=torch.bfloat16)


def factored(lost: float = 0.01) -> Compensation:
    return compensation(numbers(WIDTH, WIDTH), lost)


def by_gptq(scale: torch.Tensor) -> QuantizedWeight:
    summary = WeightScales(method="mse", axis=0, channels=OUTPUTS, scale_min=1.0, scale_max=1.0, sqnr_db=None)
    return QuantizedWeight(gptq_codes(weight(), scale, factored()), scale, summary)


def targets() -> torch.Tensor:
    halves = [MomentSums(WIDTH, 2 * OUTPUTS, "npu") for _ in range(2)]
    for sums in halves:
        sums.add(numbers(100, WIDTH), numbers(100, 2 * OUTPUTS))
    return torch.cat(ridge_targets([weight(), weight()], *halves))


def judged() -> torch.Tensor:
    tokens = numbers(64, WIDTH, dtype=torch.bfloat16)
    codes, facts = best_on_held_out(weight(), by_gptq(numbers(OUTPUTS)), tokens, factored(), 0.01)
    assert facts.shape == (2,)
    return codes


def scaled(scaling: WeightScaling) -> torch.Tensor:
    scale = scaling.scale("q", weight())
    assert scale is not None
    return scale


#: Each step, and the shape of its result.
STEPS: dict[str, tuple[Callable[[], torch.Tensor], tuple[int, ...]]] = {
    "mse scales": (lambda: mse_scales(weight()), (OUTPUTS,)),
    "a scale for all": (lambda: mse_scale([weight(), weight()]), (1,)),
    "amax scales": (lambda: scaled(WeightScaling("amax")), (OUTPUTS,)),
    "channels of zeros": (lambda: scaled(WeightScaling("mse")), (OUTPUTS,)),
    "a tensor's scale": (lambda: scaled(WeightScaling("mse", {"q": 0.5})), (OUTPUTS,)),
    "blocks' scales": (lambda: scaled(WeightScaling("mse", blocks=frozenset({"q"}))), (1, 2)),
    "nearest": (lambda: nearest_codes(weight(), numbers(OUTPUTS)), (OUTPUTS, WIDTH)),
    "nearest in blocks": (lambda: nearest_codes(weight(), numbers(1, 2)), (OUTPUTS, WIDTH)),
    "nearest in INT8": (lambda: nearest_codes(weight(), numbers(OUTPUTS), INT8), (OUTPUTS, WIDTH)),
    "factor": (lambda: factored().factor, (WIDTH, WIDTH)),
    "GPTQ": (lambda: by_gptq(numbers(OUTPUTS)).codes, (OUTPUTS, WIDTH)),
    "GPTQ of exact inputs": (lambda: gptq_codes(weight(), numbers(OUTPUTS), factored(0.0)), (OUTPUTS, WIDTH)),
    "GPTQ in blocks": (lambda: gptq_codes(weight(), numbers(1, 2), factored()), (OUTPUTS, WIDTH)),
    "facts": (lambda: weight_facts(weight(), numbers(OUTPUTS, WIDTH), numbers(OUTPUTS)), (5,)),
    "ridge targets": (targets, (2 * OUTPUTS, WIDTH)),
    "an expert's judging": (judged, (OUTPUTS, WIDTH)),
    "prediction": (
        lambda: share_left(numbers(OUTPUTS, WIDTH), Unexplained.from_moments(numbers(WIDTH, WIDTH)), 999, 999),
        (),
    ),
}


@pytest.mark.parametrize("kernels", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["kernels", "operators"])
@pytest.mark.parametrize("step", STEPS)
def test_each_step_stays_on_the_device_and_waits_for_nothing(
    step: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, shape = STEPS[step]
    if not kernels:  # thousands of operators a pass
        monkeypatch.setattr("fp8q.quantize.weights.gptq.PASSES", 1)
    with fake_device(kernels) as counted:
        result = run()
        assert result.device.type == "npu"
        assert result.shape == shape
    assert counted.started > 0


def test_a_mix_of_devices_and_a_wait_are_noticed() -> None:
    with fake_device():
        with pytest.raises(RuntimeError, match="npu"):
            weight() + torch.zeros(OUTPUTS, WIDTH)
        with pytest.raises(DataDependentOutputException):
            weight().sum().item()
        with pytest.raises(DataDependentOutputException):
            bool(weight().any())


def test_the_device_is_gone_after_its_block() -> None:
    """What tests of the same process ask of "the accelerator" afterwards: to keep its random numbers, say."""
    with fake_device():
        assert torch.get_device_module("npu").device_count() == 1
    assert torch.get_device_module("npu").device_count() == 0
    assert torch.accelerator.is_available() == torch.cuda.is_available()
    with torch.random.fork_rng():
        torch.manual_seed(0)


def rounded(inputs: int, outputs: int) -> Counted:
    with fake_device() as counted:
        gptq_codes(
            numbers(outputs, inputs, dtype=torch.bfloat16), numbers(outputs), compensation(numbers(inputs, inputs))
        )
    return counted


def test_a_block_of_inputs_takes_a_kernel_and_a_product_and_the_rest_does_not_grow() -> None:
    """Per block: one pair by GPTQ (the last block has no rest to tell) and one in each pass."""
    few, more = (rounded(blocks * BLOCK, 32) for blocks in (2, 5))
    for name, count in (("round_block", 1), ("descend_block", PASSES)):
        assert [counted.launches[name] for counted in (few, more)] == [2 * count, 5 * count]
    assert [counted.launches["addmm_"] for counted in (few, more)] == [2 * (1 + PASSES) - 1, 5 * (1 + PASSES) - 1]
    factor, others = 8, few.started - few.launches["addmm_"] - 2 * (1 + PASSES)
    assert more.started - more.launches["addmm_"] - 5 * (1 + PASSES) - others <= 3 * factor


def test_counts_of_a_product_are_its_own() -> None:
    """4 · 5 by 5 · 6: 2 · 4 · 5 · 6 operations, and 20 + 30 + 24 numbers of 4 bytes."""
    with fake_device() as counted:
        left, right = numbers(4, 5), numbers(5, 6)
        product = left @ right
        assert counted.held == counted.peak == 4 * (20 + 30 + 24)
        del product
        assert counted.held == 4 * 50
    assert dict(counted.flop) == {"float32": 240}
    assert counted.bytes == 4 * (20 + 30 + 24)
    assert counted.started == 1


def test_scales_are_those_of_the_slow_reference() -> None:
    from fp8q.quantize.scales.clip import scale_of

    amax = torch.cat([torch.logspace(-38, 38, 999), torch.tensor([0.0, 448.0, 1.0])])
    assert scales_of(amax, E4M3).tolist() == scale_of(amax.numpy(), E4M3).tolist()


def test_on_a_device_a_factor_is_made_in_place_and_a_matrix_without_one_gets_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(90, 40, generator=draw, dtype=torch.float64)
    here, there = x.T @ x, x.T @ x
    factor_in_place(here)
    monkeypatch.setattr("fp8q.quantize.weights.no_waiting.on_host", lambda tensor: False)
    factor_in_place(there)
    assert torch.allclose(there.tril(), here.tril(), rtol=1e-12)
    assert not there.triu(1).any()
    factor_in_place(bad := -torch.eye(3, dtype=torch.float64))
    assert bad.diagonal().isnan().all()


@pytest.mark.parametrize("width", [1, 7, 16, 40])
def test_a_factor_in_place_is_that_of_a_copy_bit_for_bit(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the lower triangle, as LAPACK reads it: sums of products differ in their last bits above."""
    monkeypatch.setattr("fp8q.quantize.weights.no_waiting.TILE", 16)
    x = torch.randn(90, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = x.T @ x
    matrix += 1e-9 * torch.ones_like(matrix).triu(1)
    expected = torch.linalg.cholesky(matrix)
    factor_in_place(matrix)
    assert torch.equal(matrix, expected)


def test_a_matrix_is_reversed_in_parts_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8q.quantize.weights.gptq.REVERSED", 16)
    matrix = torch.arange(40.0 * 40).reshape(40, 40)
    assert torch.equal(reversed_as(matrix, torch.float64), matrix.flip(0, 1).double())


DEVICE_BRANCHES = [f"fp8q.quantize.weights.{module}.on_host" for module in ("mse", "channels", "gptq", "no_waiting")]


@pytest.mark.parametrize("method", ["mse", "amax"])
def test_what_is_done_on_a_device_gives_the_hosts_codes(method: WeightMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    """The branches that wait for nothing, run on the CPU: the same scales, codes and facts, and NaN for zeros alone."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randn(600, 140, generator=draw) @ torch.randn(140, 140, generator=draw)
    dense = torch.randn(60, 140, generator=draw).mul(0.02).bfloat16()
    dense[7] = 0
    moments = tokens.T @ tokens
    weights = dense, torch.zeros_like(dense)
    results: list[list[torch.Tensor]] = []
    for there in (False, True):
        if there:
            for name in DEVICE_BRANCHES:
                monkeypatch.setattr(name, lambda tensor: False)
        scale = channel_scales(dense, method)
        assert scale is not None
        made = [scale, gptq_codes(dense, scale, compensation(moments, 0.01)), mse_scale(weights).float()]
        blocks = block_scales(dense, method, "bf16")
        assert blocks is not None
        results.append([*made, blocks, weight_facts(dense, made[1], scale)])
        zeros = WeightScaling(method, {"q": 0.5}).scale("q", weights[1])
        assert (zeros is None) == (not there)
        assert zeros is None or not zeros.any()
    for here, elsewhere in zip(*results, strict=True):
        assert torch.equal(here.float(), elsewhere.float())


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 1024), (1024, 4096), (300, 77)])
def test_a_gpus_codes_are_the_cpus(inputs: int, outputs: int) -> None:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randn(2 * inputs, inputs, generator=draw)
    tokens += tokens.roll(1, 1)
    dense = torch.randn(outputs, inputs, generator=draw).mul(0.02).bfloat16()
    moments = tokens.T @ tokens
    scale = channel_scales(dense, "mse")
    assert scale is not None
    there = channel_scales(dense.cuda(), "mse")
    assert there is not None
    assert (there.cpu() == scale).float().mean() > 0.999
    found = compensation(moments, 0.01)
    codes = gptq_codes(dense, scale, found), gptq_codes(dense.cuda(), scale.cuda(), compensation(moments.cuda(), 0.01))
    wide = moments.double() + 0.01 * moments.diagonal().double().diag()
    lost = [dense.double() - made.cpu().double() * scale.double()[:, None] for made in codes]
    here, elsewhere = (((each @ wide) * each).sum(1) for each in lost)
    assert ((elsewhere - here).abs() <= 1e-3 * here).all()


@pytest.mark.gpu
def test_a_gpus_codes_of_dyadic_numbers_are_the_cpus_bit_for_bit() -> None:
    draw = torch.Generator().manual_seed(0)
    dense = (torch.randint(-64, 64, (96, 256), generator=draw) / 8).bfloat16()
    scale = torch.full((96,), 0.25)
    moments = torch.eye(256) * 4
    codes = gptq_codes(dense, scale, compensation(moments))
    there = gptq_codes(dense.cuda(), scale.cuda(), compensation(moments.cuda()))
    assert torch.equal(there.cpu().view(torch.uint8), codes.view(torch.uint8))


def test_the_widest_input_of_a_70b_fits_24_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    """28,672 inputs: H, its factor in FP64 and in FP32, and a part of the channels at a time, of which each value takes
    20 bytes. A layer's weights in FP32, 3.4 GB, lie beside them where layers are rounded one by one.
    """
    width, outputs = 28_672, 8192
    monkeypatch.setattr("fp8q.quantize.weights.gptq.invert", lambda lower: None)  # in place, a block row at a time
    monkeypatch.setattr("fp8q.quantize.weights.gptq.PASSES", 1)
    monkeypatch.setattr("fp8q.quantize.weights.gptq.BLOCK", 4096)
    with fake_device() as counted:
        halves = [MomentSums(width, outputs, "npu") for _ in range(2)]
        ridge_targets([numbers(outputs, width, dtype=torch.bfloat16)], *halves)
    assert counted.peak < 20e9
    assert 4 * 855e6 + counted.peak < 24e9
    del halves
    with fake_device() as counted:
        factored = compensation(numbers(width, width), 0.01)
        assert counted.peak < 13.5e9
        counted.peak = 0
        gptq_codes(numbers(outputs, width, dtype=torch.bfloat16), numbers(outputs), factored)
    assert counted.peak < 12e9
