"""Second moments: the sum over all tokens, of each distinct tensor, in files."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fp8q.calibrate.moments import SecondMoments, load_moments, moments_file


def test_batches_add_up_to_the_moments_of_all_tokens(tmp_path: Path) -> None:
    x = torch.randn(3, 5, 7, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    moments = SecondMoments(tmp_path)
    for batch in x:
        moments.add("layer", batch)
    assert moments.close() == ["layer"]
    tokens = x.double().flatten(0, -2)
    np.testing.assert_allclose(load_moments(tmp_path, "layer").numpy(), (tokens.T @ tokens).numpy(), rtol=1e-5, atol=1e-4)


def test_only_the_first_of_a_group_is_watched_and_only_in_the_block(tmp_path: Path) -> None:
    modules = {"q": nn.Linear(4, 3), "k": nn.Linear(4, 2), "o": nn.Linear(3, 4)}
    moments, x = SecondMoments(tmp_path / "moments"), torch.arange(8.0).view(2, 4)
    with moments.observing(modules, {"q": ["q", "k"], "o": ["o"], "elsewhere": ["elsewhere"]}):
        modules["q"](x), modules["k"](x)
    modules["q"](x)
    assert moments.close() == ["q"]
    assert load_moments(tmp_path / "moments", "q").tolist() == [[16, 20, 24, 28], [20, 26, 32, 38], [24, 32, 40, 48], [28, 38, 48, 58]]


def test_a_full_disk_is_an_error_and_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device"):
        SecondMoments(tmp_path).add("layer", torch.ones(1, 4))
    assert moments_file(tmp_path, "layer") == tmp_path / "layer.npy"
