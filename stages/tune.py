"""The stage `tune`: the cheapest mix that meets a budget, chosen on calibration windows and measured on the evaluation
text; and `--apply`, which makes the run by it.

The calibration windows are split into three disjoint parts: weights are rounded by one (`gptq`'s second moments), the
mix is chosen by another, and the prediction is checked by the third. So rounding and choice are judged on other text
than they used.

All results are stored in the stage's folder as they are computed, so that a killed call goes on from there: second
moments, codes of a module, predictions of a batch, measurements of a mix.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import log1p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..calibrate.measure.statistics import Statistics, load_record, load_statistics
from ..calibrate.model.gemms import attention_heads, gemm_modules, output_channel_axis
from ..calibrate.model.source import Source, load_model
from ..calibrate.text.evaluation import Evaluation, prompt_of
from ..core.commands import name_in_commands
from ..core.errors import GateError, InputError
from ..core.files import write_document
from ..core.output_folder import Saved, WorkFolder
from ..core.reporter import SILENT
from ..core.run import Run
from ..options import AT_RUN_TIME, BLOCK, ScaleOptions, TuneOptions, ValidateOptions
from ..quantize.reading.inherited_scales import inherited_scales
from ..quantize.reference.fp8_model import experts_around, load_reference
from ..quantize.reference.linear import CallPositions, Tail
from ..quantize.scales.cache_scales import kv_cache_scales
from ..quantize.scales.choose_scales import choose_scales
from ..quantize.scales.decisions import CACHE_PARTS, Scales, TensorScale, load_scales
from ..quantize.sensitivity.document import Predicted
from ..quantize.sensitivity.gradients import summed
from ..validate.tuning.candidates import Candidates, gather, round_weights
from ..validate.tuning.choices import (
    CACHES,
    COARSEST,
    ROUNDINGS,
    GroupForm,
    Mix,
    Price,
    Shape,
    form_of,
    groups_among,
    limited_to,
    options_of,
    shape_of,
)
from ..validate.tuning.document import (
    Change,
    Chosen,
    Interval,
    Point,
    Recipe,
    Step,
    Tuning,
    Windows,
    changed,
    load_tuning,
)
from ..validate.tuning.gradients import predict_choices
from ..validate.tuning.joint import Measured, believed, measure_mix, ratio, reference_runner
from ..validate.tuning.search import Search
from ..validate.tuning.solve import Losses, Problem
from .corpus import load_tokens
from .costliest import choose_and_quantize
from .export import export_or_note
from .gradients import run_gradients
from .measure import measure
from .other_text import evaluation
from .pipeline.stage import NO_FACTS, Key, Notes, alone, arithmetic, device
from .pipeline.stages import MEASURE, QUANTIZE, TUNE
from .quantize import compensations_of
from .shared.adapters import note_base_alone
from .shared.model_files import checked_model, export_options
from .shared.sources import gemms_of, source_of

#: Token ids int64 [windows, seq_len], and which of them are scored, bool of the same shape.
Batches = list[tuple[torch.Tensor, torch.Tensor]]
#: The parts that calibration windows are split into.
PARTS = ("rounding", "choosing", "held_out")
#: The most tokens that run through the model at a time, in whole windows.
TOKENS = 1024


@dataclass
class TuneProgress(Saved):
    """The predictions and measurements so far."""

    predicted: list[Predicted] = field(default_factory=list)
    values: dict[str, int] = field(default_factory=dict)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class PredictedCandidates:
    """The candidates, their predicted losses in nats a token, the mix that the run has, and the batches of each part of
    its text, on which mixes are measured.
    """

    run: Run
    scales: Scales
    candidates: Candidates
    shape: Shape
    losses: Losses
    run_mix: Mix
    progress: TuneProgress
    batches: dict[str, Batches]
    notes: Notes

    def measured(self, part: str, mix: Mix | None) -> Measured:
        """Measure the loss of `mix` on a part of the text, once; None: of the run's own checkpoint."""
        what = "as it is" if mix is None else "a mix"
        name = json.dumps([part, what if mix is None else asdict(mix)], sort_keys=True)
        if name not in self.progress.measured:
            if mix is None:
                runner = reference_runner(load_reference(self.run.model, "exact", torch.float32, device()))
            else:
                runner = self.candidates.runner(mix)
            measured = measure_mix(self.candidates.exact, runner, self.batches[part], self.notes, what)
            self.progress.measured[name] = asdict(measured)
            self.progress.save()
        return Measured(**self.progress.measured[name])

    def rescaled(self, mix: Mix) -> list[str]:
        """The tensors that keep their form in `mix`, but whose scale differs from the one that would be chosen now."""
        rescaled = [
            name
            for name, form in mix.forms.items()
            if form in self.candidates.inputs
            and form == self.run_mix.forms[name]
            and self.candidates.inputs[form][name].scale != self.scales.activations[name].scale
        ]
        return rescaled + [
            name
            for name, scale in self.candidates.cache.items()
            if mix.codes(name)
            and name in self.scales.kv_cache
            and not np.array_equal(scale.cpu(), self.scales.kv_cache[name].stored)
        ]


