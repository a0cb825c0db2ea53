"""`--weight-rounding gptq` through the stages of calibration, on the demo."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fp8q import api
from fp8q.calibrate.checkpoint.weights import Weights
from fp8q.calibrate.measure.moments import FIRST, load_moments
from fp8q.calibrate.measure.statistics import load_record
from fp8q.calibrate.model.source import Source
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, ExportOptions, RescaleOptions
from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.scales.clip import lost_share
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.weights.gptq import compensation, gptq_codes
from fp8q.stages import quantize as quantize_stage
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared import sources

NEAREST = CalibrateOptions(samples=6, seq_len=64, batch_size=2, skip=("model.layers.[!0].*",))
GPTQ = replace(NEAREST, weight_rounding="gptq")
MODULE = "model.layers.0.self_attn.k_proj"


Calibrate = Callable[[Run, Source, Path, CalibrateOptions], None]


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory, source: Source, data: Path, calibrated: Calibrate) -> Run:
    run = Run(tmp_path_factory.mktemp("gptq") / "run")
    calibrated(run, source, data, GPTQ)
    return run


def stored(run: Run, name: str) -> torch.Tensor:
    shard = json.loads((run.model / "model.safetensors.index.json").read_text())["weight_map"][name]
    with safe_open(run.model / shard, "pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
    return tensor


def codes_of(run: Run) -> torch.Tensor:
    return stored(run, f"{MODULE}.weight").view(torch.uint8)


def expected_codes(run: Run, source: Source, lost: float) -> torch.Tensor:
    """The codes of `MODULE` by the run's stored moments, of an input that loses this share of its energy."""
    weight = Weights(source.weight_files).tensor(f"{MODULE}.weight").to(torch.bfloat16)
    scale = stored(run, f"{MODULE}.weight_scale")
    groups = json.loads(run.statistics_json.read_text())["groups"]
    (first,) = (first for first, members in groups.items() if MODULE in members)
    assert not torch.equal(codes_of(run), encode(weight, scale).view(torch.uint8))
    moments = load_moments(run.moments, first, window=load_record(run).corpus.seq_len)
    found = gptq_codes(weight, scale[:, 0], compensation(moments, lost))
    return found.view(torch.uint8)


def lost_of(run: Run) -> float:
    return lost_share(load_scales(run).activations[MODULE].sqnr_db)


def test_the_checkpoint_holds_the_codes_that_follow_from_the_stored_moments(rounded: Run, source: Source) -> None:
    assert 1e-4 < lost_of(rounded) < 1e-2
    assert torch.equal(codes_of(rounded), expected_codes(rounded, source, lost_of(rounded)))
    assert {scales.rounding for scales in load_scales(rounded).weights.values()} == {"gptq"}


def test_moments_are_kept_for_each_group_and_agree_with_the_histograms(rounded: Run) -> None:
    from fp8q.calibrate.measure.statistics import load_statistics

    statistics = load_statistics(rounded)
    assert {path.name for path in rounded.moments.iterdir()} == {
        f"{first}{ending}" for first in statistics.record.groups for ending in (".npy", FIRST)
    }
    for first in statistics.record.groups:
        values, counts = statistics.tensors[f"{first}.input"].histogram.finite
        energy = float((values.astype(np.float64) ** 2 * counts).sum())
        assert float(load_moments(rounded.moments, first).diagonal().double().sum()) == pytest.approx(energy, rel=1e-4)


def test_the_same_batches_give_the_same_bytes_and_nearest_needs_no_second_measurement(
    rounded: Run, source: Source, data: Path, calibrated: Calibrate, tmp_path: Path
) -> None:
    again = Run(tmp_path / "run")
    calibrated(again, source, data, GPTQ)
    first, second = (run.record().stages["quantize"] for run in (rounded, again))
    assert first.outputs == second.outputs
    measured = again.record().stages["measure"]
    calibrated(again, source, data, NEAREST)
    assert again.record().stages["measure"] == measured
    assert {scales.rounding for scales in load_scales(again).weights.values()} == {"nearest"}
    assert not any(name.startswith("moments/") for name in again.record().stages["quantize"].inputs)


def test_in_two_terms_there_is_nothing_to_make_up_for(rounded: Run, source: Source, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(rounded.root, tmp_path / "run")))
    options = quantize_stage.rescaled(run, RescaleOptions(activation_terms=2))
    quantize_stage.quantize(run, source, sources.gemms_of(source), options, Notes(SILENT))
    assert {scales.rounding for scales in load_scales(run).weights.values()} == {"gptq"}
    assert lost_of(run) < 1e-9
    assert torch.equal(codes_of(run), expected_codes(run, source, 0.0))
    assert not torch.equal(codes_of(run), codes_of(rounded))


def test_nothing_of_it_is_measured_unless_asked_for_and_a_change_is_refused(
    source: Source, data: Path, calibrated: Calibrate, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    calibrated(run, source, data, NEAREST)
    assert not run.moments.exists()
    calibrated(run, source, data, GPTQ)
    path = min(run.moments.glob("*.npy"))
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(InputError) as caught:
        calibrated(run, source, data, GPTQ)
    assert str(caught.value) == (
        f"{path}: is not the file that `fp8q calibrate` wrote (its SHA-256 differs from run.json); restore it, or "
        "delete it and run `fp8q calibrate` again"
    )


def test_calibration_notes_too_little_text_before_it_measures(
    source: Source, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        api.calibrate(source.name, str(data), tmp_path / "run", options=GPTQ, export_options=ExportOptions(graph=False))
    assert "--weight-rounding gptq: 384 calibration tokens are few for inputs of 704 numbers" in caplog.text
