"""The stage `token-weights`: weigh the calibration tokens for GPTQ's second moments (`--weigh-tokens gradient`).

The text runs forward and back once through the model in FP32. The norms of each batch, or layer, are saved as they
are computed, so that a killed call goes on from there.
"""

from pathlib import Path

import numpy as np
import torch

from ..calibrate.measure.chain import Chain
from ..calibrate.measure.observe import probe_groups
from ..calibrate.measure.token_weights import save_token_weights
from ..calibrate.model.gemms import observed_gemms
from ..calibrate.model.source import Source, load_model
from ..core.memory import release_memory
from ..core.run import Run
from ..options.declare import Options
from ..validate.sensitivity.backward import refused_with
from ..validate.sensitivity.token_weights import (
    WITHOUT_LAYERS,
    Collected,
    LayerwiseTokenWeights,
    TokenNorms,
    batch_norms,
    load_norms,
    save_norms,
)
from .corpus import load_tokens
from .pipeline.stage import NO_FACTS, Key, Notes, device
from .pipeline.stages import TOKEN_WEIGHTS

#: The most tokens that run through the model at a time, in whole windows.
TOKENS = 1024
#: The memory of the model in FP32 and of the tensors of one batch, as a multiple of the model's in BF16.
COPIES = 3


def check_token_weights(source: Source) -> None:
    """Raise InputError for a model that is no chain of layers, where memory does not hold it in FP32."""
    with refused_with(WITHOUT_LAYERS):
        Chain(source, device(), torch.float32, rounded=False)


def weigh_tokens(run: Run, source: Source, layer_by_layer: bool, notes: Notes) -> None:
    """Weigh the calibration tokens of `run`, unless that is done, and write `token_weights.safetensors`."""
    name = run.calibration.name
    inputs = {"model": source.fingerprint, name: run.record().stages["corpus"].outputs[name]}
    key = Key(inputs, Options(), NO_FACTS)
    if TOKEN_WEIGHTS.is_current(run, key):
        return
    windows = load_tokens(run, run.calibration, source.text_config.vocab_size)
    size = max(1, TOKENS // windows.shape[1])
    batches = {batch: windows[start : start + size] for batch, start in enumerate(range(0, len(windows), size))}
    with TOKEN_WEIGHTS.writing(run, key, notes) as log, TOKEN_WEIGHTS.working(run, key, notes) as folder:
        if layer_by_layer:
            layerwise = LayerwiseTokenWeights(source, batches, folder, device())
            layerwise.run(notes.report, "Weighing tokens by")
            norms = layerwise.collected()
        else:
            norms = _in_memory(source, batches, folder, notes)
        save_token_weights(run.token_weights, {name: values.weights for name, values in norms.items()})
        log.outputs.append(run.token_weights)
    release_memory()


def _in_memory(
    source: Source, batches: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.int64]]], folder: Path, notes: Notes
) -> dict[str, TokenNorms]:
    model = load_model(source, torch.float32, device()).requires_grad_(False)
    groups, collected = probe_groups(model, observed_gemms(model)), Collected()
    with notes.track("Weighing tokens", sum(ids.size for ids in batches.values()), "tokens") as advance:
        for batch, ids in batches.items():
            file = folder / f"{batch:05}.safetensors"
            if not file.is_file():
                save_norms(file, batch_norms(model, groups, batch, ids))
            collected.add(load_norms(file))
            advance(ids.size)
    return collected.joined()
