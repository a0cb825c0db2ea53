"""The stage `tune`: the cheapest mix that meets a budget, chosen on calibration windows and measured on the evaluation
text; and `--apply`, which makes the run by it.

The calibration windows are split into three disjoint parts: weights are rounded by one (`gptq`'s second moments), the
mix is chosen by another, and the prediction is checked by the third. So rounding and choice are judged on other text
than they used.

All results are stored in the stage's folder as they are computed, so that a killed call goes on from there: second
moments, codes of a module, predictions of a batch, measurements of a mix.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import expm1, isfinite, log1p, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ..calibrate.measure.statistics import Statistics, load_statistics
from ..calibrate.model.gemms import attention_heads, gemm_modules, output_channel_axis
from ..calibrate.model.source import Source, load_model
from ..calibrate.text.evaluation import prompt_of
from ..core.commands import name_in_commands
from ..core.errors import GateError, InputError
from ..core.files import write_document
from ..core.reporter import SILENT
from ..core.run import Run
from ..core.run_writer import WorkFolder
from ..options import AT_RUN_TIME, BLOCK, ScaleOptions, TuneOptions, ValidateOptions
from ..quantize.reading.inherited_scales import inherited_scales
from ..quantize.reference.fp8_model import experts_around, load_reference
from ..quantize.reference.linear import CallPositions, Tail
from ..quantize.scales.cache_scales import kv_cache_scales
from ..quantize.scales.choose_scales import choose_scales
from ..quantize.scales.decisions import CACHE_PARTS, Scales, TensorScale, load_scales
from ..quantize.sensitivity.document import Predicted
from ..quantize.sensitivity.gradients import summed
from ..quantize.weights.rounding_progress import Rounded
from ..validate.tuning.candidates import Candidates, Kind, gather, round_weights
from ..validate.tuning.choices import (
    CACHES,
    COARSEST,
    ROUNDINGS,
    TWO_TERMS,
    Group,
    GroupForm,
    Mix,
    Price,
    RoundingName,
    Shape,
    form_of,
    limited_to,
    options_of,
)
from ..validate.tuning.document import (
    Change,
    Chosen,
    Interval,
    Recipe,
    Step,
    Tuning,
    Windows,
    changed,
    load_tuning,
    point,
)
from ..validate.tuning.gradients import predict_choices
from ..validate.tuning.joint import Measured, Runner, believed, measure_mixes, ratio
from ..validate.tuning.solve import Correction, Losses, Problem, same
from .corpus import load_tokens
from .export import export_or_note
from .first_tokens import weigh_first_tokens
from .measure import measure
from .other_text import evaluation
from .pipeline.stage import NO_FACTS, Key, Notes, alone, arithmetic, device
from .pipeline.stages import MEASURE, QUANTIZE, TUNE
from .quantize import compensations_of, quantize
from .shared.adapters import note_base_alone
from .shared.model_files import checked_model, export_options
from .shared.progress import Saved
from .shared.sources import gemms_of, source_of

if TYPE_CHECKING:
    Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]


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
    """The candidates, their predicted losses in nats a token, and the mix that the run has."""

    run: Run
    scales: Scales
    candidates: Candidates
    shape: Shape
    losses: Losses
    run_mix: Mix
    progress: TuneProgress

    def measured(self, where: str, mix: Mix, batches: "Batches", notes: Notes) -> Measured:
        """Measure the loss of `mix` on `batches`, once; `where` names the batches in the saved results."""
        name = json.dumps([where, asdict(mix)], sort_keys=True)
        return self._measured(name, lambda: self.candidates.runner(mix), batches, notes)

    def as_it_is(self, where: str, batches: "Batches", notes: Notes) -> Measured:
        """Measure the loss of the run's own checkpoint."""
        return self._measured(json.dumps([where, "as it is"]), self._checkpoint_runner, batches, notes)

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

    def _measured(self, name: str, runner: Callable[[], Runner], batches: "Batches", notes: Notes) -> Measured:
        if name not in self.progress.measured:
            exact = self.candidates.exact
            what = "as it is" if name.endswith('"as it is"]') else "a mix"
            self.progress.measured[name] = asdict(measure_mixes(exact, {what: runner()}, batches, notes)[what])
            self.progress.save()
        return Measured(**self.progress.measured[name])

    def _checkpoint_runner(self) -> Runner:
        reference = load_reference(self.run.model, "exact", torch.float32, device())

        def run(ids: torch.Tensor) -> torch.Tensor:
            with reference.answering(ids.shape[1] - prompt_of(ids.shape[1])):
                logits: torch.Tensor = reference.model(
                    input_ids=ids, past_key_values=reference.new_cache(), use_cache=True
                ).logits
            return logits

        return run


