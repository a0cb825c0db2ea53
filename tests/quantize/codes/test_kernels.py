"""The kernels that encode and scale, against torch's operations: in Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (it comes with PyTorch for NVIDIA GPUs)")

from fp8q.quantize.codes.encoding import encode, encode_two
from fp8q.quantize.codes.epilogue import Epilogue
from fp8q.quantize.codes.formats import E4M3, TWO_TERMS
from fp8q.quantize.codes.gemm import scale_sums
from fp8q.quantize.codes.kernels import triton_encode, triton_scale
from tests.conftest import has_gpu

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # NumPy in the interpreter
DEVICE = "cuda" if has_gpu() else "cpu"
PATTERNS = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def assert_same_codes(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Byte by byte, but for a NaN's sign."""
    ours, right = found.cpu().view(torch.uint8), expected.view(torch.uint8)
    assert ours.shape == right.shape
    nan = (ours & 0x7F == 0x7F) & (right & 0x7F == 0x7F)
    assert torch.equal(ours[~nan], right[~nan])


@pytest.mark.parametrize("scale", [0.0371, 0.0123, 1.0, 2.0**-120, 2.0**100, 3e38])
def test_every_bf16_pattern_has_its_code(scale: float) -> None:
    given = torch.tensor(scale)
    found = triton_encode(PATTERNS.to(DEVICE), given.to(DEVICE), 1)
    assert found.dtype == torch.float8_e4m3fn
    assert_same_codes(found, encode(PATTERNS, given)[None])


@pytest.mark.parametrize("power", [-120, -30, -6, 0, 7, 100])
def test_every_bf16_pattern_has_its_two_codes(power: int) -> None:
    scale = torch.tensor(2.0**power)
    found = triton_encode(PATTERNS.to(DEVICE), scale.to(DEVICE), 2)
    assert_same_codes(found, torch.stack(encode_two(PATTERNS, scale)))


def test_fp32_at_and_beside_every_midpoint_is_rounded_as_the_slow_reference_does() -> None:
    edges = np.concatenate([E4M3.grid, E4M3.midpoints])
    edges = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(1e9))])
    x = np.concatenate([edges, -edges, [np.inf, -np.inf, np.nan]]).astype(np.float32)
    found = triton_encode(torch.from_numpy(x).to(DEVICE), torch.ones((), device=DEVICE), 1)
    assert_same_codes(found[0], torch.from_numpy(E4M3.encode(x)).view(torch.float8_e4m3fn))
    found = triton_encode(torch.from_numpy(x).to(DEVICE), torch.ones((), device=DEVICE), 2)
    for ours, right in zip(found, TWO_TERMS.encode(x), strict=True):
        assert_same_codes(ours, torch.from_numpy(right).view(torch.float8_e4m3fn))


@pytest.mark.parametrize("shape", [(0, 16), (1,), (3, 5, 7), (1025,)])
def test_shapes_that_fill_no_block_keep_theirs(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    found = triton_encode(x.to(DEVICE), torch.tensor(0.25, device=DEVICE), 2)
    assert_same_codes(found, torch.stack(encode_two(x, torch.tensor(0.25))))


def test_a_transposed_activation_is_encoded_in_its_own_order() -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).t()
    found = triton_encode(x.to(DEVICE), torch.tensor(0.25, device=DEVICE), 1)
    assert_same_codes(found[0], encode(x, torch.tensor(0.25)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize(("rows", "outputs"), [(3, 5), (2, 1025), (0, 4)])
def test_sums_are_scaled_as_torch_s_operations_do(
    rows: int, outputs: int, terms: int, biased: bool, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    sums = torch.randn(terms * rows, outputs, generator=draw) * 1e3
    bias = torch.randn(outputs, generator=draw) if biased else None
    for scales in (torch.rand(outputs, generator=draw) + 0.1, torch.tensor([0.37])):
        epilogue = Epilogue(torch.tensor(0.0371), scales, bias)
        expected = scale_sums(sums, epilogue, terms, dtype, lambda at, kernel, torch: torch())
        there = (None if each is None else each.to(DEVICE) for each in vars(epilogue).values())
        found = triton_scale(sums.to(DEVICE), Epilogue(*there), terms, dtype)  # type: ignore[arg-type]
        assert (found.dtype, found.shape) == (dtype, (rows, outputs))
        assert torch.equal(found.cpu(), expected)


def test_a_sum_of_two_terms_is_scaled_once() -> None:
    """(3 + 8 / 16) · 0.5 · 4 + 1 = 8, by hand."""
    sums, half, four, one = (torch.tensor(each, device=DEVICE) for each in ([[3.0], [8.0]], 0.5, [4.0], [1.0]))
    found = triton_scale(sums, Epilogue(half, four, one), 2, torch.bfloat16)
    assert found.tolist() == [[8.0]]


COMPILED = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fp8q.quantize.codes import kernels as k
pointers = {"x_at": "*i16", "scale_at": "*fp32", "codes_at": "*u8", "count": "i32"}
fixed = {"bf16": True, "terms": 2, "divisor": 16.0, "block": k.BLOCK, "dropped": k._DROPPED, "largest": k._LARGEST}
fixed |= {"smallest_normal": k._SMALLEST_NORMAL, "steps": k._STEPS, "excess": k._EXCESS}
for kind in ("*i16", "*fp32"):
    types = pointers | {"x_at": kind} | dict.fromkeys(fixed, "constexpr")
    source = ASTSource(k._encode, types, fixed | {"bf16": kind == "*i16"})
    made = compile(source, target=GPUTarget("cuda", 90, 32))
    assert "div.rn.f32" in made.asm["ptx"]  # not the approximation that Triton's own slash is
    print(len(made.asm["cubin"]))
types = dict.fromkeys(("sums_at", "input_scale_at", "weight_scale_at", "bias_at"), "*fp32") | {"out_at": "*i16"}
fixed = {"has_bias": True, "bf16": True, "terms": 2, "divisor": 16.0, "block": k.BLOCK}
types |= dict.fromkeys(("rows", "outputs", "weight_step"), "i32") | dict.fromkeys(fixed, "constexpr")
options = {"enable_fp_fusion": False}
made = compile(ASTSource(k._scale, types, fixed), target=GPUTarget("cuda", 90, 32), options=options)
assert "fma." not in made.asm["ptx"]  # a product and a sum are rounded one by one
print(len(made.asm["cubin"]))
"""


def test_the_kernels_compile_for_hopper_and_round_as_ieee_says() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert [int(size) > 1000 for size in done.stdout.split()] == [True, True, True]
