"""The gradients at outputs: gathered layer by layer, against a backward pass of the whole model."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fp8q.calibrate.model.gemms import observed_gemms
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.core.reporter import SILENT
from fp8q.quantize.sensitivity.gradients import End, drawn_gradient, seeing
from fp8q.quantize.sensitivity.output_gradients import OutputMoments, WatchedGemms, is_judged_by, output_gradients
from fp8q.quantize.weights.output_side import OutputSide, load_output_side

WINDOWS = np.random.default_rng(3).integers(0, 500, (3, 24))
MODULES = ("model.layers.1.self_attn.k_proj", "model.layers.2.mlp.down_proj")


@pytest.fixture(scope="module")
def source(demo_checkpoint: Path) -> Source:
    return open_source(str(demo_checkpoint))


def test_moments_and_held_out_tokens_are_those_of_the_whole_model(source: Source, tmp_path: Path) -> None:
    gathering = OutputMoments(source, {number: WINDOWS[number : number + 1] for number in range(3)}, tmp_path)
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


def test_the_last_of_every_five_windows_is_held_out_and_of_fewer_the_last() -> None:
    assert [window for window in range(12) if is_judged_by(window, 12)] == [4, 9]
    assert [window for window in range(3) if is_judged_by(window, 3)] == [2]
    assert not is_judged_by(0, 1)


def test_the_loss_is_the_square_of_gradient_times_error_and_of_the_inputs_noise() -> None:
    side = OutputSide(torch.eye(2), torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]]))
    weight, values = torch.tensor([[1.0, 1.0], [2.0, 2.0]]), torch.tensor([[0.5, 1.0], [2.0, 3.0]])
    assert side.loss(weight, values, 0.0) == (3 * 0.5 + 1 * 2) ** 2
    noise = (3 * 0.5 - 2) ** 2 * 1 + (3 * 1 - 3) ** 2 * 4
    assert side.loss(weight, values, 0.5) == (3 * 0.5 + 1 * 2) ** 2 + 0.5 * noise


def test_nothing_is_known_of_a_module_without_moments(tmp_path: Path) -> None:
    assert load_output_side(tmp_path, "experts.0.down_proj") is None
