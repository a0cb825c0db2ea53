"""The plugin's GEMM by itself, on a CPU, against the reference's; in vLLM it runs in `tests/elsewhere`.

Of vLLM it imports what registers an operator, and what knows of the batch that is computed; here nothing is registered,
and there is no batch, so that all rows have second terms, or those of `tail_rows`.
"""

import importlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fp8q_vllm import terms
from fp8q_vllm.rows import Rows
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.reference.linear import CallPositions, FP8Linear, Tail
from tests.stand_in.vllm import Plugin

ROWS, IN, OUT, TAIL = 6, 32, 8, 2


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("tail", [0, TAIL])
def test_it_is_the_references_product(plugin: Plugin, monkeypatch: pytest.MonkeyPatch, tail: int, biased: bool) -> None:
    """In FP32, where only the order of sums may differ; with a tail the last rows of the only sequence are exact."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, IN, generator=draw).bfloat16().float()
    weight = torch.randn(OUT, IN, generator=draw)
    scale, weight_scale = torch.tensor(2.0**-7), 2.0 ** -torch.arange(5, 5 + OUT).float()
    codes = encode(weight, weight_scale[:, None])
    bias = torch.randn(OUT, generator=draw) if biased else None
    layer = FP8Linear(codes, weight_scale, scale, bias, "exact", terms=2)
    if tail:
        layer.tail = Tail(tail, CallPositions(ROWS))
        numbers = torch.tensor([ROWS - 1, ROWS - 2, 0])  # the first row is there to fill up
        rows = Rows(numbers, torch.tensor([True, True, False]))
        monkeypatch.setattr(plugin.product, "rows_of_batch", lambda *asked: rows)
    plugin.forward(None)
    found = plugin.product.fp8q_linear(x, codes, weight_scale[:, None], scale, bias, torch.ones(()), tail, 0)
    assert torch.allclose(found, layer(x), rtol=1e-6, atol=1e-6)
    exact = x @ (codes.float() * weight_scale[:, None]).T + (0 if bias is None else bias)
    off = (found - exact).abs().amax(1)
    assert off[-TAIL:].max() < 1e-4
    assert (off[:-TAIL].min() > 1e-3) == (tail > 0), "one term is off by 2 % of a value"


def test_outside_of_a_forward_pass_the_weights_are_answered(plugin: Plugin) -> None:
    """An identity matrix, as vLLM multiplies it by what latent attention expands: 1 is four times the largest value of
    the input's codes here.
    """
    draw = torch.Generator().manual_seed(4)
    weight_scale = 2.0 ** -torch.arange(5, 5 + OUT).float()
    codes = encode(torch.randn(OUT, IN, generator=draw), weight_scale[:, None])
    arguments = (codes, weight_scale[:, None], torch.tensor(2.0**-11), None, torch.ones(()), TAIL, 0)
    asked = plugin.product.fp8q_linear(torch.eye(IN, dtype=torch.bfloat16), *arguments)
    assert torch.equal(asked.T, (codes.float() * weight_scale[:, None]).bfloat16())
    plugin.forward(None)
    assert plugin.product.fp8q_linear(torch.eye(IN), *arguments).abs().max() < asked.abs().max() / 2


def test_codes_of_a_gpu_are_made_by_torch_where_kernels_do_not_start(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tensors of a GPU that is not there, and Triton, which finds none to launch on."""
    launching = importlib.import_module("fp8q_vllm.launching")
    monkeypatch.setattr(launching, "FAILURES", [])
    monkeypatch.setattr(launching, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with FakeTensorMode():
        x, scale = (torch.empty(shape, device="cuda:1") for shape in ((4, IN), ()))
        for count in (1, 2):
            found = terms.terms_of(x, scale, count)
            assert (found.shape, found.dtype) == ((count, 4, IN), torch.float8_e4m3fn)
    assert len(caplog.messages) == len(launching.FAILURES) == 1


def test_a_long_prompt_is_multiplied_in_parts(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The FP32 sums of 8,192 rows in two terms are 1.9 GB where an 8B multiplies gate and up."""
    draw = torch.Generator().manual_seed(5)
    x, codes = torch.randn(2, 7, IN, generator=draw), encode(torch.randn(OUT, IN, generator=draw), torch.tensor(1.0))
    arguments = (codes, torch.ones(OUT, 1), torch.tensor(2.0**-7), torch.ones(OUT), torch.ones(()), 0, 0)
    plugin.forward(None)
    whole = plugin.product.fp8q_linear(x, *arguments)
    multiplied: list[int] = []
    product = terms.code_gemm

    def counted(codes: torch.Tensor, *others: torch.Tensor) -> Any:
        multiplied.append(len(codes))
        return product(codes, *others)

    monkeypatch.setattr(terms, "code_gemm", counted)
    monkeypatch.setattr(terms, "CHUNK", 6)
    found = plugin.product.fp8q_linear(x, *arguments)
    assert multiplied == [12, 12, 4]
    assert found.shape == (2, 7, OUT)
    assert torch.allclose(found, whole, rtol=1e-6, atol=1e-6)
