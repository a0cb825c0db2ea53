"""Per-channel weight scales and codes, by their definitions."""

import numpy as np
import pytest
import torch

from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.scales.clip import scale_of
from fp8q.quantize.scales.decisions import Skipped
from fp8q.quantize.weights import channels
from fp8q.quantize.weights.channels import channel_scales, quantize_weight


def weight(rows: int = 8, columns: int = 512, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-3, 1, rows)[:, None]
    return (torch.randn(rows, columns, generator=generator) * spread).to(torch.bfloat16)


def test_amax_scales_put_each_channel_s_largest_value_on_the_largest_code() -> None:
    w = weight()
    quantized = quantize_weight(w, "amax")
    assert not isinstance(quantized, Skipped)
    np.testing.assert_array_equal(quantized.scale.numpy(), scale_of(w.float().abs().amax(1).numpy(), E4M3))
    largest = quantized.codes.float().abs().amax(1)
    assert (
        (largest == 448) | (largest == 416)
    ).all()  # a scale rounded up to BF16 may leave the amax nearer to the code below


def test_codes_are_those_of_the_format_at_the_stored_scale() -> None:
    w = weight()
    quantized = quantize_weight(w, "mse")
    assert not isinstance(quantized, Skipped)
    np.testing.assert_array_equal(
        quantized.codes.view(torch.uint8).numpy(), E4M3.encode((w.float() / quantized.scale[:, None]).numpy())
    )


def test_mse_errs_no_more_than_amax_on_any_channel() -> None:
    w = weight(seed=4)
    errors = {}
    for method in ("amax", "mse"):
        quantized = quantize_weight(w, method)
        assert not isinstance(quantized, Skipped)
        errors[method] = (w.float() - quantized.codes.float() * quantized.scale[:, None]).square().sum(1)
    assert (errors["mse"] <= errors["amax"]).all()


def test_the_ratio_of_signal_to_noise_is_of_all_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of 1 under scales of 1 / 448 are exact; 1.0625 is off by 0.0625 from the nearest codes, 448 and 480, of
    which the second does not exist: of two rows of four values the noise is 4 · 2^-8, the signal 4 + 4 · 1.0625².
    """
    w = torch.tensor([[1.0] * 4, [1.0625] * 4], dtype=torch.bfloat16)
    codes, scale = torch.full((2, 4), 448.0).to(torch.float8_e4m3fn), torch.full((2,), 1 / 448)
    for values in (channels.BLOCK_VALUES, 4):
        monkeypatch.setattr(channels, "BLOCK_VALUES", values)
        for rows in ([0, 1], [1, 0]):
            found = channels.weight_summary(w[rows], codes, scale, "amax", "nearest").sqnr_db
            assert found == pytest.approx(10 * np.log10((4 + 4 * 1.0625**2) / (4 / 256)), abs=1e-4)


def test_a_channel_of_zeros_takes_the_largest_scale_of_the_others_and_is_counted() -> None:
    w = weight()
    w[2] = 0
    quantized = quantize_weight(w, "amax")
    assert not isinstance(quantized, Skipped)
    assert quantized.scale[2] == quantized.scale.max()
    assert (quantized.codes[2].float() == 0).all()
    assert quantized.summary.zero_channels == 1


def test_a_matrix_of_zeros_has_no_scale() -> None:
    assert channel_scales(torch.zeros(4, 16, dtype=torch.bfloat16), "amax") is None
    assert quantize_weight(torch.zeros(4, 16, dtype=torch.bfloat16), "mse") == Skipped(
        reason="amax of the weight is 0: every value is zero or vanishes in BF16", value=0.0, samples=64
    )
