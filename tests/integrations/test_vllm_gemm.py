"""The plugin's GEMM by itself, on a CPU, against the reference's; in vLLM it runs in `tests/elsewhere`.

Of vLLM it imports what registers an operator, and what knows of the batch that is computed; here nothing is registered,
and there is no batch, so that all rows are exact, or those of `tail_rows`.
"""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fp8q_vllm import terms
from fp8q_vllm.codes.encoding import encode_terms
from fp8q_vllm.codes.epilogue import Epilogue
from fp8q_vllm.codes.gemm import scaled_gemm
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
    first = encode(x, scale) if tail else None
    found = plugin.product.fp8q_linear(x, first, codes, weight_scale[:, None], scale, bias, torch.ones(()), tail, 0)
    assert torch.allclose(found, layer(x), rtol=1e-6, atol=1e-6)
    exact = x @ (codes.float() * weight_scale[:, None]).T + (0 if bias is None else bias)
    off = (found - exact).abs().amax(1)
    assert off[-TAIL:].max() < 1e-5
    assert (off[:-TAIL].min() > 1e-3) == (tail > 0), "one term is off by 2 % of a value"


def test_exact_rows_are_the_references_of_weights_alone(plugin: Plugin) -> None:
    """Values that two codes round, below a 64th of the scale, and clip, above 476 times it, are as they are."""
    scale, codes = torch.tensor(2.0**-7), torch.eye(4).to(torch.float8_e4m3fn)
    x = torch.tensor([[2.0**-22, 1.0078125 * 2.0**-16, 100.0, -3.0]]).bfloat16()
    plugin.forward(None)
    found = plugin.product.fp8q_linear(x, None, codes, torch.ones(4, 1), scale, None, torch.ones(()), 0, 0)
    assert torch.equal(found, FP8Linear(codes, torch.ones(4), None, None, "exact")(x))
    two = FP8Linear(codes, torch.ones(4), scale, None, "exact", 2)(x)
    assert torch.equal(found, x)
    assert (two != x).tolist() == [[True, True, True, False]]


