"""BF16 GEMMs by FP32 arithmetic: the values of BF16 units where sums are exact, and nothing but GEMMs widened."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies
from torch import nn
from torch._C import _len_torch_function_stack
from transformers import DynamicCache
from transformers.pytorch_utils import Conv1D

from fp8q.calibrate.measure.measurement import Measurement, measure_in_memory
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity, Statistics
from fp8q.calibrate.measure.stream import measure_streamed
from fp8q.calibrate.model import bf16_gemms
from fp8q.calibrate.model.bf16_gemms import (
    GemmsInFP32,
    bf16_arithmetic,
    bf16_linear,
    compute_gemms_in_fp32,
    gemms_in_fp32,
    has_bf16_units,
)
from fp8q.calibrate.model.source import load_model, open_source
from fp8q.core.output_folder import WorkFolder
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.reference.linear import FP8Linear
from fp8q.stages.pipeline.stage import Notes, note_other_arithmetic
from tests.noise import bf16_noise

BF16 = torch.bfloat16
#: What makes any x86-64 machine one without BF16 units, for oneDNN and for torch's own kernels.
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@pytest.fixture
def without_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without BF16 units, as far as fp8q knows."""
    monkeypatch.setattr(bf16_gemms, "has_bf16_units", lambda: False)


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small whole numbers as BF16: FP32 adds their products exactly in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@given(
    rows=strategies.integers(1, 5), inner=strategies.integers(1, 70), out=strategies.integers(1, 40),
    block=strategies.integers(1, 400), biased=strategies.booleans(), seed=strategies.integers(0, 1000),
)  # fmt: skip
def test_exact_sums_are_rounded_once_whatever_the_blocks(
    rows: int, inner: int, out: int, block: int, biased: bool, seed: int
) -> None:
    x, weight = integers(rows, inner, seed=seed), integers(out, inner, seed=seed + 1)
    bias = integers(out, seed=seed + 2) if biased else None
    wanted = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bf16_gemms, "BLOCK", block)
        found = bf16_linear(x, weight, bias)
    assert found.dtype == BF16
    assert torch.equal(found, wanted.to(BF16))


def test_exact_sums_are_those_of_torchs_own_bf16_product() -> None:
    x, weight = integers(64, 300), integers(128, 300, seed=1)
    assert torch.equal(bf16_linear(x, weight), nn.functional.linear(x, weight))


def test_one_product_differs_from_the_exact_one_by_one_step_in_few_values() -> None:
    x, weight = normal(256, 384), normal(1024, 384, seed=1)
    wide, exact = bf16_linear(x, weight), (x.double() @ weight.double().t()).to(BF16)
    steps = (wide.view(torch.int16).int() - exact.view(torch.int16).int()).abs()
    apart = (wide.double() - exact.double()).abs()
    assert (steps != 0).float().mean() < 1e-3
    assert (apart <= 2.0**-7 * exact.double().abs() + 1e-4).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: a @ b,
        torch.matmul,
        lambda a, b: a.matmul(b),
        torch.mm,
        lambda a, b: torch.bmm(a[None], b[None])[0],
        lambda a, b: torch.addmm(torch.zeros(1, dtype=BF16), a, b),
        lambda a, b: torch.baddbmm(torch.zeros(1, 1, 1, dtype=BF16), a[None], b[None], alpha=1.0)[0],
        lambda a, b: torch.zeros(1, 1, 1, dtype=BF16).baddbmm(batch1=a[None], batch2=b[None], beta=1.0)[0],  # Bloom's
        lambda a, b: torch.mm(input=a, mat2=b),
        lambda a, b: torch.einsum("ik,kj->ij", a, b),
        lambda a, b: nn.functional.linear(a, b.t()),
        lambda a, b: nn.functional.linear(a, b.t(), bias=torch.zeros(b.shape[1], dtype=BF16)),
    ],
)
def test_each_way_to_multiply_is_widened(
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []
    own = torch.Tensor.float

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.dtype)
        return own(tensor)

    monkeypatch.setattr(torch.Tensor, "float", noted)
    a, b = integers(3, 20), integers(20, 5, seed=1)
    with GemmsInFP32():
        found = call(a, b)
    assert seen.count(BF16) >= 2
    assert found.dtype == BF16
    assert torch.equal(found, (a.double() @ b.double()).to(BF16))


def test_other_types_single_rows_and_what_has_no_numbers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("was widened")

    monkeypatch.setattr(bf16_gemms, "bf16_linear", refuse)
    weight = normal(8, 16)
    with GemmsInFP32():
        assert nn.functional.linear(normal(1, 16), weight).dtype == BF16
        assert nn.functional.linear(normal(4, 16).float(), weight.float()).dtype == torch.float32
        assert nn.functional.linear(normal(4, 16).to("meta"), weight.to("meta")).is_meta
        assert torch.matmul(normal(4, 16).half(), weight.half().t()).dtype == torch.float16
        into = torch.zeros(4, 8, dtype=BF16)
        assert torch.mm(normal(4, 16), weight.t(), out=into) is into


