"""Attention on codes, where the model is."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gpu.waits import host_waits
from safetensors.torch import save_file
from transformers import LlamaConfig

from fp8q.calibrate.model.skeleton import empty
from fp8q.options import Accumulator
from fp8q.quantize.reference.attention import attend_in_codes, attention_on_codes, sum_values_in


def test_scales_are_where_the_model_is_and_no_call_uploads_them(tmp_path: Path) -> None:
    """The model is on the meta device, which stands for a GPU."""
    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    model, path = empty(config, torch.float32), tmp_path / "scales"
    names = [f"model.layers.0.self_attn.attention.{part}_scale" for part in "qkvp"]
    save_file({name: torch.tensor([0.5]) for name in names}, path, metadata={"format": "pt", "terms": "2"})
    attend_in_codes(model, path)
    query, mask = torch.empty(1, 2, 6, 16, device="meta"), torch.empty(1, 1, 6, 6, device="meta")
    with host_waits() as counted:
        found, _ = attention_on_codes(model.get_submodule("model.layers.0.self_attn"), query, query, query, mask)
    assert found.shape == (1, 6, 2, 16)
    assert (counted.waits, counted.to_device) == (0, 0)


def test_a_long_sum_of_values_loses_in_fourteen_bits_what_two_levels_keep(tmp_path: Path) -> None:
    """Of 1,025 tokens the first has half of the attention and a value of 1, and each other one 1/2048 and 1/8. In codes
    of a scale of 1/448 the first product is 224 · 448 = 100,352, and each other 0.21875 · 56 = 12.25.

    `fp22`: in the first instruction, beside an exponent of 15, 31 of them are cut to 12 (a unit of 4), and the sum
    100,724 to 100,720; then it has the exponent 16, and the 993 that are left count 8 each. `two-level`: so do 96 of
    the first 128, and the 897 in later chains are whole.
    """
    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    model, path = empty(config, torch.float32), tmp_path / "scales"
    scales = {"q": 1.0, "k": 1.0, "p": 1 / 448, "v": 1 / 448}
    named = {
        f"model.layers.0.self_attn.attention.{part}_scale": torch.tensor([scale]) for part, scale in scales.items()
    }
    save_file(named, path, metadata={"format": "pt", "terms": "1"})
    model = type(model)(config)
    attend_in_codes(model, path)
    module = model.get_submodule("model.layers.0.self_attn")
    tokens = 1025
    mask = torch.full((1, 1, 2, tokens), -torch.tensor(1024.0).log().item())
    mask[..., 0] = 0.0
    query, key = torch.zeros(1, 1, 2, 32), torch.zeros(1, 1, tokens, 32)
    value = torch.full((1, 1, tokens, 32), 0.125)
    value[:, :, 0] = 1.0

    def summed(accumulator: Accumulator) -> float:
        sum_values_in(model, accumulator)
        return float(attention_on_codes(module, query, key, value, mask)[0][0, 0, 0, 0])

    assert summed("fp32") == pytest.approx((100_352 + 1024 * 12.25) / 448**2, rel=1e-6)
    assert summed("fp22") == pytest.approx((100_720 + 993 * 8) / 448**2, rel=1e-6)
    assert summed("two-level") == pytest.approx((100_720 + 96 * 8 + 897 * 12.25) / 448**2, rel=1e-6)


@pytest.mark.parametrize("softcap", [None, 0.25])
def test_the_reference_multiplies_none_in_a_call_of_one_token(softcap: float | None) -> None:
    random = np.random.default_rng(1)
    q, k, v = (random.normal(size=(1, heads, rows, 8)).astype(np.float32) for heads, rows in ((2, 1), (1, 5), (1, 5)))
    module = torch.nn.Module()
    object.__setattr__(module, "fp8q_scales", {part: torch.tensor(1.0) for part in "qkvp"})
    object.__setattr__(module, "fp8q_two_terms", False)
    mask = np.array([0, 0, np.finfo(np.float32).min, 0, 0], np.float32)[None, None, None]
    query, key, value, added = map(torch.from_numpy, (q, k, v, mask))
    found, _ = attention_on_codes(module, query, key, value, added, softcap=softcap)
    scores = q.astype(np.float64) @ k.astype(np.float64).transpose(0, 1, 3, 2) / np.sqrt(8)
    scores = (scores if softcap is None else np.tanh(scores / softcap) * softcap) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ v
    np.testing.assert_allclose(found.numpy(), expected.transpose(0, 2, 1, 3), atol=1e-6)
