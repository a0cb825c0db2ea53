"""How long the graphs of a deep model take, and in how much memory: that of few layers, whatever the depth.

    python benchmarks/export_time.py [--depths 2 8 32 80]

Narrow Llamas (width 128), whose graphs are those of wide ones but for the numbers in them, each calibrated on a few
tokens by one process. Another runs the stage `export` (both graphs, their lint) and says how long that took, in seconds
of the clock and of the processor, and its peak of anonymous memory. Of a kind of layers three are traced, so the
ceiling is what two layers take. Limits: 32 layers 30 s and 80 layers 45 s of the processor (all but all of it is one
thread's, so that is the clock's where nobody else works), and 1 MB of memory a further layer, which is the graph
itself: some 50 kB a layer in the two files, ten times that as objects. Prints one JSON line; exit status 1 when a limit
is not met.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from shutil import copyfile, rmtree

from result import arguments, described, publish
from synthetic import DEMO, sampled
from transformers import AutoModelForCausalLM, LlamaConfig

from fp8q.core.run import Run
from fp8q.core.run_files import GRAPH, GRAPH_FP32

#: Layers -> seconds.
LIMIT_SECONDS = {32: 30.0, 80: 45.0}
#: Peak memory a layer, from the shallowest to the deepest.
LIMIT_LAYER_BYTES = 1_000_000


def calibrate(checkpoint: str, out: str) -> None:
    """All stages before `export`."""
    from fp8q.api import CalibrateOptions
    from fp8q.calibrate.model.source import open_source
    from fp8q.calibrate.model.tokenizer import load_tokenizer
    from fp8q.core.reporter import SILENT
    from fp8q.options import ScaleOptions
    from fp8q.stages import corpus as corpus_stage
    from fp8q.stages import measure as measure_stage
    from fp8q.stages import quantize as quantize_stage
    from fp8q.stages.pipeline.stage import Notes
    from fp8q.stages.shared import sources

    options = CalibrateOptions(samples=2, seq_len=128)
    run, notes, source = Run(Path(out)), Notes(SILENT), open_source(checkpoint)
    text = str(DEMO / "calibration.txt")
    collected = corpus_stage.collect(source, load_tokenizer(source), text, None, options, notes)
    corpus_stage.write_corpus(run, source, collected, notes)
    measure_stage.measure(run, source, options, notes)
    quantize_stage.quantize(run, source, sources.gemms_of(source), ScaleOptions(), notes)


def export(checkpoint: str, out: str) -> None:
    """The stage `export`; its seconds go into a file beside the run."""
    print("start", flush=True)
    from fp8q.core.reporter import SILENT
    from fp8q.options import ExportOptions
    from fp8q.stages import export as export_stage
    from fp8q.stages.pipeline.stage import Notes

    print("export", flush=True)
    began, worked = time.perf_counter(), time.process_time()
    export_stage.export(Run(Path(out)), ExportOptions(), Notes(SILENT))
    took = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - worked}
    Path(f"{out}.json").write_text(json.dumps(took))


CHILDREN = {"calibrate": calibrate, "export": export}


def of_depth(folder: Path, depth: int) -> dict[str, float]:
    """Seconds, peak memory and the size of both graphs for a Llama of `depth` layers."""
    checkpoint, run = folder / "model", Run(folder / "run")
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=depth,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
        dtype="bfloat16",
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(checkpoint)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(DEMO / "checkpoint" / name, checkpoint / name)
    subprocess.run([sys.executable, __file__, "--child", "calibrate", str(checkpoint), str(run.root)], check=True)
    stages = sampled(__file__, ["--child", "export", str(checkpoint), str(run.root)])
    took = json.loads(Path(f"{run.root}.json").read_text())
    found = {
        **{name: round(seconds, 1) for name, seconds in took.items()},
        "peak_anonymous_bytes": stages["export"]["peak_anonymous_bytes"],
        "graph_bytes": sum((run.model / name).stat().st_size for name in (GRAPH, GRAPH_FP32)),
    }
    rmtree(checkpoint)
    rmtree(run.root)
    print(f"{depth} layers: {found}", file=sys.stderr)
    return found


def main() -> int:
    """Measure, print, and say by the exit status whether every limit was met."""
    parser = arguments(__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 8, 32, 80])
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, checkpoint, out = options.child
        CHILDREN[name](checkpoint, out)
        return 0
    head = described("export_time")
    with tempfile.TemporaryDirectory() as directory:
        found = {depth: of_depth(Path(directory), depth) for depth in options.depths}
    late = [depth for depth, limit in LIMIT_SECONDS.items() if depth in found and found[depth]["cpu_seconds"] > limit]
    shallow, deep = min(found), max(found)
    peaks = found[deep]["peak_anonymous_bytes"] - found[shallow]["peak_anonymous_bytes"]
    layer_bytes = round(peaks / max(1, deep - shallow))
    result = {
        "limit_seconds": LIMIT_SECONDS,
        "limit_bytes_a_further_layer": LIMIT_LAYER_BYTES,
        "ceiling_cpu_seconds": found[shallow]["cpu_seconds"],
        "layers": found,
        "peak_bytes_a_further_layer": layer_bytes,
        "passed": not late and layer_bytes <= LIMIT_LAYER_BYTES,
    }
    return publish(head, result, options.save)


if __name__ == "__main__":
    sys.exit(main())
