"""The GEMM of codes under another default type of torch's than FP32, as vLLM has it while it loads a model."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from fp8q.quantize.codes.encoding import CODE
from fp8q.quantize.codes.gemm import scaled_gemm


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def default_type(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def test_a_product_of_codes_is_in_fp32_whatever_the_default_type(default_type: torch.dtype) -> None:
    x, weight = (torch.arange(count * 32).reshape(count, 32).remainder(9).to(CODE) for count in (3, 5))
    found = scaled_gemm(x, weight)
    assert found.dtype == torch.float32
    assert torch.equal(found.long(), x.long() @ weight.long().t())


def test_the_kernels_constants_are_fp32s_whatever_the_default_type() -> None:
    """They are made where the module is first imported; E4M3's largest number, 448, is 0x43e00000 in FP32."""
    pytest.importorskip("triton", reason="Triton is not installed (it comes with PyTorch for NVIDIA GPUs)")
    code = (
        "import torch; torch.set_default_dtype(torch.bfloat16); from fp8q.quantize.codes import kernels; "
        "print(hex(kernels._LARGEST))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("0x43e00000\n", "")
