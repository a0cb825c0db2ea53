"""`fp8q tune` on a part of the demo: it predicts what other windows give, and writes what it says."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8q import api
from fp8q.api import TuneOptions, ValidateOptions
from fp8q.core.errors import GateError, InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.scheme import in_two_codes, tails_of
from fp8q.stages.corpus import load_tokens
from fp8q.stages.other_text import evaluation
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared.sources import source_of
from fp8q.stages.tune import PARTS, PredictedCandidates, batches_of, check_met, parted, predicted_candidates
from fp8q.validate.tuning.choices import ROUNDINGS, GroupForm, Mix
from fp8q.validate.tuning.document import Tuning
from fp8q.validate.tuning.gradients import predict_choices
from fp8q.validate.tuning.joint import Measured, believed, measure_mix, ratio, reference_runner

WINDOWS = 4
#: The forms of codes that `tune` has candidates of.
CANDIDATES: tuple[GroupForm, ...] = ("one_term", "tail", "two_terms", "weights_alone")


@pytest.fixture(scope="module")
def run(demo_run: Run, without_graphs: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo's run, of which one layer is quantized."""
    found = Run(Path(shutil.copytree(demo_run.root, tmp_path_factory.mktemp("tune") / "run")))
    with without_graphs():
        api.scales(found.root, api.RescaleOptions(only=("*.layers.2.*",), kv_cache="v"))
    return found


@pytest.fixture(scope="module")
def tuned(run: Run) -> Tuning:
    """The run, tuned to a third of what it loses."""
    found = api.tune(run.root, TuneOptions(windows=WINDOWS))
    return api.tune(run.root, TuneOptions(windows=WINDOWS, max_kl=found.run.kl_nats / 3))


@pytest.fixture(scope="module")
def prepared(run: Run, tmp_path_factory: pytest.TempPathFactory) -> PredictedCandidates:
    windows = load_tokens(run, run.calibration)
    batches = {name: batches_of(windows[part]) for name, part in zip(PARTS, parted(len(windows), WINDOWS), strict=True)}
    return predicted_candidates(run, source_of(run), batches, tmp_path_factory.mktemp("work"), Notes(SILENT))


@pytest.fixture(scope="module")
def choosing(prepared: PredictedCandidates) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return prepared.batches["choosing"]


def test_windows_are_shared_out_and_none_serves_twice() -> None:
    rounding, choosing, held_out = parted(10, 32)
    assert (choosing, held_out) == ([0, 6], [3, 9])
    assert rounding == [1, 2, 4, 5, 7, 8]
    assert [len(part) for part in parted(512, 32)] == [448, 32, 32]
    with pytest.raises(InputError, match=r"^fp8q tune: needs 4 calibration windows, .* and the run has 3; calibrate "):
        parted(3, 1)


def test_losses_and_intervals_by_hand() -> None:
    """Two windows of 10 tokens: KL 0.1 and 0.3, rise 0.2 and 0.2."""
    found = Measured([10, 10], [0.1, 0.3], [0.2, 0.2])
    assert [found.kl_nats, found.rise_nats] == pytest.approx([0.02, 0.02])
    assert list(ratio(found)) == pytest.approx([1, 1.96 * 0.1 * 2**0.5 * 2**0.5 / 0.4])
    assert Measured([10, 10], [1, 1], [0.1, 0.3]).rise_within(0.02) == pytest.approx(1.96 * 0.1 * 2**0.5 / 2**0.5 / 10)
    assert believed(1.4, 0.5) == 1
    assert believed(1.4, 0.3) == 1.4


def test_divergence_and_rise_are_those_of_two_distributions() -> None:
    """A fair coin against 3 to 1: KL = ½ ln(½ / ¾) + ½ ln(½ / ¼); the second of three tokens is not scored."""
    fair, biased = torch.zeros(1, 3, 2), torch.tensor([[[3.0, 1.0]] * 3]).log()
    ids, scored = torch.tensor([[0, 0, 1]]), torch.tensor([[True, False, True]])
    found = measure_mix(lambda _: fair, lambda _: biased, [(ids, scored)], SILENT, "biased")
    assert found.tokens == [1]
    assert found.kl == pytest.approx([0.5 * torch.tensor(4 / 3).log().item()])
    assert found.rise == pytest.approx([torch.tensor(2.0).log().item()])


