"""The plugin's product by itself, on a CPU, against the reference's; in vLLM it runs in `tests/elsewhere`.

Of vLLM it imports what registers an operator, and what knows of the batch that is computed; here nothing is registered,
and there is no batch, so that all rows have second terms, or those of `tail_rows`.
"""

import importlib
import sys
from types import ModuleType

import pytest
import torch
from fp8q_vllm.rows import Rows

from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.reference.linear import CallPositions, FP8Linear, Tail

ROWS, IN, OUT, TAIL = 6, 32, 8, 2


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`fp8q_vllm.product`, as imported without vLLM."""
    context, utils = ModuleType("vllm.forward_context"), ModuleType("vllm.utils.torch_utils")
    context.__dict__.update(is_forward_context_available=lambda: False, get_forward_context=None)
    utils.__dict__.update(direct_register_custom_op=lambda *names, **options: None)
    for module in (ModuleType("vllm"), ModuleType("vllm.utils"), utils, context):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "fp8q_vllm.product", raising=False)
    found = importlib.import_module("fp8q_vllm.product")
    monkeypatch.delitem(sys.modules, "fp8q_vllm.product")
    return found


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("tail", [0, TAIL])
def test_it_is_the_references_product(
    product: ModuleType, monkeypatch: pytest.MonkeyPatch, tail: int, biased: bool
) -> None:
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
        monkeypatch.setattr(product, "rows_of_batch", lambda *asked: rows)
    found = product.fp8q_linear(x, codes, weight_scale[:, None], scale, bias, tail, 0)
    assert torch.allclose(found, layer(x), rtol=1e-6, atol=1e-6)
    exact = x @ (codes.float() * weight_scale[:, None]).T + (0 if bias is None else bias)
    off = (found - exact).abs().amax(1)
    assert off[-TAIL:].max() < 1e-4
    assert (off[:-TAIL].min() > 1e-3) == (tail > 0), "one term is off by 2 % of a value"
