"""What watching costs: `fp8q calibrate`'s pass over the plain BF16 forward pass of the decoder.

    python benchmarks/calibration.py [--rounds 7] [--layers 4] [--batches 1 4] [--llmcompressor PYTHON]

A Llama of width 2048 (intermediate 5632, 32 heads, 4 KV heads, vocabulary 4096 so that the head would hide nothing),
random weights, windows of 512 tokens, in batches of one and of four. The ceiling is the decoder alone, without the
output head. In each round the contenders take turns; each is timed by the clock and by the processors (which a busy
machine changes little), as a whole call of 28 windows and as what the windows beyond the fourth take. The peers are
ModelOpt's `max` calibration, on the decoder too, and, where the Python of an environment that has it is given,
llm-compressor's FP8 calibration (`peer_llmcompressor.py`, held against the plain pass in that environment). Prints one
JSON line: `ratio` is ours to the ceiling, a further batch of four in processor time, `limit_ratio` the target.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from decoder import LONG, SHORT, WINDOW, Series, build, plain, ratios, rounds_of, tokens
from result import arguments, described, publish
from transformers import LlamaForCausalLM

from fp8q.calibrate.measure.measurement import Measurement, measure_in_memory
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity
from fp8q.core.reporter import SILENT

LIMIT_RATIO = 1.15


def ours(model: LlamaForCausalLM) -> Series:
    """The measuring stage of fp8q."""
    identity = ModelIdentity(name="random", architecture="LlamaForCausalLM", fingerprint="0")

    def series(windows: int, batch: int) -> None:
        corpus = Corpus(name="random", fingerprint="0", windows=windows, seq_len=WINDOW, batch_size=batch)
        measure_in_memory(model, Measurement(tokens(windows), identity, corpus), SILENT)

    return series


def modelopt(model: LlamaForCausalLM) -> Series:
    """ModelOpt's `max`, per tensor for inputs and caches and per channel for weights; the model is converted once,
    before it is timed, and each call of `mtq.calibrate` reads its weights again.
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

    def series(windows: int, batch: int) -> None:
        mtq.calibrate(model, "max", forward_loop=lambda _: run(windows, batch))

    return series


def peer(python: str, layers: int, batches: list[int], rounds: int) -> dict[str, Any]:
    """What llm-compressor makes of the same decoder, in its own environment."""
    script = Path(__file__).with_name("peer_llmcompressor.py")
    command = [python, str(script), "--layers", str(layers), "--rounds", str(rounds), "--batches", *map(str, batches)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument(
        "--llmcompressor", metavar="PYTHON", help="the interpreter of an environment with llm-compressor"
    )
    parser.add_argument("--peer-rounds", type=int, default=3, help="of llm-compressor, which takes its time")
    options = parser.parse_args()
    head, model = described("calibration"), build(options.layers)
    contenders = {"plain": plain(model), "fp8q": ours(model), "modelopt": modelopt(build(options.layers))}
    for series in contenders.values():
        series(4, 4)
    other = None
    if options.llmcompressor:
        other = peer(options.llmcompressor, options.layers, options.batches, options.peer_rounds)
    batch_sizes: dict[str, Any] = {}
    for batch in options.batches:
        seconds = rounds_of(contenders, batch, options.rounds)
        found = {name: ratios(seconds, name) for name in ("fp8q", "modelopt")}
        if other:
            found["llmcompressor"] = other["ratios"][str(batch)]
        batch_sizes[str(batch)] = {"ratios": found, "seconds": seconds}
    ratio = batch_sizes[str(max(options.batches))]["ratios"]["fp8q"]["further_cpu"]
    result = {
        "ratio": ratio,
        "limit_ratio": LIMIT_RATIO,
        "passed": ratio <= LIMIT_RATIO,
        "windows": {"short": SHORT, "long": LONG, "tokens": WINDOW},
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
        "llmcompressor": {key: other[key] for key in ("rounds", "versions")} if other else None,
        "batch_sizes": batch_sizes,
    }
    return publish(head, result, options.save)


if __name__ == "__main__":
    sys.exit(main())
