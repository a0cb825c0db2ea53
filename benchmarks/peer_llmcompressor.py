"""llm-compressor's static FP8 calibration over the plain forward pass: the peer of `calibration.py`, run by it in an
environment of llm-compressor's own.

    PYTHON benchmarks/peer_llmcompressor.py [--rounds 3] [--layers 4] [--batches 1 4]

`oneshot` with the scheme FP8 (weights and inputs per tensor, static) and its default pipeline, on the decoder of
`decoder.py`, loaded anew for each call, as it converts what it is given. Prints one JSON line.
"""

import argparse
import json
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decoder import Series, build, plain, ratios, rounds_of, tokens
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, LlamaForCausalLM

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo" / "checkpoint"


def peer(folder: str, layers: int) -> Series:
    """`oneshot` on a model of its own each time, from a directory, as it wants it: it converts what it is given.

    Loading is a cost of both series, and drops out.
    """
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    build(layers).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)  # asked for, and not used: the rows are tokens

    def series(windows: int, batch: int) -> None:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        rows: Any = [{"input_ids": torch.from_numpy(ids)} for ids in np.split(tokens(windows), windows // batch)]
        recipe = QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"])
        oneshot(
            model=model,
            tokenizer=tokenizer,
            dataset=DataLoader(rows, batch_size=None),
            recipe=recipe,
            num_calibration_samples=len(rows),
        )

    return series


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        contenders = {"plain": plain(build(arguments.layers)), "llmcompressor": peer(folder, arguments.layers)}
        for series in contenders.values():
            series(4, 4)
        for batch in arguments.batches:
            found[batch] = ratios(rounds_of(contenders, batch, arguments.rounds), "llmcompressor")
    versions = {
        name: metadata.version(name) for name in ("llmcompressor", "compressed-tensors", "torch", "transformers")
    }
    print(json.dumps({"ratios": found, "rounds": arguments.rounds, "versions": versions}))


if __name__ == "__main__":
    main()