def test_the_mode_ends_with_its_block_and_with_a_failure() -> None:
    with pytest.raises(RuntimeError), GemmsInFP32():
        torch.matmul(normal(2, 3), normal(4, 5))
    assert not _len_torch_function_stack()


@pytest.mark.parametrize("units", [True, False])
def test_products_are_widened_where_there_are_no_units(units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_gemms, "has_bf16_units", lambda: units)
    with gemms_in_fp32():
        assert _len_torch_function_stack() == (0 if units else 1)
    assert not _len_torch_function_stack()


def test_gradients_pass() -> None:
    x, weight = normal(4, 16).requires_grad_(), normal(8, 16, seed=1)
    bf16_linear(x, weight).float().sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad.float(), weight.float().sum(0).expand(4, 16), atol=0.05)


class Model(nn.Module):
    """A linear layer, a Conv1D and an attention that multiplies by itself."""

    class OwnAttention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x.transpose(-1, -2)

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv, self.attention = nn.Linear(8, 8), Conv1D(8, 8), Model.OwnAttention()

    def get_output_embeddings(self) -> None:
        return None


def test_modules_stay_what_they_are_and_multiply_in_fp32(without_units: None) -> None:
    model = Model().to(BF16)
    before = {name: type(module) for name, module in model.named_modules()}
    x = integers(4, 8)
    wanted = [module(x) for module in model.children()]
    compute_gemms_in_fp32(model, BF16, "cpu")  # type: ignore[arg-type]
    compute_gemms_in_fp32(model, BF16, "cpu")  # type: ignore[arg-type]
    assert all(isinstance(module, before[name]) for name, module in model.named_modules())
    assert {type(module).__name__ for module in model.children()} == {"Linear", "Conv1D", "OwnAttention"}
    assert [len(type(module).__mro__) - len(before[name].__mro__) for name, module in model.named_children()] == [1] * 3
    found = [module(x) for module in copy.deepcopy(model).children()]
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=2**-7)


def test_with_bf16_units_on_a_gpu_or_in_fp32_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    for units, dtype, device in ((True, BF16, "cpu"), (False, torch.float32, "cpu"), (False, BF16, "cuda")):
        monkeypatch.setattr(bf16_gemms, "has_bf16_units", lambda units=units: units)
        compute_gemms_in_fp32(model, dtype, device)  # type: ignore[arg-type]
        assert type(model.linear) is nn.Linear
    monkeypatch.setattr(bf16_gemms, "has_bf16_units", lambda: True)
    assert bf16_arithmetic("cpu") == {}
    monkeypatch.setattr(bf16_gemms, "has_bf16_units", lambda: False)
    assert (bf16_arithmetic("cpu"), bf16_arithmetic("cuda")) == ({"bf16_products": "fp32"}, {})


def test_the_fast_reference_rounds_its_sum_to_bf16_once_more(without_units: None) -> None:
    codes = encode(normal(8, 16), torch.tensor(0.01))
    layer = FP8Linear(codes, torch.full((8,), 0.01), torch.tensor(0.01), None, "fast")
    x = normal(4, 16, seed=1)
    total = encode(x, torch.tensor(0.01)).double() @ codes.double().t()
    wanted = (total.to(BF16).float() * (layer.input_scale * layer.weight_scale)).to(BF16)
    assert torch.equal(layer(x), wanted)


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(input_ids=ids).logits.float(), -1)


