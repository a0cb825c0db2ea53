"""The stage `forms` of `fp8q run`: find the cheapest form that meets the limits of the verdict, where one code an
activation loses more and no form was asked for.

Losses are predicted for every tensor from a few calibration windows (`sensitivity`). Of the forms that the server
computes, those that promise to meet the limit are made and measured on a few windows of the evaluation text; the one
chosen is then evaluated on all of it, as any run is, and where that still exceeds the limit a finer one is aimed at.
The statistics of the run serve all of them.

All results are stored in the stage's folder as they are computed, so that a killed call goes on from there. Codes that
GPTQ has rounded for one candidate serve the others where they are measured, whatever form the input has there; the one
chosen gets its own. What BF16 gives of the evaluated windows serves all forms that are evaluated on these.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import log1p
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..calibrate.measure.moments import SHRINKAGE
from ..calibrate.measure.statistics import load_record
from ..calibrate.model.source import Source, load_model
from ..calibrate.text.evaluation import prompt_of
from ..core.errors import GateError, InputError
from ..core.files import read_document, write_document
from ..core.memory import release_memory
from ..core.output_folder import Saved, WorkFolder
from ..core.reporter import SILENT
from ..core.run import Run
from ..core.run_writer import RunWriter
from ..options import FormChoiceOptions, RunOptions, ScaleOptions, Server
from ..quantize.reading.run_checkpoint import vocabulary_size
from ..quantize.reference.fp8_model import load_reference
from ..quantize.scales.decisions import load_scales
from ..quantize.scales.servers import need_the_plugin
from ..quantize.sensitivity.document import Sensitivity
from ..validate.accuracy.compare import BASELINE
from ..validate.accuracy.decision import loss_in_words
from ..validate.accuracy.document import Accuracy, load_accuracy
from ..validate.accuracy.limits import DEFAULT_RISE, Limits, RuntimeLoss, loss_and_limits, used
from ..validate.bench.document import gemm_shapes
from ..validate.tuning.choices import (
    KINDS,
    GroupForm,
    Mix,
    Price,
    RoundingName,
    Shape,
    groups_among,
    input_form,
    leaving_out,
    limited_to,
    served_forms,
    shape_of,
)
from ..validate.tuning.form_choice import (
    ALLOW_MORE,
    NO_FORM_MEETS,
    FormChoice,
    FormRecipe,
    FormRow,
    load_form_choice,
    mix_in_words,
)
from ..validate.tuning.form_search import group_losses, mix_options, uniform_forms
from ..validate.tuning.joint import measure_mix, reference_runner
from ..validate.tuning.search import Search
from ..validate.tuning.solve import EXACT, Problem, same
from .build_engine import build_engine
from .costliest import choose_costliest
from .export import export_or_note
from .gradients import run_gradients
from .measure import measure
from .other_text import evaluation, positions
from .pipeline.stage import Key, Notes, device
from .pipeline.stages import FORMS, MEASURE, QUANTIZE, FormFacts, QuantizeFacts
from .quantize import KnownCodes, quantize
from .sensitivity import predicted_losses
from .shared.sources import gemms_of, source_of
from .tune import batches_of, mix_of_run
from .validate import validate
from .validate_runtimes import evaluate_runtimes, go_by_layer

#: Options that decide what the search may choose where they are asked for, be it with their default values.
OBEYED = ("weigh_first_token", "weight_rounding", "bf16_weights")
#: Calibration windows that losses are predicted on.
PREDICTED_WINDOWS = 8
#: Windows of the evaluation text that a candidate is measured on, and the tokens of one at most.
FEW_WINDOWS = 8
FEW_CONTEXT = 512


@dataclass
class FormProgress(Saved):
    """The progress of a search: the verdict's numbers of the form to begin with, its mix, its groups' members, the
    KL in nats of measured mixes, the recipe of the form that was chosen last, and the share of the limits that a nat of
    KL uses.
    """

    first: dict[str, float] = field(default_factory=dict)
    first_mix: dict[str, Any] | None = None
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    chosen: dict[str, object] | None = None
    factor: float = 0.0


@dataclass(frozen=True)
class FormTask:
    """One search: the run, the options of `fp8q run`, and the `folder` with its progress."""

    run: Run
    notes: Notes
    options: RunOptions
    folder: Path
    progress: FormProgress


@dataclass(frozen=True)
class FormCandidates:
    """The candidates of a search. `shape`: of all that the server computes; `problem`: of what is chosen from; `first`:
    the mix of the run at the beginning.
    """

    task: FormTask
    source: Source
    problem: Problem
    shape: Shape
    first: Mix

    def options(self, mix: Mix) -> ScaleOptions:
        """The options of scales that make the run in the form of `mix`."""
        asked = self.task.options.calibrate
        if mix == self.first:
            return asked
        options = mix_options(self.shape.groups, mix, asked.tail_length, asked)
        if asked.asks("weigh_first_token"):
            return options
        return replace(options, weigh_first_token=options.needs_moments)

    def make(self, mix: Mix, of_any_input: bool = False) -> ScaleOptions:
        """Write scales and checkpoint in the form of `mix`, without graphs; return the options that give it.

        `of_any_input`: codes that GPTQ rounded for inputs in other forms serve too.
        """
        task = self.task
        options = self.options(mix)
        if options.needs_moments:
            measure(task.run, self.source, task.run.options(MEASURE), task.notes, moments=True)
            stream = task.options.calibrate.stream or None  # --no-stream is of measuring, which takes less memory
            run_gradients(task.run, self.source, options, task.notes, stream)
        codes = task.folder / "codes"
        codes.mkdir(exist_ok=True)
        known = KnownCodes(rounded=codes, of_any_input=of_any_input)
        gemms = gemms_of(self.source, options)
        if not of_any_input:  # a candidate keeps the weights in BF16 that the run has
            choose_costliest(task.run, self.source, gemms, options, task.notes, known)
        quantize(task.run, self.source, gemms, options, task.notes, known)
        return options


def candidates_of(task: FormTask) -> FormCandidates:
    """List the forms that the server computes, with their losses as predicted on a few calibration windows."""
    run = task.run
    source = source_of(task.run)
    asked = task.options.calibrate
    losses_file = task.folder / "losses.json"
    if not losses_file.is_file():
        folder = task.folder / "sensitivity"
        folder.mkdir(exist_ok=True)
        write_document(losses_file, predicted_losses(run, source, PREDICTED_WINDOWS, folder, task.notes))
        release_memory()
    sensitivity = read_document(losses_file, Sensitivity)
    groups, first = _beginning(task)
    on_codes = _on_codes(source, asked, task.options.server)
    losses = group_losses(sensitivity, on_codes, _roundings(asked), first.kv_cache)
    shape = shape_of(groups, gemm_shapes(run, vocabulary_size(run)), asked.tail_length)
    offered = limited_to(shape.groups, task.options.server, load_record(run).experts or {})
    if asked.asks("bf16_weights"):  # no more weights in BF16 than that share
        offered = tuple(leaving_out(group, "bf16") for group in offered)
    shape = replace(shape, groups=offered)
    # a tail loses as little of answers as two codes and weights alone, for less
    searched = tuple(
        leaving_out(group, *EXACT) if "tail" in group.forms and "tail" in on_codes else group for group in offered
    )
    problem = Problem(losses, replace(shape, groups=searched), Price(shape.plain, "both", 0), first)
    return FormCandidates(task, source, problem, shape, first)


def _beginning(task: FormTask) -> tuple[Mapping[str, Sequence[str]], Mix]:
    """Return the groups of the run as the search began with it, and their mix: a run whose search was killed may have
    another form by then.
    """
    progress = task.progress
    if progress.first_mix is None:
        scales = load_scales(task.run).of_text
        progress.groups = groups_among(load_record(task.run).groups.values(), scales.activations)
        progress.first_mix = asdict(mix_of_run(scales, progress.groups))
        progress.save()
    return progress.groups, Mix.from_stored(progress.first_mix)


def _on_codes(source: Source, asked: ScaleOptions, server: Server) -> tuple[GroupForm, ...]:
    """List the forms on codes that `server` computes and the model may have."""
    forms: list[GroupForm] = ["one_term"]
    for form in served_forms(server):
        if form not in ("one_term", "weights_alone", "bf16"):
            try:
                gemms_of(source, asked.in_one_form(input_form(form, asked.tail_length)))
            except InputError:  # Conv1D, or a model with no more positions than a tail
                continue
            forms.append(form)
    return tuple(forms)


def _roundings(asked: ScaleOptions) -> tuple[RoundingName, ...]:
    """List the roundings of weights to choose from: that of the run, and GPTQ where none was asked for."""
    if asked.asks("weight_rounding"):
        return (asked.weight_rounding,)
    return ("nearest", "gptq")


class FewWindows:
    """A few windows of the evaluation text, on which candidates are measured, and BF16's logits of them.

    Where memory does not hold a whole model they go layer by layer, as `validate` has them; windows that stand for
    decoded tokens need a whole one in `validate` too.
    """

    def __init__(self, candidates: FormCandidates):
        """Cut windows whose second halves stand for decoded tokens where a candidate has a tail."""
        run = candidates.task.run
        asked = candidates.task.options.validate
        window = min(FEW_CONTEXT, positions(run) or FEW_CONTEXT, asked.context or FEW_CONTEXT)
        window = min(window, load_record(run).corpus.seq_len)
        self.as_served = "tail" in candidates.problem.losses.on_codes
        prompt = prompt_of(window) if self.as_served else None
        few = replace(
            asked, context=window, stride=None, as_served=prompt, accumulator=None,
            max_tokens=FEW_WINDOWS * (window - (prompt or 0)),
        )  # fmt: skip
        text = evaluation(run, None, few, SILENT)
        self.candidates = candidates
        self.batches = batches_of(text.ids, text.scored)
        self.text = text
        self.evaluated = replace(few, runtimes=(BASELINE, "reference"))

    def kl(self, mix: Mix) -> float:
        """Measure KL(bf16 || run) in nats a token, of the run made in the form of `mix`; each mix is measured once."""
        task = self.candidates.task
        measured = task.progress.measured
        name = json.dumps(asdict(mix), sort_keys=True)
        if name not in measured:
            self.candidates.make(mix, of_any_input=mix != self.candidates.first)  # of which the run has codes
            by_layer = go_by_layer(self.evaluated.chosen, lambda: self.candidates.source, self.evaluated, Notes(SILENT))
            measured[name] = self._by_layer() if by_layer else self._whole()
            task.progress.save()
            release_memory()
        return measured[name]

    def _whole(self) -> float:
        """The KL of the run as it is now, by a whole model."""
        task = self.candidates.task
        bf16 = self._bf16
        reference = load_reference(task.run.model, "fast", torch.bfloat16, device())
        runner = reference_runner(reference, self.as_served)
        return measure_mix(lambda ids: bf16[id(ids)].to(device()), runner, self.batches, task.notes, "a form").kl_nats

    def _by_layer(self) -> float:
        """The same, layer by layer."""
        task = self.candidates.task
        known, here = (task.folder / name for name in ("few-bf16", "few"))
        known.mkdir(exist_ok=True)
        shutil.rmtree(here, ignore_errors=True)  # of another form, where a call was killed
        here.mkdir()
        outcome = evaluate_runtimes(task.run, self.text, self.evaluated, here, task.notes, known)
        shutil.rmtree(here)
        return float(np.nanmean(outcome.kl["reference"]))

    @cached_property
    def _bf16(self) -> dict[int, torch.Tensor]:
        """The identity of each batch of ids, and BF16's logits of it."""
        logits: dict[int, torch.Tensor] = {}
        model = load_model(self.candidates.source, torch.bfloat16, device())
        notes = self.candidates.task.notes
        with notes.track("Running BF16", len(self.batches), "batches") as advance, torch.inference_mode():
            for ids, _ in self.batches:
                logits[id(ids)] = model(input_ids=ids, use_cache=False).logits.bfloat16().cpu()
                advance(1)
        del model
        release_memory()
        return logits


