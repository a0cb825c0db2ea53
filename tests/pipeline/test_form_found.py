"""`fp8q run` finds a form that meets the limit, where one code an activation does not and none was asked for."""

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8q import api
from fp8q.calibrate.model.source import Source
from fp8q.core.errors import GateError
from fp8q.core.run import Run
from fp8q.options import ScaleOptions
from fp8q.quantize.scales.costliest import load_costliest
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.scheme import in_two_codes, tails_of
from fp8q.quantize.weights.channels import QuantizedWeight
from fp8q.quantize.weights.rounding_progress import CachedCodes
from fp8q.stages.forms import FormCandidates
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.pipeline.stages import COSTLIEST
from fp8q.stages.quantize import scale_options
from fp8q.stages.validate import validate
from fp8q.validate.accuracy import runtimes
from fp8q.validate.accuracy.compare import Forward
from fp8q.validate.accuracy.document import Accuracy, load_accuracy
from fp8q.validate.report.verdict import next_steps, report_verdict, standing
from fp8q.validate.tuning.choices import Mix
from fp8q.validate.tuning.form_choice import form_table, load_form_choice

pytestmark = pytest.mark.slow
#: Less than one code loses on this text, and more than other forms do.
LIMIT = 0.001


#: What a search leaves that does not say when it ran.
RESULTS = ("accuracy.json", "tokens.npz", "top_logits.npz", "forms.json", "scales.json")


def run(model: Path, texts: Any, out: Path, **more: Any) -> Run:
    options = {
        "calibrate": api.CalibrateOptions(samples=16, seq_len=256),
        "export": api.ExportOptions(graph=False),
        "validate": api.ValidateOptions(("bf16", "reference"), max_ppl_increase=LIMIT, max_tokens=8160),
    }
    return api.run(str(model), str(texts.calibration), out, str(texts.evaluation), api.RunOptions(**(options | more)))


@dataclass
class Counted:
    """A run of which a form was searched: the runtimes of the float model that were loaded, the weights that GPTQ
    rounded, each for a share that its input loses, and the mixes that the run was made in.
    """

    run: Run
    loaded: list[str] = field(default_factory=list)
    rounded: list[tuple[str, float]] = field(default_factory=list)
    mixes: list[Mix] = field(default_factory=list)


@pytest.fixture(scope="module")
def counted(demo_checkpoint: Path, demo_texts: Any, tmp_path_factory: pytest.TempPathFactory) -> Counted:
    counts = Counted(Run(tmp_path_factory.mktemp("forms") / "run"))
    float_model, keep, make = runtimes.float_model, CachedCodes.keep, FormCandidates.make

    def loading(source: Source, dtype: torch.dtype, device: str) -> Forward:
        counts.loaded.append(str(dtype))
        return float_model(source, dtype, device)

    def keeping(codes: CachedCodes, module: str, lost: float, weight: QuantizedWeight, unrevised: bool = False) -> None:
        counts.rounded.append((module, lost))
        keep(codes, module, lost, weight, unrevised)

    def making(candidates: FormCandidates, mix: Mix, of_any_input: bool = False) -> api.ScaleOptions:
        counts.mixes.append(mix)
        assert not (of_any_input and mix == candidates.first), "the run has its codes, and would be rounded again"
        return make(candidates, mix, of_any_input)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runtimes, "float_model", loading)
        patched.setattr(CachedCodes, "keep", keeping)
        patched.setattr(FormCandidates, "make", making)
        run(demo_checkpoint, demo_texts, counts.run.root)
    return counts


@pytest.fixture(scope="module")
def made(counted: Counted) -> Run:
    return counted.run


def test_the_run_ends_acceptable_and_tells_what_each_form_costs(made: Run) -> None:
    verdict = load_accuracy(made).verdict
    assert verdict is not None
    assert verdict.kind == "acceptable"
    choice = load_form_choice(made)
    assert choice.server == "vllm"  # no graph, and so no engine
    assert choice.met
    assert not choice.needs_plugin
    first, *others = choice.rows
    assert (first.form, first.weight_rounding, first.known) == ("one code", "nearest", "measured")
    assert first.perplexity_increase is not None
    assert first.perplexity_increase > LIMIT
    assert choice.chosen.perplexity_increase == verdict.perplexity_increase
    assert [row.chosen for row in choice.rows].count(True) == 1
    assert {"one code", "one code, scales of tokens", "weights alone in FP8"} <= {row.form for row in (first, *others)}
    assert (
        "is the cheapest that meets the limits (0.1 % perplexity, KL 0.00995 nats, 8 of 100 next tokens) for --for vllm"
    ) in form_table(choice).note
    assert "windows of the evaluation text, which the verdict is of too" in form_table(choice).note
    assert (first.flips or 0) > (choice.chosen.flips or 0) > 0
    stages = made.record().stages
    assert stages["forms"].seconds > stages["quantize"].seconds  # which is of the search


