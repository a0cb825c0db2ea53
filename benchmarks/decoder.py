"""The decoder whose plain forward pass is the ceiling of calibration: imports nothing of fp8q, so that peers can run it
in environments of their own.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

WINDOW, BATCH, VOCABULARY = 512, 4, 4096
SHORT, LONG = 1, 7
Series = Callable[[int], None]


def tokens(batches: int) -> np.ndarray:
    """`batches` batches of random windows, int64 [batches × BATCH, WINDOW]."""
    return np.random.default_rng(0).integers(0, VOCABULARY, (batches * BATCH, WINDOW))


def build(layers: int) -> LlamaForCausalLM:
    """The model to run, with random weights."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, torch.bfloat16).eval()
    return model


def plain(model: LlamaForCausalLM) -> Series:
    """The ceiling: the decoder and nothing else."""

    def series(batches: int) -> None:
        with torch.inference_mode():
            for ids in np.split(tokens(batches), batches):
                model.model(input_ids=torch.from_numpy(ids), use_cache=False)

    return series


def marginal(series: Series) -> float:
    """Seconds of a series of `LONG` batches less those of one of `SHORT`: what takes the same time in both, such as
    starting up, drops out.
    """
    seconds = []
    for batches in (SHORT, LONG):
        start = time.perf_counter()
        series(batches)
        seconds.append(time.perf_counter() - start)
    return seconds[1] - seconds[0]