#: The share of the limits that a form may use on a few windows: texts differ.
AIM = 0.9
#: A mix that uses this share of what is aimed at is not made cheaper.
CLOSE = 0.9
#: The most mixes that are measured for one aim.
ROUNDS = 4
#: A KL below which none is told from zero.
LEAST_NATS = 1e-9
#: Forms that are chosen and evaluated on all windows, at most.
ATTEMPTS = 3


def validate_acceptable(run: Run, notes: Notes, options: RunOptions) -> Accuracy:
    """Validate the run; where it is worse and no form was asked for, find one that is acceptable, and validate that.

    A search that was killed while it evaluated its choice is brought to its end. Raises GateError as `validate` does,
    where no form meets the limit.
    """
    lasting = _lasting_results(run)
    try:
        accuracy = _acceptable(run, notes, options)
    except (GateError, InputError):
        lasting.remove()
        raise
    lasting.remove()
    return accuracy


def _lasting_results(run: Run) -> WorkFolder:
    """The folder of what the float model gives of the evaluated windows, while forms of `run` are searched."""
    return WorkFolder(run.root, "float-model")


def _acceptable(run: Run, notes: Notes, options: RunOptions) -> Accuracy:
    try:
        accuracy = _evaluated(run, notes, options)
        gate = None
    except GateError as error:
        accuracy = load_accuracy(run)
        gate = error
    worse = accuracy.verdict is not None and accuracy.verdict.kind == "worse"
    # a form that was chosen before the call was killed may be broken: there is no loss to begin a search with
    if options.finds_form and accuracy.verdict is not None and loss_and_limits(accuracy.verdict) is not None:
        key = _key(run, options)
        if not FORMS.is_current(run, key) and (worse or _chosen_before(run, key)):
            return _find(run, notes, options, accuracy)
    if gate:
        raise gate
    return accuracy