def test_outside_of_a_forward_pass_the_weights_are_answered(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    """An identity matrix, as vLLM multiplies it by what latent attention expands: 1 is four times the largest value of
    the input's codes here. The kernel, which clips, is not asked.
    """
    monkeypatch.setattr(plugin.product, "exact_product", None)
    draw = torch.Generator().manual_seed(4)
    weight_scale = 2.0 ** -torch.arange(5, 5 + OUT).float()
    codes = encode(torch.randn(OUT, IN, generator=draw), weight_scale[:, None])
    x = torch.eye(IN, dtype=torch.bfloat16)
    first = encode(x, torch.tensor(2.0**-11))
    arguments = (first, codes, weight_scale[:, None], torch.tensor(2.0**-11), None, torch.ones(()), TAIL, 0)
    asked = plugin.product.fp8q_linear(x, *arguments)
    assert torch.equal(asked.T, (codes.float() * weight_scale[:, None]).bfloat16())


def test_codes_of_a_gpu_are_made_by_torch_where_kernels_do_not_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tensors of a GPU that is not there, and Triton, which finds none to launch on."""
    launching = importlib.import_module("fp8q_vllm.launching")
    monkeypatch.setattr(launching, "FAILURES", [])
    monkeypatch.setattr(launching, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with FakeTensorMode():
        x, scale = (torch.empty(shape, device="cuda:1") for shape in ((4, IN), ()))
        for count in (1, 2):
            found = encode_terms(x, scale, count, launching.launched)
            assert (found.shape, found.dtype) == ((count, 4, IN), torch.float8_e4m3fn)
    assert len(caplog.messages) == len(launching.FAILURES) == 1


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's capability; tensors are a CPU's, on which torch's operations take the place of kernels."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(terms, "REFUSALS", set())


def small_layer() -> tuple[torch.Tensor, torch.Tensor, Epilogue]:
    """Inputs of few small numbers, a weight's codes, and their scales."""
    draw = torch.Generator().manual_seed(6)
    x = torch.randint(-8, 9, (ROWS, IN), generator=draw) / 64
    codes = torch.randint(-4, 5, (16, IN), generator=draw).float().to(torch.float8_e4m3fn)
    return x.bfloat16(), codes, Epilogue(torch.tensor(2.0**-6), torch.rand(16, generator=draw))


@pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")
@pytest.mark.parametrize("interpreted", [True, False])
def test_the_kernel_and_two_codes_give_what_16_bits_give(
    on_hopper: None, monkeypatch: pytest.MonkeyPatch, interpreted: bool
) -> None:
    """The kernel in Triton's interpreter, on a view whose rows have gaps; two codes where it does not start."""
    x, codes, epilogue = small_layer()
    one = torch.ones(())
    gaps = torch.cat([x, x], 1)[:, :IN]
    multiplied: list[int] = []

    def counted(codes: torch.Tensor, weight: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        multiplied.append(len(codes))
        return scaled_gemm(codes, weight, one=one)

    monkeypatch.setattr(terms, "scaled_gemm", counted)
    right = terms.sixteen_bit_product(x, codes, epilogue, one)
    rows = Rows(torch.tensor([4, 1, 0]), torch.tensor([True, False, True]))
    if interpreted:
        pytest.importorskip("triton", reason="Triton is not installed (it comes with PyTorch for NVIDIA GPUs)")
        monkeypatch.setattr(terms, "launched", lambda device, kernel, operations: kernel())
    found = terms.kernel_product(torch.empty(ROWS, 16).bfloat16(), gaps, codes, epilogue, one)
    assert torch.equal(found, right)
    some = terms.kernel_product(torch.full((ROWS, 16), 7.0).bfloat16(), gaps, codes, epilogue, one, rows)
    assert torch.equal(some[[0, 4]], right[[0, 4]])
    assert (some[[1, 2, 3, 5]] == 7).all()
    assert multiplied == ([] if interpreted else [2 * ROWS, 6])


Change = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@pytest.mark.parametrize(("change", "capability", "reason"), [
    (lambda x, w: (x.float(), w), (9, 0), "it takes activations of 16 bits, and these are torch.float32"),
    (lambda x, w: (x, w.view(torch.float8_e5m2)), (9, 0),
     "it takes weights in torch.float8_e4m3fn, and these are torch.float8_e5m2"),
    (lambda x, w: (x, torch.cat([w, w], 1)[:, :IN]), (9, 0), "it takes weights whose rows have no gaps"),
    (lambda x, w: (x, w), (8, 6), "it takes GPUs of compute capability 8.9 or newer, and this has 8.6"),
])  # fmt: skip
def test_what_the_kernel_does_not_take_is_named_once(
    on_hopper: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: Change,
    capability: tuple[int, int], reason: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(terms, "two_code_product", lambda x, *others: x[:, :16])
    x, codes, epilogue = small_layer()
    changed, weight = change(x, codes)
    for _ in range(2):
        y = terms.kernel_product(torch.empty(ROWS, 16).to(changed.dtype), changed, weight, epilogue, torch.ones(()))
        assert torch.equal(y, changed[:, :16])
    assert caplog.messages == [
        f"exact rows are multiplied in two codes, which is slower, not by the kernel of 16 bits: {reason}"
    ]


def test_few_rows_of_a_gpu_are_the_kernel_s_and_many_are_multiplied_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any number and width; those among rows of one code are the kernel's however many they are."""
    by: list[tuple[str, int]] = []

    def by_kernel(y: torch.Tensor, x: torch.Tensor, *others: object) -> torch.Tensor:
        by.append(("kernel", len(x)))
        return y

    def in_16_bits(x: torch.Tensor, *others: object) -> torch.Tensor:
        by.append(("16 bits", len(x)))
        return x

    monkeypatch.setattr(terms, "kernel_product", by_kernel)
    monkeypatch.setattr(terms, "sixteen_bit_product", in_16_bits)
    most = terms.KERNEL_ROWS
    with FakeTensorMode():
        weight, x = (torch.empty(rows, 7, device="cuda:1") for rows in (5, 2 * most))
        for rows in (1, most, most + 1):
            terms.exact_product(weight.new_empty(rows, 7), weight, Epilogue(x, x), x)
        assert terms.with_exact_rows(x, x, weight, Epilogue(x, x), x, Rows(x, x)) is x
    assert by == [("kernel", 1), ("kernel", most), ("16 bits", most + 1), ("kernel", 2 * most)]


def test_a_long_prompt_is_multiplied_in_parts(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The FP32 sums of 8,192 rows are 0.9 GB where an 8B multiplies gate and up."""
    draw = torch.Generator().manual_seed(5)
    x, codes = torch.randn(2, 7, IN, generator=draw), encode(torch.randn(OUT, IN, generator=draw), torch.tensor(1.0))
    arguments = (None, codes, torch.ones(OUT, 1), torch.tensor(2.0**-7), torch.ones(OUT), torch.ones(()), 0, 0)
    plugin.forward(None)
    whole = plugin.product.fp8q_linear(x, *arguments)
    multiplied: list[int] = []
    product = terms.sums_of

    def counted(part: torch.Tensor, weight: torch.Tensor) -> Any:
        multiplied.append(len(part))
        return product(part, weight)

    monkeypatch.setattr(terms, "sums_of", counted)
    monkeypatch.setattr(terms, "CHUNK", 6)
    found = plugin.product.fp8q_linear(x, *arguments)
    assert multiplied == [6, 6, 2]
    assert found.shape == (2, 7, OUT)
    assert torch.allclose(found, whole, rtol=1e-6, atol=1e-6)
