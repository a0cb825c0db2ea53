"""`--weigh-first-token` through the stages of calibration, on the demo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fp8q import api
from fp8q.calibrate.measure.moments import load_moments
from fp8q.calibrate.model.source import open_source
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, MeasureOptions
from fp8q.stages import first_tokens as stage
from fp8q.stages import measure, preflight
from fp8q.stages.first_tokens import load_first_tokens
from fp8q.stages.measure import gradients_by_layer

SMALL: dict[str, Any] = {"samples": 12, "seq_len": 64, "batch_size": 4}
INPUT = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path, demo_texts: Any) -> Callable[..., Run]:
    """`calibrated(**options)`: a run of the demo without graphs, in a directory of its own unless `out` names one."""

    def calibrate(out: Path | None = None, **options: Any) -> Run:
        return api.calibrate(
            str(demo_checkpoint), str(demo_texts.calibration), out or tmp_path_factory.mktemp("weighed") / "run",
            str(demo_texts.evaluation), CalibrateOptions(**SMALL | {"weight_rounding": "gptq"} | options),
            api.ExportOptions(graph=False),
        )  # fmt: skip

    return calibrate


@pytest.fixture(scope="module")
def weighed(calibrated: Callable[..., Run]) -> Run:
    return calibrated(weigh_first_token=True)


def test_moments_hold_first_tokens_as_often_as_their_weight(weighed: Run, calibrated: Callable[..., Run]) -> None:
    weights, equal = load_first_tokens(weighed), calibrated()
    assert not equal.first_tokens.exists()
    assert weighed.statistics.read_bytes() == equal.statistics.read_bytes()  # histograms count every token once
    assert min(abs(weight - 1) for weight in weights.values()) > 0.001
    first = load_moments(weighed.moments, INPUT) - load_moments(equal.moments, INPUT)
    moments = first / (weights[INPUT] - 1)  # of the first tokens of twelve windows alone: a matrix of that rank
    values = torch.linalg.eigvalsh(moments.double()).flip(0)
    assert values[0] > 0
    assert values[12:].abs().max() < 1e-3 * values[0]
    assert float(moments.trace()) < 0.5 * float(load_moments(equal.moments, INPUT).trace())


def test_streamed_or_not_the_weights_are_the_same(weighed: Run, calibrated: Callable[..., Run]) -> None:
    streamed = calibrated(weigh_first_token=True, stream=True)
    assert load_first_tokens(streamed) == pytest.approx(load_first_tokens(weighed), rel=1e-3)


def test_what_is_known_is_not_measured_again(
    weighed: Run, calibrated: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = weighed.record().stages["measure"].outputs
    monkeypatch.setattr(stage, "batch_squares", lambda *_: pytest.fail("first tokens are weighed"))
    calibrated(weighed.root, weigh_first_token=True)
    calibrated(weighed.root, weigh_first_token=True, weight_rounding="nearest")  # needs no moments, and leaves them
    assert weighed.record().stages["measure"].outputs == written


def test_rounding_to_nearest_weighs_nothing(calibrated: Callable[..., Run]) -> None:
    assert not calibrated(weigh_first_token=True, weight_rounding="nearest").first_tokens.exists()


def test_a_model_without_a_chain_of_layers_is_refused_first_where_memory_does_not_hold_it(
    calibrated: Callable[..., Run], demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = transformers.LlamaModel.__init__

    def nameless(self: Any, config: Any) -> None:
        made(self, config)
        self.layers = torch.nn.Sequential(*self.layers)

    monkeypatch.setattr(transformers.LlamaModel, "__init__", nameless)
    monkeypatch.setattr(preflight, "gradients_by_layer", lambda *_: True)
    with pytest.raises(InputError) as refused:
        calibrated(tmp_path / "run", weigh_first_token=True)
    assert str(refused.value) == (
        f"{open_source(str(demo_checkpoint)).name}: LlamaForCausalLM has no list of 4 decoder layers, so it cannot be "
        "streamed layer by layer; give it memory for the whole in FP32, or leave --weigh-first-token out, which needs "
        "gradients"
    )
    assert not (tmp_path / "run").exists()


def test_the_option_decides_if_gradients_go_layer_by_layer_and_memory_else(
    demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(str(demo_checkpoint))
    assert not gradients_by_layer(source, MeasureOptions())
    assert gradients_by_layer(source, MeasureOptions(stream=True))
    monkeypatch.setattr(measure, "beyond", lambda _: "and 80% of the memory available is 0 GB")
    assert gradients_by_layer(source, MeasureOptions())
    assert not gradients_by_layer(source, MeasureOptions(stream=False))