def test_the_demo_is_as_far_from_fp32_as_bf16_in_any_other_order(
    demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The yardstick is BF16 itself with the inputs of each GEMM in another order: only its sums change."""
    source = open_source(str(demo_checkpoint))
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 500, (4, 128)))
    native, exact = load_model(source, BF16), load_model(source, torch.float32)
    plain, fp32 = logits(native, ids), logits(exact, ids)
    reordered = load_model(source, BF16)
    for module in reordered.modules():
        if isinstance(module, nn.Linear):
            order = torch.randperm(module.in_features, generator=torch.Generator().manual_seed(0))
            module.weight = nn.Parameter(module.weight[:, order], requires_grad=False)
            module.register_forward_pre_hook(lambda _, inputs, order=order: (inputs[0][..., order],))
    shuffled = logits(reordered, ids)
    monkeypatch.setattr(bf16_gemms, "has_bf16_units", lambda: False)
    wide = logits(load_model(source, BF16), ids)

    def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
        return float((p.exp() * (p - q)).sum(-1).mean())

    assert divergence(plain, wide) < 1.15 * divergence(plain, shuffled)
    assert divergence(fp32, wide) < 1.1 * divergence(fp32, plain)


def test_layer_by_layer_gives_the_same_statistics(demo_checkpoint: Path, tmp_path: Path, without_units: None) -> None:
    source = open_source(str(demo_checkpoint))
    corpus = Corpus(name="random tokens", fingerprint="0", windows=5, seq_len=24, batch_size=2)
    windows = np.random.default_rng(0).integers(3, 500, (5, 24))
    what = Measurement(windows, ModelIdentity(name="demo", architecture="any", fingerprint="0"), corpus)
    in_memory = measure_in_memory(load_model(source, BF16), what, SILENT)
    streamed = measure_streamed(source, what, SILENT, tmp_path)

    def counts(statistics: Statistics) -> dict[str, list[int]]:
        return {name: tensor.histogram.dense().tolist() for name, tensor in statistics.tensors.items()}

    assert counts(in_memory) == counts(streamed)


@pytest.mark.skipif(sys.platform != "linux", reason="the variables are oneDNN's, on x86-64")
def test_a_processor_of_avx2_alone_has_no_units() -> None:
    script = (
        "from fp8q.calibrate.model.bf16_gemms import bf16_arithmetic, has_bf16_units;"
        "print(has_bf16_units(), bf16_arithmetic('cpu'))"
    )
    told = subprocess.run([sys.executable, "-c", script], env={**os.environ, **AVX2}, capture_output=True, text=True)
    assert told.stdout == "False {'bf16_products': 'fp32'}\n", told.stderr


def test_units_are_the_processors_and_not_an_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    has_bf16_units.cache_clear()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert not has_bf16_units()
    has_bf16_units.cache_clear()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")  # where the variables of the next test mean nothing
    assert has_bf16_units()
    has_bf16_units.cache_clear()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not has_bf16_units()
    monkeypatch.undo()
    has_bf16_units.cache_clear()


@pytest.mark.parametrize(
    ("limit", "units"),
    [
        ("", True),
        ("AVX512_CORE", False),
        ("avx512_core_vnni", False),
        ("AVX512_CORE_BF16", True),
        ("AVX512_CORE_AMX", True),
    ],
)
def test_units_that_onednn_may_not_use_are_none(limit: str, units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN then emulates BF16, while PyTorch goes on saying that the processor has the instructions."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for name, other in (("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"), ("DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA")):
        monkeypatch.setenv(name, limit)
        monkeypatch.delenv(other, raising=False)
        has_bf16_units.cache_clear()
        assert has_bf16_units() is units, name
    monkeypatch.undo()
    has_bf16_units.cache_clear()


def test_a_run_of_another_kind_of_processor_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, notes = Run(tmp_path / "run"), Notes(SILENT)
    with RunWriter(run).stage("measure", {}, {}) as log:
        log.machine = {"device": "CPU", "threads": 1}
    monkeypatch.setattr(bf16_gemms, "has_bf16_units", lambda: True)
    note_other_arithmetic(run, notes)
    assert notes.lines == []
    monkeypatch.setattr(bf16_gemms, "has_bf16_units", lambda: False)
    note_other_arithmetic(run, notes)
    (line,) = notes.lines
    assert line == (
        "the run was measured where BF16 units compute BF16 GEMMs, and FP32 units do here: sums round in another "
        "order, and last bits differ; scales and checkpoint are the run's, and nothing is measured again"
    )


def test_a_stage_stopped_half_way_on_another_kind_begins_anew_and_says_so(tmp_path: Path) -> None:
    run, lines = Run(tmp_path), list[str]()
    with WorkFolder(run.root, "measure").opened({"model": "m", "threads": 2, "device": "cpu"}) as folder:
        (folder / "step").touch()
    with WorkFolder(run.root, "measure").opened(
        {"model": "m", "threads": 2, "device": "cpu"}, note=lines.append
    ) as folder:
        assert (folder / "step").exists()
    with WorkFolder(run.root, "measure").opened({"model": "other", "threads": 2, "device": "cpu"}, note=lines.append):
        assert lines == []
    here = {"model": "other", "threads": 1, "device": "cpu", "bf16_products": "fp32"}
    with WorkFolder(run.root, "measure").opened(here, note=lines.append) as folder:
        assert not (folder / "step").exists()
    assert lines == ["begins anew: an earlier call, which stopped half-way, had 2 threads, BF16 GEMMs computed in BF16"]


def test_eager_attention_and_its_cache_run_widened(without_units: None, demo_checkpoint: Path) -> None:
    source = open_source(str(demo_checkpoint))
    model = load_model(source, BF16)
    model.set_attn_implementation("eager")
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 500, (2, 16)))
    with torch.inference_mode():
        cache = DynamicCache()
        model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)
        step = model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1].float()
        whole = model(input_ids=ids).logits[:, -1].float()
    difference = torch.log_softmax(step, -1) - torch.log_softmax(whole, -1)
    assert difference.abs().max() < bf16_noise(demo_checkpoint, ids)
