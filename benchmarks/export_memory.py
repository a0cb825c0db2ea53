"""How much memory writing the FP8 checkpoint and its graphs takes: at most 1.5 GB, for 4 GB of weights and for 8.

    python benchmarks/export_memory.py [--layers 5 14] [--no-engine]

Checkpoints of the 8 B shape (`synthetic`: 4.3 and 8.2 GB) are measured on a few tokens by one process; another then
chooses scales, writes the checkpoint (`quantize`) and exports and lints both graphs (`export`), and its anonymous
memory is sampled. What any way of writing needs is the libraries (the stage `start`) and one matrix. A third process
builds an engine from the smaller one: TensorRT holds the weights, so its peak is told and not limited. How long the
graphs of deep models take is the question of `export_time.py`. Prints one JSON line; exit status 1 when a limit is not
met.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree

from result import arguments, described, publish
from synthetic import DEMO, sampled, write_checkpoint

from fp8q.core.run import Run

LIMIT_BYTES = 1_500_000_000


def measure(checkpoint: str, out: str) -> None:
    """The stages `corpus` and `measure`."""
    from fp8q.api import CalibrateOptions
    from fp8q.calibrate.model.source import open_source
    from fp8q.calibrate.model.tokenizer import load_tokenizer
    from fp8q.core.reporter import SILENT
    from fp8q.stages import corpus as corpus_stage
    from fp8q.stages import measure as measure_stage
    from fp8q.stages.pipeline.stage import Notes

    options = CalibrateOptions(samples=2, seq_len=128, stream=True)
    run, notes, source = Run(Path(out)), Notes(SILENT), open_source(checkpoint)
    corpus_stage.write_corpus(
        run,
        source,
        corpus_stage.collect(source, load_tokenizer(source), str(DEMO / "calibration.txt"), None, options, notes),
        notes,
    )
    measure_stage.measure(run, source, options, notes)


def write(checkpoint: str, out: str) -> None:
    """The stages `quantize` and `export`, each named on standard output when it begins."""
    print("start", flush=True)
    from fp8q.calibrate.model.source import open_source
    from fp8q.core.reporter import SILENT
    from fp8q.options import ExportOptions, ScaleOptions
    from fp8q.stages import export as export_stage
    from fp8q.stages import quantize as quantize_stage
    from fp8q.stages.pipeline.stage import Notes
    from fp8q.stages.shared import sources

    run, notes, source = Run(Path(out)), Notes(SILENT), open_source(checkpoint)
    products = sources.gemms_of(source)
    print("quantize", flush=True)
    quantize_stage.quantize(run, source, products, ScaleOptions(), notes)
    print("export", flush=True)
    export_stage.export(run, ExportOptions(), notes)


def build(checkpoint: str, out: str) -> None:
    """The stage `build-engine`, for one target."""
    from fp8q.api import EngineOptions, build_engine

    print("engine", flush=True)
    build_engine(Path(out), EngineOptions("tensorrt-rtx", ("sm89",)))


CHILDREN = {"measure": measure, "write": write, "build": build}


def of_checkpoint(folder: Path, layers: int, engine: bool) -> dict[str, object]:
    """Write a checkpoint, calibrate and export it, build its engine; remove it."""
    checkpoint, run = folder / "model", Run(folder / "run")
    size = write_checkpoint(checkpoint, layers)
    subprocess.run([sys.executable, __file__, "--child", "measure", str(checkpoint), str(run.root)], check=True)
    stages = sampled(__file__, ["--child", "write", str(checkpoint), str(run.root)])
    peak = max(stage["peak_anonymous_bytes"] for stage in stages.values())
    found: dict[str, object] = {
        "layers": layers,
        "checkpoint_bytes": size,
        "peak_anonymous_bytes": peak,
        "passed": peak <= LIMIT_BYTES,
        "stages": stages,
    }
    if engine:
        built = sampled(__file__, ["--child", "build", str(checkpoint), str(run.root)])["engine"]
        (info,) = (json.loads(file.read_bytes()) for file in run.engines.glob("*.json"))
        found["engine"] = built | {
            key: info[key] for key in ("target", "bytes", "promised_products", "fp8_products", "evidence")
        }
    rmtree(checkpoint)
    rmtree(run.root)
    return found


def main() -> int:
    """Measure, print, and say by the exit status whether every limit was met."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, nargs=2, default=[5, 14])
    parser.add_argument(
        "--engine", action=argparse.BooleanOptionalAction, default=find_spec("tensorrt_rtx") is not None
    )
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, checkpoint, out = options.child
        CHILDREN[name](checkpoint, out)
        return 0
    head = described("export_memory")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        found = [
            of_checkpoint(folder, layers, options.engine and layers == min(options.layers)) for layers in options.layers
        ]
    result = {
        "limit_bytes": LIMIT_BYTES,
        "checkpoints": found,
        "passed": all(each["passed"] for each in found),
    }
    return publish(head, result, options.save)


if __name__ == "__main__":
    sys.exit(main())
