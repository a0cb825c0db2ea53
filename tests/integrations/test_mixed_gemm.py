"""The plugin's kernel of FP8 weights by rows of 16 bits: in Triton's interpreter where there is no GPU; compiled."""

import os
import re
import subprocess
import sys
from importlib import metadata

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (it comes with PyTorch for NVIDIA GPUs)")

from fp8q_vllm.codes.epilogue import Epilogue
from fp8q_vllm.mixed_gemm import TILES, parts_of, tiles_of, triton_mixed_gemm
from fp8q_vllm.rows import Rows

from fp8q.quantize.codes.encoding import CODE, encode, two_code_values
from tests.conftest import ROOT, has_gpu

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # NumPy in the interpreter
DEVICE = "cuda" if has_gpu() else "cpu"
INTEGRATION = ROOT / "integrations" / "vllm"
DECISION = ROOT / "docs" / "decisions" / "0116-the-plugin-multiplies-in-16-bits.md"
PATTERNS = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
#: Rows, outputs and inputs: of less than one tile, of widths that fill none, in parts, of several tiles of rows.
SHAPES = [(1, 16, 32), (3, 70, 200), (17, 130, 1032), (40, 64, 2048), (150, 24, 96)]
#: Outputs and inputs of Llama 3 8B's GEMMs: q/k/v, o, gate/up, down.
OF_8B = [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)]


def multiplied(
    x: torch.Tensor, codes: torch.Tensor, epilogue: Epilogue, out: torch.Tensor | None = None, rows: Rows | None = None
) -> torch.Tensor:
    """The kernel's answer, on the CPU."""
    out = torch.empty(len(x), len(codes), dtype=x.dtype) if out is None else out
    there = [None if tensor is None else tensor.to(DEVICE) for tensor in vars(epilogue).values()]
    chosen = None if rows is None else Rows(rows.numbers.to(DEVICE), rows.exact.to(DEVICE))
    y = triton_mixed_gemm(x.to(DEVICE), codes.to(DEVICE), Epilogue(*there), out.to(DEVICE), chosen)  # type: ignore[arg-type]
    return y.cpu()


def random_layer(outputs: int, inputs: int, biased: bool) -> tuple[torch.Tensor, Epilogue]:
    """Codes of random weights, and their scales."""
    draw = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=draw)
    scales = 0.01 + torch.rand(outputs, generator=draw) * 0.01
    bias = torch.randn(outputs, generator=draw).bfloat16() if biased else None
    return encode(weight, scales[:, None]), Epilogue(torch.tensor(2.0**-7), scales, bias)


