"""The remedy of a loss: its effect by sums that can be added by hand, and a command that is there and works."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.quantize.scales.decisions import load_scales
from fp8q.validate.advice import remedy as remedy_module
from fp8q.validate.advice.remedy import LossSums, remedy_of
from fp8q.validate.sensitivity.document import KlAfter, Loss, Sensitivity


def of(*losses: tuple[str, float, dict[str, float]]) -> Sensitivity:
    return Sensitivity(
        windows=1,
        tokens=8,
        modules=[
            Loss(module="a", kind=kind, kl_nats=kl, measured=False, kl_after=KlAfter(**after))  # type: ignore[arg-type]
            for kind, kl, after in losses
        ],
    )


WEIGHTS, INPUTS = ("weight", 0.0112, {"gptq": 0.0028}), ("activation", 0.0176, {"two_terms": 0.00001})


def test_losses_are_added_by_kind() -> None:
    sums = LossSums.of(of(WEIGHTS, INPUTS, INPUTS, ("kv_cache", 0.001, {})))
    assert str(sums) == (
        "KL in nats a token, each tensor alone, summed: weights 0.0112, inputs 0.0352, the cache 0.001; together "
        "about 0.0474."
    )
    assert sums.inputs_in_two == pytest.approx(0.00002)


def test_the_remedy_says_effect_time_and_need_and_begins_with_the_run_s_own_command(
    calibrated_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remedy_module, "_minutes", lambda run: 2)
    remedy = remedy_of(calibrated_run, of(WEIGHTS, INPUTS))
    assert remedy is not None
    assert remedy.effect == (
        "inputs 0.0176 -> 1e-05 in two codes, weights 0.0112 -> 0.0028 by GPTQ, about 2 minutes; needs the plugin "
        "fp8q-vllm in vLLM"
    )
    # it was measured without second moments
    assert remedy.command.startswith("fp8q calibrate ")
    assert remedy.command.split(" --samples ")[1].split()[-4:] == ["--form", "tail:64", "--weight-rounding", "gptq"]
    inputs = remedy_of(calibrated_run, of(INPUTS))
    assert inputs is not None
    assert inputs.command == f"fp8q scales {calibrated_run.root} --form tail:64"


def test_a_change_that_gains_little_is_not_advised(calibrated_run: Run) -> None:
    exact = ("activation", 0.0002, {"two_terms": 0.0})
    assert remedy_of(calibrated_run, of(("weight", 0.01, {}), exact)) is None


def test_what_is_advised_can_be_done(demo_run: Run, tmp_path: Path, fp8q: Any, without_graphs: Any) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "again")))
    remedy = remedy_of(run, of(WEIGHTS, INPUTS))
    assert remedy is not None
    assert remedy.command == f"fp8q scales {run.root} --form tail:64 --weight-rounding gptq"
    with without_graphs():
        fp8q(*remedy.command.split()[1:])
    scales = load_scales(run)
    assert scales.tails
    assert {weight.rounding for weight in scales.weights.values()} == {"gptq"}


def test_gptq_without_second_moments_is_refused_by_its_reason(calibrated_run: Run) -> None:
    said = (
        f"--weight-rounding gptq: needs the second moments of inputs, which {calibrated_run.root} has not, since it "
        "was measured without them; use `fp8q calibrate` with the options of the run and --weight-rounding gptq"
    )
    with pytest.raises(InputError) as error:
        api.scales(calibrated_run.root, api.RescaleOptions(weight_rounding="gptq"))
    assert str(error.value) == said