def predicted_candidates(
    run: Run,
    source: Source,
    rounding: Sequence[torch.Tensor],
    choosing: Sequence[torch.Tensor],
    folder: Path,
    notes: Notes,
) -> PredictedCandidates:
    """Choose scales and round weights in every way, by `gptq` on the windows `rounding`, and predict the loss of each
    choice on the windows `choosing` (each int64 [windows, seq_len]). Results are stored in `folder`.
    """
    scales = load_scales(run)
    options = run.options(QUANTIZE)
    candidates, codes, roundings = _candidates(run, source, scales, options, folder, notes)
    if "gptq" in roundings:
        gather(candidates, rounding, folder / "moments", notes)
    compensations = partial(compensations_of, run, load_statistics(run), options, folder / "moments", candidates.first)
    round_weights(candidates, codes, options.weight_method, compensations, notes)
    progress = TuneProgress.of(folder / "found.json")
    _predict(candidates, choosing, progress, notes)
    tokens = sum(len(ids) * (ids.shape[1] - candidates.prompt(ids.shape[1])) for ids in choosing)
    parts = {
        name: {which: nats / tokens for which, nats in variants.items()}
        for name, variants in summed(progress.predicted).items()
    }
    caches = CACHES if candidates.cache else CACHES[:1]
    run_mix = mix_of_run(scales, candidates.groups)
    losses = Losses(parts, roundings, caches, candidates.forms)
    shape = _shape(candidates, progress.values, options.tail_length)
    return PredictedCandidates(run, scales, candidates, shape, losses, run_mix, progress)


def _candidates(
    run: Run, source: Source, scales: Scales, options: ScaleOptions, folder: Path, notes: Notes
) -> tuple[Candidates, dict[Kind, Rounded], tuple[RoundingName, ...]]:
    """The scales of all choices, the places of their codes, and the available ways of rounding."""
    statistics = load_statistics(run)
    read = [tuple(name for name in members if name in scales.weights) for members in statistics.record.groups.values()]
    gemms = gemms_of(source, options)
    inputs: dict[GroupForm, Mapping[str, TensorScale]] = {}
    for form, asked in options_of(options, source.max_positions).items():
        choose = inherited_scales if asked.inherit else choose_scales
        inputs[form] = choose(source, statistics, gemms, asked).activations
    roundings = ROUNDINGS if _can_compensate(run, notes) else ROUNDINGS[:1]
    codes: dict[Kind, Rounded] = {}
    for rounding in roundings:
        for form in inputs:
            like = TWO_TERMS if form == "tail" else form  # whose weights are the same
            place = folder / (rounding if rounding == "nearest" else f"{rounding}-{like}")
            place.mkdir(exist_ok=True)
            codes[rounding, form] = Rounded(place)
        codes[rounding, "weights_alone"] = codes[rounding, TWO_TERMS]
    model = load_model(source, torch.float32, device()).requires_grad_(False)
    groups = {members[0]: members for members in read if members}
    call = CallPositions()
    of_tail = {
        name: Tail(tail, call, experts_around(model, name))
        for name, scale in inputs.get("tail", {}).items()
        if (tail := scale.form.tail) is not None
    }
    cache = _cache_scales(source, statistics, options, notes)
    return Candidates(model, groups, inputs, codes, cache, of_tail, call), codes, roundings


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


def _can_compensate(run: Run, notes: Notes) -> bool:
    """Tell whether `--apply` could round weights by `gptq`."""
    merged = run.facts(MEASURE).runs is not None
    if merged:
        notes.note("weights are rounded to nearest: the run is merged, and second moments are of one run")
    return not merged


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


def _shape(candidates: Candidates, values: Mapping[str, int], tail: int) -> Shape:
    """Return the sizes from which costs are computed; `tail`: the length of a tail."""

    def rows_and_columns(module: torch.nn.Module) -> tuple[int, int]:
        weight = module.weight
        assert isinstance(weight, torch.Tensor), "a GEMM has a weight"
        rows, columns = weight.movedim(output_channel_axis(module), 0).shape
        return rows, columns

    shapes = {name: rows_and_columns(module) for name, module in gemm_modules(candidates.model).items()}
    groups = tuple(
        Group(name, {member: shapes[member] for member in members}, tail) for name, members in candidates.groups.items()
    )
    taken = {member for group in groups for member in group.weights}
    return Shape(groups, sum(prod(shape) for name, shape in shapes.items() if name not in taken), values)


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


