"""Read a checkpoint in ModelOpt's form as the one in compressed-tensors' form that says the same, for transformers.

transformers knows no ModelOpt: it takes codes for the values of weights, and reads no scale. Codes and scales are the
same in both forms; config.json, the shapes of scales and the names of those of a cache are not. So such a checkpoint is
computed, with its inputs and its cache rounded, as transformers computes compressed-tensors.

Weights in blocks are left out: ModelOpt leaves their inputs in BF16, and compressed-tensors has no block but of 128.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...calibrate.checkpoint.weights import Weights
from ...calibrate.model.source import open_source
from ...core.errors import Fp8qError
from .codecs import declared_form
from .compressed_tensors import config_by_names
from .dequantized import fp8_source, recognize
from .modelopt import MODELOPT


@dataclass(frozen=True)
class CompressedTensors:
    """A checkpoint in compressed-tensors' form: its `quantization_config`, and its tensors, mapped from their files."""

    config: dict[str, object]
    tensors: dict[str, torch.Tensor]


def as_compressed_tensors(directory: Path) -> CompressedTensors | None:
    """Read the checkpoint in `directory`; None where it is in another form than ModelOpt's, in blocks, or damaged."""
    try:
        declared = declared_form(directory)
        if declared is None or declared.codec is not MODELOPT:
            return None
        return _translated(directory)
    except Fp8qError:
        return None


def _translated(directory: Path) -> CompressedTensors | None:
    source = open_source(str(directory), fingerprinted=False, recognize=recognize)
    fp8 = fp8_source(source)
    assert fp8 is not None, "the form was looked at"
    if any(codes.granularity == "block" for codes in fp8.weights.values()):
        return None
    stored = Weights(source.weight_files)
    tensors = {name: stored.tensor(name) for name in stored.names()}
    model_names = {under: name for name, under in source.renamed.items()}
    schemes = {}
    for weight, codes in fp8.weights.items():
        assert codes.scale is not None, "its absence is refused"
        shape = [1] if codes.granularity == "tensor" else [-1, 1]
        tensors[codes.scale] = tensors[codes.scale].reshape(shape)
        scale = fp8.input_scale(weight)
        if codes.input_scale is not None and scale is not None:
            tensors[codes.input_scale] = torch.tensor([scale])
        module = model_names.get(weight, weight).removesuffix(".weight")
        schemes[module] = replace(codes.scheme, weights=codes.granularity)
    cache = fp8.checkpoint.declared.cache
    if cache:
        tensors |= {f"{part}_scale": torch.from_numpy(scale) for part, scale in fp8.cache_scales.items()}
    return CompressedTensors(config_by_names(schemes, cache), tensors)
