"""The plugin's GEMM on an FP8 GPU: a tail, whether its rows are multiplied apart or not, is the reference's."""

import pytest
import torch
from fp8q_vllm import terms
from fp8q_vllm.codes.epilogue import Epilogue
from fp8q_vllm.rows import tail_rows

from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.reference.linear import CallPositions, FP8Linear, Tail

pytestmark = pytest.mark.gpu
WIDTH, OUTPUTS, LENGTH = 4096, 512, 64


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [16, 300, 1024, 5000])
def test_a_tail_is_the_references(rows: int, biased: bool) -> None:
    """Rounding to BF16 is 0.17 % of the outputs' root mean square, and the adder's error less."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU has no FP8")
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, WIDTH, generator=draw).to(torch.bfloat16)
    codes = encode(torch.randn(OUTPUTS, WIDTH, generator=draw), torch.tensor(2.0**-6))
    scales, scale = torch.rand(OUTPUTS, generator=draw) + 0.5, torch.tensor(2.0**-6)
    bias = torch.randn(OUTPUTS, generator=draw).to(torch.bfloat16) if biased else None
    right = FP8Linear(codes, scales, scale, bias, "exact", 2)
    right.tail = Tail(LENGTH, CallPositions(rows))
    numbers = tail_rows(torch.tensor([0, rows], device="cuda"), rows, LENGTH)
    epilogue = Epilogue(scale.cuda(), scales.cuda(), None if bias is None else bias.cuda())
    found = terms.scaled_of(x.cuda(), codes.cuda(), epilogue, torch.ones((), device="cuda"), numbers)
    expected = right(x.float())
    assert (found.cpu().float() - expected).square().mean().sqrt() < 0.005 * expected.square().mean().sqrt()
