"""The stage `costliest`: choose the weights that stay in BF16 since FP8 costs them most (`--bf16-weights`).

The loss of each weight is that which `sensitivity` predicts on a few calibration windows, of codes that are rounded to
nearest: so a checkpoint of those is written first, into a run in the work folder of the stage. The run itself keeps its
checkpoint and options until all is known. The choice does not depend on how weights are rounded, nor on the forms of
inputs, and other scales keep it.
"""

import os
from dataclasses import replace
from pathlib import Path

from ..calibrate.measure.statistics import load_record
from ..calibrate.model.source import Source
from ..core.errors import InputError
from ..core.files import write_document
from ..core.memory import release_memory
from ..core.run import Run
from ..options import ONE, ScaleOptions
from ..options.declare import Options
from ..quantize.scales.costliest import Costliest, costliest_weights
from ..quantize.scales.decisions import load_scales
from ..quantize.scales.policy import ModelGemms
from ..quantize.sensitivity.backward import check_chain
from ..quantize.weights.channels import joined_families
from .gradients import LOSSES_PASS
from .pipeline.stage import Key, Notes, device
from .pipeline.stages import CORPUS, COSTLIEST, MEASURE, CostliestFacts
from .quantize import quantize
from .sensitivity import WEIGHTS, predicted_losses

#: Calibration windows that losses are predicted on.
WINDOWS = 8


def check_costliest(source: Source, options: ScaleOptions) -> None:
    """Raise InputError where weights are to stay in BF16, and what each costs cannot be predicted: the model in FP32
    does not fit in memory, and is no chain of layers.
    """
    if options.bf16_weights and LOSSES_PASS.goes_by_layer(source):
        check_chain(
            source, device(), "give it memory for the whole in FP32, or --bf16-weights 0, which needs no losses"
        )


def choose_costliest(run: Run, source: Source, gemms: ModelGemms, options: ScaleOptions, notes: Notes) -> None:
    """Choose the weights that stay in BF16, unless none are to or they are known, and write `costliest.json`."""
    if not options.bf16_weights:
        return
    name = run.calibration.name
    inputs = {"model": source.fingerprint, name: run.record().stages["corpus"].outputs[name]}
    facts = CostliestFacts(
        bf16_weights=options.bf16_weights, weight_method=options.weight_method, skip=[*options.skip],
        only=[*options.only],
    )  # fmt: skip
    key = Key(inputs, Options(), facts)
    if COSTLIEST.is_current(run, key):
        return
    nearest = replace(
        options.in_one_form(ONE), weight_scale="channel", weight_rounding="nearest", bf16_weights=0.0, kv_cache="off",
        kv_scale="tensor", kv_skip=(), q_scale=False, layout="compressed-tensors",
    )  # fmt: skip
    with COSTLIEST.writing(run, key, notes) as log, COSTLIEST.working(run, key, notes) as folder:
        measured = _measured_run(run, folder / "nearest")
        quantize(measured, source, gemms, nearest, Notes(notes.report))
        costliest = _predicted(measured, source, gemms, options, folder, notes)
        write_document(run.costliest, costliest)
        log.outputs.append(run.costliest)
        _note_chosen(costliest, options.bf16_weights, notes)
    release_memory()


def _measured_run(run: Run, root: Path) -> Run:
    """Make a run at `root` that was measured as `run` was, and no more, unless a killed call has made it."""
    measured = Run(root)
    if not measured.exists():
        root.mkdir(exist_ok=True)
        for path in (run.calibration, run.statistics, run.statistics_json):
            (root / path.name).unlink(missing_ok=True)
            os.link(path, root / path.name)
        record = run.record()
        stages = {name: record.stages[name] for name in (CORPUS.name, MEASURE.name)}
        write_document(measured.record_file, record.model_copy(update={"stages": stages}))
    return measured


def _predicted(
    run: Run, source: Source, gemms: ModelGemms, options: ScaleOptions, folder: Path, notes: Notes
) -> Costliest:
    """Predict the loss of each weight of the run, whose codes are rounded to nearest, and choose the costliest.

    Raises InputError where these are all.
    """
    predicted = predicted_losses(run, source, WINDOWS, folder, notes, WEIGHTS)
    scales = load_scales(run).of_text
    record = load_record(run)
    losses = {loss.module: loss.kl_nats for loss in predicted.modules}
    numbers = {module: weight.channels * gemms.widths[module] for module, weight in scales.weights.items()}
    families = joined_families(numbers, record.groups.values())
    chosen = costliest_weights(families, losses, numbers, options.bf16_weights, record.experts or {})
    if sum(len(weights.modules) for weights in chosen) == len(numbers):
        raise InputError(
            f"--bf16-weights {100 * options.bf16_weights:g}%",
            f"holds all {len(numbers):,} weights in BF16, so there is nothing to quantize",
            "give a smaller share",
        )
    return Costliest(windows=predicted.windows, kl_nats=sum(losses.values()), weights=chosen)


def _note_chosen(costliest: Costliest, share: float, notes: Notes) -> None:
    """Note how many weights stay in BF16, for how many bytes, and the predicted loss that they save."""
    if not costliest.weights:
        notes.note(f"--bf16-weights {100 * share:g}%: no weights fit into so few bytes, and all are FP8")
        return
    saved = sum(weights.kl_nats for weights in costliest.weights) / costliest.kl_nats
    added = sum(weights.bytes_share for weights in costliest.weights)
    first = costliest.modules[0]
    count = len(costliest.modules)
    notes.note(
        f"--bf16-weights {100 * share:g}%: {count} {'weight stays' if count == 1 else 'weights stay'} in BF16 "
        f"({first}{' …' if count > 1 else ''}): {added:.1%} more bytes, without {saved:.0%} of what rounding all "
        "weights to nearest is predicted to lose"
    )
