"""Statistics of random tokens, measured in memory and layer by layer."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8q.calibrate.measure.measurement import Measurement, measure_in_memory
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity, Statistics
from fp8q.calibrate.measure.stream import measure_streamed
from fp8q.calibrate.model.source import Source, load_model
from fp8q.core.reporter import SILENT

IDENTITY = ModelIdentity(name="model", architecture="any", fingerprint="0")
#: The last batch is smaller than the others: a shape of its own.
CORPUS = Corpus(name="random tokens", fingerprint="0", windows=5, seq_len=24, batch_size=2)
WINDOWS = np.random.default_rng(0).integers(3, 500, (5, 24))
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def in_memory(source: Source) -> Statistics:
    return measure_in_memory(load_model(source, torch.bfloat16), Measurement(WINDOWS, IDENTITY, CORPUS), SILENT)


def streaming(source: Source, folder: Path, **options: Any) -> Statistics:
    folder.mkdir(exist_ok=True)
    return measure_streamed(source, Measurement(WINDOWS, IDENTITY, CORPUS, **options), SILENT, folder)
