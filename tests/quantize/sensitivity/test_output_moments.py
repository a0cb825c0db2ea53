"""The gradients at outputs: gathered layer by layer, against a backward pass of the whole model."""

from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8q.calibrate.model.gemms import observed_gemms
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.quantize.sensitivity.gradients import End, drawn_gradient, seeing
from fp8q.quantize.sensitivity.output_gradients import (
    LayerGradients,
    OutputMoments,
    WatchedGemms,
    judges_codes,
    output_gradients,
)
from fp8q.quantize.weights.output_side import OutputSide, load_output_side

WINDOWS = np.random.default_rng(3).integers(0, 500, (3, 24))
BATCHES = {number: WINDOWS[number : number + 1] for number in range(3)}
MODULES = ("model.layers.1.self_attn.k_proj", "model.layers.2.mlp.down_proj")


@pytest.fixture(scope="module")
def source(demo_checkpoint: Path) -> Source:
    return open_source(str(demo_checkpoint))


def test_moments_and_held_out_tokens_are_those_of_the_whole_model(source: Source, tmp_path: Path) -> None:
    gathering = OutputMoments(source, BATCHES, tmp_path)
    gathering.run(SILENT, "Weighing outputs in")
    model = load_model(source, torch.float32, "cpu").requires_grad_(False)
    watched = WatchedGemms(model, observed_gemms(model))
    sums: dict[str, torch.Tensor] = {}
    for number in range(3):
        with seeing(watched) as (seen, cache), torch.enable_grad():
            tokens = torch.from_numpy(WINDOWS[number : number + 1])
            logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
        drawn = drawn_gradient(logits.detach(), 1, torch.Generator().manual_seed(number))
        gradients, _ = output_gradients(MODULES, End(seen, logits, drawn), (1, 24))
        for module in MODULES:
            gradient = gradients[module][0, 1:]
            if number < 2:
                sums[module] = sums.get(module, torch.zeros(())) + gradient.T @ gradient
                continue
            side = load_output_side(gathering.outputs, module)
            assert side is not None
            torch.testing.assert_close(
                side.moments, sums[module], rtol=1e-3, atol=1e-3 * float(sums[module].abs().max())
            )
            torch.testing.assert_close(side.gradients, gradient, rtol=0.02, atol=0.01 * float(gradient.abs().max()))
            assert side.inputs.shape == (23, model.get_submodule(module).get_parameter("weight").shape[1])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_gathering_that_was_killed_in_a_layer_goes_on_there_and_gives_the_same_files(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps back go from layer 3 to layer 0; the second ends with half of its files."""
    expected = tmp_path / "expected"
    expected.mkdir()
    gathering = OutputMoments(source, BATCHES, expected)
    gathering.run(SILENT, "Weighing outputs in")
    assert len(files(gathering.outputs)) == 3 * 28

    saved = LayerGradients.save
    layers = list[LayerGradients]()

    def killed(sums: LayerGradients, folder: Path) -> None:
        saved(sums, folder)
        layers.append(sums)
        if len(layers) == 3:  # of the head there is nothing
            for path in sorted(folder.glob("model.layers.2.*"))[::2]:
                path.unlink()
            raise KeyboardInterrupt

    again = tmp_path / "again"
    again.mkdir()
    monkeypatch.setattr(LayerGradients, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        OutputMoments(source, BATCHES, again).run(SILENT, "Weighing outputs in")
    resumed = OutputMoments(source, BATCHES, again)
    resumed.run(SILENT, "Weighing outputs in")
    assert len(layers) == 3 + 3
    assert files(resumed.outputs) == files(gathering.outputs)


Usage = namedtuple("Usage", ("total", "used", "free"))


def test_a_disk_without_room_is_refused_with_the_numbers(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four layers of H_O, float32, of q, o and down (256 channels), k and v (128), gate and up (704); of the last
    window inputs, 256 each and 704 of down, and gradients of 23 tokens, in BF16.
    """
    moments = 3 * 256**2 + 2 * 128**2 + 2 * 704**2
    held_out = 23 * (6 * 256 + 704 + 3 * 256 + 2 * 128 + 2 * 704)
    size = 4 * (4 * moments + 2 * held_out)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 10**9 - size + 1, size - 1))
    with pytest.raises(InputError) as refused:
        OutputMoments(source, BATCHES, tmp_path)
    assert str(refused.value) == (
        f"--weigh-outputs: the gradients at outputs take 20.4 MB on the disk of {tmp_path.parent}, which has 20.4 MB "
        "free; free some, or leave it out"
    )
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 10**9 - size, size))
    OutputMoments(source, BATCHES, tmp_path)


@pytest.mark.parametrize("judged", [False, True])
def test_a_gemm_whose_gradients_are_not_finite_has_no_files(tmp_path: Path, judged: bool) -> None:
    """Be it in a window of H_O, or in one that judges."""
    sums = LayerGradients()
    for window in (False, True):
        for module, number in (("a", 1.0), ("b", float("nan") if window == judged else 1.0)):
            sums.add(module, torch.ones(2, 3), torch.full((2, 4), number), window)
    sums.save(tmp_path)
    assert sorted(files(tmp_path)) == ["a.gradients.npy", "a.inputs.npy", "a.npy"]
    assert load_output_side(tmp_path, "b") is None


def test_a_gemm_whose_moments_memory_does_not_hold_has_no_files(tmp_path: Path) -> None:
    """Those of ten million channels take 400 TB; in the window before nothing wanted for room."""
    sums = LayerGradients()
    for held_out in (True, False, False):
        sums.add("a", torch.ones(2, 3), torch.ones(2, 4), held_out)
        sums.add("b", torch.ones(2, 3), torch.ones(2, 1).expand(2, 10**7), held_out)
    sums.save(tmp_path)
    assert sorted(files(tmp_path)) == ["a.gradients.npy", "a.inputs.npy", "a.npy"]
    with pytest.raises(RuntimeError, match="should match"):
        sums.add("a", torch.ones(2, 3), torch.ones(2, 5), False)


def test_the_last_of_every_five_windows_is_held_out_and_of_fewer_the_last() -> None:
    assert [window for window in range(12) if judges_codes(window, 12)] == [4, 9]
    assert [window for window in range(3) if judges_codes(window, 3)] == [2]
    assert not judges_codes(0, 1)


def test_the_loss_is_the_square_of_gradient_times_error_and_of_the_inputs_noise() -> None:
    side = OutputSide(torch.eye(2), torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]]))
    weight, values = torch.tensor([[1.0, 1.0], [2.0, 2.0]]), torch.tensor([[0.5, 1.0], [2.0, 3.0]])
    assert side.loss(weight, values, 0.0) == (3 * 0.5 + 1 * 2) ** 2
    noise = (3 * 0.5 - 2) ** 2 * 1 + (3 * 1 - 3) ** 2 * 4
    assert side.loss(weight, values, 0.5) == (3 * 0.5 + 1 * 2) ** 2 + 0.5 * noise


def test_nothing_is_known_of_a_module_without_moments(tmp_path: Path) -> None:
    assert load_output_side(tmp_path, "experts.0.down_proj") is None
