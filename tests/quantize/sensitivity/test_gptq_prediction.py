"""What `gptq` would leave of a weight's loss, told without rounding: against the loss that its codes have."""

from pathlib import Path

import pytest
import torch
from gpu.waits import host_waits

from fp8q.calibrate.measure.moments import SecondMoments
from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.sensitivity.gptq_prediction import Gathered, Unexplained, share_left
from fp8q.quantize.weights.channels import channel_scales
from fp8q.quantize.weights.gptq import compensation, gptq_codes

TOKENS = 4096


def tokens_of(mixing: torch.Tensor, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, len(mixing), generator=draw) @ mixing


def both_errors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What nearest rounding and `gptq` change of a random weight whose input is `x`, float32 [out, in]."""
    draw = torch.Generator().manual_seed(7)
    weight = torch.randn(96, x.shape[1], generator=draw).to(torch.bfloat16)
    scale = channel_scales(weight, "mse")
    assert scale is not None
    nearest = encode(weight, scale[:, None]).float() * scale[:, None]
    compensated = gptq_codes(weight, scale, compensation(x.T @ x)).float() * scale[:, None]
    return nearest - weight.float(), compensated - weight.float()


def test_uncorrelated_inputs_leave_all_of_it() -> None:
    x = tokens_of(torch.eye(8))
    error, _ = both_errors(x)
    assert share_left(error, Unexplained.from_moments(x.T @ x), TOKENS, TOKENS) == pytest.approx(1, abs=0.01)


def test_an_input_that_another_repeats_leaves_next_to_nothing_of_one_of_the_two() -> None:
    """Two inputs, of which each tells all of the other: the first one's error goes into the second, whose own stays."""
    x = tokens_of(torch.ones(1, 1)) @ torch.ones(1, 2) + 1e-3 * tokens_of(torch.eye(2), 1)
    error = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert share_left(error, Unexplained.from_moments(x.T @ x), TOKENS, TOKENS) == pytest.approx(0.5, abs=0.01)
    assert share_left(torch.zeros(2, 2), Unexplained.from_moments(x.T @ x), TOKENS, TOKENS) == 1.0


@pytest.mark.parametrize("common", [0.5, 1.0, 3.0])
def test_the_share_is_about_what_the_codes_of_gptq_leave_on_other_tokens(common: float) -> None:
    mixing = torch.eye(64) + common * torch.ones(64, 64) / 8
    x, other = tokens_of(mixing), tokens_of(mixing, 1)
    nearest, compensated = both_errors(x)
    found = share_left(nearest, Unexplained.from_moments(x.T @ x), TOKENS, TOKENS)
    assert found < 0.99
    actual = float((other @ compensated.T).square().sum() / (other @ nearest.T).square().sum())
    assert 0.75 < actual / found < 1.2


def test_what_is_untold_is_what_rounding_in_turn_takes_its_errors_by() -> None:
    x = tokens_of(torch.randn(32, 32, generator=torch.Generator().manual_seed(3)))
    found, factor = Unexplained.from_moments(x.T @ x), compensation(x.T @ x).factor
    assert torch.allclose(found.left, 1 / factor.diagonal().square(), rtol=1e-3)


def test_few_tokens_are_not_believed_what_they_explain_by_chance() -> None:
    """48 uncorrelated inputs on 96 tokens: all of the loss would stay, and the moments themselves say far less."""
    x = tokens_of(torch.eye(48))[:96]
    error, found = both_errors(tokens_of(torch.eye(48)))[0], Unexplained.from_moments(x.T @ x)
    assert share_left(error, found, 96, TOKENS) > 0.85
    assert share_left(error, found, 1_000_000, 1_000_000) < 0.8


def test_moments_are_gathered_batch_by_batch_by_one_call_or_several(tmp_path: Path) -> None:
    batches = [torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    once = Gathered(tmp_path / "once")
    for number, batch in enumerate(batches):
        once.add(number, {"a": batch})
    assert (once.batches, once.tokens) == (3, {"a": 2 * 4 * 3})  # the first and the third
    for number, batch in enumerate(batches):
        Gathered(tmp_path / "again").add(number, {"a": batch})
    files = [(tmp_path / name / "a.npy").read_bytes() for name in ("once", "again")]
    assert files[0] == files[1]
    once.add(0, {"a": batches[0]})
    assert once.tokens == {"a": 12}


def test_sums_on_a_gpu_are_copied_after_the_first_batch_and_when_they_are_saved(tmp_path: Path) -> None:
    """Counted on the meta device, as a GPU with room for them."""
    gathered, x = Gathered(tmp_path / "moments"), torch.empty(2, 3, 5, device="meta")
    counts = []
    for number in range(5):
        with host_waits() as counted:
            gathered.add(number, {"a": x})
        counts.append((counted.waits, counted.to_device, counted.to_memory, gathered.batches))
    assert counts == [(1, 0, 4 * 5 * 5, 1), *[(0, 0, 0, 1)] * 4]
    with host_waits() as counted:
        gathered.save()
    assert (counted.waits, counted.to_memory) == (1, 4 * 5 * 5)
    assert (gathered.batches, gathered.tokens) == (5, {"a": 3 * 2 * 3})


def test_a_call_goes_on_with_the_batches_that_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are held apart from the files, as on a GPU: a killed call leaves those of its last writing."""
    monkeypatch.setattr(SecondMoments, "in_files", False)
    batches = [torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    killed = Gathered(tmp_path / "moments")
    for number, batch in enumerate(batches):
        killed.add(number, {"a": batch})
    assert (killed.batches, killed.tokens) == (1, {"a": 4})
    again = Gathered(tmp_path / "moments")
    for number in (1, 2):
        again.add(number, {"a": batches[number]})
    again.save()
    assert (again.batches, again.tokens) == (3, {"a": 8})
