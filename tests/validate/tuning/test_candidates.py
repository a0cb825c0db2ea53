"""The codes of GPTQ that `fp8q tune` chooses among are those that `fp8q scales` would write, of other windows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8q.api import CalibrateOptions, ExportOptions, TuneOptions, calibrate, tune
from fp8q.calibrate.measure.held_out import input_name, load_held_out
from fp8q.calibrate.measure.moments import load_moments
from fp8q.calibrate.measure.statistics import load_record
from fp8q.calibrate.model.gemms import output_channel_axis
from fp8q.core.reporter import SILENT
from fp8q.quantize.scales.clip import lost_share
from fp8q.quantize.weights.channels import LEAST_HELD_OUT, gemm_error, nearest_codes
from fp8q.quantize.weights.gptq import compensation, gptq_codes
from fp8q.stages.corpus import load_tokens
from fp8q.stages.gradients import load_first_tokens
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared.sources import source_of
from fp8q.stages.tune import PARTS, PredictedCandidates, batches_of, parted, predicted_candidates

from ...conftest import Texts
from ...mixtures import random_mixture

SHAPE = CalibrateOptions(samples=28, seq_len=64, batch_size=4, weigh_first_token=True, weight_rounding="gptq")
EXPERTS = [f"model.layers.1.mlp.experts.{number}.{part}_proj" for number in range(4) for part in ("gate", "up", "down")]


@pytest.fixture(scope="module")
def prepared(demo_texts: Texts, tmp_path_factory: pytest.TempPathFactory) -> tuple[PredictedCandidates, Path]:
    folder = tmp_path_factory.mktemp("tune")
    model, work = random_mixture(folder / "mixtral", "mixtral"), folder / "work"
    work.mkdir()
    run = calibrate(
        model, demo_texts.calibration, folder / "run", options=SHAPE, export_options=ExportOptions(graph=False)
    )
    windows = load_tokens(run, run.calibration)
    batches = {name: batches_of(windows[part]) for name, part in zip(PARTS, parted(len(windows), 2), strict=True)}
    return predicted_candidates(run, source_of(run), batches, work, Notes(SILENT)), work / "moments"


def rows(prepared: PredictedCandidates, module: str) -> torch.Tensor:
    gemm = prepared.candidates.gemms[module]
    return gemm.get_parameter("weight").movedim(output_channel_axis(gemm), 0).to(torch.bfloat16).contiguous()


def stored(prepared: PredictedCandidates, module: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes = prepared.candidates.codes("gptq", "two_terms").get(module)
    assert codes is not None
    return codes


def test_experts_are_no_worse_than_nearest_on_tokens_that_were_held_out(
    prepared: tuple[PredictedCandidates, Path],
) -> None:
    found, moments = prepared
    judged, compensated = 0, 0
    for module in EXPERTS:
        weight, (codes, scale) = rows(found, module), stored(found, module)
        nearest = nearest_codes(weight, scale)
        tokens = load_held_out(moments, input_name(module))
        assert tokens is not None
        if len(tokens) >= LEAST_HELD_OUT:
            errors = [gemm_error(weight, c.float() * scale[:, None], tokens) for c in (codes, nearest)]
            assert errors[0] <= errors[1] * 1.0001, module
            judged += 1
        compensated += not torch.equal(codes.view(torch.uint8), nearest.view(torch.uint8))
    assert judged >= 6
    assert 0 < compensated <= judged


def test_first_tokens_are_weighed_for_other_weights(prepared: tuple[PredictedCandidates, Path]) -> None:
    found, moments = prepared
    weights, module = load_first_tokens(found.run), "model.layers.1.self_attn.v_proj"
    assert abs(weights[module] - 1) > 0.01
    weight, (codes, scale) = rows(found, module), stored(found, module)
    lost = lost_share(found.candidates.inputs["two_terms"][module].sqnr_db)
    window = load_record(found.run).corpus.seq_len
    second_moments = load_moments(moments, found.candidates.first[module], weights[module], window)
    expected = gptq_codes(weight, scale, compensation(second_moments, lost))
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


def test_the_weights_of_first_tokens_are_a_stage_that_tune_leaves_on_record(
    prepared: tuple[PredictedCandidates, Path], demo_texts: Texts, tmp_path: Path
) -> None:
    """The run is rounded to nearest, so that nothing has weighed them before."""
    source = prepared[0].run.root.parent / "mixtral"
    nearest = replace(SHAPE, weight_rounding="nearest")
    run = calibrate(
        source, demo_texts.calibration, tmp_path / "run", options=nearest, export_options=ExportOptions(graph=False)
    )
    assert "first-tokens" not in run.record().stages
    tune(run.root, TuneOptions(windows=2))
    assert {"first-tokens", "tune"} <= run.record().stages.keys()


def test_a_run_of_inherited_codes_has_candidates_too(
    prepared: tuple[PredictedCandidates, Path], demo_texts: Texts, tmp_path: Path
) -> None:
    inherited = CalibrateOptions(samples=28, seq_len=64, batch_size=4, inherit=True)
    run = calibrate(
        prepared[0].run.model, demo_texts.calibration, tmp_path / "run", options=inherited,
        export_options=ExportOptions(graph=False),
    )  # fmt: skip
    assert tune(run.root, TuneOptions(windows=2)).frontier
