"""The decoder whose plain forward pass is the ceiling of calibration: imports nothing of fp8q, so that peers can run it
in environments of their own.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

WINDOW, VOCABULARY = 512, 4096
#: Windows in a short and in a long series.
SHORT, LONG = 4, 28
#: Runs so many windows in batches of so many.
Series = Callable[[int, int], None]


@dataclass(frozen=True)
class Seconds:
    """Of the clock, and of the processors."""

    wall: float
    cpu: float


def tokens(windows: int) -> np.ndarray:
    """Random windows, int64 [windows, WINDOW]."""
    return np.random.default_rng(0).integers(0, VOCABULARY, (windows, WINDOW))


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

    def series(windows: int, batch: int) -> None:
        with torch.inference_mode():
            for ids in np.split(tokens(windows), windows // batch):
                model.model(input_ids=torch.from_numpy(ids), use_cache=False)

    return series


def timed(series: Series, windows: int, batch: int) -> Seconds:
    """What a series takes."""
    start, cpu = time.perf_counter(), time.process_time()
    series(windows, batch)
    return Seconds(time.perf_counter() - start, time.process_time() - cpu)


def rounds_of(contenders: dict[str, Series], batch: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Contender -> for each round its seconds: of a whole call of `LONG` windows, and of those beyond `SHORT`, which a
    series of that length leaves when what both take once (starting up, finishing) drops out. The contenders take turns.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, series in contenders.items():
            short, whole = timed(series, SHORT, batch), timed(series, LONG, batch)
            further = {f"further_{kind}": asdict(whole)[kind] - value for kind, value in asdict(short).items()}
            found[name].append({"whole_wall": whole.wall, "whole_cpu": whole.cpu, **further})
    return found


def ratios(found: dict[str, list[dict[str, float]]], name: str) -> dict[str, float]:
    """Kind of seconds -> the median over rounds of a contender's over the plain pass's."""
    pairs = list(zip(found[name], found["plain"], strict=True))
    return {kind: statistics.median(ours[kind] / plain[kind] for ours, plain in pairs) for kind in found[name][0]}
