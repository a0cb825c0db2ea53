"""llm-compressor's checkpoint of a model: the peer of `accuracy.py` and `made_by_others.py`, run by them in an
environment of its own.

    PYTHON benchmarks/peer_checkpoint.py MODEL WINDOWS.npy OUT [SCHEME [DTYPE]]        or --versions

`oneshot` with the scheme (FP8: weights and inputs per tensor, static), the output head left out, on windows int64
[windows, context], computed in DTYPE (bfloat16).
"""

import json
import sys
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Write the checkpoint."""
    if sys.argv[1:] == ["--versions"]:
        names = ("llmcompressor", "compressed-tensors", "torch", "transformers")
        print(json.dumps({name: metadata.version(name) for name in names}))
        return
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    directory, windows, out, *chosen = sys.argv[1:]
    scheme, dtype = (*chosen, *("FP8", "bfloat16")[len(chosen) :])
    rows: Any = [{"input_ids": torch.from_numpy(ids)} for ids in np.split(np.load(windows), len(np.load(windows)))]
    oneshot(
        model=AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)),
        tokenizer=AutoTokenizer.from_pretrained(directory),  # saved with the model; the rows are tokens
        dataset=DataLoader(rows, batch_size=None),
        recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head", "embed_out"]),
        num_calibration_samples=len(rows),
        output_dir=out,
    )


if __name__ == "__main__":
    main()
