"""Kernels on the GPU of their tensors, and torch's operations where they do not start; on tensors of a GPU that is not
there, which PyTorch has for its compiler.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8q.calibrate.measure import counting
from fp8q.calibrate.measure.histogram import PATTERNS
from fp8q.calibrate.model import launching
from fp8q.calibrate.model.launching import has_triton, launched
from fp8q.quantize.codes.encoding import encode_terms
from fp8q.quantize.reference.linear import FP8Linear

GPU = torch.device("cuda", 1)
ROOT = Path(launching.__file__).parents[2]


@pytest.fixture(autouse=True)
def entered(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The GPUs that were made the current one; Triton is there, and nothing has failed yet."""
    found: list[torch.device] = []

    @contextmanager
    def device(gpu: torch.device) -> Iterator[None]:
        found.append(gpu)
        yield
        found.append(torch.device("cuda", 0))

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(launching, "FAILURES", [])
    monkeypatch.setattr(launching, "has_triton", lambda: True)
    return found


def without_compiler() -> Any:
    """Build something as Triton builds its launcher."""
    from triton.runtime.build import compile_module_from_src

    return compile_module_from_src("int no_launcher_of_this_text;", "launcher")


def test_without_a_c_compiler_torchs_operations_take_over_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it comes with PyTorch for NVIDIA GPUs)")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert [launched(GPU, without_compiler, lambda: "by torch") for _ in range(3)] == ["by torch"] * 3
    (message,) = caplog.messages
    said = (
        "Triton's kernels do not start on this machine (RuntimeError: Failed to find C compiler. Please specify via CC "
        "environment variable"  # versions of Triton go on in other words
    )
    remedy = (
        "), so torch's operations take their place, which is slower; Triton needs a C compiler: install gcc, or name "
        "one in CC"
    )
    assert message.startswith(said)
    assert message.endswith(remedy)


def test_a_kernel_that_has_failed_is_not_tried_again(entered: list[torch.device]) -> None:
    tried = []

    def kernel() -> str:
        tried.append("once")
        raise OSError("no launcher")

    assert [launched(GPU, kernel, lambda: "by torch") for _ in range(3)] == ["by torch"] * 3
    assert (tried, len(entered)) == (["once"], 1)
    assert launching.FAILURES == ["OSError: no launcher"]


def test_a_want_of_memory_passes_through() -> None:
    def kernel() -> str:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):
        launched(GPU, kernel, lambda: "by torch")
    assert launching.FAILURES == []


@pytest.mark.parametrize("device", ["cpu", "meta", "mps"])
def test_kernels_are_for_cuda_alone(device: str, entered: list[torch.device]) -> None:
    assert launched(torch.device(device), lambda: "by the kernel", lambda: "by torch") == "by torch"
    assert entered == []


def test_without_triton_nothing_is_tried(monkeypatch: pytest.MonkeyPatch, entered: list[torch.device]) -> None:
    monkeypatch.setattr(launching, "has_triton", lambda: False)
    assert launched(GPU, lambda: "by the kernel", lambda: "by torch") == "by torch"
    assert (entered, launching.FAILURES) == ([], [])


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, entered: list[torch.device]) -> list[tuple[torch.device, torch.device]]:
    """Where each kernel's tensor lies, and the GPU on which it was launched; nothing is computed."""
    pytest.importorskip("triton", reason="Triton is not installed (it comes with PyTorch for NVIDIA GPUs)")
    from fp8q.calibrate.measure import counting_kernel
    from fp8q.quantize.codes import kernels

    found = []

    def encoded(x: torch.Tensor, scale: torch.Tensor, terms: int) -> torch.Tensor:
        found.append((x.device, entered[-1]))
        return x.new_empty((terms, *x.shape), dtype=torch.float8_e4m3fn)

    def counted(patterns: torch.Tensor) -> torch.Tensor:
        found.append((patterns.device, entered[-1]))
        return patterns.new_empty(PATTERNS, dtype=torch.int64)

    monkeypatch.setattr(kernels, "triton_encode", encoded)
    monkeypatch.setattr(counting_kernel, "triton_count", counted)
    return found


def test_every_kernel_is_launched_on_the_gpu_of_its_tensor(kernels: list[tuple[torch.device, torch.device]]) -> None:
    """A model on the second GPU, as `load(…, device="cuda:1")` gives it, while the first is the current one."""
    codes, scales = torch.zeros(16, 32, dtype=torch.float8_e4m3fn), torch.ones(16)
    layer = FP8Linear(codes, scales, torch.ones(()), None, "exact", terms=2)
    with FakeTensorMode():
        layer.codes = torch.empty(16, 32, dtype=torch.float8_e4m3fn, device=GPU)
        assert layer.input_codes(torch.empty(4, 32, dtype=torch.bfloat16, device=GPU)).shape == (2, 4, 32)
        assert counting.count_patterns(torch.empty(64, dtype=torch.int16, device=GPU)).shape == (PATTERNS,)
    assert kernels == [(GPU, GPU), (GPU, GPU)]


def test_where_kernels_do_not_start_both_computations_are_done_by_torch(
    kernels: list[tuple[torch.device, torch.device]],
) -> None:
    launching.FAILURES.append("RuntimeError: Failed to find C compiler")
    with FakeTensorMode():
        x, scale = torch.empty(4, 32, dtype=torch.bfloat16, device=GPU), torch.empty((), device=GPU)
        for terms in (1, 2):
            found = encode_terms(x, scale, terms, launched)
            assert (found.shape, found.device, found.dtype) == ((terms, 4, 32), GPU, torch.float8_e4m3fn)
        assert counting.count_patterns(torch.empty(64, dtype=torch.int16, device=GPU)).device == GPU
    assert kernels == []


def test_the_image_has_a_compiler_where_it_has_triton() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
    step = re.search(
        r"^RUN if python -c '(.+?)'; then +apt-get update && (apt-get install .*?) && ", text, re.MULTILINE
    )
    assert step
    assert {"gcc", "libc6-dev"} <= set(step[2].split())
    assert text.index(step[0]) < text.index("USER fp8q"), "root installs it"
    asked = subprocess.run([sys.executable, "-c", step[1]], timeout=60)
    assert (asked.returncode == 0) == has_triton()