def _evaluated(run: Run, notes: Notes, options: RunOptions) -> Accuracy:
    """Evaluate the present form of `run`, as `validate` does; what the float model gives serves other forms too."""
    return validate(run, notes, None, options.validate, _lasting_results(run) if options.finds_form else None)


def chosen_options(run: Run, options: RunOptions) -> ScaleOptions:
    """The options of scales for the form that was found for this run, now or in a killed call; those asked for where
    none was.
    """
    asked = options.calibrate
    if not options.finds_form or not {"corpus", "measure"} <= run.record().stages.keys():
        return asked
    key = _key(run, options)
    if FORMS.is_current(run, key):
        recipe = load_form_choice(run).recipe
    else:
        if (chosen := _chosen_before(run, key)) is None:
            return asked
        recipe = FormRecipe.model_validate(chosen)
    return replace(
        asked,
        form=tuple(recipe.form),
        skip=tuple(recipe.skip),
        weight_rounding=recipe.weight_rounding,  # type: ignore[arg-type]  # the names of roundings are the options'
        weigh_first_token=recipe.weigh_first_token,
    )


def _chosen_before(run: Run, key: Key[FormChoiceOptions, FormFacts]) -> dict[str, object] | None:
    """The recipe that a killed search had chosen last; None where no search was killed, or none was chosen."""
    folder = WorkFolder(run.root, FORMS.name).left(FORMS.work_key(key))
    if folder:
        return FormProgress.of(folder / "found.json").chosen
    return None


