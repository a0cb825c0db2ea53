"""The stage `sensitivity`: find the tensors that cause the loss."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from ..calibrate.measure.statistics import load_record
from ..calibrate.model.source import Source, load_model
from ..core.errors import InputError
from ..core.files import write_document
from ..core.output_folder import Saved
from ..core.run import Run
from ..options import SensitivityOptions
from ..quantize.reference.fp8_model import load_reference, open_codes
from ..quantize.scales.decisions import Scales, load_scales
from ..quantize.scales.scheme import tails_of
from ..quantize.sensitivity.document import (
    AS_IT_IS,
    Kind,
    Predicted,
    Sensitivity,
    Site,
    load_sensitivity,
    ranked_losses,
)
from ..quantize.sensitivity.gptq_prediction import Gathered, left_of_sites
from ..quantize.sensitivity.gradients import predict_sites, summed
from ..quantize.sensitivity.layerwise import PASSES, Layerwise, LayerwiseTask
from ..quantize.sensitivity.single_site import Float, Prefix
from ..quantize.sensitivity.site_quantizers import Quantizer, sites_of
from .corpus import load_tokens, spread_windows
from .gradients import LOSSES_PASS, TOKENS
from .measure import streams_layers
from .pipeline.stage import NO_FACTS, Key, Notes, device
from .pipeline.stages import SENSITIVITY
from .shared.adapters import note_base_alone
from .shared.model_files import checked_model
from .shared.sources import source_of

#: The time of a forward and backward pass with all errors, and of second moments of half of it, in forward passes
#: (`benchmarks/sensitivity.py`).
GRADIENT_PASSES = 5.0
#: The kinds of tensors whose losses are predicted.
KINDS: tuple[Kind, ...] = get_args(Kind)
WEIGHTS: tuple[Kind, ...] = ("weight",)
#: By default the worst sites are measured on this many batches, in the time of this many forward passes over them.
MEASURED_BATCHES = 1
MEASURING_PASSES = 1.0


@dataclass
class SensitivityProgress(Saved):
    """The losses so far, batch by batch."""

    predicted: list[Predicted] = field(default_factory=list)
    chosen: list[str] | None = None
    measured: list[dict[str, float]] = field(default_factory=list)


def sensitivity(run: Run, notes: Notes, options: SensitivityOptions) -> Sensitivity:
    """Measure the loss that each tensor of `run` causes alone, unless that is known, and write `sensitivity.json`."""
    run.refuse_stale("measure", "quantize")
    note_base_alone(run, "what each tensor costs is of", notes)
    run.require(run.calibration, "corpus")
    inputs = checked_model(run) | {run.calibration.name: run.record().stages["corpus"].outputs[run.calibration.name]}
    in_memory, streamed = (Key(inputs, replace(options, stream=stream), NO_FACTS) for stream in (False, True))
    if not SENSITIVITY.is_current(run, in_memory, *([] if options.stream is False else [streamed])):
        source = source_of(run)
        key = streamed if _streamed(run, source, options, notes) else in_memory
        with SENSITIVITY.writing(run, key, notes) as log, SENSITIVITY.working(run, key, notes) as folder:
            locate = _locate_streamed if key is streamed else _locate
            write_document(run.sensitivity, locate(run, source, options, folder, notes))
            log.outputs.append(run.sensitivity)
    return load_sensitivity(run)


def predicted_losses(
    run: Run, source: Source, windows: int, folder: Path, notes: Notes, kinds: Collection[Kind] = KINDS
) -> Sensitivity:
    """Predict the loss that each tensor of `run` of these `kinds` causes alone, by calibration `windows`, with the
    progress in `folder`; `sensitivity.json` is neither read nor written.

    No second moments are gathered for weights alone.
    """
    options = SensitivityOptions(windows=windows, measure=0)
    locate = _locate_streamed if _streamed(run, source, options, notes) else _locate
    return locate(run, source, options, folder, notes, kinds)


def _locate(
    run: Run, source: Source, options: SensitivityOptions, folder: Path, notes: Notes, kinds: Collection[Kind] = KINDS
) -> Sensitivity:
    scales = load_scales(run).of_text
    where = device()
    model = load_model(source, torch.float32, where).requires_grad_(False)
    quantizer = Quantizer(model, load_reference(run.model, "exact", torch.float32, where), scales)
    sites = _sites(run, scales, kinds)
    prefix = Prefix.from_model(quantizer, source, where)
    batches, windows = _batches(run, options, where)
    progress = SensitivityProgress.of(folder / "progress.json")
    _tell(quantizer, batches, sites, prefix, options.measure, notes)
    _predict(quantizer, sites, batches, progress, folder / "moments", notes)
    worst = _worst(sites, progress, prefix, options)
    measured = batches[:MEASURED_BATCHES] if options.measure is None else batches
    _measure(quantizer, worst, measured, prefix, progress, notes)
    prompt = quantizer.prompt(batches[0].shape[1])
    tokens = sum(len(ids) * (ids.shape[1] - prompt) for ids in batches)
    left = left_of_sites(quantizer, sites, Gathered(folder / "moments"), load_tokens(run, run.calibration).size)
    modules = ranked_losses(scales, sites, tokens, summed(progress.predicted), _over_all(progress), left)
    return Sensitivity(
        windows=windows, tokens=tokens, prompt=prompt if tails_of(scales.forms) else None, modules=modules
    )


def _streamed(run: Run, source: Source, options: SensitivityOptions, notes: Notes) -> bool:
    """Tell whether to go layer by layer, with a note: as the option says or a pass does; where sites are to be measured
    only if memory does not hold the whole.

    Raises InputError where sites are to be measured in that case.
    """
    window = load_tokens(run, run.calibration).shape[1]
    if not options.measure:
        return LOSSES_PASS.goes_by_layer(source, options.stream, window, notes)
    stream = streams_layers(options.stream, LOSSES_PASS.need(source, window), notes)
    if stream:
        raise InputError(
            f"--measure {options.measure}",
            "runs the whole model, and --stream has one decoder layer of it in memory",
            "leave it out, or give --no-stream",
        )
    return stream


def _sites(run: Run, scales: Scales, kinds: Collection[Kind]) -> list[Site]:
    return [site for site in sites_of(scales, load_record(run).groups) if site.kind in kinds]


def _locate_streamed(
    run: Run, source: Source, options: SensitivityOptions, folder: Path, notes: Notes, kinds: Collection[Kind] = KINDS
) -> Sensitivity:
    scales = load_scales(run).of_text
    where = device()
    sites = _sites(run, scales, kinds)
    ids, windows = _batches(run, options, "cpu")
    batches = {index: batch.numpy() for index, batch in enumerate(ids)}
    task = LayerwiseTask(sites, batches, load_tokens(run, run.calibration).size)
    stored = open_codes(run.model, "exact", torch.float32, where)
    layerwise = Layerwise(source, stored, scales, task, folder, where)
    prompt = layerwise.quantizer.prompt(ids[0].shape[1])
    notes.note(
        f"sensitivity: {len(sites)} tensors on {sum(map(np.size, batches.values())):,} tokens, layer by layer; about "
        f"{PASSES:.1f} forward passes; none is measured"
    )
    layerwise.run(notes.report, "Predicting")
    predicted = layerwise.results
    tokens = sum(len(batch) * (batch.shape[1] - prompt) for batch in ids)
    modules = ranked_losses(scales, sites, tokens, summed(predicted.predicted), {}, predicted.left)
    return Sensitivity(
        windows=windows, tokens=tokens, prompt=prompt if tails_of(scales.forms) else None, modules=modules
    )


def _batches(run: Run, options: SensitivityOptions, where: str) -> tuple[list[torch.Tensor], int]:
    """The windows of the prediction, spread evenly over the calibration windows, in batches of tokens; and their
    number.
    """
    ids = torch.from_numpy(spread_windows(load_tokens(run, run.calibration), options.windows)).to(where)
    return list(ids.split(max(1, TOKENS // ids.shape[1]))), len(ids)


def _tell(
    quantizer: Quantizer,
    batches: list[torch.Tensor],
    sites: list[Site],
    prefix: Prefix | None,
    measure: int | None,
    notes: Notes,
) -> None:
    """Note the expected time, extrapolated from one window."""
    begun = time.perf_counter()
    Float(quantizer, batches[0][:1], None, ())
    forward = (time.perf_counter() - begun) * sum(map(len, batches))
    if measure is None:
        measuring = (1 + MEASURING_PASSES) * min(1.0, MEASURED_BATCHES / len(batches))
    else:
        prefix_share = sum(prefix.share(site) for site in sites) / len(sites) if prefix else 1.0
        measuring = 1 + prefix_share * min(measure, len(sites)) if measure else 0.0
    passes = GRADIENT_PASSES + measuring
    notes.note(
        f"sensitivity: {len(sites)} tensors on {sum(ids.numel() for ids in batches):,} tokens; about {passes:.1f} "
        f"forward passes, some {passes * forward:,.0f} s here"
    )


def _predict(
    quantizer: Quantizer,
    sites: list[Site],
    batches: list[torch.Tensor],
    progress: SensitivityProgress,
    moments: Path,
    notes: Notes,
) -> None:
    """Predict the loss of all sites on the remaining batches, and gather `moments` in the same pass."""
    gathered = Gathered(moments)
    if gathered.batches > len(progress.predicted):
        progress.predicted.clear()  # a killed call added a batch that it did not predict
    del progress.predicted[max(gathered.batches, 0) :]  # or part of one, or had not yet written its last ones
    remaining = range(len(progress.predicted), len(batches))
    with notes.track(f"Predicting {len(sites)} tensors", len(remaining), "batches") as advance:
        for batch in remaining:
            draw = torch.Generator(batches[batch].device).manual_seed(batch)
            see = partial(gathered.add, batch)
            progress.predicted.append(predict_sites(quantizer, sites, batches[batch], draw, see))
            progress.save()
            advance(1)
    gathered.save()


def _worst(
    sites: list[Site], progress: SensitivityProgress, prefix: Prefix | None, options: SensitivityOptions
) -> list[Site]:
    """The sites to measure: the worst by prediction, as many as the option says, or as `MEASURING_PASSES` allow."""
    if progress.chosen is None:
        predicted = summed(progress.predicted)
        falling = sorted(sites, key=lambda site: -predicted.get(site.key, {}).get(AS_IT_IS, 0.0))
        if options.measure is not None:
            chosen = falling[: options.measure]
        else:
            chosen = []
            spent = 0.0
            for site in falling:
                spent += prefix.share(site) if prefix else 1.0
                if chosen and spent > MEASURING_PASSES:
                    break
                chosen.append(site)
        progress.chosen = [site.key for site in chosen]
        progress.save()
    return [site for site in sites if site.key in progress.chosen]


def _measure(
    quantizer: Quantizer,
    worst: list[Site],
    batches: list[torch.Tensor],
    prefix: Prefix | None,
    progress: SensitivityProgress,
    notes: Notes,
) -> None:
    """Measure the chosen sites on the remaining batches."""
    remaining = range(len(progress.measured), len(batches) if worst else 0)
    with notes.track(f"Measuring the worst {len(worst)}", len(remaining) * len(worst), "passes") as advance:
        for batch in remaining:
            exact = Float(quantizer, batches[batch], prefix, worst)
            losses: dict[str, float] = {}
            for site in worst:
                losses[site.key] = exact.divergence(site)
                advance(1)
            progress.measured.append(losses)
            progress.save()


def _over_all(progress: SensitivityProgress) -> dict[str, float]:
    """Measured site -> nats over all batches. A measurement of the first batches alone is extrapolated by the ratio of
    the predictions (ratio estimate: Cochran 1977, "Sampling Techniques", chapter 6).
    """
    measured = progress.measured
    every = summed(progress.predicted)
    there = summed(progress.predicted[: len(measured)])
    losses: dict[str, float] = {}
    for site in measured[0] if measured else ():
        nats = sum(batch[site] for batch in measured)
        guess = there.get(site, {}).get(AS_IT_IS, 0.0)
        losses[site] = nats * (every[site][AS_IT_IS] / guess if guess > 0 else len(progress.predicted) / len(measured))
    return losses
