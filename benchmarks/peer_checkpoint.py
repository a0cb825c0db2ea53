"""llm-compressor's FP8 checkpoint of a model: the peer of `accuracy.py`, run by it in an environment of its own.

    PYTHON benchmarks/peer_checkpoint.py MODEL WINDOWS.npy OUT        or --versions

`oneshot` with the scheme FP8 (weights and inputs per tensor, static), the output head left out, on windows int64
[windows, context].
"""

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo" / "checkpoint"


def main() -> None:
    """Write the checkpoint."""
    if sys.argv[1:] == ["--versions"]:
        names = ("llmcompressor", "compressed-tensors", "torch", "transformers")
        print(json.dumps({name: metadata.version(name) for name in names}))
        return
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    directory, windows, out = sys.argv[1:]
    rows: Any = [{"input_ids": torch.from_numpy(ids)} for ids in np.split(np.load(windows), len(np.load(windows)))]
    oneshot(
        model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16),
        tokenizer=AutoTokenizer.from_pretrained(DEMO),  # asked for, and not used: the rows are tokens
        dataset=DataLoader(rows, batch_size=None),
        recipe=QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head", "embed_out"]),
        num_calibration_samples=len(rows),
        output_dir=out,
    )


if __name__ == "__main__":
    main()