def _key(run: Run, options: RunOptions) -> Key[FormChoiceOptions, FormFacts]:
    stages = run.record().stages
    scales = QUANTIZE.dump(options.calibrate, QuantizeFacts(shrinkage=SHRINKAGE))
    digest = hashlib.sha256(json.dumps(scales, sort_keys=True).encode()).hexdigest()
    inputs = {"model": stages["measure"].inputs["model"], **stages["corpus"].outputs}
    asked = options.validate
    rise = options.validate.max_ppl_increase
    facts = FormFacts(
        limit=DEFAULT_RISE if rise is None else rise, max_kl=asked.max_kl, max_flips=asked.max_flips, scales=digest,
        asked=[name for name in OBEYED if options.calibrate.asks(name)] or None,
    )  # fmt: skip
    return Key(inputs, FormChoiceOptions(server=options.server), facts)


def _find(run: Run, notes: Notes, options: RunOptions, first: Accuracy) -> Accuracy:
    """Find the cheapest form that meets the limits, from the form whose accuracy is `first`; write `forms.json`."""
    key, (_, limits), start = _key(run, options), _loss_and_limits(first), time.monotonic()
    RunWriter(run).forget(FORMS.name)
    with FORMS.working(run, key, notes) as folder:
        task = FormTask(run, notes, options, folder, FormProgress.of(folder / "found.json"))
        if not task.progress.first:
            task.progress.first = _numbers(first)
            task.progress.save()
        begin = task.progress.first
        loss = RuntimeLoss(begin["rise"], begin["kl"], begin["flips"])
        notes.note(
            f"one code an activation loses too much: {loss_in_words(loss, limits)}; finding the cheapest form that "
            f"does not, for --for {options.server}; --form FORM chooses one"
        )
        candidates = candidates_of(task)
        search = Search(candidates.problem, FewWindows(candidates).kl, CLOSE, ROUNDS)
        mix, accuracy, gate = _settled(candidates, search, used(loss, limits), limits)
        choice = _choice(candidates, search, mix, accuracy, limits)
    with FORMS.writing(run, key, notes) as log:
        write_document(run.form_choice, choice)
        log.outputs.append(run.form_choice)
        log.seconds_before = time.monotonic() - start  # of this call, with the stages that it ran anew
    if gate:
        raise gate if choice.met else GateError(gate.subject, gate.fault, f"{NO_FORM_MEETS}; {ALLOW_MORE}")
    return accuracy


