"""`--weigh-outputs` through the stages of calibration, on the demo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8q import api
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, RescaleOptions
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.sensitivity.output_gradients import OutputMoments
from fp8q.stages import gradients as stage

SMALL: dict[str, Any] = {"samples": 12, "seq_len": 64, "batch_size": 4, "weight_rounding": "gptq"}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path, demo_texts: Any) -> Callable[..., Run]:
    """`calibrated(**options)`: a run of the demo without graphs."""

    def calibrate(**options: Any) -> Run:
        return api.calibrate(
            str(demo_checkpoint), str(demo_texts.calibration), tmp_path_factory.mktemp("outputs") / "run",
            str(demo_texts.evaluation), CalibrateOptions(**SMALL | options), api.ExportOptions(graph=False),
        )  # fmt: skip

    return calibrate


def checkpoint_digests(run: Run) -> dict[str, str]:
    outputs = run.record().stages["quantize"].outputs
    return {name: digest for name, digest in outputs.items() if name.endswith(".safetensors")}


@pytest.mark.slow
def test_codes_are_revised_and_the_run_says_by_how_many_windows(
    calibrated: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = calibrated()
    before = checkpoint_digests(run)
    assert not run.output_moments.exists()
    api.scales(run.root, RescaleOptions(weigh_outputs=6))
    revised = checkpoint_digests(run)
    assert revised != before
    recorded = run.record().stages["outputs"]
    assert recorded.options["windows"] == 6
    assert len(recorded.outputs) == 3 * len(load_scales(run).weights)
    monkeypatch.setattr(OutputMoments, "run", lambda *_: pytest.fail("outputs are weighed again"))
    api.scales(run.root, RescaleOptions(weigh_outputs=6, weight_method="mse"))
    assert checkpoint_digests(run) == revised
    api.scales(run.root, RescaleOptions(weigh_outputs=0))
    assert checkpoint_digests(run) == before


def test_gemms_without_gradients_are_named_once() -> None:
    assert stage.left_out(["a.0", "a.1"]) == (
        "--weigh-outputs: 2 GEMMs (a.0 …) have no finite gradients at outputs of a window's tokens, as experts, or no "
        "held-out ones; GPTQ rounds them without"
    )
