"""The stage `costliest`: choose the weights that stay in BF16 since FP8 costs them most (`--bf16-weights`).

The loss of each weight is that which `sensitivity` predicts on a few calibration windows, of the codes that GPTQ gives
it; of codes that are rounded to nearest, where weights are rounded so, or can be rounded by GPTQ only as one block or
one layer after the other. So a checkpoint of those is written first, into a run in the work folder of the stage, and
the codes of GPTQ are handed on. The run itself keeps its checkpoint and options until all is known.
"""

import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ..calibrate.measure.statistics import load_record
from ..calibrate.model.source import Source
from ..core.files import remove, write_document
from ..core.memory import release_memory
from ..core.output_folder import WorkFolder
from ..core.run import Run
from ..options import BLOCK, ONE, ScaleOptions
from ..options.declare import Options
from ..quantize.scales.costliest import Costliest, costliest_weights
from ..quantize.scales.decisions import load_scales
from ..quantize.scales.policy import ModelGemms
from ..quantize.sensitivity.backward import check_chain
from ..quantize.weights.channels import joined_families
from .gradients import LOSSES_PASS
from .pipeline.stage import Key, Notes, arithmetic, device
from .pipeline.stages import CORPUS, COSTLIEST, FIRST_TOKENS, MEASURE, OUTPUTS, CostliestFacts
from .quantize import ALL_LEARNED, KnownCodes, identity, quantize, rounding_key
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


def chosen_by_gptq(options: ScaleOptions) -> bool:
    """Tell whether `options` choose weights by the loss of the codes that GPTQ gives them."""
    blocks = any(rule.form == BLOCK for rule in options.form_rules)
    return options.bf16_weights > 0 and options.needs_moments and not blocks


def choose_costliest(
    run: Run, source: Source, gemms: ModelGemms, options: ScaleOptions, notes: Notes, known: KnownCodes = ALL_LEARNED
) -> None:
    """Choose the weights that stay in BF16, unless none are to or they are known, and write `costliest.json`; `known`:
    codes that are not made again, and get those of GPTQ.
    """
    if not options.bf16_weights:
        return
    key = _key(run, source, options)
    if COSTLIEST.is_current(run, key):
        return
    by_gptq = chosen_by_gptq(options)
    rounded = _all_rounded(options, by_gptq)
    with COSTLIEST.writing(run, key, notes) as log, COSTLIEST.working(run, key, notes) as folder:
        measured = _measured_run(run, folder / "rounded", by_gptq)
        quantize(measured, source, gemms, rounded, Notes(notes.report), known if by_gptq else ALL_LEARNED)
        release_memory()  # of GPTQ, before memory decides how losses are predicted
        costliest = _predicted(measured, source, gemms, options, folder, notes)
        write_document(run.costliest, costliest)
        log.outputs.append(run.costliest)
        _note_chosen(costliest, options.bf16_weights, by_gptq, notes)
    release_memory()


def is_chosen(run: Run, source: Source, options: ScaleOptions) -> bool:
    """Tell whether the weights that `options` leave in BF16 are known, in a run that was measured."""
    return not options.bf16_weights or COSTLIEST.is_current(run, _key(run, source, options))


def choose_and_quantize(
    run: Run, source: Source, gemms: ModelGemms, options: ScaleOptions, notes: Notes, known: KnownCodes = ALL_LEARNED
) -> None:
    """Choose the weights that stay in BF16, where any are to, and write the checkpoint: codes that GPTQ rounds for the
    choice, where none are `known`, are the checkpoint's too.
    """
    work = WorkFolder(run.root, "rounded")
    with ExitStack() as stack:
        if known.rounded is None and chosen_by_gptq(options):
            key = {"rounded": _rounded_identity(run, source, options), **arithmetic()}
            folder = work.left(key) if is_chosen(run, source, options) else stack.enter_context(work.until_done(key))
            known = replace(known, rounded=folder)
        choose_costliest(run, source, gemms, options, notes, known)
        quantize(run, source, gemms, options, notes, known)
    work.remove()


def _key(run: Run, source: Source, options: ScaleOptions) -> Key[Options, CostliestFacts]:
    name = run.calibration.name
    inputs = {"model": source.fingerprint, name: run.record().stages["corpus"].outputs[name]}
    facts = CostliestFacts(
        bf16_weights=options.bf16_weights, weight_method=options.weight_method, skip=[*options.skip],
        only=[*options.only],
        rounded=_rounded_identity(run, source, options) if chosen_by_gptq(options) else None,
    )  # fmt: skip
    return Key(inputs, Options(), facts)


def _rounded_identity(run: Run, source: Source, options: ScaleOptions) -> str:
    """SHA-256 of what the codes by GPTQ of all weights depend on."""
    return identity(rounding_key(run, source, _all_rounded(options, by_gptq=True)))


def _all_rounded(options: ScaleOptions, by_gptq: bool) -> ScaleOptions:
    """The options by which all weights have codes: by GPTQ as `options` say, or rounded to nearest."""
    alone = replace(
        options, bf16_weights=0.0, kv_cache="off", kv_scale="tensor", kv_skip=(), q_scale=False,
        layout="compressed-tensors",
    )  # fmt: skip
    return alone if by_gptq else replace(alone.in_one_form(ONE), weight_scale="channel", weight_rounding="nearest")


def _measured_run(run: Run, root: Path, by_gptq: bool) -> Run:
    """Make a run at `root` that was measured as `run` was, and no more, with all that GPTQ reads, or without; unless a
    killed call has made it.
    """
    measured = Run(root)
    if not measured.exists():
        root.mkdir(exist_ok=True)
        for_gptq = (run.first_tokens, run.moments, run.output_moments) if by_gptq else ()
        for path in (run.calibration, run.statistics, run.statistics_json, *for_gptq):
            remove(root / path.name)
            if path.is_dir():
                shutil.copytree(path, root / path.name, copy_function=os.link)
            elif path.exists():
                os.link(path, root / path.name)
        record = run.record()
        read = {CORPUS.name, MEASURE.name} | ({FIRST_TOKENS.name, OUTPUTS.name} if by_gptq else set())
        stages = {name: stage for name, stage in record.stages.items() if name in read}
        write_document(measured.record_file, record.model_copy(update={"stages": stages}))
    return measured


def _predicted(
    run: Run, source: Source, gemms: ModelGemms, options: ScaleOptions, folder: Path, notes: Notes
) -> Costliest:
    """Predict the loss of each weight of the run, all of whose weights have codes, and choose the costliest."""
    predicted = predicted_losses(run, source, WINDOWS, folder, notes, WEIGHTS)
    scales = load_scales(run).of_text
    record = load_record(run)
    losses = {loss.module: loss.kl_nats for loss in predicted.modules}
    numbers = {module: weight.channels * gemms.widths[module] for module, weight in scales.weights.items()}
    families = joined_families(numbers, record.groups.values())
    chosen = costliest_weights(families, losses, numbers, options.bf16_weights, record.experts or {})
    return Costliest(windows=predicted.windows, kl_nats=sum(losses.values()), weights=chosen)


def _note_chosen(costliest: Costliest, share: float, by_gptq: bool, notes: Notes) -> None:
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
        f"weights {'by GPTQ' if by_gptq else 'to nearest'} is predicted to lose"
    )
