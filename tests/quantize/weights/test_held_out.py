"""An expert keeps the codes by GPTQ or `sequential` where they are better than the nearest on held-out tokens."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8q.calibrate.measure.held_out import TOKENS, HeldOutTokens, input_name, is_held_out, load_held_out
from fp8q.calibrate.measure.moments import SecondMoments, load_moments
from fp8q.calibrate.model.source import Source, open_source
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, RescaleOptions
from fp8q.quantize.scales.decisions import HeldOutError, WeightScales, load_scales
from fp8q.quantize.weights.channels import (
    LEAST_HELD_OUT,
    QuantizedWeight,
    WeightScaling,
    compared_with_nearest,
    gemm_error,
    judged,
    quantize_weight,
)
from fp8q.quantize.weights.code_sources import FloatWeight, GptqCodes, Rounding
from fp8q.quantize.weights.gptq import Compensations
from fp8q.quantize.weights.rounding_progress import CachedCodes
from fp8q.stages import quantize as quantize_stage
from fp8q.stages.choice_notes import judged_experts_note
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared import sources

from ...mixtures import random_mixture

WIDTH, LAYER = 64, "model.layers.0.mlp.experts"
EXPERT = f"{LAYER}.0.down_proj"
Calibrate = Callable[[Run, Source, Path, CalibrateOptions], None]
#: Six batches, of which the last is held out; every expert sees enough tokens.
OPTIONS = CalibrateOptions(samples=24, seq_len=64, batch_size=4, weight_rounding="gptq", min_expert_tokens=1)


def test_the_last_of_every_eight_batches_is_held_out() -> None:
    assert [batch for batch in range(20) if is_held_out(batch, 20)] == [7, 15]
    assert [batch for batch in range(3) if is_held_out(batch, 3)] == [2]
    assert not is_held_out(0, 1)


def test_tokens_are_spread_over_the_held_out_batches(tmp_path: Path) -> None:
    chosen = HeldOutTokens(24)  # batches 7, 15 and 23 are held out: 43 tokens of each, or what others leave
    counting = torch.arange(100.0)[:, None]
    chosen.add("e", counting, 7)
    chosen.add("e", counting[:5], 15)
    chosen.add("e", counting, 23)
    tokens = chosen.tokens("e")
    assert tokens is not None
    assert tokens.shape == (TOKENS, 1)
    assert tokens[:4, 0].tolist() == [0, 2, 4, 6]
    assert tokens[43:50, 0].tolist() == [0, 1, 2, 3, 4, 0, 1]
    chosen.save(tmp_path)
    stored = load_held_out(tmp_path, "e")
    assert stored is not None
    assert torch.equal(stored, tokens)
    assert load_held_out(tmp_path, "other") is None
    going_on = HeldOutTokens(24)
    going_on.load(tmp_path)
    assert going_on.names() == ["e"]
    assert torch.equal(going_on.tokens("e"), tokens)  # type: ignore[arg-type]  # as was asserted of the first


def test_gate_and_up_read_one_input() -> None:
    assert input_name(f"{LAYER}.3.up_proj") == input_name(f"{LAYER}.3.gate_proj") == f"{LAYER}.3.gate_proj"
    assert input_name(EXPERT) == EXPERT


def test_the_error_of_each_token_is_over_its_energy() -> None:
    weight, values = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.5, 2.0]])
    tokens = torch.tensor([[2.0, 0.0], [0.0, 5.0], [100.0, 100.0]])
    assert float(gemm_error(weight, values, tokens)) == pytest.approx(0.25 + 0 + 0.125)
    assert float(gemm_error(weight, values, tokens, 0.1)) == pytest.approx(0.375 + 0.1 * (2.25 + 4 + 3.125))


def test_codes_are_kept_only_where_enough_tokens_say_that_they_are_better() -> None:
    weight, closer, farther = torch.ones(1, 2), torch.full((1, 2), 1.25), torch.full((1, 2), 1.5)
    tokens = torch.ones(LEAST_HELD_OUT, 2)
    assert float(compared_with_nearest(weight, closer, farther, tokens)) == 0.25
    assert float(compared_with_nearest(weight, farther, closer, tokens)) == 4
    assert float(compared_with_nearest(weight, closer, closer, tokens)) == 1
    assert compared_with_nearest(weight, weight, weight, tokens).isnan()
    assert compared_with_nearest(weight, closer, weight, tokens).isnan()
    fine = (2 * weight).bfloat16()  # codes of 2 have no error under a scale of 1, and those of 3 are half of it off
    summary = quantize_weight(fine, "amax")
    assert isinstance(summary, QuantizedWeight)
    exact, off = (torch.full((1, 2), value).to(torch.float8_e4m3fn) for value in (2.0, 3.0))
    for codes, held, error in (
        (off, tokens, HeldOutError(tokens=LEAST_HELD_OUT)),
        (off, tokens[1:], HeldOutError(tokens=LEAST_HELD_OUT - 1)),
        (off, None, HeldOutError(tokens=0)),
    ):
        made = judged(fine, QuantizedWeight(codes, torch.ones(1), summary.summary), "amax", held)
        assert isinstance(made, QuantizedWeight)
        assert made.summary.held_out == error
        assert not error.beats_nearest
        assert made.summary.rounding == "nearest"
        assert torch.equal(made.codes.float(), exact.float())


Round = Callable[[torch.Tensor, torch.Tensor | None], QuantizedWeight]


@pytest.fixture
def rounded(tmp_path: Path) -> Round:
    """`rounded(fitted, others)`: an expert's weight by GPTQ on the `fitted` tokens, and judged by the `others`."""
    torch.manual_seed(0)
    weight = torch.randn(32, WIDTH).bfloat16()

    def round_weight(fitted: torch.Tensor, others: torch.Tensor | None) -> QuantizedWeight:
        moments = SecondMoments(tmp_path / "moments")
        moments.add(EXPERT, fitted)
        if others is not None:
            moments.hold_out(EXPERT, others, 7, 8)
        moments.close()
        compensations = Compensations(moments.folder, {EXPERT: EXPERT}, {EXPERT: 0.0}, experts=[LAYER])
        sources = (GptqCodes(WeightScaling("mse"), compensations, CachedCodes(tmp_path)),)
        first, again = (
            Rounding(WeightScaling("mse"), sources).quantized(FloatWeight(EXPERT, lambda: weight)) for _ in range(2)
        )
        assert isinstance(first, QuantizedWeight)
        assert isinstance(again, QuantizedWeight)
        assert again.summary == first.summary
        assert torch.equal(again.codes.float(), first.codes.float())
        nearest = quantize_weight(weight, "mse")
        assert isinstance(nearest, QuantizedWeight)
        assert torch.equal(first.codes.float(), nearest.codes.float()) == (first.summary.rounding == "nearest")
        return first

    return round_weight


