"""How much memory `fp8q distill --stream` takes: at most 1.3 times as much as calibrating took, however many layers.

    python benchmarks/distill_memory.py [--layers 3 11] [--windows 10] [--seq-len 128] [--width 1024]

Makes checkpoints of 3 and 11 layers (`synthetic`). A process of its own calibrates each as `--stream --weight-rounding
sequential` does, and learns its weights layer by layer from the same windows, both without the ONNX export. The peaks
are those of anonymous memory in each stage. The ceiling beside them, what a layer that learns needs, is the FP32
weights, their gradient and Adam's two means of one layer alone. Growth is what a layer more adds to the peak of
learning: its codes, a byte a weight, are the least that it can leave behind, and half of that is beyond what the peaks
of one depth differ by.
Prints one JSON line; exit status 1 where learning takes more than calibrating and 30 %, or grows with layers.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from result import arguments, described, publish
from synthetic import DEMO, layer_shapes, sampled, shape, write_checkpoint

RATIO = 1.3
#: Bytes that no learned weight can do without: the weight, its gradient and Adam's two means, in FP32.
LEARNED_BYTES = 16
#: Bytes a weight that a layer may leave behind.
LEFT_BYTES = 0.5
#: The width of the checkpoints, and as many tokens as the demo's tokenizer has, so that a layer and not the embedding
#: takes the memory, as in models of the 8 B Llama's width or more.
NARROW, VOCABULARY = 1024, 2048


def calibrate_and_learn(checkpoint: str, out: str, asked: argparse.Namespace) -> None:
    """Do what the measured process is for: calibrate, then learn, naming each on standard output when it begins."""
    print("calibrate", flush=True)
    from fp8q import api
    from fp8q.core.reporter import SILENT
    from fp8q.options import CalibrateOptions, DistillOptions, ExportOptions

    options = CalibrateOptions(
        samples=asked.windows, seq_len=asked.seq_len, batch_size=2, stream=True, weight_rounding="sequential",
        activation_terms=2,
    )  # fmt: skip
    data = [str(DEMO / name) for name in ("calibration.txt", "evaluation.txt")]
    run = api.calibrate(checkpoint, data[0], Path(out), data[1], options, ExportOptions(graph=False), SILENT)
    print("distill", flush=True)
    api.distill(run.root, options=DistillOptions(epochs=1.0, batch_size=2, stream=True), progress=SILENT)


def measure_checkpoint(folder: Path, layers: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Write a checkpoint, calibrate it and learn its weights, remove it."""
    checkpoint, run = folder / "model", folder / "run"
    size = write_checkpoint(checkpoint, layers, asked.width, VOCABULARY)
    given = {"windows": asked.windows, "seq-len": asked.seq_len, "width": asked.width}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    stages = sampled(__file__, ["--child", str(checkpoint), str(run), *words])
    rmtree(checkpoint)
    rmtree(run)
    peaks = {stage: stages[stage]["peak_anonymous_bytes"] for stage in ("calibrate", "distill")}
    return {
        "layers": layers,
        "checkpoint_bytes": size,
        "ratio": round(peaks["distill"] / peaks["calibrate"], 3),
        "limit_ratio": RATIO,
        "passed": peaks["distill"] <= RATIO * peaks["calibrate"],
        "stages": stages,
    }


def main() -> int:
    """Measure, print, and say by the exit status whether every limit was met."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, nargs=2, default=[3, 11])
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--width", type=int, default=NARROW)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        checkpoint, out = asked.child
        calibrate_and_learn(checkpoint, out, asked)
        return 0
    weights = sum(torch.Size(size).numel() for size in layer_shapes(shape(asked.width)).values())
    head = described("distill_memory")
    with tempfile.TemporaryDirectory() as directory:
        found = [measure_checkpoint(Path(directory), layers, asked) for layers in asked.layers]
    small, large = (checkpoint["stages"]["distill"]["peak_anonymous_bytes"] for checkpoint in found)
    growth = (large - small) / (asked.layers[1] - asked.layers[0])
    growth_limit = LEFT_BYTES * weights
    result = {
        "windows": asked.windows,
        "seq_len": asked.seq_len,
        "width": asked.width,
        "threads": torch.get_num_threads(),
        "layer_weights": weights,
        "ceiling_bytes": LEARNED_BYTES * weights,
        "checkpoints": found,
        "growth_bytes_a_layer": round(growth),
        "growth_limit_bytes_a_layer": round(growth_limit),
        "passed": all(checkpoint["passed"] for checkpoint in found) and growth <= growth_limit,
    }
    return publish(head, result, asked.save)


if __name__ == "__main__":
    sys.exit(main())
