"""How much memory `fp8q calibrate --stream` takes: at most 1.2 GB and three decoder layers, however many layers there
are.

    python benchmarks/memory.py [--layers 5 14] [--windows 4] [--seq-len 128]

Makes checkpoints of 5 and 14 layers (`synthetic`: 4.3 and 8.2 GB). A process of its own runs all of `calibrate` but the
ONNX export on a few windows. The largest layer is a decoder layer (0.44 GB), though the embedding (1.05 GB) is larger:
that is the stricter limit, and says that the embedding is never copied. Growth is the largest difference of a stage's
two peaks, a layer; a layer that stayed would be 0.44 GB. The ceiling beside it, what any way of running a layer needs,
is that layer alone. Prints one JSON line; exit status 1 when a limit is not met.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from result import arguments, described, publish
from synthetic import DEMO, layer_shapes, sampled, write_checkpoint

FIXED_BYTES, LAYERS_HELD = 1_200_000_000, 3
#: A layer may add this share of itself to the peak: what its statistics weigh, and the sampling.
GROWTH_SHARE = 0.02


def calibrate(checkpoint: str, out: str, windows: int, seq_len: int) -> None:
    """What the measured process does: `fp8q calibrate --stream` but for the export, naming each stage on standard
    output when it begins.
    """
    print("start", flush=True)
    from fp8q.api import CalibrateOptions
    from fp8q.calibrate.model.source import open_source
    from fp8q.calibrate.model.tokenizer import load_tokenizer
    from fp8q.reporter import SILENT
    from fp8q.run import Run
    from fp8q.stages import choosing, corpora, measuring, sources
    from fp8q.stages.steps import Notes

    options = CalibrateOptions(samples=windows, seq_len=seq_len, batch_size=2, stream=True)
    run, notes = Run(Path(out)), Notes(SILENT)
    source = open_source(checkpoint)
    products = sources.products_of(source)
    collected = corpora.collect(source, load_tokenizer(source), str(DEMO / "calibration.txt"), None, options, notes)
    sources.check_weights(run, source, notes)
    corpora.write_corpus(run, source, collected, notes)
    print("measure", flush=True)
    measuring.measure(run, source, options, notes)
    print("quantize", flush=True)
    choosing.quantize(run, source, products, options, notes)


def measure_checkpoint(folder: Path, layers: int, windows: int, seq_len: int, limit: int) -> dict[str, Any]:
    """Write a checkpoint, calibrate it, remove it."""
    checkpoint, run = folder / "model", folder / "run"
    size = write_checkpoint(checkpoint, layers)
    stages = sampled(
        __file__, ["--child", str(checkpoint), str(run), "--windows", str(windows), "--seq-len", str(seq_len)]
    )
    rmtree(checkpoint)
    rmtree(run)
    peak = max(stage["peak_anonymous_bytes"] for stage in stages.values())
    return {
        "layers": layers,
        "checkpoint_bytes": size,
        "peak_anonymous_bytes": peak,
        "limit_bytes": limit,
        "passed": peak <= limit,
        "stages": stages,
    }


def main() -> int:
    """Measure, print, and say by the exit status whether every limit was met."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, nargs=2, default=[5, 14])
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        checkpoint, out = options.child
        calibrate(checkpoint, out, options.windows, options.seq_len)
        return 0
    layer = sum(2 * torch.Size(shape).numel() for shape in layer_shapes().values())
    limit, head = FIXED_BYTES + LAYERS_HELD * layer, described("memory")
    with tempfile.TemporaryDirectory() as directory:
        found = [
            measure_checkpoint(Path(directory), layers, options.windows, options.seq_len, limit)
            for layers in options.layers
        ]
    small, large = (checkpoint["stages"] for checkpoint in found)
    growth = max(large[stage]["peak_anonymous_bytes"] - small[stage]["peak_anonymous_bytes"] for stage in small) / (
        options.layers[1] - options.layers[0]
    )
    passed = all(checkpoint["passed"] for checkpoint in found) and growth <= GROWTH_SHARE * layer
    result = {
        "windows": options.windows,
        "seq_len": options.seq_len,
        "layer_bytes": layer,
        "checkpoints": found,
        "growth_bytes_a_layer": round(growth),
        "growth_limit_bytes_a_layer": round(GROWTH_SHARE * layer),
        "passed": passed,
    }
    return publish(head, result, options.save)


if __name__ == "__main__":
    sys.exit(main())
