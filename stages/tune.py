"""The stage `tune`: the cheapest mix that meets a budget, chosen on calibration windows and measured on the evaluation
text; and `--apply`, which makes the run by it.

The calibration windows are split into three disjoint parts: weights are rounded by one (`gptq`'s second moments), the
mix is chosen by another, and the prediction is checked by the third. So rounding and choice are judged on other text
than they used.
"""

from dataclasses import dataclass, replace
from math import expm1, isfinite, log1p
from pathlib import Path

import torch

from ..calibrate.measure.statistics import load_statistics
from ..calibrate.model.source import Source
from ..core.commands import name_in_commands
from ..core.errors import GateError, InputError
from ..core.files import write_document
from ..core.run import Run
from ..options import ScaleOptions, TuneOptions, ValidateOptions
from ..quantize.scales.decisions import load_scales
from ..validate.accuracy.perplexity import prompt_of
from ..validate.tuning.choices import COARSEST, Mix, Price, limited_to
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
from ..validate.tuning.joint import Measured, believed, ratio
from ..validate.tuning.solve import Correction, Problem, same
from .corpus import load_tokens
from .export import export_or_note
from .measure import measure
from .other_text import evaluation
from .pipeline.stage import NO_FACTS, Key
from .pipeline.stages import MEASURE, QUANTIZE, TUNE
from .pipeline.steps import Notes, alone, arithmetic
from .quantize import quantize
from .shared.adapters import note_base_alone
from .shared.model_files import checked_model, export_options
from .shared.sources import products_of, source_of
from .tune_candidates import PredictedCandidates, batches_of, parted, predicted_candidates

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
    if load_scales(run).dynamic_inputs:
        raise InputError(
            run.root,
            "has inputs in dynamic form, which `fp8q tune` has no candidates of",
            f"`fp8q scales {name_in_commands(run.root)} --form one` gives them static scales, to be tuned",
        )
    note_base_alone(run, "the budget is held by", notes)
    written = {name: record.outputs for name, record in run.record().stages.items()}
    for path, made_by in ((run.calibration, "corpus"), (run.statistics, "measure")):
        run.require(path, made_by)
    inputs = written["corpus"] | written["measure"] | checked_model(run)
    key = Key(inputs, options, NO_FACTS)
    if not TUNE.is_current(run, key):
        source = source_of(run)
        depends = {"inputs": inputs, "windows": options.windows, **arithmetic()}  # not on the budget
        with TUNE.writing(run, key, notes) as log, run.work(TUNE.name, depends, note=notes.note) as folder:
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
        asked, predicted = f"--max-kl {tuning.max_kl:g}", f"a KL of {tuning.chosen.kl_nats:.3g} nats"
        measured, less = f"{tuning.chosen.measured_kl_nats:.3g}", f"--max-kl {AIM * tuning.max_kl:.3g}"
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
    source, recipe = source_of(run), tuning.chosen.recipe
    options, graph = asked_for(run, tuning.chosen), export_options(run)
    if recipe.weight_rounding == "gptq":
        measure(run, source, run.options(MEASURE), notes, moments=True)
    if any(change.choice == "rescaled" for change in tuning.changes):
        run.scales.unlink(missing_ok=True)
    quantize(run, source, products_of(source, options), options, notes)
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
        best, tried = self.problem.best(), list["Mix"]()
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
    shape, own_mix = prepared.shape, prepared.own
    losses, experts = prepared.losses, load_statistics(run).record.experts or {}
    shape = replace(shape, groups=limited_to(shape.groups, options.server, experts))
    problem = Problem(losses, shape, Price(shape.plain, options.prefer, every.shape[1]), own_mix)
    if problem.unknown:
        others = f" and {len(problem.unknown) - 1} more" if len(problem.unknown) > 1 else ""
        notes.note(
            f"no token of the {len(parts[1])} windows for choosing came by {problem.unknown[0]}{others}: what is not "
            "measured stays as it is; give more --windows, or calibrate on more text"
        )
    search = Search(prepared, problem, choosing, notes)
    names = [group.name for group in shape.groups]
    worst = Mix(dict.fromkeys(names, COARSEST), losses.roundings[0], losses.caches[-1])
    as_it_is = prepared.as_it_is("choosing", choosing, notes)
    anchors, factor = [worst, problem.finest()], believed(*ratio(search.measured(worst)))
    chosen = None
    if (aim := _aim(options, factor)) is not None:
        chosen = search.chosen(aim, anchors)
    correction = search.correction(*anchors)
    frontier, before = list[Step](), own_mix
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
        run=point(shape, own_mix, as_it_is.kl_nats, True),
        frontier=frontier,
        prompt=prompt_of(every.shape[1]),
        windows=Windows(rounding=len(parts[0]), choosing=len(parts[1]), held_out=len(parts[2])),
        rise_over_kl=factor,
    )
    return tuning if chosen is None else _judged(run, search, tuning, chosen, held_out)


def _aim(options: TuneOptions, factor: float) -> float | None:
    """The KL in nats to aim at; None without a budget. `factor`: the rise of NLL for each nat of KL."""
    if options.max_kl is not None:
        return AIM * options.max_kl
    return None if options.max_ppl_increase is None else AIM * log1p(options.max_ppl_increase) / factor


def _judged(
    run: Run, search: Search, tuning: Tuning, mix: Mix, held_out: list[tuple[torch.Tensor, torch.Tensor]]
) -> Tuning:
    """Measure the chosen `mix` on the held-out windows and on the evaluation text, and add the results to `tuning`."""
    prepared, notes, shape = search.prepared, search.notes, search.problem.shape
    text = evaluation(run, None, ValidateOptions(as_served=tuning.prompt), notes)
    predicted = search.measured(mix)
    elsewhere = prepared.measured("held out", mix, held_out, notes)
    there = prepared.measured("evaluation", mix, batches_of(text.ids, text.scored), notes)
    rise = tuning.rise_over_kl * predicted.kl_nats
    within, their_within = predicted.rise_within(rise, len(text.ids)), there.rise_within(there.rise_nats)

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
            "changes": changed(shape.groups, prepared.own, mix) + rescaled,
            "predicted_kl_nats": chosen.kl_nats,
            "measured_kl_nats": chosen.measured_kl_nats,
            "weight_bytes": chosen.weight_bytes,
            "cache_bytes": chosen.cache_bytes,
            "prefill_flops_ratio": chosen.prefill_flops_ratio,
            "chosen": chosen,
        }
    )
