"""Prepare the candidates of `tune`: scales, codes and the predicted loss of every choice.

All results are stored in the stage's folder as they are computed, so that a killed call goes on from there: second
moments, codes of a module, predictions of a batch, measurements of a mix.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ..calibrate.measure.statistics import Statistics, load_statistics
from ..calibrate.model.products import attention_heads, matrix_products, output_channel_axis
from ..calibrate.model.source import Source, load_model
from ..core.errors import InputError
from ..core.run import Run
from ..options import ScaleOptions
from ..quantize.reference.fp8_model import experts_around, load_reference
from ..quantize.reference.linear import CallPositions, Tail
from ..quantize.scales.cache_scales import kv_cache_scales
from ..quantize.scales.decisions import CACHE_PARTS, Scales, TensorScale, load_scales
from ..quantize.weights.rounding_progress import Rounded
from ..validate.accuracy.perplexity import prompt_of
from ..validate.sensitivity.document import Predicted
from ..validate.sensitivity.gradients import summed
from ..validate.tuning.candidates import Candidates, Kind, gather, round_weights
from ..validate.tuning.choices import CACHES, ROUNDINGS, Form, Group, Mix, RoundingName, Shape, form_of, options_of
from ..validate.tuning.gradients import predict_choices
from ..validate.tuning.joint import Measured, Runner, measure_mixes
from ..validate.tuning.solve import Losses
from .pipeline.stages import MEASURE, QUANTIZE
from .pipeline.steps import Notes, device
from .quantize import choose_scales
from .shared.resuming import Saved
from .shared.sources import products_of

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
    own: Mix
    progress: TuneProgress

    def measured(self, where: str, mix: Mix, batches: "Batches", notes: Notes) -> Measured:
        """Measure the loss of `mix` on `batches`, once; `where` names the batches in the saved results."""
        name = json.dumps([where, asdict(mix)], sort_keys=True)
        return self._measured(name, lambda: self.candidates.runner(mix), batches, notes)

    def as_it_is(self, where: str, batches: "Batches", notes: Notes) -> Measured:
        """Measure the loss of the run's own checkpoint."""
        return self._measured(json.dumps([where, "as it is"]), self._own_runner, batches, notes)

    def rescaled(self, mix: Mix) -> list[str]:
        """The tensors that keep their form in `mix`, but whose scale differs from the one that would be chosen now."""
        found = [
            name
            for name, form in mix.forms.items()
            if form in self.candidates.inputs
            and form == self.own.forms[name]
            and self.candidates.inputs[form][name].scale != self.scales.activations[name].scale
        ]
        return found + [
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

    def _own_runner(self) -> Runner:
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
    scales, options = load_scales(run), run.options(QUANTIZE)
    candidates, codes, roundings = _candidates(run, source, scales, options, folder, notes)
    if "gptq" in roundings:
        gather(candidates, rounding, folder / "moments", notes)
    round_weights(candidates, codes, options.weight_method, folder / "moments", notes)
    progress = TuneProgress.of(folder / "found.json")
    _predict(candidates, choosing, progress, notes)
    tokens = sum(len(ids) * (ids.shape[1] - candidates.prompt(ids.shape[1])) for ids in choosing)
    parts = {
        name: {which: nats / tokens for which, nats in variants.items()}
        for name, variants in summed(progress.predicted).items()
    }
    caches = CACHES if candidates.cache else CACHES[:1]
    own = own_mix(scales, candidates.groups)
    losses = Losses(parts, roundings, caches, candidates.forms)
    shape = _shape(candidates, progress.values, options.tail_length)
    return PredictedCandidates(run, scales, candidates, shape, losses, own, progress)


def _candidates(
    run: Run, source: Source, scales: Scales, options: ScaleOptions, folder: Path, notes: Notes
) -> tuple[Candidates, dict[Kind, Rounded], tuple[RoundingName, ...]]:
    """The scales of all choices, the places of their codes, and the available ways of rounding."""
    statistics = load_statistics(run)
    read = [tuple(name for name in members if name in scales.weights) for members in statistics.record.groups.values()]
    products, inputs = products_of(source, options), dict["Form", "Mapping[str, TensorScale]"]()
    for form, asked in options_of(options, source.max_positions).items():
        inputs[form] = choose_scales(source, statistics, products, asked).activations
    roundings = ROUNDINGS if _can_compensate(run, notes) else ROUNDINGS[:1]
    codes: dict[Kind, Rounded] = {}
    for rounding in roundings:
        for form in inputs:
            like = "two_terms" if form == "tail" else form  # whose weights are the same
            place = folder / (rounding if rounding == "nearest" else f"{rounding}-{like}")
            place.mkdir(exist_ok=True)
            codes[rounding, form] = Rounded(place)
        codes[rounding, "weights_alone"] = codes[rounding, "two_terms"]
    model = load_model(source, torch.float32, device()).requires_grad_(False)
    groups, call = {members[0]: members for members in read if members}, CallPositions()
    tails = {
        name: Tail(scale.tail, call, experts_around(model, name))
        for name, scale in inputs.get("tail", {}).items()
        if scale.tail is not None
    }
    cache = _cache_scales(source, statistics, options, notes)
    return Candidates(model, groups, inputs, codes, cache, tails, call), codes, roundings


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
            found, progress.values = predict_choices(candidates, choosing[batch], draw)
            progress.predicted.append(found)
            progress.save()
            advance(1)


def _shape(candidates: Candidates, values: Mapping[str, int], tail: int) -> Shape:
    """Return the sizes from which costs are computed; `tail`: the length of a tail."""

    def rows_and_columns(module: torch.nn.Module) -> tuple[int, int]:
        weight = module.weight
        assert isinstance(weight, torch.Tensor), "a matrix product has a weight"
        rows, columns = weight.movedim(output_channel_axis(module), 0).shape
        return rows, columns

    shapes = {name: rows_and_columns(module) for name, module in matrix_products(candidates.model).items()}
    groups = tuple(
        Group(name, {member: shapes[member] for member in members}, tail) for name, members in candidates.groups.items()
    )
    taken = {member for group in groups for member in group.weights}
    return Shape(groups, sum(prod(shape) for name, shape in shapes.items() if name not in taken), values)


def own_mix(scales: Scales, groups: Mapping[str, Sequence[str]]) -> Mix:
    """The mix of a run with these `scales`."""
    parts = {"".join(sorted(parts)): kv_cache for kv_cache, parts in CACHE_PARTS.items()}
    return Mix(
        {name: form_of(scales.activations.get(name)) for name in groups},
        next(iter(scales.weights.values())).rounding,
        parts[scales.cache_parts],
        tuple(dict.fromkeys(name.rpartition(".")[0] for name in scales.wide_cache)),
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
    each = min(windows, count // 4)
    spread = np.linspace(0, count - 1, 2 * each).round().astype(int).tolist()
    choosing, held_out = spread[::2], spread[1::2]
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
