"""What an engine takes on disk, by precision: of the demo, most of which is program, and of one layer of width 1,024,
most of which is weights.

    python benchmarks/engine_size.py [--target sm89]

TensorRT-RTX, two profiles. The ceiling for FP8 over BF16 is 0.5, where every byte is a quantized weight's. The wide
layer has random weights: sizes do not depend on values. Prints one JSON line.
"""

import json
import sys
import tempfile
from pathlib import Path
from shutil import copyfile
from typing import Any, get_args

import torch
from models import DEMO
from result import arguments, described, publish
from transformers import LlamaConfig, LlamaForCausalLM

from fp8q.api import CalibrateOptions, EngineOptions, ExportOptions, build_engine, calibrate, export
from fp8q.export.engine.info import engines_of
from fp8q.export.engine.plan import modules_by_types, read_plan
from fp8q.options import Precision
from fp8q.quantize.scales.decisions import load_scales


def wide_layer(path: Path) -> Path:
    """A Llama of one layer with 16.8 M weights in its products, random, with the demo's tokenizer."""
    vocabulary = json.loads((DEMO / "checkpoint" / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=1,
        num_attention_heads=16,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(DEMO / "checkpoint" / name, path / name)
    return path


def measure(checkpoint: Path, target: str, folder: Path) -> dict[str, Any]:
    """Precision -> bytes of the engine, and the products it runs; and how many weights are quantized."""
    options = CalibrateOptions(samples=16, seq_len=256)
    run = calibrate(
        str(checkpoint), str(DEMO / "calibration.txt"), folder / "run", str(DEMO / "evaluation.txt"), options
    )
    found: dict[str, Any] = {
        "weights": weights(checkpoint, list(load_scales(run).weights)),
        "bytes": {},
        "products": {},
    }
    for precision in get_args(Precision):
        if precision != "fp8":
            export(run.root, ExportOptions(precision=precision))
        engines = EngineOptions(runtime="tensorrt-rtx", targets=(target,), precision=precision)
        info = build_engine(run.root, engines)[0]
        plan = read_plan((engines_of(run, precision) / f"{target}.plan").read_bytes())
        assert plan is not None, "this version's plans read"
        found["bytes"][precision] = info.bytes
        found["products"][precision] = modules_by_types(plan)
    return found


def weights(checkpoint: Path, modules: list[str]) -> int:
    """Values in the weights of `modules`."""
    parameters = dict(LlamaForCausalLM.from_pretrained(checkpoint).named_parameters())
    return sum(parameters[f"{name}.weight"].numel() for name in modules)


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--target", default="sm89")
    asked = parser.parse_args()
    head, results = described("engine_size"), {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "demo").mkdir()
        results["demo"] = measure(DEMO / "checkpoint", asked.target, folder / "demo")
        results["one layer, width 1,024"] = measure(wide_layer(folder / "wide"), asked.target, folder)
    return publish(head, {"target": asked.target, "results": results}, asked.save)


if __name__ == "__main__":
    sys.exit(main())