def _numbers(accuracy: Accuracy) -> dict[str, float]:
    """The loss of the runtime that decides, and the tokens that it is of."""
    verdict = accuracy.verdict
    tokens = accuracy.protocol.tokens
    assert verdict is not None, "`validate` of this version writes one, and files of others are made anew"
    numbers = {"rise": verdict.perplexity_increase, "kl": verdict.kl_nats, "flips": verdict.flips, "tokens": tokens}
    return {name: number or 0.0 for name, number in numbers.items()}


def _loss_and_limits(accuracy: Accuracy) -> tuple[RuntimeLoss, Limits]:
    """The loss of the runtime that decides, and the limits that it was held against."""
    known = loss_and_limits(accuracy.verdict) if accuracy.verdict else None
    assert known is not None, "`validate_acceptable` looked, and a verdict that is worse compares"
    return known


def _aim(task: FormTask) -> float:
    """The KL in nats that is aimed at on a few windows."""
    return AIM / task.progress.factor


def _settled(
    candidates: FormCandidates, search: Search, first: float, limits: Limits
) -> tuple[Mix, Accuracy, GateError | None]:
    """Choose and evaluate forms until one is acceptable, or nothing better is left; return the last one.

    `first`: the share of the limits that the form to begin with uses. A nat of KL is taken to use at least what it does
    on a text of the model's own, whose log-perplexity it raises by a nat.
    """
    task = candidates.task
    kl = search.attempt(candidates.first)
    least = 1 / max(min(log1p(limits.rise), limits.kl_nats), LEAST_NATS)
    task.progress.factor = max(task.progress.factor, least, first / max(kl, LEAST_NATS))
    settled: tuple[Mix, Accuracy, GateError | None] | None = None
    for _ in range(ATTEMPTS):
        mix, kl = search.within(_aim(task))
        if settled and same(mix, settled[0]):
            break
        settled = (mix, *_judged(candidates, mix))
        verdict = settled[1].verdict
        if verdict is None or verdict.kind != "worse":
            break
        share = used(*_loss_and_limits(settled[1]))
        task.progress.factor = max(task.progress.factor, share / max(kl, LEAST_NATS)) / CLOSE
        task.progress.save()
    assert settled, "one form is chosen and evaluated at least"
    return settled


