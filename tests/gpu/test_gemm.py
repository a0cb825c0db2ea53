"""Products of codes on an FP8 GPU, pass or fail; `benchmarks/gpu` has the figures. They ran on an H100."""

import pytest
import torch
from gpu.adder_bits import cuts, kept_bits

from fp8q.calibrate.model.launching import FAILURES, launched
from fp8q.quantize.codes.encoding import CODE, encode, encode_terms, encode_two
from fp8q.quantize.codes.formats import E4M3, TWO_TERMS
from fp8q.quantize.codes.gemm import scaled_gemm
from fp8q.quantize.reference.adder import ADDERS, accumulated_gemm
from fp8q.quantize.reference.linear import FP8Linear, Mode
from fp8q.quantize.scales.clip import scale_of

pytestmark = pytest.mark.gpu
PATTERNS = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def fp8_units() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU has no FP8")


@pytest.mark.parametrize("terms", [1, 2])
def test_every_bf16_pattern_has_the_cpu_s_codes(terms: int) -> None:
    scale = torch.tensor(2.0**-6)
    right = torch.stack(encode_two(PATTERNS, scale) if terms == 2 else (encode(PATTERNS, scale),))
    found = encode_terms(PATTERNS.cuda(), scale.cuda(), terms, launched).cpu()
    assert FAILURES == []
    nan = PATTERNS.isnan().expand_as(right)
    assert torch.equal(found.view(torch.uint8)[~nan], right.view(torch.uint8)[~nan])
    assert found.float()[nan].isnan().all()


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("width", [172, 4096, 14_336, 28_672])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_layer_is_the_cpu_s_within_accumulation_error(width: int, terms: int, mode: Mode) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, width, generator=generator).to(torch.bfloat16)
    codes = (torch.randn(172, width, generator=generator) * 60).to(CODE)
    amax = float(x.abs().max())
    given = codes, torch.rand(172, generator=generator) + 0.5
    scale = torch.tensor(float(scale_of(amax, TWO_TERMS if terms == 2 else E4M3)))
    right = FP8Linear(*given, scale, None, "exact", terms)(x.float())
    layer = FP8Linear(given[0].cuda(), given[1].cuda(), scale.cuda(), None, mode, terms)
    assert layer.codes.dtype == CODE
    found = layer(x.cuda()).cpu().float()
    assert (found - right).square().mean().sqrt() < 0.005 * right.square().mean().sqrt()


@pytest.mark.parametrize("distance", [1, 32, 128, 1024])
@pytest.mark.parametrize(("fast", "adder"), [(True, "fp22"), (False, "two-level")])
def test_hopper_keeps_the_bits_that_the_simulated_adder_keeps(fast: bool, adder: str, distance: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU is no Hopper")
    assert adder in ADDERS
    on_gpu = kept_bits(lambda x, weight: scaled_gemm(x, weight, fast), distance, device="cuda")
    simulated = kept_bits(lambda x, weight: accumulated_gemm(x, weight, adder), distance, size=16)  # type: ignore[arg-type]
    assert on_gpu == simulated
    assert cuts(lambda x, weight: scaled_gemm(x, weight, fast), 1, device="cuda")