def predicted_candidates(
    run: Run, source: Source, batches: dict[str, Batches], folder: Path, notes: Notes
) -> PredictedCandidates:
    """Choose scales and round weights in every way, by `gptq` on the `batches` for rounding, and predict the loss of
    each choice on those for choosing. Results are stored in `folder`.
    """
    scales = load_scales(run).of_text
    options = run.options(QUANTIZE)
    statistics = load_statistics(run)
    candidates = _candidates(run, source, scales, statistics, folder, notes)
    if "gptq" in candidates.roundings:
        gather(candidates, [ids for ids, _ in batches["rounding"]], folder / "moments", notes)
    compensations = partial(compensations_of, run, statistics, options, folder / "moments", candidates.first)
    round_weights(candidates, options.weight_method, compensations, notes)
    progress = TuneProgress.of(folder / "found.json")
    choosing = [ids for ids, _ in batches["choosing"]]
    _predict(candidates, choosing, progress, notes)
    tokens = sum(len(ids) * (ids.shape[1] - candidates.prompt(ids.shape[1])) for ids in choosing)
    parts = {
        name: {which: nats / tokens for which, nats in variants.items()}
        for name, variants in summed(progress.predicted).items()
    }
    caches = CACHES if candidates.cache else CACHES[:1]
    losses = Losses(parts, candidates.roundings, caches, candidates.forms)
    shapes = {
        name: tuple(module.get_parameter("weight").movedim(output_channel_axis(module), 0).shape)
        for name, module in gemm_modules(candidates.model).items()
    }
    shape = shape_of(candidates.groups, shapes, options.tail_length, progress.values)
    run_mix = mix_of_run(scales, candidates.groups)
    return PredictedCandidates(run, scales, candidates, shape, losses, run_mix, progress, batches, notes)


def _candidates(
    run: Run, source: Source, run_scales: Scales, statistics: Statistics, folder: Path, notes: Notes
) -> Candidates:
    """The scales of all choices, and the folder of their codes; without `gptq`, with a note, where `--apply` could not
    round by it.
    """
    options = run.options(QUANTIZE)
    gemms = gemms_of(source, options)
    inputs: dict[GroupForm, Mapping[str, TensorScale]] = {}
    for form, asked in options_of(options, source.max_positions).items():
        choose = inherited_scales if asked.inherit else choose_scales
        inputs[form] = choose(source, statistics, gemms, asked).activations
    roundings = ROUNDINGS
    if run.facts(MEASURE).runs is not None:
        notes.note("weights are rounded to nearest: the run is merged, and second moments are of one run")
        roundings = ROUNDINGS[:1]
    model = load_model(source, torch.float32, device()).requires_grad_(False)
    call = CallPositions()
    of_tail = {
        name: Tail(tail, call, experts_around(model, name))
        for name, scale in inputs.get("tail", {}).items()
        if (tail := scale.form.tail) is not None
    }
    groups = groups_among(statistics.record.groups.values(), run_scales.weights)
    cache = _cache_scales(source, statistics, options, notes)
    return Candidates(model, groups, inputs, roundings, folder, cache, of_tail, call)


def _cache_scales(
    source: Source, statistics: Statistics, options: ScaleOptions, notes: Notes
) -> dict[str, torch.Tensor]:
    """The scales of every cache tensor; empty, with a note, where one of them has none."""
    heads = attention_heads(source.text_config) if options.kv_scale == "head" else {}
    try:
        chosen = kv_cache_scales(statistics, options.clip, heads=heads)
    except InputError as error:
        notes.note(f"the cache stays in BF16: {error}")
        return {}
    return {name: torch.from_numpy(scale.stored).to(device()) for name, scale in chosen.items()}


