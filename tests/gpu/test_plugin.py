"""The plugin's GEMM on an FP8 GPU: exact rows are the reference's, the same in each call, and in a CUDA graph."""

import pytest
import torch
from fp8q_vllm import terms
from fp8q_vllm.codes.epilogue import Epilogue
from fp8q_vllm.rows import tail_rows

from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.reference.linear import CallPositions, FP8Linear, Tail

pytestmark = pytest.mark.gpu
WIDTH, OUTPUTS, LENGTH = 4096, 512, 64


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def layer(request: pytest.FixtureRequest) -> tuple[torch.Tensor, Epilogue]:
    """A weight's codes, and their scales."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU has no FP8")
    draw = torch.Generator().manual_seed(0)
    codes = encode(torch.randn(OUTPUTS, WIDTH, generator=draw), torch.tensor(2.0**-6))
    bias = torch.randn(OUTPUTS, generator=draw).to(torch.bfloat16) if request.param else None
    return codes, Epilogue(torch.tensor(2.0**-6), torch.rand(OUTPUTS, generator=draw) + 0.5, bias)


def on_the_gpu(epilogue: Epilogue) -> Epilogue:
    bias = None if epilogue.bias is None else epilogue.bias.cuda()
    return Epilogue(epilogue.input_scale.cuda(), epilogue.weight_scale.cuda(), bias)


def inputs(rows: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square error over that of the values; rounding to BF16 is 0.17 %, and an adder's error less."""
    return float((found.cpu().float() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("rows", [300, 1024, 5000])
def test_a_tail_is_the_references(rows: int, layer: tuple[torch.Tensor, Epilogue]) -> None:
    codes, epilogue = layer
    x = inputs(rows)
    right = FP8Linear(codes, epilogue.weight_scale, epilogue.input_scale, epilogue.bias, "exact", 2)
    right.tail = Tail(LENGTH, CallPositions(rows))
    there = on_the_gpu(epilogue)
    one_code = FP8Linear(codes.cuda(), there.weight_scale, there.input_scale, there.bias, "exact").cuda()
    numbers = tail_rows(torch.tensor([0, rows], device="cuda"), rows, LENGTH)
    one = torch.ones((), device="cuda")
    found = terms.with_exact_rows(one_code(x.cuda()), x.cuda(), codes.cuda(), there, one, numbers)
    assert error(found, right(x.float())) < 0.005


@pytest.mark.parametrize("rows", [1, 16, 33, 512, terms.KERNEL_ROWS + 1])
def test_exact_rows_are_the_references_of_weights_alone(rows: int, layer: tuple[torch.Tensor, Epilogue]) -> None:
    """In a CUDA graph too, bit for bit as before."""
    codes, epilogue = layer
    x = inputs(rows)
    arguments = x.cuda(), codes.cuda(), on_the_gpu(epilogue), torch.ones((), device="cuda")
    found = terms.exact_product(*arguments)
    assert not terms.REFUSALS
    assert error(found, FP8Linear(codes, epilogue.weight_scale, None, epilogue.bias, "exact")(x.float())) < 0.002
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = terms.exact_product(*arguments)
    graph.replay()
    assert torch.equal(again, found)