def test_codes_that_are_fitted_to_few_tokens_are_left_for_the_nearest(rounded: Round) -> None:
    made = rounded(torch.randn(8, WIDTH), torch.randn(100, WIDTH))
    assert made.summary.rounding == "nearest"
    assert made.summary.held_out is not None
    assert made.summary.held_out.tokens == 100
    assert (made.summary.held_out.over_nearest or 0) > 1.4


def test_shrunk_moments_serve_where_tokens_are_few(rounded: Round) -> None:
    torch.manual_seed(1)
    mixed = torch.randn(500, WIDTH) + 0.7 * torch.randn(500, WIDTH // 8) @ torch.randn(WIDTH // 8, WIDTH)
    made = rounded(mixed[:160], mixed[400:])
    assert made.summary.rounding == "gptq"
    assert made.summary.held_out is not None
    assert made.summary.held_out.shrunk


def test_codes_that_are_better_on_other_tokens_stay(rounded: Round) -> None:
    mixed = torch.randn(4100, WIDTH // 4) @ torch.randn(WIDTH // 4, WIDTH)
    made = rounded(mixed[:4000], mixed[4000:])
    assert made.summary.rounding == "gptq"
    assert made.summary.held_out is not None
    assert made.summary.held_out.over_nearest is not None
    assert made.summary.held_out.over_nearest < 0.5
    assert not made.summary.held_out.shrunk


def test_an_expert_without_held_out_tokens_has_the_nearest(rounded: Round) -> None:
    assert rounded(torch.randn(4000, WIDTH // 4) @ torch.randn(WIDTH // 4, WIDTH), None).summary.rounding == "nearest"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(str(random_mixture(tmp_path_factory.mktemp("held-out") / "mixtral", "mixtral")))


@pytest.fixture(scope="module")
def calibrated_run(mixture: Source, tmp_path_factory: pytest.TempPathFactory, data: Path, calibrated: Calibrate) -> Run:
    run = Run(tmp_path_factory.mktemp("held-out") / "run")
    calibrated(run, mixture, data, OPTIONS)
    return run


def note_of(run: Run) -> str:
    (note,) = [line for line in run.record().stages["quantize"].notes if "weights of experts" in line]
    return note


def split(run: Run) -> tuple[dict[str, WeightScales], dict[str, WeightScales]]:
    """The weights of experts in `scales.json`, and the others."""
    weights = load_scales(run).weights
    experts = {name: weight for name, weight in weights.items() if ".experts." in name}
    return experts, {name: weight for name, weight in weights.items() if name not in experts}


def test_each_weight_of_an_expert_says_how_it_was_judged_and_a_note_counts_them(calibrated_run: Run) -> None:
    experts, others = split(calibrated_run)
    assert {weight.rounding for weight in others.values()} == {"gptq"}
    assert all(weight.held_out is None for weight in others.values())
    for weight in experts.values():
        assert weight.held_out is not None
        assert weight.held_out.tokens > LEAST_HELD_OUT
        assert (weight.rounding == "gptq") == weight.held_out.beats_nearest
    kept = [name for name, weight in experts.items() if weight.rounding == "gptq"]
    left = [name for name in experts if name not in kept]
    assert note_of(calibrated_run) == f"--weight-rounding gptq: kept for {len(kept)} of 24 weights of experts" + (
        f"; {len(left)} ({left[0]}{' …' if len(left) > 1 else ''}) {'is' if len(left) == 1 else 'are'} rounded to "
        "nearest, where its error on held-out tokens is no smaller"
        if left
        else ""
    )


def test_tokens_are_held_out_of_the_moments_of_experts_alone(calibrated_run: Run) -> None:
    moments, tokens = calibrated_run.moments, 24 * 64
    held = {path.name.removesuffix(".held_out.npy") for path in moments.glob("*.held_out.npy")}
    parts = ("gate_proj", "down_proj")
    assert held == {f"model.layers.{n}.mlp.experts.{e}.{part}" for n in range(2) for e in range(4) for part in parts}
    shared = load_moments(moments, f"{LAYER}.0.gate_proj")
    attention = load_moments(moments, "model.layers.0.self_attn.q_proj")
    for matrix, seen in ((shared, tokens * 5 // 6), (attention, tokens)):
        # norms of about 1 leave a token an energy of about its width
        assert float(matrix.diagonal().sum()) == pytest.approx(seen * WIDTH, rel=0.1)


def test_streaming_and_a_second_calibration_give_the_same_bytes(
    calibrated_run: Run, mixture: Source, data: Path, calibrated: Calibrate, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    calibrated(run, mixture, data, replace(OPTIONS, stream=True))
    first, second = (each.record().stages["measure"].outputs for each in (calibrated_run, run))
    assert {name: digest for name, digest in first.items() if name.startswith("moments/")} == {
        name: digest for name, digest in second.items() if name.startswith("moments/")
    }
    assert load_scales(run) == load_scales(calibrated_run)


def test_scales_are_judged_again_from_the_stored_tokens(calibrated_run: Run, mixture: Source, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(calibrated_run.root, tmp_path / "run")))
    options = quantize_stage.rescaled(run, RescaleOptions(weight_method="amax"))
    quantize_stage.quantize(run, mixture, sources.gemms_of(mixture), options, Notes(SILENT))
    (experts, _), (before, _) = split(run), split(calibrated_run)
    for name, weight in experts.items():
        error, other = weight.held_out, before[name].held_out
        assert error is not None
        assert other is not None
        assert error.tokens == other.tokens
        assert error.over_nearest != other.over_nearest


def test_a_single_batch_leaves_nothing_to_judge_by(
    mixture: Source, data: Path, calibrated: Calibrate, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    calibrated(run, mixture, data, replace(OPTIONS, samples=4))
    experts, others = split(run)
    assert {weight.rounding for weight in others.values()} == {"gptq"}
    assert {weight.rounding for weight in experts.values()} == {"nearest"}
    assert all(weight.held_out == HeldOutError(tokens=0) for weight in experts.values())
    assert note_of(run) == (
        f"--weight-rounding gptq: kept for 0 of 24 weights of experts; 24 ({next(iter(experts))} …) are rounded to "
        "nearest, with too few tokens of their own to fit or to judge"
    )


def test_sequential_judges_experts_too(mixture: Source, data: Path, calibrated: Calibrate, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    calibrated(run, mixture, data, replace(OPTIONS, weight_rounding="sequential"))
    experts, others = split(run)
    assert {weight.rounding for weight in others.values()} == {"sequential"}
    assert all(weight.held_out is None for weight in others.values())
    for weight in experts.values():
        assert weight.held_out is not None
        assert weight.held_out.tokens > LEAST_HELD_OUT
        assert (weight.rounding == "sequential") == weight.held_out.beats_nearest
    assert note_of(run).startswith("--weight-rounding sequential: kept for ")


def test_a_mixture_without_compensated_codes_has_no_note(calibrated_run: Run) -> None:
    scales = load_scales(calibrated_run)
    assert judged_experts_note(scales, [], "gptq") is None