def test_where_no_form_meets_the_limit_nothing_is_advised_that_cannot(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    limits = api.ValidateOptions(("bf16", "reference"), max_kl=1e-9, max_tokens=4080)
    with pytest.raises(GateError, match=r"; `fp8q run` found no form that meets the limits; allow more with "):
        run(demo_checkpoint, demo_texts, tmp_path, validate=limits)
    made = Run(tmp_path)
    assert not load_form_choice(made).met
    steps = [step.command for step in next_steps(report_verdict(made), standing(made))]
    assert any("fp8q distill" in step for step in steps)
    assert not any("fp8q tune" in step for step in steps)
    with pytest.raises(GateError, match="`fp8q tune "):  # of other limits the search says nothing
        api.validate(made.root, options=replace(limits, max_kl=1e-8))
    assert any("fp8q tune" in step.command for step in next_steps(report_verdict(made), standing(made)))


def test_codes_that_gptq_rounds_weigh_first_tokens(made: Run) -> None:
    recipe = load_form_choice(made).recipe
    assert recipe.weight_rounding == "gptq"
    assert recipe.weigh_first_token
    assert made.first_tokens.name in made.record().stages["quantize"].inputs


def test_no_form_is_chosen_that_the_server_does_not_compute(made: Run) -> None:
    scales = load_scales(made)
    assert not in_two_codes(scales.forms)
    assert not tails_of(scales.forms)


def test_a_search_evaluates_the_float_model_once_and_rounds_a_weight_to_measure_and_once_more_for_what_is_chosen(
    counted: Counted,
) -> None:
    assert counted.loaded == ["torch.bfloat16"]
    assert len(counted.mixes) > 2  # that to begin with, the finest and the chosen one, at least
    times = Counter(module for module, _ in counted.rounded)
    assert times
    assert max(times.values()) <= 2
    assert len(counted.rounded) == len({*counted.rounded})
    assert not list(counted.run.root.glob(".*.work"))


def test_what_it_writes_is_what_each_form_evaluated_alone_gives(
    made: Run, demo_checkpoint: Path, demo_texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluated_alone(run: Run, notes: Notes, options: api.RunOptions) -> Accuracy:
        return validate(run, notes, None, options.validate)

    monkeypatch.setattr("fp8q.stages.forms._evaluated", evaluated_alone)
    alone = run(demo_checkpoint, demo_texts, tmp_path / "alone")
    for file in RESULTS:
        assert (alone.root / file).read_bytes() == (made.root / file).read_bytes(), file


def test_what_is_chosen_has_codes_for_its_own_inputs(
    made: Run, demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    """A run that is asked for this form gives the same checkpoint, and searches nothing."""
    form = {option.name: getattr(scale_options(made), option.name) for option in fields(ScaleOptions)}
    options = api.CalibrateOptions(samples=16, seq_len=256, **form)
    alone = run(demo_checkpoint, demo_texts, tmp_path / "alone", calibrate=options)
    assert "forms" not in alone.record().stages
    for path in (made.scales, *made.model.glob("*.safetensors")):
        assert (alone.root / path.relative_to(made.root)).read_bytes() == path.read_bytes(), path.name
    assert load_accuracy(alone).verdict == load_accuracy(made).verdict


def times_of_files(root: Path) -> dict[Path, int]:
    """When each file of a run was written, but for those that every call writes."""
    every_time = {".lock", "report.html", "report.ipynb", "run.json"}
    return {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file() and path.name not in every_time}


def test_another_call_does_nothing_again(made: Run, demo_checkpoint: Path, demo_texts: Any) -> None:
    before = times_of_files(made.root)
    run(demo_checkpoint, demo_texts, made.root)
    assert times_of_files(made.root) == before


def test_a_form_that_was_found_has_weights_in_bf16_by_its_own_codes(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    """So that the same command finds nothing to do."""
    options = api.CalibrateOptions(samples=16, seq_len=256, bf16_weights=0.05)
    out = run(demo_checkpoint, demo_texts, tmp_path / "run", calibrate=options)
    assert load_form_choice(out).recipe.weight_rounding == "gptq"
    assert out.facts(COSTLIEST).rounded is not None
    assert not load_scales(out).weights.keys() & set(load_costliest(out).modules)
    before = times_of_files(out.root)
    run(demo_checkpoint, demo_texts, out.root, calibrate=options)
    assert times_of_files(out.root) == before


def test_a_search_that_was_killed_while_it_judged_its_choice_ends_as_another(
    made: Run, demo_checkpoint: Path, demo_texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def killed(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:  # the first is of one code
            raise KeyboardInterrupt
        return validate(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr("fp8q.stages.forms.validate", killed)
        with pytest.raises(KeyboardInterrupt):
            run(demo_checkpoint, demo_texts, tmp_path / "killed")
    out = run(demo_checkpoint, demo_texts, tmp_path / "killed")
    assert load_form_choice(out) == load_form_choice(made)
    assert out.scales.read_bytes() == made.scales.read_bytes()
    assert not list(out.root.glob(".*.work"))


def test_a_form_that_is_asked_for_is_kept(made: Run, demo_checkpoint: Path, demo_texts: Any, tmp_path: Path) -> None:
    one = api.CalibrateOptions(samples=16, seq_len=256, form=("one",))
    with pytest.raises(GateError, match=r"^reference: perplexity is "):
        run(demo_checkpoint, demo_texts, tmp_path / "one", calibrate=one)
    out = Run(tmp_path / "one")
    assert not out.form_choice.exists()
    assert not out.moments.exists()
