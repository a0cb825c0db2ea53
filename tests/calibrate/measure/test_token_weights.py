"""The weights of tokens in second moments: their scale, their file, the sums that they enter."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fp8q.calibrate.measure.moments import SecondMoments, load_moments
from fp8q.calibrate.measure.token_weights import TokenWeights, load_token_weights, normalized, save_token_weights
from fp8q.core.errors import InputError


def test_weights_are_scaled_to_a_mean_of_one() -> None:
    assert normalized(np.array([[1, 3], [0, 4]], np.float32)).tolist() == [[0.5, 1.5], [0, 2]]
    assert normalized(np.array([[1e-30, 3e-30]], np.float32)).tolist() == [[0.5, 1.5]]


@pytest.mark.parametrize("values", [[0.0, 0.0], [float("inf"), 1.0], [float("nan"), 1.0]])
def test_weights_without_a_mean_are_all_one(values: list[float]) -> None:
    assert normalized(np.array([values], np.float32)).tolist() == [[1.0, 1.0]]


def test_a_token_outweighs_others_up_to_the_largest_of_fp16() -> None:
    values = np.zeros((1, 100_000), np.float32)
    values[0, 0] = 1.0
    assert normalized(values)[0, 0] == 65504  # 100,000 times the mean


def test_the_file_gives_the_tokens_of_a_batch(tmp_path: Path) -> None:
    save_token_weights(tmp_path / "w.safetensors", {"a": np.array([[1, 3], [0, 4], [2, 2]], np.float32)})
    weights = load_token_weights(tmp_path / "w.safetensors", 2)
    first, last = weights.of("a", 0), weights.of("a", 1)
    assert first is not None
    assert last is not None
    assert first.tolist() == [0.5, 1.5, 0, 2]
    assert last.tolist() == [1, 1]
    assert weights.of("b", 0) is None


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match="w.safetensors: "):
        load_token_weights(tmp_path / "w.safetensors", 2)


def test_moments_hold_each_token_as_often_as_its_weight(tmp_path: Path) -> None:
    weights = TokenWeights({"a": np.array([[4, 0], [1, 9]], np.float16)}, 1)
    moments = SecondMoments(tmp_path, weights=weights)
    moments.add("a", torch.tensor([[[1.0, 2.0], [5.0, 7.0]]]), 0)
    moments.add("a", torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), 1)
    moments.add("b", torch.tensor([[[3.0, 0.0], [0.0, 1.0]]]), 1)
    moments.close()
    assert load_moments(tmp_path, "a").tolist() == [[4 * 1 + 1, 4 * 2], [4 * 2, 4 * 4 + 9]]
    assert load_moments(tmp_path, "b").tolist() == [[9, 0], [0, 1]]  # without weights all tokens are alike
