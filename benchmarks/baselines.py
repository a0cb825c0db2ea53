"""What INT8 and BF16 weights cost beside FP8, in the same graph on ONNX Runtime, clipped by amax and by squared error.

    python benchmarks/baselines.py [MODEL=CALIBRATION,EVALUATION …] [--windows 40] [--context 256]

Calibrated on 64 windows of 256 tokens; INT8 and FP8 are made of the same statistics. The ceiling is the graph of the
BF16 weights, which computes in FP32. Prints one JSON line.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args

from models import ModelTexts, cut_text, main_of

from fp8q.api import (
    CalibrateOptions,
    Clipping,
    ExportOptions,
    RescaleOptions,
    ValidateOptions,
    calibrate,
    export,
    scales,
    validate,
)

RUNTIMES = {"onnxruntime": "fp8", "onnxruntime-int8": "int8", "onnxruntime-bf16": "bf16"}
Clip = Literal["amax", "mse"]


def measure(model: ModelTexts, windows: int, context: int) -> dict[str, Any]:
    """Clip method -> precision -> KL in nats and the increase of perplexity; and BF16's perplexity."""
    with tempfile.TemporaryDirectory() as directory:
        evaluation = cut_text(model, windows * context, Path(directory))
        options = CalibrateOptions(samples=64, seq_len=256)
        run = calibrate(model.directory, model.data, Path(directory) / "run", str(evaluation), options)
        export(run.root, ExportOptions(precision="bf16"))
        found: dict[str, Any] = {}
        for method in get_args(Clip):
            scales(run.root, RescaleOptions(clip=Clipping(method)))
            export(run.root, ExportOptions(precision="int8"))
            runtimes = validate(run.root, options=ValidateOptions(("bf16", *RUNTIMES), context)).runtimes
            found["perplexity_bf16"] = runtimes["bf16"].perplexity
            found[method] = {
                precision: {
                    "kl_mean_nats": runtimes[name].kl_mean_nats,
                    "perplexity_increase": runtimes[name].perplexity_increase,
                }
                for name, precision in RUNTIMES.items()
            }
    return found


if __name__ == "__main__":
    sys.exit(main_of("baselines", __doc__, measure, "demo", "llama"))
