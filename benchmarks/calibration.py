"""What watching costs: `fp8q calibrate`'s pass over the plain BF16 forward pass of the decoder.

    python benchmarks/calibration.py [--rounds 5] [--layers 4]

A Llama of width 2048 (intermediate 5632, 32 heads, 4 KV heads, vocabulary 4096 so that the head would hide nothing), random weights, windows of 512 tokens. The
ceiling is the decoder alone, without the output head. In each round every contender runs a short and a long series of batches in turn, and
the difference of the two counts: start-up and what is done once drop out. The peer is ModelOpt's `max` calibration, on the decoder too. Prints one JSON
line: `ratio` is the median over rounds of ours to the ceiling, `limit_ratio` the target.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fp8q.calibrate.measure import measure
from fp8q.calibrate.statistics import Corpus, ModelIdentity
from fp8q.progress import SILENT
from fp8q.run import library_versions

LIMIT_RATIO = 1.15
WINDOW, BATCH, VOCABULARY = 512, 4, 4096
SHORT, LONG = 1, 3
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


def ours(model: LlamaForCausalLM) -> Series:
    """The measuring stage of fp8q."""
    identity = ModelIdentity(name="random", architecture="LlamaForCausalLM", fingerprint="0")

    def series(batches: int) -> None:
        corpus = Corpus(name="random", fingerprint="0", windows=batches * BATCH, seq_len=WINDOW, batch_size=BATCH)
        measure(model, tokens(batches), identity, corpus, SILENT)

    return series


def modelopt(model: LlamaForCausalLM) -> Series:
    """ModelOpt's `max`, per tensor for inputs and caches and per channel for weights; the model is converted once, before it is timed."""
    import modelopt.torch.quantization as mtq

    quantizers = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*weight_quantizer", "parent_class": "nn.Linear", "cfg": {"num_bits": (4, 3), "axis": 0}},
        {"quantizer_name": "*input_quantizer", "parent_class": "nn.Linear", "cfg": {"num_bits": (4, 3), "axis": None}},
        {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}},
        {"quantizer_name": "*lm_head*", "enable": False},
    ]
    mtq.quantize(model, {"quant_cfg": quantizers, "algorithm": None})
    run = plain(model)

    def series(batches: int) -> None:
        mtq.calibrate(model, "max", forward_loop=lambda _: run(batches))

    return series


def marginal(series: Series) -> float:
    """Seconds of a long series less those of a short one."""
    seconds = []
    for batches in (SHORT, LONG):
        start = time.perf_counter()
        series(batches)
        seconds.append(time.perf_counter() - start)
    return seconds[1] - seconds[0]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    model = build(arguments.layers)
    contenders = {"plain": plain(model), "fp8q": ours(model), "modelopt": modelopt(build(arguments.layers))}
    for series in contenders.values():
        series(1)
    rounds = [{name: marginal(series) for name, series in contenders.items()} for _ in range(arguments.rounds)]
    ratios = {name: statistics.median(seconds[name] / seconds["plain"] for seconds in rounds) for name in ("fp8q", "modelopt")}
    per_second = (LONG - SHORT) * BATCH * WINDOW / statistics.median(seconds["plain"] for seconds in rounds)
    result = {
        "ratio": ratios["fp8q"],
        "limit_ratio": LIMIT_RATIO,
        "passed": ratios["fp8q"] <= LIMIT_RATIO,
        "modelopt_ratio": ratios["modelopt"],
        "plain_tokens_per_second": per_second,
        "rounds": arguments.rounds,
        "threads": torch.get_num_threads(),
        "versions": library_versions(),
    }
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
