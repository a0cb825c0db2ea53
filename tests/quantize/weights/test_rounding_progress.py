"""Codes that are there for one form of an input serve to measure another."""

from pathlib import Path

import pytest
import torch

from fp8q.quantize.weights.channels import QuantizedWeight, weight_summary
from fp8q.quantize.weights.rounding_progress import CachedCodes, CodesOfAnyInput


def keep(folder: Path, module: str, lost: float) -> torch.Tensor:
    """Store codes of `module` for inputs that lose the share `lost`, and return them."""
    weight, scale = torch.randn(4, 8), torch.ones(4)
    codes = weight.to(torch.float8_e4m3fn)
    summary = weight_summary(weight, codes, scale, "amax", "gptq")
    assert not isinstance(summary, str)
    CachedCodes(folder).keep(module, lost, QuantizedWeight(codes, scale, summary))
    return codes


@pytest.mark.parametrize(("lost", "nearest"), [(0.0, 0.0), (2e-5, 1e-05), (0.5, 0.003), (0.003, 0.003)])
def test_of_a_modules_codes_those_of_the_nearest_share_serve(tmp_path: Path, lost: float, nearest: float) -> None:
    stored = {share: keep(tmp_path, "a.up", share) for share in (0.0, 1e-05, 0.003)}
    keep(tmp_path, "a.up-b", 0.5)
    found = CodesOfAnyInput(tmp_path).of_input("a.up", lost)
    assert found is not None
    assert torch.equal(found[0].view(torch.uint8), stored[nearest].view(torch.uint8))
    assert CodesOfAnyInput(tmp_path).of_input("a", lost) is None
    assert (CachedCodes(tmp_path).of_input("a.up", lost) is None) == (lost not in stored)