def _predict(candidates: Candidates, choosing: Sequence[torch.Tensor], progress: TuneProgress, notes: Notes) -> None:
    """Predict all choices on the batches that are not done."""
    remaining = range(len(progress.predicted), len(choosing))
    with notes.track("Predicting what each choice loses", len(remaining), "batches") as advance:
        for batch in remaining:
            draw = torch.Generator(choosing[batch].device).manual_seed(batch)
            losses, progress.values = predict_choices(candidates, choosing[batch], draw)
            progress.predicted.append(losses)
            progress.save()
            advance(1)


def mix_of_run(scales: Scales, groups: Mapping[str, Sequence[str]]) -> Mix:
    """The mix of a run with these `scales`."""
    parts = {"".join(sorted(parts)): kv_cache for kv_cache, parts in CACHE_PARTS.items()}
    return Mix(
        {name: form_of(scales.activations.get(name)) for name in groups},
        next(iter(scales.weights.values())).rounding,
        parts[scales.cache_parts],
        tuple(scales.bf16_caches),
    )


def parted(count: int, windows: int) -> tuple[list[int], list[int], list[int]]:
    """Split `count` calibration windows into those for rounding weights, for choosing the mix, and for checking the
    prediction.

    The last two have `windows` each, but at most a quarter of all, spread evenly. Raises InputError for fewer than four
    windows.
    """
    if count < 4:
        raise InputError(
            "fp8q tune",
            f"needs 4 calibration windows, some to choose by and others to check by, and the run has {count}",
            "calibrate on more text, or with a smaller --seq-len",
        )
    half = min(windows, count // 4)
    spread = np.linspace(0, count - 1, 2 * half).round().astype(int).tolist()
    choosing = spread[::2]
    held_out = spread[1::2]
    return [index for index in range(count) if index not in {*spread}], choosing, held_out


def batches_of(windows: npt.NDArray[np.int64], scored: npt.NDArray[np.bool_] | None = None) -> Batches:
    """Split windows int64 [windows, seq_len], and the mask of their `scored` tokens (None: those that are not read as a
    prompt), into batches.
    """
    where = device()
    ids = torch.from_numpy(np.ascontiguousarray(windows)).to(where)
    counted = torch.arange(ids.shape[1], device=where).ge(prompt_of(ids.shape[1])).expand_as(ids)
    if scored is not None:
        counted = torch.from_numpy(scored).to(where)
    size = max(1, TOKENS // ids.shape[1])
    return list(zip(ids.split(size), counted.split(size), strict=True))


#: The share of the budget that a mix may use by prediction: texts differ.
AIM = 0.9
#: A mix that uses this share of the aim is not made cheaper.
CLOSE = 0.95
#: The most mixes that are measured in the search.
ROUNDS = 5


def tune(run: Run, notes: Notes, options: TuneOptions, apply: bool) -> Tuning:
    """Find the cheapest mix for the budget of `options`, where it is not current; `apply` it where it meets the budget.

    Raises InputError for `apply` without a budget, and where the source checkpoint is missing.
    """
    check_budget(options, apply)
    tuned = find_mix(run, options, notes)
    if apply:
        with alone(run):
            apply_mix(run, tuned, notes)
    return tuned


def find_mix(run: Run, options: TuneOptions, notes: Notes) -> Tuning:
    """Find the cheapest mix for the budget of `options`, unless that is known, and write `tune.json`."""
    run.refuse_stale("measure", "quantize")
    if form := next((form for form in AT_RUN_TIME if load_scales(run).in_form(form)), None):
        raise InputError(
            run.root,
            f"has {'GEMMs' if form == BLOCK else 'inputs'} in {form} form, which `fp8q tune` has no candidates of",
            f"`fp8q scales {name_in_commands(run.root)} --form one` gives them static scales, to be tuned",
        )
    if load_scales(run).tensor_weights:
        raise InputError(
            run.root,
            "has weights with one scale, which `fp8q tune` has no candidates of",
            f"`fp8q scales {name_in_commands(run.root)} --weight-scale channel` gives each output channel its own",
        )
    note_base_alone(run, "the budget is held by", notes)
    stages = run.record().stages
    for path, made_by in ((run.calibration, "corpus"), (run.statistics, "measure")):
        run.require(path, made_by)
    inputs = stages["corpus"].outputs | stages["measure"].outputs | checked_model(run)
    key = Key(inputs, options, NO_FACTS)
    if not TUNE.is_current(run, key):
        source = source_of(run)
        run_gradients(run, source, run.options(QUANTIZE), notes)  # for GPTQ; a stage, so before this one begins
        depends = {"inputs": inputs, "windows": options.windows, **arithmetic()}  # not on the budget
        work = WorkFolder(run.root, TUNE.name)
        with TUNE.writing(run, key, notes) as log, work.opened(depends, notes.note) as folder:
            write_document(run.tuning, _tune(run, source, options, folder, notes))
            log.outputs.append(run.tuning)
    return load_tuning(run)


def check_budget(options: TuneOptions, apply: bool) -> None:
    """Raise InputError where there is no budget, and so no mix to `apply`."""
    if apply and options.max_kl is None and options.max_ppl_increase is None:
        raise InputError("--apply", "there is no budget to choose for", "give --max-ppl-increase or --max-kl")


def check_met(tuning: Tuning) -> None:
    """Raise GateError where the budget is not met."""
    if tuning.chosen is None or tuning.met:
        return
    if tuning.max_kl is not None:
        asked = f"--max-kl {tuning.max_kl:g}"
        predicted = f"a KL of {tuning.chosen.kl_nats:.3g} nats"
        measured = f"{tuning.chosen.measured_kl_nats:.3g}"
        less = f"--max-kl {AIM * tuning.max_kl:.3g}"
    else:
        assert tuning.max_ppl_increase is not None, "one of the two is the budget"
        asked = f"--max-ppl-increase {tuning.max_ppl_increase:.3%}"
        predicted = f"a rise of perplexity by {tuning.chosen.predicted_increase.increase:.3%}"
        measured = f"{tuning.chosen.measured_increase.increase:.3%}"
        less = f"--max-ppl-increase {AIM * tuning.max_ppl_increase:.3%}"
    if tuning.met_on_calibration:
        raise GateError(
            asked,
            f"{predicted} is predicted of the mix and {measured} measured on the evaluation text, which is more",
            f"ask for less, such as {less}, so that there is room for what texts differ by",
        )
    raise GateError(asked, f"nothing that fp8q can choose meets it; the best there is has {predicted}", "allow more")


def apply_mix(run: Run, tuning: Tuning, notes: Notes) -> None:
    """Make the checkpoint and graphs of `run` by the chosen mix, which meets its budget.

    Second moments for `gptq` are measured where the run has none: on all calibration windows, as `calibrate` does.
    Scales of the run that differ from the choice are chosen again, even if the run's options are those of the mix.
    """
    if tuning.chosen is None or not tuning.met:
        return
    source = source_of(run)
    options = tuning.chosen.recipe.over(run.options(QUANTIZE))
    graph = export_options(run)
    if tuning.chosen.recipe.weight_rounding == "gptq":
        measure(run, source, run.options(MEASURE), notes, moments=True)
        run_gradients(run, source, options, notes)
    if any(change.choice == "rescaled" for change in tuning.changes):
        run.scales.unlink(missing_ok=True)
    choose_and_quantize(run, source, gemms_of(source, options), options, notes)
    export_or_note(run, graph, notes)
    notes.note(f"{run.root}: made anew by the mix for this budget; `fp8q validate {run.root}` measures its runtimes")


def _tune(run: Run, source: Source, options: TuneOptions, folder: Path, notes: Notes) -> Tuning:
    every = load_tokens(run, run.calibration)
    parts = dict(zip(PARTS, parted(len(every), options.windows), strict=True))
    windows = Windows(**{name: len(numbers) for name, numbers in parts.items()})
    batches = {name: batches_of(every[numbers]) for name, numbers in parts.items()}
    prepared = predicted_candidates(run, source, batches, folder, notes)
    losses = prepared.losses
    groups = limited_to(prepared.shape.groups, options.server, load_record(run).experts or {})
    shape = replace(prepared.shape, groups=groups)
    problem = Problem(losses, shape, Price(shape.plain, options.prefer, every.shape[1]), prepared.run_mix)
    _note_unknown(problem.unknown, windows, notes)
    prompt = prompt_of(every.shape[1])
    text = None
    if options.max_kl is not None or options.max_ppl_increase is not None:
        text = evaluation(run, None, ValidateOptions(as_served=prompt), SILENT)
        batches["evaluation"] = batches_of(text.ids, text.scored)
    _note_passes(windows, text, notes)
    as_it_is = prepared.measured("choosing", None)
    search = Search(problem, lambda mix: prepared.measured("choosing", mix).kl_nats, CLOSE, ROUNDS)
    worst = Mix(dict.fromkeys((group.name for group in groups), COARSEST), losses.roundings[0], losses.caches[-1])
    search.anchor(worst, problem.finest())
    factor = believed(*ratio(prepared.measured("choosing", worst)))
    judged: dict[str, object] = {"changes": []}
    if text is not None:
        judged = _judged(prepared, search, options, factor, len(text.ids))
    return Tuning.model_validate({
        "max_kl": options.max_kl,
        "max_ppl_increase": options.max_ppl_increase,
        "prefer": options.prefer,
        "server": options.server,
        "run": Point.of(shape, prepared.run_mix, as_it_is.kl_nats, True),
        "frontier": _frontier(search),
        "prompt": prompt,
        "windows": windows,
        "rise_over_kl": factor,
        **judged,
    })  # fmt: skip


def _note_unknown(unknown: Sequence[str], windows: Windows, notes: Notes) -> None:
    """Note the groups and cache tensors whose loss is `unknown`, if any."""
    if unknown:
        others = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        notes.note(
            f"no token of the {windows.choosing} windows for choosing came by {unknown[0]}{others}: what is not "
            "measured stays as it is; give more --windows, or calibrate on more text"
        )


def _note_passes(windows: Windows, text: Evaluation | None, notes: Notes) -> None:
    """Note the passes over windows that measuring takes: of the run, the anchors and the mixes that are tried, then of
    the chosen one on other text, where there is a budget. Each is of the float model and of a mix.
    """
    mixes = 3
    rest = ""
    if text is not None:
        mixes += ROUNDS + 1
        rest = (
            f", then of the chosen one on {windows.held_out} held out and on {len(text.ids)} of the evaluation text "
            f"({text.protocol.tokens:,} tokens)"
        )
    notes.note(f"tune: {mixes} mixes at most are measured on {windows.choosing} windows, in two passes each{rest}")


def _frontier(search: Search) -> list[Step]:
    """Describe the frontier, with the losses that are expected by what was measured."""
    problem = search.problem
    groups = problem.shape.groups
    correction = search.correction()
    frontier: list[Step] = []
    before = problem.run_mix
    for mix in problem.frontier():
        expected = correction.to_measured(problem.losses.total(mix))
        frontier.append(Step.of(problem.shape, mix, expected, False, changes=changed(groups, before, mix)))
        before = mix
    return frontier


def _judged(
    prepared: PredictedCandidates, search: Search, options: TuneOptions, factor: float, texts: int
) -> dict[str, object]:
    """Choose a mix for the budget of `options`, measure it on windows held out and on the `texts` windows of the
    evaluation text, and return the fields of `Tuning` that say so. `factor`: the rise of NLL for each nat of KL.
    """
    problem = search.problem
    shape = problem.shape
    of_kl = options.max_kl is not None
    limit = options.max_kl if options.max_kl is not None else options.max_ppl_increase
    assert limit is not None, "there is a budget where something is chosen"
    aim = AIM * (limit if of_kl else log1p(limit) / factor)
    mix, kl_nats = search.within(aim)
    if kl_nats > aim and search.measure(problem.best()) < kl_nats:
        mix = problem.best()
    predicted, elsewhere, there = (prepared.measured(part, mix) for part in ("choosing", "held_out", "evaluation"))
    rise = factor * predicted.kl_nats
    chosen = Chosen.of(
        shape, mix, predicted.kl_nats, True,
        recipe=Recipe.from_mix(shape.groups, mix),
        predicted_increase=Interval.around(rise, predicted.rise_within(rise, texts)),
        held_out_kl_nats=elsewhere.kl_nats,
        measured_kl_nats=there.kl_nats,
        measured_increase=Interval.around(there.rise_nats, there.rise_within(there.rise_nats)),
    )  # fmt: skip
    met_here = (chosen.kl_nats if of_kl else chosen.predicted_increase.increase) <= limit
    met_there = (chosen.measured_kl_nats if of_kl else chosen.measured_increase.increase) <= limit
    rescaled = [Change(module=name, choice="rescaled") for name in prepared.rescaled(mix)]
    return {
        "met": met_here and met_there,
        "met_on_calibration": met_here,
        "changes": changed(shape.groups, prepared.run_mix, mix) + rescaled,
        "predicted_kl_nats": chosen.kl_nats,
        **chosen.model_dump(include={"measured_kl_nats", "weight_bytes", "cache_bytes", "prefill_flops_ratio"}),
        "chosen": chosen,
    }
