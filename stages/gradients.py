"""The stages `first-tokens` and `outputs`: gather what GPTQ takes from gradients.

Some calibration windows run forward and back once through the model in FP32. The first weighs the first token of
windows in the second moments (`--weigh-first-token`), in memory or layer by layer. The second gathers the gradients at
outputs by which codes are revised (`--weigh-outputs`), layer by layer whatever memory there is: H_O of all GEMMs
together is larger than the weights.
"""

import os
import shutil
from pathlib import Path

import torch

from ..calibrate.measure.hidden_states import Batches
from ..calibrate.model.gemms import observed_gemms
from ..calibrate.model.memory import weight_bytes
from ..calibrate.model.source import Source, load_model
from ..core.files import read_document, replacing, write_document
from ..core.memory import release_memory
from ..core.run import Run
from ..options import ScaleOptions
from ..options.declare import Options
from ..quantize.sensitivity.backward import by_layer_on_cpu
from ..quantize.sensitivity.output_gradients import (
    FirstTokens,
    GradientSquares,
    LayerwiseFirstTokens,
    OutputMoments,
    WatchedGemms,
    added,
    batch_squares,
)
from .corpus import in_batches, load_tokens, spread_windows
from .measure import beyond
from .pipeline.stage import NO_FACTS, Key, Notes, device
from .pipeline.stages import FIRST_TOKENS, OUTPUTS, OutputFacts

#: Calibration windows by which first tokens are weighed, evenly spaced.
WINDOWS = 16
#: The most tokens that run through the model at a time, in whole windows.
TOKENS = 1024
#: The memory of the model in FP32 and of the tensors of one batch, as a multiple of the model's in BF16.
COPIES = 3


def run_gradients(run: Run, source: Source, options: ScaleOptions, notes: Notes, stream: bool | None = None) -> None:
    """Gather what GPTQ takes from gradients, where `options` ask for it and it is not done: `first_tokens.json` and
    `output_moments/`. `stream`: weigh first tokens layer by layer.
    """
    weigh_first_tokens(run, source, options, notes, stream)
    if options.weigh_outputs:
        _weigh_outputs(run, source, options.weigh_outputs, notes)


def gradients_by_layer(source: Source, stream: bool | None) -> bool:
    """Tell whether first tokens are weighed layer by layer: as the option `stream` says, or where memory does not hold
    the model in FP32, or it is large and on a CPU.
    """
    if stream is None:
        return bool(beyond(COPIES * weight_bytes(source))) or by_layer_on_cpu(source, device())
    return stream


def weigh_first_tokens(
    run: Run, source: Source, options: ScaleOptions, notes: Notes, stream: bool | None = None
) -> None:
    """Weigh the first token of the calibration windows of `run` for GPTQ where `options` ask for that, unless it is
    done, and write `first_tokens.json`.
    """
    if not options.weigh_first_token:
        return
    name = run.calibration.name
    inputs = {"model": source.fingerprint, name: run.record().stages["corpus"].outputs[name]}
    key = Key(inputs, Options(), NO_FACTS)
    if FIRST_TOKENS.is_current(run, key):
        return
    release_memory()  # of the measurement, before memory decides how this runs
    windows = spread_windows(load_tokens(run, run.calibration, source.text_config.vocab_size), WINDOWS)
    size = max(1, TOKENS // windows.shape[1])
    batches = in_batches(windows, size)
    with FIRST_TOKENS.writing(run, key, notes) as log:
        if gradients_by_layer(source, stream):
            with FIRST_TOKENS.working(run, key, notes) as folder:
                layerwise = LayerwiseFirstTokens(source, batches, folder, device())
                layerwise.run(notes.report, "Weighing first tokens in")
                squares = layerwise.results.squares
        else:
            squares = _in_memory(source, batches, notes)
        weights = {module: sums.weight for module, sums in squares.items()}
        write_document(run.first_tokens, FirstTokens(windows=len(windows), weights=weights))
        log.outputs.append(run.first_tokens)
    release_memory()


def _in_memory(source: Source, batches: Batches, notes: Notes) -> dict[str, GradientSquares]:
    model = load_model(source, torch.float32, device()).requires_grad_(False)
    watched = WatchedGemms(model, observed_gemms(model))
    sums: list[dict[str, GradientSquares]] = []
    with notes.track("Weighing first tokens", sum(ids.size for ids in batches.values()), "tokens") as advance:
        for batch, ids in batches.items():
            sums.append(batch_squares(watched, batch, ids))
            advance(ids.size)
    return added(sums)


def load_first_tokens(run: Run) -> dict[str, float]:
    """Read the weights of `first_tokens.json`; raises InputError where it is missing or changed."""
    return read_document(run.require(run.first_tokens, FIRST_TOKENS.name), FirstTokens).weights


def _weigh_outputs(run: Run, source: Source, count: int, notes: Notes) -> None:
    name = run.calibration.name
    inputs = {"model": source.fingerprint, name: run.record().stages["corpus"].outputs[name]}
    key = Key(inputs, Options(), OutputFacts(windows=count))
    if OUTPUTS.is_current(run, key):
        return
    release_memory()
    windows = spread_windows(load_tokens(run, run.calibration, source.text_config.vocab_size), count)
    with OUTPUTS.writing(run, key, notes) as log, OUTPUTS.working(run, key, notes) as folder:
        gathering = OutputMoments(source, in_batches(windows, 1), folder, device())
        gathering.run(notes.report, "Weighing outputs in")
        without = [module for module in gathering.gemms if not (gathering.outputs / f"{module}.npy").is_file()]
        if without:
            notes.note(left_out(without))
        shutil.rmtree(run.output_moments, ignore_errors=True)
        with replacing(run.output_moments) as partial:
            shutil.copytree(gathering.outputs, partial, copy_function=os.link)
        log.outputs += sorted(run.output_moments.glob("*.npy"))
    release_memory()


def left_out(modules: list[str]) -> str:
    """Note the GEMMs that have no gradients, which are rounded by GPTQ alone."""
    return (
        f"--weigh-outputs: {len(modules):,} GEMMs ({modules[0]}{' …' if len(modules) > 1 else ''}) have no finite "
        "gradients at outputs of a window's tokens, as experts, or no held-out ones; GPTQ rounds them without"
    )


def output_folder(run: Run, options: ScaleOptions) -> Path | None:
    """The folder of what is known of outputs; None where `options` do not ask for it."""
    return run.output_moments if options.weighs_outputs else None
