"""What attention in FP8 costs beside all other products: KL from BF16 and perplexity, without and with it.

    python benchmarks/attention.py [MODEL=CALIBRATION,EVALUATION …] [--windows 40] [--context 256]

Calibrated on 64 windows of 256 tokens; the cache is wide. The ceiling is attention in the compute type, in the same
run. Prints one JSON line.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from models import ModelTexts, cut_text, main_of

from fp8q.api import CalibrateOptions, ExportOptions, ValidateOptions, calibrate, export, validate

RUNTIMES = ("bf16", "reference", "onnxruntime")


def measure(model: ModelTexts, windows: int, context: int) -> dict[str, dict[str, Any]]:
    """`wide` and `fp8` -> KL in nats and the increase of perplexity by runtime."""
    with tempfile.TemporaryDirectory() as directory:
        evaluation = cut_text(model, windows * context, Path(directory))
        options = CalibrateOptions(samples=64, seq_len=256)
        run = calibrate(model.directory, model.data, Path(directory) / "run", str(evaluation), options)
        found = {}
        for how in ("wide", "fp8"):
            export(run.root, ExportOptions(attention=how))
            accuracy = validate(run.root, options=ValidateOptions(RUNTIMES, context)).runtimes
            fp8 = {name: accuracy[name] for name in RUNTIMES[1:]}
            found[how] = {
                "kl_mean_nats": {name: runtime.kl_mean_nats for name, runtime in fp8.items()},
                "perplexity_increase": {name: runtime.perplexity_increase for name, runtime in fp8.items()},
            }
    return found


if __name__ == "__main__":
    sys.exit(main_of("attention", __doc__, measure, "demo", "llama", "opt"))