def _judged(candidates: FormCandidates, mix: Mix) -> tuple[Accuracy, GateError | None]:
    """Make the run in the form of `mix`, and evaluate it as any run is."""
    task = candidates.task
    run = task.run
    notes = task.notes
    options = task.options
    chosen = candidates.make(mix)
    task.progress.chosen = _recipe(chosen).model_dump()
    task.progress.save()
    export_or_note(run, options.export, notes)
    if options.validate.engines:
        build_engine(run, notes, options.engine)
    try:
        return _evaluated(run, notes, options), None
    except GateError as gate:
        return load_accuracy(run), gate


def _recipe(options: ScaleOptions) -> FormRecipe:
    return FormRecipe(
        form=[*options.form], skip=[*options.skip], weight_rounding=options.weight_rounding,
        weigh_first_token=options.weigh_first_token, kv_cache=options.kv_cache,
    )  # fmt: skip


def _choice(candidates: FormCandidates, search: Search, chosen: Mix, accuracy: Accuracy, limits: Limits) -> FormChoice:
    """Describe the `chosen` mix, whose accuracy was measured, and what each other form would have cost."""
    task = candidates.task
    others = uniform_forms(candidates.shape, candidates.problem.losses, candidates.first)
    rows = [
        _row(candidates, search, candidates.first, task.progress.first),
        *(_row(candidates, search, mix) for mix in others if not same(mix, chosen)),
        _row(candidates, search, chosen, _numbers(accuracy)).model_copy(update={"chosen": True}),
    ]
    return FormChoice(
        server=task.options.server,
        limit=limits.rise,
        kl_limit_nats=limits.kl_nats,
        flips_limit=limits.flips,
        aim_kl_nats=_aim(task),
        met=accuracy.verdict is not None and accuracy.verdict.kind != "worse",
        needs_plugin=need_the_plugin(KINDS[form] for form in chosen.forms.values() if form in KINDS),
        recipe=_recipe(candidates.options(chosen)),
        rows=rows,
    )


def _row(candidates: FormCandidates, search: Search, mix: Mix, numbers: Mapping[str, float] | None = None) -> FormRow:
    """Describe a mix with its measured `numbers`, or as a few windows or the prediction have it."""
    shape = candidates.shape
    cost = shape.cost(mix)
    row = FormRow(
        form=mix_in_words(shape.groups, mix, candidates.task.options.calibrate.tail_length),
        weight_rounding=mix.rounding,
        kl_nats=search.expected(mix),
        known="predicted" if search.measured(mix) is None else "measured",
        weight_bytes=cost.weight_bytes,
        prefill_flops_ratio=cost.prefill_operations / shape.plain.prefill_operations,
    )
    if numbers is None:
        return row
    measured = {"known": "measured", "kl_nats": numbers["kl"], "tokens": int(numbers["tokens"])}
    return row.model_copy(update={**measured, "perplexity_increase": numbers["rise"], "flips": numbers["flips"]})
