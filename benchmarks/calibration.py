"""What watching costs: `fp8q calibrate`'s pass over the plain BF16 forward pass of the decoder.

    python benchmarks/calibration.py [--rounds 7] [--layers 4] [--llmcompressor PYTHON]

A Llama of width 2048 (intermediate 5632, 32 heads, 4 KV heads, vocabulary 4096 so that the head would hide nothing),
random weights, windows of 512 tokens. The ceiling is the decoder alone, without the output head. In each round every
contender runs a short and a long series of batches in turn, and the difference of the two counts: start-up and what is
done once drop out. The peers are ModelOpt's `max` calibration, on the decoder too, and, where the Python of an
environment that has it is given, llm-compressor's FP8 calibration (`peer_llmcompressor.py`, held against the plain pass
in that environment). Prints one JSON
line: `ratio` is the median over rounds of ours to the ceiling, `limit_ratio` the target.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from decoder import BATCH, LONG, SHORT, WINDOW, Series, build, marginal, plain, tokens
from synthetic import commit
from transformers import LlamaForCausalLM

from fp8q.calibrate.measure.in_memory import measure
from fp8q.calibrate.measure.measurement import Measurement
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity
from fp8q.record import library_versions
from fp8q.reporter import SILENT

LIMIT_RATIO = 1.15


def ours(model: LlamaForCausalLM) -> Series:
    """The measuring stage of fp8q."""
    identity = ModelIdentity(name="random", architecture="LlamaForCausalLM", fingerprint="0")

    def series(batches: int) -> None:
        corpus = Corpus(name="random", fingerprint="0", windows=batches * BATCH, seq_len=WINDOW, batch_size=BATCH)
        measure(model, Measurement(tokens(batches), identity, corpus), SILENT)

    return series


def modelopt(model: LlamaForCausalLM) -> Series:
    """ModelOpt's `max`, per tensor for inputs and caches and per channel for weights; the model is converted once,
    before it is timed.
    """
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


def peer(python: str, layers: int) -> dict[str, object]:
    """What llm-compressor makes of the same decoder, in its own environment."""
    script = Path(__file__).with_name("peer_llmcompressor.py")
    printed = subprocess.run(
        [python, str(script), "--layers", str(layers)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    found: dict[str, object] = json.loads(printed.splitlines()[-1])
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--llmcompressor", metavar="PYTHON", help="the interpreter of an environment with llm-compressor"
    )
    arguments = parser.parse_args()
    model, measured = build(arguments.layers), commit()
    contenders = {"plain": plain(model), "fp8q": ours(model), "modelopt": modelopt(build(arguments.layers))}
    for series in contenders.values():
        series(1)
    rounds = [{name: marginal(series) for name, series in contenders.items()} for _ in range(arguments.rounds)]
    ratios = {
        name: statistics.median(seconds[name] / seconds["plain"] for seconds in rounds) for name in ("fp8q", "modelopt")
    }
    per_second = (LONG - SHORT) * BATCH * WINDOW / statistics.median(seconds["plain"] for seconds in rounds)
    result = {
        "ratio": ratios["fp8q"],
        "limit_ratio": LIMIT_RATIO,
        "passed": ratios["fp8q"] <= LIMIT_RATIO,
        "modelopt_ratio": ratios["modelopt"],
        "llmcompressor": peer(arguments.llmcompressor, arguments.layers) if arguments.llmcompressor else None,
        "plain_tokens_per_second": per_second,
        "rounds": arguments.rounds,
        "seconds": {name: [round(seconds[name], 3) for seconds in rounds] for name in contenders},
        "commit": measured,
        "threads": torch.get_num_threads(),
        "versions": library_versions(),
    }
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