def test_the_model_as_the_run_s_mix_has_it_is_the_checkpoint(
    prepared: PredictedCandidates, choosing: list[tuple[torch.Tensor, torch.Tensor]], run: Run
) -> None:
    """Weights exchanged and inputs rounded in the float model, against the reference that reads the checkpoint: they
    part where one code rounds the other way, by little of what the mix loses.
    """
    notes, checkpoint = Notes(SILENT), reference_runner(load_reference(run.model, "exact", torch.float32))
    before = prepared.candidates.exact(choosing[0][0])
    apart = measure_mix(prepared.candidates.runner(prepared.run_mix), checkpoint, choosing, notes, "file")
    own, as_it_is = (
        prepared.measured("choosing", prepared.run_mix),
        prepared.measured("choosing", None),
    )
    assert own.kl_nats == pytest.approx(as_it_is.kl_nats, rel=0.02)
    assert apart.kl_nats < 0.2 * own.kl_nats
    assert torch.equal(prepared.candidates.exact(choosing[0][0]), before)


def test_a_group_s_loss_is_predicted_as_it_is_measured(prepared: PredictedCandidates) -> None:
    wide: dict[str, GroupForm] = dict.fromkeys(prepared.run_mix.forms, "bf16")
    for rounding in ROUNDINGS:
        for form in CANDIDATES:
            predicted, measured = 0.0, 0.0
            for name in wide:
                mix = Mix(wide | {name: form}, rounding, "off")
                predicted += prepared.losses.total(mix)
                measured += prepared.measured("choosing", mix).kl_nats
            assert 0.6 < predicted / measured < 1.5, (rounding, form)


def test_the_prediction_holds_elsewhere_and_the_budget_is_met(tuned: Tuning, run: Run) -> None:
    its = tuned.chosen
    assert its is not None
    assert tuned.max_kl == pytest.approx(tuned.run.kl_nats / 3, rel=1e-6)
    assert its.kl_nats <= tuned.max_kl  # type: ignore[operator]
    assert its.kl_nats == pytest.approx(its.held_out_kl_nats, rel=0.35)  # four windows of each
    assert its.weight_bytes <= tuned.run.weight_bytes
    assert 1 < its.prefill_flops_ratio < 1 + 64 / 2048
    assert tuned.changes
    kept = load_scales(run)
    of_products = [change for change in tuned.changes if change.module in kept.weights]
    assert {change.choice for change in of_products} == {"tail"}  # the cheapest that suffices
    layers = [change for change in tuned.changes if change.module != "*" and change not in of_products]
    assert {change.choice for change in layers} <= {"wide_cache"}
    assert [change.module for change in layers] == its.recipe.kv_skip
    assert its.wide_cache == len(layers) < 4


def test_the_frontier_goes_from_the_cheapest_to_what_loses_next_to_nothing(tuned: Tuning) -> None:
    losses = [point.kl_nats for point in tuned.frontier]
    assert losses == sorted(losses, reverse=True)
    assert tuned.frontier[0].prefill_flops_ratio == 1
    assert tuned.frontier[0].kv_cache == "fp8"
    assert losses[-1] < 0.05 * losses[0]


