"""How much memory `fp8q calibrate --stream` takes: at most 1.2 GB and three decoder layers, however many layers there are.

    python benchmarks/memory.py [--layers 5 14] [--windows 4] [--seq-len 128]

Makes Llama checkpoints of the 8 B shape (width 4,096, intermediate 14,336, 32 heads, 8 KV heads, vocabulary 128,256, embedding and head apart: 2.1 GB of
them), random BF16, a shard a layer: 5 layers are 4.3 GB, 14 are 8.2 GB. A process of its own runs all of `calibrate` but the ONNX export
on a few windows; its *anonymous* resident memory (RssAnon of /proc/PID/status) is sampled every 20 ms, since the pages of mapped files can be dropped at
any time and do not count. The largest layer is a decoder layer (0.44 GB), though the embedding (1.05 GB) is larger: that is the stricter
limit, and says that the embedding is never copied. Growth is the difference of the two peaks of the stage `measure`, a layer; a layer that stayed would be 0.44 GB.
The ceiling beside it, what any way of running a layer needs, is that layer alone. Prints one JSON line; exit status 1 when a limit is not met.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from shutil import copyfile, rmtree

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from fp8q.run import library_versions

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "demo"
FIXED_BYTES, LAYERS_HELD = 1_200_000_000, 3
#: A layer may add this share of itself to the peak: what its statistics weigh, and the sampling.
GROWTH_SHARE = 0.02
SAMPLING_SECONDS = 0.02
WIDTH, INNER, KV_HEADS, HEAD_SIZE = 4096, 14_336, 8, 128
SHAPE = LlamaConfig(
    architectures=["LlamaForCausalLM"], vocab_size=128_256, hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=32, num_key_value_heads=KV_HEADS,
    max_position_embeddings=8192, tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip


def layer_shapes() -> dict[str, tuple[int, ...]]:
    """Name within a layer -> shape."""
    width, inner, cache = WIDTH, INNER, KV_HEADS * HEAD_SIZE
    products = {"q": (width, width), "k": (cache, width), "v": (cache, width), "o": (width, width)}
    return {
        **{f"self_attn.{name}_proj.weight": shape for name, shape in products.items()},
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }


@cache
def random_weight(shape: tuple[int, ...]) -> torch.Tensor:
    """BF16 normal values of the size that keeps a product's; ones for a norm. One tensor a shape: memory does not know what values it holds."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=shape[1] ** -0.5)


def write_checkpoint(path: Path, layers: int) -> int:
    """Write a random checkpoint of `layers` layers shard by shard; returns the bytes of its weights."""
    path.mkdir()
    shards: list[dict[str, tuple[int, ...]]] = [{"model.embed_tokens.weight": (SHAPE.vocab_size, SHAPE.hidden_size)}]
    shards += [{f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes().items()} for layer in range(layers)]
    shards += [{"model.norm.weight": (SHAPE.hidden_size,)}, {"lm_head.weight": (SHAPE.vocab_size, SHAPE.hidden_size)}]
    names: dict[str, str] = {}
    for number, shapes in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        names |= dict.fromkeys(shapes, file)
        save_file({name: random_weight(shape).clone() for name, shape in shapes.items()}, path / file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    SHAPE.num_hidden_layers = layers
    SHAPE.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(DEMO / "checkpoint" / name, path / name)
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def calibrate(checkpoint: str, out: str, windows: int, seq_len: int) -> None:
    """What the measured process does: `fp8q calibrate --stream` but for the export, naming each stage on standard output when it begins."""
    print("start", flush=True)
    from fp8q.api import CalibrateOptions
    from fp8q.calibrate.source import load_tokenizer, open_source
    from fp8q.progress import SILENT
    from fp8q.run import Run
    from fp8q.stages import choosing, corpora, measuring, sources
    from fp8q.stages.steps import Notes

    options = CalibrateOptions(samples=windows, seq_len=seq_len, batch_size=2, stream=True)
    run, notes = Run(Path(out)), Notes(SILENT)
    source = open_source(checkpoint)
    products = sources.products_of(source, ())
    collected = corpora.collect(source, load_tokenizer(source), str(DEMO / "calibration.txt"), None, options, notes)
    sources.check_weights(run, source, notes)
    corpora.write_corpus(run, source, collected, notes)
    print("measure", flush=True)
    measuring.measure(run, source, options, notes)
    print("quantize", flush=True)
    choosing.quantize(run, source, products, options, notes)


def sampled(arguments: list[str]) -> dict[str, dict[str, float]]:
    """Run this script with `arguments`; stage -> its peak of anonymous memory in bytes, and its seconds."""
    found: dict[str, dict[str, float]] = {}
    with subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        stage, began = "start", time.monotonic()
        while process.poll() is None:
            told = process.stdout.read()
            if told:
                stage, began = told.decode().split()[-1], time.monotonic()
                print(f"{stage} …", file=sys.stderr)
            peak = found.get(stage, {}).get("peak_anonymous_bytes", 0)
            found[stage] = {"peak_anonymous_bytes": max(peak, anonymous_bytes(process.pid)), "seconds": round(time.monotonic() - began, 1)}
            time.sleep(SAMPLING_SECONDS)
    if process.returncode:
        raise SystemExit(f"the measured process failed with exit status {process.returncode}")
    return found


def anonymous_bytes(process: int) -> int:
    """Anonymous resident memory of a process; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def measure_checkpoint(folder: Path, layers: int, windows: int, seq_len: int, limit: int) -> dict[str, object]:
    """Write a checkpoint, calibrate it, remove it."""
    checkpoint, run = folder / "model", folder / "run"
    size = write_checkpoint(checkpoint, layers)
    stages = sampled(["--child", str(checkpoint), str(run), "--windows", str(windows), "--seq-len", str(seq_len)])
    rmtree(checkpoint)
    rmtree(run)
    peak = max(stage["peak_anonymous_bytes"] for stage in stages.values())
    return {"layers": layers, "checkpoint_bytes": size, "peak_anonymous_bytes": peak, "limit_bytes": limit, "passed": peak <= limit, "stages": stages}


def main() -> int:
    """Measure, print, and say by the exit status whether every limit was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    limit, measured = FIXED_BYTES + LAYERS_HELD * layer, commit()
    with tempfile.TemporaryDirectory() as directory:
        found = [measure_checkpoint(Path(directory), layers, options.windows, options.seq_len, limit) for layers in options.layers]
    peaks = [checkpoint["stages"]["measure"]["peak_anonymous_bytes"] for checkpoint in found]  # type: ignore[index]
    growth = (peaks[1] - peaks[0]) / (options.layers[1] - options.layers[0])
    passed = all(checkpoint["passed"] for checkpoint in found) and growth <= GROWTH_SHARE * layer
    result = {
        "benchmark": "memory", "machine": f"{os.cpu_count()} cores, {torch.cuda.device_count()} GPUs", "versions": library_versions(), "commit": measured,
        "windows": options.windows, "seq_len": options.seq_len, "layer_bytes": layer, "checkpoints": found,
        "growth_bytes_a_layer": round(growth), "growth_limit_bytes_a_layer": round(GROWTH_SHARE * layer), "passed": passed,
    }  # fmt: skip
    print(json.dumps(result))
    return 0 if passed else 1


def commit() -> str:
    """The commit that was measured."""
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
