"""Second moments on a GPU: exact products of BF16, added up in FP32. Not run yet."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fp8q.calibrate.measure.moments import SecondMoments, load_moments

pytestmark = pytest.mark.gpu


def test_a_gpu_adds_up_the_exact_products_of_bf16(tmp_path: Path) -> None:
    x = torch.randn(3, 512, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    moments = SecondMoments(tmp_path)
    for batch in x:
        moments.add("layer", batch.cuda())
    moments.close()
    tokens = x.double().flatten(0, -2)
    np.testing.assert_allclose(
        load_moments(tmp_path, "layer").numpy(), (tokens.T @ tokens).numpy(), rtol=1e-5, atol=1e-3
    )
