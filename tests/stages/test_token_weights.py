"""`--weigh-tokens gradient` through the stages of calibration, on the demo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from fp8q import api
from fp8q.calibrate.measure.moments import load_moments
from fp8q.calibrate.model.source import open_source
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions
from fp8q.stages import preflight
from fp8q.stages import token_weights as stage

SMALL = {"samples": 12, "seq_len": 64, "batch_size": 4}
INPUT = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path, demo_texts: Any) -> Callable[..., Run]:
    """`calibrated(**options)`: a run of the demo without graphs, in a directory of its own unless `out` names one."""

    def calibrate(out: Path | None = None, **options: Any) -> Run:
        return api.calibrate(
            str(demo_checkpoint), str(demo_texts.calibration), out or tmp_path_factory.mktemp("weighed") / "run",
            str(demo_texts.evaluation), CalibrateOptions(**SMALL | options), api.ExportOptions(graph=False),
        )  # fmt: skip

    return calibrate


@pytest.fixture(scope="module")
def weighed(calibrated: Callable[..., Run]) -> Run:
    return calibrated(weight_rounding="gptq", weigh_tokens="gradient")


def test_moments_are_sums_over_weighed_tokens(weighed: Run, calibrated: Callable[..., Run]) -> None:
    weights = load_file(weighed.token_weights)
    assert {values.shape for values in weights.values()} == {(12, 64)}
    assert all(np.isclose(values.mean(dtype=np.float64), 1, atol=2e-3) for values in weights.values())
    assert weights[INPUT].astype(np.float32).std() > 0.3  # far from all alike
    equal = calibrated(weight_rounding="gptq")
    assert not equal.token_weights.exists()
    assert weighed.statistics.read_bytes() == equal.statistics.read_bytes()  # histograms count every token once
    different = load_moments(weighed.moments, INPUT) / load_moments(equal.moments, INPUT) - 1
    assert 0.02 < float(different.diagonal().abs().mean()) < 1


def test_streamed_or_not_the_moments_are_the_same(weighed: Run, calibrated: Callable[..., Run]) -> None:
    streamed = calibrated(weight_rounding="gptq", weigh_tokens="gradient", stream=True)
    weights, expected = load_file(streamed.token_weights), load_file(weighed.token_weights)
    assert weights.keys() == expected.keys()
    np.testing.assert_allclose(weights[INPUT], expected[INPUT], rtol=5e-3, atol=1e-4)  # FP16
    torch.testing.assert_close(
        load_moments(streamed.moments, INPUT), load_moments(weighed.moments, INPUT), rtol=1e-2, atol=1e-2
    )


def test_what_is_known_is_not_measured_again(
    weighed: Run, calibrated: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = weighed.record().stages["measure"].outputs
    monkeypatch.setattr(stage, "batch_norms", lambda *_: pytest.fail("tokens are weighed"))
    calibrated(weighed.root, weight_rounding="gptq", weigh_tokens="gradient")
    calibrated(weighed.root, weigh_tokens="gradient")  # nearest rounding needs no moments, and leaves them
    assert weighed.record().stages["measure"].outputs == written


def test_a_killed_pass_goes_on_at_its_batch(
    calibrated: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stage, "TOKENS", 256)  # three batches
    weigh, calls = stage.batch_norms, list[int]()

    def killed(*given: Any) -> Any:
        if len(calls) == 2:
            calls.append(-1)
            raise KeyboardInterrupt
        calls.append(given[2])  # the number of the batch
        return weigh(*given)

    monkeypatch.setattr(stage, "batch_norms", killed)
    options = {"weight_rounding": "gptq", "weigh_tokens": "gradient"}
    with pytest.raises(KeyboardInterrupt):
        calibrated(tmp_path / "run", **options)
    run = calibrated(tmp_path / "run", **options)
    assert calls == [0, 1, -1, 2]
    assert load_file(run.token_weights)[INPUT].shape == (12, 64)


def test_a_model_without_a_chain_of_layers_is_refused_first_where_memory_does_not_hold_it(
    calibrated: Callable[..., Run], demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = transformers.LlamaModel.__init__

    def nameless(self: Any, config: Any) -> None:
        made(self, config)
        self.layers = torch.nn.Sequential(*self.layers)

    monkeypatch.setattr(transformers.LlamaModel, "__init__", nameless)
    monkeypatch.setattr(preflight, "beyond", lambda _: "and 80% of the memory available is 0 GB")
    with pytest.raises(InputError) as refused:
        calibrated(tmp_path / "run", weight_rounding="gptq", weigh_tokens="gradient")
    assert str(refused.value) == (
        f"{open_source(str(demo_checkpoint)).name}: LlamaForCausalLM has no list of 4 decoder layers, so it cannot be "
        "streamed layer by layer; give it memory for the whole in FP32, or take --weigh-tokens equal, which needs no "
        "gradients"
    )
    assert not (tmp_path / "run").exists()
