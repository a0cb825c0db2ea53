"""The kernels of a block of inputs, against torch's operations: in Triton's interpreter where there is no GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (it comes with PyTorch for NVIDIA GPUs)")

from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.weights import gptq
from fp8q.quantize.weights.block_kernels import CHANNELS, triton_descend, triton_round
from fp8q.quantize.weights.gptq import BLOCK, MARGIN, compensation, gptq_codes
from tests.conftest import has_gpu

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # NumPy in the interpreter
DEVICE = "cuda" if has_gpu() else "cpu"
#: Inputs and outputs: of less than one program, of one and a part.
SHAPES = [(9, 5), (24, CHANNELS + 1)]
#: GPUs of data centres and desks, from A100 to RTX 5090.
CAPABILITIES = (90, *(pytest.param(capability, marks=pytest.mark.slow) for capability in (80, 89, 120)))


def random_block(inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights in units of their scale, H and its factor."""
    draw = torch.Generator().manual_seed(inputs)
    x = torch.randn(4 * inputs, inputs, generator=draw) @ torch.randn(inputs, inputs, generator=draw)
    factors = compensation(x.T @ x / len(x))
    return torch.randn(inputs, outputs, generator=draw) * 8, factors.moments, factors.factor


def dyadic_block(inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Eighths, and a factor and H of few small whole numbers: every sum is exact, in whatever order."""
    draw = torch.Generator().manual_seed(inputs)
    few = torch.rand(inputs, inputs, generator=draw) < 2 / inputs
    signs = torch.randint(0, 2, (inputs, inputs), generator=draw) * 2 - 1
    above = (few * signs).float().triu(1)
    left = torch.randint(-512, 512, (inputs, outputs), generator=draw) / 8
    return left, above + above.T + 4 * torch.eye(inputs), above + torch.eye(inputs)


def both_ways(
    block: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Values and errors of rounding, then values and changes of a descent from there: by torch and by the kernels."""
    left, moments, factor = block
    shares = -factor.diagonal().reciprocal()
    steps = (1 - MARGIN) / moments.diagonal()
    errors, values = left.clone(), torch.empty_like(left)
    gptq.round_block(errors, values, factor, shares)
    gradient = moments @ (left - values)
    changed = values.clone()
    moved = gptq.descend_block(changed, gradient.clone(), moments, steps)
    there = [tensor.to(DEVICE) for tensor in (left, torch.empty_like(left), factor, shares)]
    triton_round(*there)
    again, slopes = values.clone().to(DEVICE), gradient.clone().to(DEVICE)
    moves = triton_descend(again, slopes, moments.to(DEVICE), steps.to(DEVICE))
    assert torch.equal(slopes.cpu(), gradient)
    by_kernels = [tensor.cpu() for tensor in (there[1], there[0], again, moves)]
    return [values, errors, changed, moved], by_kernels


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_dyadic_numbers_come_out_bit_for_bit(inputs: int, outputs: int) -> None:
    right, found = both_ways(dyadic_block(inputs, outputs))
    for ours, theirs in zip(right, found, strict=True):
        assert torch.equal(ours, theirs)
    assert right[3].any()


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_random_numbers_have_the_same_codes(inputs: int, outputs: int) -> None:
    right, found = both_ways(random_block(inputs, outputs))
    for ours, theirs in ((right[0], found[0]), (right[2], found[2]), (right[3], found[3])):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(found[1], right[1], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("make", [dyadic_block, random_block])
def test_a_block_of_full_size_has_the_same_codes(make: type) -> None:
    right, found = both_ways(make(BLOCK, CHANNELS + 8))
    for ours, theirs in ((right[0], found[0]), (right[2], found[2]), (right[3], found[3])):
        assert torch.equal(ours, theirs)


def test_values_are_clipped_and_nan_and_the_sign_of_zero_stay() -> None:
    """No input tells another: 1,000 is clipped, 1.06 rounds to 1, and NaN is no code's neighbour."""
    left = torch.tensor([[1000.0, -0.0], [1.06, torch.nan], [-1000.0, 2.0**-10]]).to(DEVICE)
    values = torch.empty_like(left)
    triton_round(left, values, torch.eye(3, device=DEVICE), -torch.ones(3, device=DEVICE))
    found = values.cpu()
    assert found[:, 0].tolist() == [E4M3.max, 1.0, -E4M3.max]
    assert found[0, 1].signbit()
    assert found[1, 1].isnan()
    assert left.cpu()[0].tolist() == [1000 - E4M3.max, 0.0]


def test_codes_of_a_weight_by_the_kernels_are_those_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16, of which the last one is smaller; a channel of it ends as before."""
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randn(200, 37, generator=draw) @ torch.randn(37, 37, generator=draw)
    weight = torch.randn(34, 37, generator=draw).mul(0.02).bfloat16()
    scale = weight.abs().amax(1).float() / E4M3.max
    factors = compensation(tokens.T @ tokens, 0.01)
    monkeypatch.setattr(gptq, "BLOCK", 16)
    expected = gptq_codes(weight, scale, factors)
    monkeypatch.setattr(gptq, "launched", lambda device, kernel, operations: kernel())
    monkeypatch.setattr(gptq, "PASSES", 2)
    found = gptq_codes(weight, scale, factors)
    monkeypatch.setattr(gptq, "launched", lambda device, kernel, operations: operations())
    two_passes = gptq_codes(weight, scale, factors)
    assert torch.equal(found.view(torch.uint8), two_passes.view(torch.uint8))
    assert (expected.view(torch.uint8) == found.view(torch.uint8)).float().mean() > 0.9


COMPILED = """
import sys
from pathlib import Path
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fp8q.quantize.weights import block_kernels as k
capability, folder = int(sys.argv[1]), Path(sys.argv[2])
fixed = {"block": 128, "channels": k.CHANNELS}
fixed |= dict(zip(("dropped", "largest", "smallest_normal", "steps", "excess"), k.FORMAT, strict=True))
for kernel in (k._round_block, k._descend_block):
    types = {name: "*fp32" if name.endswith("_at") else "i32" for name in kernel.arg_names}
    source = ASTSource(kernel, types | dict.fromkeys(fixed, "constexpr"), fixed)
    made = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": k.WARPS})
    assert "tf32" not in made.asm["ptx"]
    (folder / f"{kernel.__name__}.ptx").write_text(made.asm["ptx"])
assert "div.rn.f32" in (folder / "_round_block.ptx").read_text()  # not an approximation
"""


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_they_compile_without_spilling_registers(capability: int, tmp_path: Path) -> None:
    import triton

    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", COMPILED, str(capability), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assemblers = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    assembler = assemblers / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    files = sorted(tmp_path.glob("*.ptx"))
    assert len(files) == 2
    for file in files:
        target = re.search(r"^\.target (\w+)", file.read_text(), re.MULTILINE)
        assert target is not None
        words = [str(assembler), f"-arch={target[1]}", "-v", str(file), "-o", str(tmp_path / "made.cubin")]
        said = subprocess.run(words, capture_output=True, text=True)
        assert said.returncode == 0, said.stderr
        assert set(re.findall(r"(\d+) bytes spill", said.stderr)) == {"0"}