def test_the_command_prints_the_frontier_and_what_changes(
    tuned: Tuning, run: Run, fp8q: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["tune", run.root, "--windows", WINDOWS, "--max-kl", repr(tuned.max_kl)]
    found = json.loads(fp8q(*words, "--json").out)
    wanted = ["changes", "predicted_kl_nats", "measured_kl_nats", "weight_bytes", "prefill_flops_ratio"]
    assert all(found[name] is not None for name in wanted)
    assert list(found["changes"][0]) == ["module", "choice", "members"]
    shown = fp8q(*words)
    assert shown.code == 0, shown.err
    assert [title in shown.out for title in ("KL against cost", "What changes", "Predicted and measured")] == [True] * 3
    assert shown.out.splitlines()[-1].endswith(f"Apply it: fp8q tune {run.root} --max-kl {tuned.max_kl:g} --apply")


def test_what_is_applied_is_what_was_measured(tuned: Tuning, run: Run, keeping_graphs: Any, tmp_path: Path) -> None:
    """The checkpoint that `--apply` writes, on the evaluation text; `gptq` has more windows to go by there."""
    copy = Run(Path(shutil.copytree(run.root, tmp_path / "run")))
    with keeping_graphs():
        found = api.tune(copy.root, TuneOptions(windows=WINDOWS, max_kl=tuned.max_kl), apply=True)
    assert found.met
    assert found.chosen is not None
    assert copy.onnx.is_file()
    scales = load_scales(copy)
    recipe = found.chosen.recipe
    assert in_two_codes(scales.forms) == [name for name in scales.weights if name in {*recipe.tail, *recipe.two_terms}]
    assert tails_of(scales.forms) == dict.fromkeys((name for name in scales.weights if name in recipe.tail), 64)
    assert {weight.rounding for weight in scales.weights.values()} == {found.chosen.weight_rounding}
    assert scales.weights.keys() == load_scales(run).weights.keys() - {*recipe.skip}
    assert list(dict.fromkeys(name.rpartition(".")[0] for name in scales.wide_cache)) == recipe.kv_skip
    reference, exact = load_reference(copy.model, "exact", torch.float32), source_of(copy)
    text = evaluation(copy, None, ValidateOptions(as_served=found.prompt), SILENT)
    from fp8q.validate.accuracy.runtimes import float_model

    forward = float_model(exact, torch.float32, "cpu")
    as_written = reference_runner(reference)
    batches = batches_of(text.ids, text.scored)
    written = measure_mix(lambda ids: forward(ids.numpy()), as_written, batches, SILENT, "run")
    assert written.kl_nats == pytest.approx(found.measured_kl_nats, rel=0.2)


def test_without_a_budget_there_is_the_frontier_alone(run: Run, fp8q: Callable[..., Any]) -> None:
    found = json.loads(fp8q("tune", run.root, "--windows", WINDOWS, "--json").out)
    assert (found["changes"], found["chosen"], found["met"], found["measured_kl_nats"]) == ([], None, None, None)
    assert len(found["frontier"]) > 4
    refused = fp8q("tune", run.root, "--apply")
    assert refused.complaint() == "--apply: there is no budget to choose for; give --max-ppl-increase or --max-kl"


def test_a_budget_that_nothing_meets_has_the_best_there_is_and_exit_code_3(run: Run, fp8q: Callable[..., Any]) -> None:
    model = run.scales.read_bytes()
    result = fp8q("tune", run.root, "--windows", WINDOWS, "--max-kl", 0, "--apply", "--json")
    assert result.code == 3
    found = json.loads(result.out)
    assert found["met"] is False
    assert found["chosen"]["bf16"] in {4, 5, 6}  # of 7 all but one group: q, k and v; gate and up; o; down
    line = result.err.splitlines()[-1]
    assert line.startswith("fp8q: --max-kl 0: nothing that fp8q can choose meets it; the best there is has a KL of ")
    assert run.scales.read_bytes() == model


def test_a_killed_call_goes_on_and_finds_the_same(tuned: Tuning, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    options, batches = TuneOptions(windows=WINDOWS + 2, max_kl=tuned.max_kl), list[int]()

    def interrupted(candidates: Any, ids: torch.Tensor, draw: torch.Generator) -> Any:
        batches.append(len(ids))
        if len(batches) == 2:
            raise KeyboardInterrupt
        return predict_choices(candidates, ids, draw)

    monkeypatch.setattr("fp8q.stages.tune.predict_choices", interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.tune(run.root, options)
    resumed = api.tune(run.root, options)
    assert batches == [4, 2, 2]
    monkeypatch.undo()
    run.tuning.unlink()
    assert api.tune(run.root, options) == resumed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-kl", "much"], "--max-kl much: is no number of nats; give one such as 0.001"),
        (["--max-kl", -1], "--max-kl -1: is no number of nats; give one such as 0.001"),
        (["--max-ppl-increase", "1"], "--max-ppl-increase 1: is no share; give one such as 1% or 0.01"),
        (
            ["--max-kl", 0.001, "--max-ppl-increase", "1%"],
            "--max-kl 0.001: --max-ppl-increase 1.00% is a budget too; give one of them",
        ),
        (["--windows", 0], "--windows 0: must be at least 1"),
    ],
)
def test_budgets_that_are_none(run: Run, fp8q: Callable[..., Any], words: list[object], message: str) -> None:
    assert fp8q("tune", run.root, *words).complaint() == message


def test_a_mix_that_the_evaluation_text_refuses_is_told_apart(tuned: Tuning) -> None:
    assert tuned.chosen is not None
    worse = tuned.chosen.model_copy(update={"kl_nats": 0.0009, "measured_kl_nats": 0.0011})
    with pytest.raises(GateError) as gate:
        check_met(tuned.model_copy(update={"max_kl": 0.001, "met": False, "met_on_calibration": True, "chosen": worse}))
    assert str(gate.value) == (
        "--max-kl 0.001: a KL of 0.0009 nats is predicted of the mix and 0.0011 measured on the evaluation text, which "
        "is more; ask for less, such as --max-kl 0.0009, so that there is room for what texts differ by"
    )