def dyadic_layer(rows: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and codes that are few small whole numbers over a power of two, so that every sum is exact."""
    draw = torch.Generator().manual_seed(inputs)
    x = torch.randint(-8, 9, (rows, inputs), generator=draw) / 64
    return x.bfloat16(), torch.randint(-4, 5, (outputs, inputs), generator=draw).float().to(CODE)


@pytest.mark.parametrize("power", [-120, -7, 0, 100])
def test_sixteen_bits_hold_every_bf16_number_at_least_as_well_as_two_codes(power: int) -> None:
    """All 65,536 patterns: exact from 2^-17 to 65,280 scales, within 2^-25 below, and clipped at 65,504 above."""
    scale = torch.tensor(2.0**power)
    x = PATTERNS[PATTERNS.isfinite()].double()
    quotients = x / scale.double()
    sixteen = quotients.float().clamp(-65504, 65504).half().double()
    two = sum(term.double() / 16**number for number, term in enumerate(two_code_values(x.bfloat16(), scale)))
    size = quotients.abs()
    held = (size >= 2**-17) & (size <= 65280) | (size == 0)
    assert torch.equal(sixteen[held], quotients[held])
    assert (sixteen - quotients).abs()[size < 2**-17].max() <= 2**-25
    assert torch.equal(sixteen[size > 65504], quotients[size > 65504].sign() * 65504)
    within = (size >= 2**-6) & (size <= 476)
    assert torch.equal(sixteen[within], two[within])
    assert ((sixteen - quotients).abs() <= (two - quotients).abs()).all()


@pytest.mark.parametrize("power", [-120, -7, 0, 100])
def test_the_kernel_takes_every_bf16_number_so(power: int) -> None:
    """By a weight that is the identity; a row with a NaN is NaN throughout."""
    scale = torch.tensor(2.0**power)
    x = PATTERNS.view(-1, 16)
    y = multiplied(x, torch.eye(16).to(CODE), Epilogue(scale, torch.ones(1)))
    nan = x.isnan().any(1)
    assert y[nan].isnan().all()
    expected = (x[~nan].float() / scale).clamp(-65504, 65504).half().float() * scale
    assert torch.equal(y[~nan], expected.bfloat16())


def test_every_code_is_taken_as_it_is() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(CODE)
    codes = codes[codes.float().isfinite()].view(-1, 127)
    y = multiplied(torch.eye(127).half(), codes, Epilogue(torch.tensor(1.0), torch.ones(1)))
    assert torch.equal(y.T.float(), codes.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_it_is_the_exact_sum_but_for_fp32_s_rounding(
    rows: int, outputs: int, inputs: int, biased: bool, dtype: torch.dtype
) -> None:
    codes, epilogue = random_layer(outputs, inputs, biased)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = codes.double() * epilogue.weight_scale.double()[:, None]
    bias = 0 if epilogue.bias is None else epilogue.bias.double()
    exact, sizes = x.double() @ weight.T + bias, x.double().abs() @ weight.abs().T
    y = multiplied(x, codes, epilogue).double()
    rounding = torch.finfo(dtype).eps / 2 * exact.abs()
    assert ((y - exact).abs() <= 1.01 * rounding + inputs * 2**-24 * (sizes + exact.abs()) + 2**-24).all()


@pytest.mark.parametrize("scales", [1, 0])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_dyadic_numbers_come_out_bit_for_bit(rows: int, outputs: int, inputs: int, scales: int) -> None:
    """In parts or not, whatever the order of sums; scales and bias are applied as torch's operations do."""
    x, codes = dyadic_layer(rows, outputs, inputs)
    draw = torch.Generator().manual_seed(2)
    bias = torch.randn(outputs, generator=draw).bfloat16()
    epilogue = Epilogue(torch.tensor(2.0**-6), torch.rand(outputs if scales else 1, generator=draw), bias)
    sums = (x.float() * 64) @ codes.float().T
    assert torch.equal(multiplied(x, codes, epilogue), epilogue.of_sums(sums, torch.bfloat16))


@pytest.mark.parametrize(("outputs", "inputs", "parts"), [(24, 96, 1), (24, 2048, 4)])
def test_exact_rows_alone_are_stored(outputs: int, inputs: int, parts: int) -> None:
    """Rows come in any order, and those that fill up stay as they are."""
    x, codes = dyadic_layer(30, outputs, inputs)
    epilogue = Epilogue(torch.tensor(2.0**-6), torch.rand(outputs, generator=torch.Generator().manual_seed(3)))
    rows = Rows(torch.tensor([29, 2, 17, 0, 11]), torch.tensor([True, True, False, True, False]))
    assert parts_of(len(rows.numbers), outputs, inputs) == parts
    before = torch.full((30, outputs), 7.0).bfloat16()
    y, whole = multiplied(x, codes, epilogue, before.clone(), rows), multiplied(x, codes, epilogue)
    stored = torch.tensor([29, 2, 0])
    assert torch.equal(y[stored], whole[stored])
    others = torch.ones(30, dtype=torch.bool)
    others[stored] = False
    assert torch.equal(y[others], before[others])


def test_no_rows_are_multiplied_by_no_kernel() -> None:
    codes, epilogue = random_layer(16, 32, False)
    assert multiplied(torch.empty(0, 32).bfloat16(), codes, epilogue).shape == (0, 16)


def test_tiles_and_parts_follow_from_the_shape() -> None:
    """256 programs or more, but for gate and up, which have as many without parts; each of 512 inputs or more."""
    parts = {rows: [parts_of(rows, *shape) for shape in OF_8B] for rows in (1, 32, 64, 512)}
    assert parts == {1: [4, 4, 1, 4], 32: [4, 4, 1, 4], 64: [8, 8, 2, 8], 512: [2, 2, 1, 2]}
    assert parts_of(1, 64, 1000) == 1
    assert [tiles_of(rows).tokens for rows in (1, 16, 17, 33, 64, 65, 5000)] == [16, 16, 32, 64, 64, 128, 128]


COMPILED = """
import re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fp8q_vllm import mixed_gemm as m

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    "x_at": "*i16", "weight_at": "*u8", "input_scale_at": "*fp32", "weight_scale_at": "*fp32", "bias_at": "*bf16",
    "numbers_at": "*i64", "exact_at": "*u8", "sums_at": "*fp32", "out_at": "*i16",
}

def used(kernel, sizes, fixed, capability, warps):
    names = [*(name for name in TYPES if name in kernel.arg_names), *sizes]
    types = {name: TYPES.get(name, "i32") for name in names} | dict.fromkeys(fixed, "constexpr")
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name != "rows"}
    options = {"num_warps": warps, "enable_fp_fusion": False}
    made = triton.compile(ASTSource(kernel, types, fixed, aligned), GPUTarget("cuda", capability, 32), options)
    ptx = made.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "made.ptx"
        file.write_text(ptx)
        ptxas = BIN / ("ptxas" if capability < 100 else "ptxas-blackwell")
        (target,) = re.findall(r"^[.]target (sm_[0-9a-z]+)", ptx, re.M)
        command = [ptxas, "-v", f"-arch={target}", file, "-o", Path(folder) / "made.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\\d+) registers", said)
    spilled = sum(map(int, re.findall(r"(\\d+) bytes spill", said)))
    return ptx, int(registers), spilled, made.metadata.shared

capability = int(sys.argv[1])
for tiles in m.TILES.values():
    sizes = ("rows", "outputs", "inputs", "part_inputs")
    for hard in (False, True):
        fixed = {"has_bias": hard, "bf16": True, "chosen": hard, "parts": 4 if hard else 1, "even": not hard}
        fixed |= {"tile_tokens": tiles.tokens, "tile_outputs": tiles.outputs, "tile_inputs": tiles.inputs}
        fixed |= {"stages": tiles.stages, "weight_step": 1}
        ptx, *numbers = used(m._multiply, sizes, fixed, capability, tiles.warps)
        assert "cvt.rn.f16x2.e4m3x2" in ptx and "div.rn.f32" in ptx and "fma." not in ptx
        assert re.search(r"wgmma.*f32.f16.f16|mma.sync.*f32.f16.f16.f32|tcgen05.mma.*kind::f16", ptx)
        print(tiles.tokens, int(hard), *numbers)
fixed = {"has_bias": True, "bf16": True, "chosen": True, "parts": 4, "block": m.BLOCK, "weight_step": 1}
print("parts", 1, *used(m._add_parts, ("rows", "outputs"), fixed, capability, 4)[1:])
"""
#: Bytes of shared memory that a program has at most on the smallest of these GPUs.
SHARED_BYTES = 101_376


def compiled(capability: int) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Registers, spilled bytes and shared bytes of each kernel for a GPU, by tokens, and whether it is the harder one:
    chosen rows, parts, a bias, widths that fill no tile.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(INTEGRATION)
    command = [sys.executable, "-c", COMPILED, str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {(line[0], line[1]): (int(line[2]), int(line[3]), int(line[4])) for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_the_kernels_compile_without_spills_and_as_the_decision_states(capability: int) -> None:
    numbers = compiled(capability)
    assert len(numbers) == 2 * len(TILES) + 1
    assert {spilled for _, spilled, _ in numbers.values()} == {0}
    assert max(shared for _, _, shared in numbers.values()) <= SHARED_BYTES
    text = DECISION.read_text(encoding="utf-8")
    (version,) = re.findall(r"Triton (\d+\.\d+\.\d+)", text)
    if version != metadata.version("triton"):
        pytest.skip(f"the decision states Triton {version}'s numbers, and this is {metadata.version('triton')}")
    (row,) = re.findall(rf"^\| sm_{capability} \|(.*)\|$", text, re.MULTILINE)
    stated = [tuple(int(number.replace(",", "")) for number in cell.split(" / ")) for cell in row.split("|")]
    assert stated == [numbers[str(tokens), "0"][::2] for tokens in TILES]
