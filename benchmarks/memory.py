"""How much memory `fp8q calibrate --stream` takes: at most 1.2 GB and three decoder layers, however many layers there
are.

    python benchmarks/memory.py [--layers 5 32] [--windows 4] [--seq-len 128] [--width 4096]
        [--weight-rounding nearest|gptq|sequential]

Makes checkpoints of 5 and 32 layers (`synthetic`: 4.3 and 16.1 GB). A process of its own runs all of `calibrate` but
the ONNX export on a few windows. The largest layer is a decoder layer (0.44 GB), though the embedding (1.05 GB) is
larger: that is the stricter limit, and says that the embedding is never copied. Growth is the largest difference of a
stage's two peaks, a layer; a layer that stayed would be 0.44 GB. Peaks of one depth differ by 0.15 GB from run to run,
by what the allocator keeps of freed tensors, so that depths must lie far apart for a growth of 2 % of a layer to show.
The ceiling beside it, what any way of running a layer needs, is that layer alone. Prints one JSON line; exit status 1
when a limit is not met.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from shutil import rmtree
from typing import Any, get_args

import torch
from result import arguments, described, publish
from synthetic import DEMO, WIDTH, layer_shapes, sampled, shape, write_checkpoint
from transformers import LlamaConfig

from fp8q.options import WeightRounding

FIXED_BYTES, LAYERS_HELD = 1_200_000_000, 3
#: A layer may add this share of itself to the peak, or so many bytes: what its statistics weigh (seven histograms of
#: 32,768 counts), and the sampling.
GROWTH_SHARE, GROWTH_BYTES = 0.02, 2_000_000
#: Bytes for each number of H: while it is factored, and kept by `sequential`, of both halves of the batches; and for
#: rounding in all.
FACTORING, BESIDE, ROUNDING_BYTES = 24, 8, 500_000_000


def limit_bytes(config: LlamaConfig, rounding: WeightRounding) -> tuple[int, int]:
    """What a layer takes in BF16, and what calibrating may."""
    layer = sum(2 * torch.Size(size).numel() for size in layer_shapes(config).values())
    limit = FIXED_BYTES + LAYERS_HELD * layer
    if rounding != "nearest":
        limit += FACTORING * config.intermediate_size**2 + ROUNDING_BYTES
    if rounding == "sequential":
        limit += BESIDE * config.intermediate_size**2 + 4 * layer
    return layer, limit


def calibrate(checkpoint: str, out: str, asked: argparse.Namespace) -> None:
    """What the measured process does: `fp8q calibrate --stream` but for the export, naming each stage on standard
    output when it begins.
    """
    print("start", flush=True)
    from fp8q.api import CalibrateOptions
    from fp8q.calibrate.model.source import open_source
    from fp8q.calibrate.model.tokenizer import load_tokenizer
    from fp8q.core.reporter import SILENT
    from fp8q.core.run import Run
    from fp8q.stages import corpus as corpus_stage
    from fp8q.stages import measure as measure_stage
    from fp8q.stages import quantize as quantize_stage
    from fp8q.stages.pipeline.stage import Notes
    from fp8q.stages.shared import sources

    options = CalibrateOptions(
        samples=asked.windows,
        seq_len=asked.seq_len,
        batch_size=2,
        stream=True,
        weight_rounding=asked.weight_rounding,
    )
    run, notes = Run(Path(out)), Notes(SILENT)
    source = open_source(checkpoint)
    products = sources.gemms_of(source)
    collected = corpus_stage.collect(
        source, load_tokenizer(source), str(DEMO / "calibration.txt"), None, options, notes
    )
    sources.check_weights(run, source, notes)
    corpus_stage.write_corpus(run, source, collected, notes)
    print("measure", flush=True)
    measure_stage.measure(run, source, options, notes, moments=options.needs_moments)
    print("quantize", flush=True)
    quantize_stage.quantize(run, source, products, options, notes)


def measure_checkpoint(folder: Path, layers: int, asked: argparse.Namespace, limit: int) -> dict[str, Any]:
    """Write a checkpoint, calibrate it, remove it."""
    checkpoint, run = folder / "model", folder / "run"
    size = write_checkpoint(checkpoint, layers, asked.width)
    given = {"windows": asked.windows, "seq-len": asked.seq_len, "weight-rounding": asked.weight_rounding}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    stages = sampled(__file__, ["--child", str(checkpoint), str(run), *words])
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
    parser.add_argument("--layers", type=int, nargs=2, default=[5, 32])
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--weight-rounding", choices=get_args(WeightRounding), default="nearest")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        checkpoint, out = options.child
        calibrate(checkpoint, out, options)
        return 0
    layer, limit = limit_bytes(shape(options.width), options.weight_rounding)
    head = described("memory")
    with tempfile.TemporaryDirectory() as directory:
        found = [measure_checkpoint(Path(directory), layers, options, limit) for layers in options.layers]
    small, large = (checkpoint["stages"] for checkpoint in found)
    growth = max(large[stage]["peak_anonymous_bytes"] - small[stage]["peak_anonymous_bytes"] for stage in small) / (
        options.layers[1] - options.layers[0]
    )
    growth_limit = max(GROWTH_SHARE * layer, GROWTH_BYTES)
    passed = all(checkpoint["passed"] for checkpoint in found) and growth <= growth_limit
    result = {
        "windows": options.windows,
        "seq_len": options.seq_len,
        "weight_rounding": options.weight_rounding,
        "threads": torch.get_num_threads(),
        "layer_bytes": layer,
        "checkpoints": found,
        "growth_bytes_a_layer": round(growth),
        "growth_limit_bytes_a_layer": round(growth_limit),
        "passed": passed,
    }
    return publish(head, result, options.save)


if __name__ == "__main__":
    sys.exit(main())