def batches_of(
    windows: npt.NDArray[np.int64], scored: npt.NDArray[np.bool_] | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
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
#: A mix that uses this share of the aim is not improved further.
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
        weigh_first_tokens(run, source, run.options(QUANTIZE), notes)  # for GPTQ; a stage, so before this one begins
        depends = {"inputs": inputs, "windows": options.windows, **arithmetic()}  # not on the budget
        with TUNE.writing(run, key, notes) as log, WorkFolder(run, TUNE.name).opened(depends, notes.note) as folder:
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
    options = asked_for(run, tuning.chosen)
    graph = export_options(run)
    if tuning.chosen.recipe.weight_rounding == "gptq":
        measure(run, source, run.options(MEASURE), notes, moments=True)
        weigh_first_tokens(run, source, options, notes)
    if any(change.choice == "rescaled" for change in tuning.changes):
        run.scales.unlink(missing_ok=True)
    quantize(run, source, gemms_of(source, options), options, notes)
    export_or_note(run, graph, notes)
    notes.note(f"{run.root}: made anew by the mix for this budget; `fp8q validate {run.root}` measures its runtimes")


def asked_for(run: Run, chosen: Chosen) -> ScaleOptions:
    """The options that `fp8q scales` would be given: the recipe over the run's own."""
    return chosen.recipe.over(run.options(QUANTIZE))


@dataclass
class Search:
    """The state of the search: the measured mixes, and the correction of predictions that follows from them."""

    prepared: PredictedCandidates
    problem: Problem
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    notes: Notes

    def measured(self, mix: Mix) -> Measured:
        """Measure the loss of `mix` on the windows for choosing; each mix is measured once."""
        return self.prepared.measured("choosing", mix, self.batches, self.notes)

    def correction(self, *mixes: Mix) -> Correction:
        """Correct predictions by measuring `mixes`."""
        return Correction((self.problem.losses.total(mix), self.measured(mix).kl_nats) for mix in mixes)

    def chosen(self, aim: float, anchors: list[Mix]) -> Mix:
        """The cheapest mix whose measured loss is at most `aim` nats, or the best where none meets it. `anchors` are
        measured mixes, and those measured here are appended.
        """
        best = self.problem.best()
        tried: list[Mix] = []
        for _ in range(ROUNDS):
            mix = self.problem.cheapest(self.correction(*anchors).to_predicted(aim)) or best
            if any(same(mix, other) for other in tried):
                break
            tried.append(mix)
            if not any(same(mix, other) for other in anchors):
                anchors.append(mix)
            if CLOSE * aim <= self.measured(mix).kl_nats <= aim:
                break
        within = [mix for mix in tried if self.measured(mix).kl_nats <= aim]
        if within:
            return min(within, key=lambda mix: self.problem.price.of_cost(self.problem.shape.cost(mix)))
        return min([*tried, best], key=lambda mix: self.measured(mix).kl_nats)


def _tune(run: Run, source: Source, options: TuneOptions, folder: Path, notes: Notes) -> Tuning:
    every = load_tokens(run, run.calibration)
    parts = parted(len(every), options.windows)
    rounding, choosing, held_out = (batches_of(every[part]) for part in parts)
    prepared = predicted_candidates(
        run, source, [ids for ids, _ in rounding], [ids for ids, _ in choosing], folder, notes
    )
    shape = prepared.shape
    run_mix = prepared.run_mix
    losses = prepared.losses
    experts = load_statistics(run).record.experts or {}
    shape = replace(shape, groups=limited_to(shape.groups, options.server, experts))
    problem = Problem(losses, shape, Price(shape.plain, options.prefer, every.shape[1]), run_mix)
    if problem.unknown:
        others = f" and {len(problem.unknown) - 1} more" if len(problem.unknown) > 1 else ""
        notes.note(
            f"no token of the {len(parts[1])} windows for choosing came by {problem.unknown[0]}{others}: what is not "
            "measured stays as it is; give more --windows, or calibrate on more text"
        )
    search = Search(prepared, problem, choosing, notes)
    _note_passes(run, len(parts[1]), len(parts[2]), options, notes)
    names = [group.name for group in shape.groups]
    worst = Mix(dict.fromkeys(names, COARSEST), losses.roundings[0], losses.caches[-1])
    as_it_is = prepared.as_it_is("choosing", choosing, notes)
    anchors = [worst, problem.finest()]
    factor = believed(*ratio(search.measured(worst)))
    chosen = None
    if (aim := _aim(options, factor)) is not None:
        chosen = search.chosen(aim, anchors)
    correction = search.correction(*anchors)
    frontier: list[Step] = []
    before = run_mix
    for mix in problem.frontier():
        expected = correction.to_measured(losses.total(mix))
        frontier.append(
            Step(**point(shape, mix, expected, False).model_dump(), changes=changed(shape.groups, before, mix))
        )
        before = mix
    tuning = Tuning(
        max_kl=options.max_kl,
        max_ppl_increase=options.max_ppl_increase,
        prefer=options.prefer,
        server=options.server,
        changes=[],
        run=point(shape, run_mix, as_it_is.kl_nats, True),
        frontier=frontier,
        prompt=prompt_of(every.shape[1]),
        windows=Windows(rounding=len(parts[0]), choosing=len(parts[1]), held_out=len(parts[2])),
        rise_over_kl=factor,
    )
    if chosen is None:
        return tuning
    return _judged(run, search, tuning, chosen, held_out)


def _note_passes(run: Run, choosing: int, held_out: int, options: TuneOptions, notes: Notes) -> None:
    """Note the passes over windows that measuring takes: of the run, the anchors and the mixes that are tried, then of
    the chosen one on other text. Each is of the float model and of a mix.
    """
    budget = options.max_kl is not None or options.max_ppl_increase is not None
    mixes = 3 + (ROUNDS + 1 if budget else 0)
    rest = ""
    if budget:
        prompt = prompt_of(load_tokens(run, run.calibration).shape[1])
        text = evaluation(run, None, ValidateOptions(as_served=prompt), SILENT)
        rest = (
            f", then of the chosen one on {held_out} held out and on {len(text.ids)} of the evaluation text "
            f"({text.protocol.tokens:,} tokens)"
        )
    notes.note(f"tune: {mixes} mixes at most are measured on {choosing} windows, in two passes each{rest}")


def _aim(options: TuneOptions, factor: float) -> float | None:
    """The KL in nats to aim at; None without a budget. `factor`: the rise of NLL for each nat of KL."""
    if options.max_kl is not None:
        return AIM * options.max_kl
    if options.max_ppl_increase is None:
        return None
    return AIM * log1p(options.max_ppl_increase) / factor


def _judged(
    run: Run, search: Search, tuning: Tuning, mix: Mix, held_out: list[tuple[torch.Tensor, torch.Tensor]]
) -> Tuning:
    """Measure the chosen `mix` on the held-out windows and on the evaluation text, and add the results to `tuning`."""
    prepared = search.prepared
    notes = search.notes
    shape = search.problem.shape
    text = evaluation(run, None, ValidateOptions(as_served=tuning.prompt), SILENT)
    predicted = search.measured(mix)
    elsewhere = prepared.measured("held out", mix, held_out, notes)
    there = prepared.measured("evaluation", mix, batches_of(text.ids, text.scored), notes)
    rise = tuning.rise_over_kl * predicted.kl_nats
    within = predicted.rise_within(rise, len(text.ids))
    their_within = there.rise_within(there.rise_nats)

    def interval(middle: float, half: float) -> Interval:
        known = isfinite(half)  # infinite for a single window
        return Interval(
            increase=expm1(middle),
            low=expm1(middle - half) if known else None,
            high=expm1(middle + half) if known else None,
        )

    chosen = Chosen(
        **point(shape, mix, predicted.kl_nats, True).model_dump(),
        recipe=Recipe.from_mix(shape.groups, mix),
        predicted_increase=interval(rise, within),
        held_out_kl_nats=elsewhere.kl_nats,
        measured_kl_nats=there.kl_nats,
        measured_increase=interval(there.rise_nats, their_within),
    )
    limit = tuning.max_kl if tuning.max_kl is not None else tuning.max_ppl_increase
    assert limit is not None, "there is a budget where something is chosen"
    of_kl = tuning.max_kl is not None
    met_here = (chosen.kl_nats if of_kl else chosen.predicted_increase.increase) <= limit
    met_there = (chosen.measured_kl_nats if of_kl else chosen.measured_increase.increase) <= limit
    rescaled = [Change(module=name, choice="rescaled") for name in prepared.rescaled(mix)]
    return tuning.model_copy(
        update={
            "met": met_here and met_there,
            "met_on_calibration": met_here,
            "changes": changed(shape.groups, prepared.run_mix, mix) + rescaled,
            "predicted_kl_nats": chosen.kl_nats,
            "measured_kl_nats": chosen.measured_kl_nats,
            "weight_bytes": chosen.weight_bytes,
            "cache_bytes": chosen.cache_bytes,
            "prefill_flops_ratio": chosen.prefill_flops_ratio,
            "chosen": chosen,
        }
    )
