"""What it costs to start from an FP8 checkpoint: codes that are kept, and scales of blocks that become one a channel.

    python benchmarks/fp8_input.py [MODEL=CALIBRATION,EVALUATION …] [--windows 40] [--context 256]

Each model's linear layers are quantized as others do it (scale = amax / 448 of a tensor, of a channel, or of a block of
128 × 128), and `fp8q calibrate` is given the result. KL(yardstick || FP8), all else in FP32: the yardstick is the model
as it was given, dequantized, and for comparison the BF16 original with the FP8 that is made of that. With activations
left exact the loss of weights alone is seen, which is 0 where codes are kept. Prints one JSON line.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from loaded_runtimes import compare_runtimes
from models import ModelTexts, main_of
from safetensors.torch import save_file

from fp8q.calibrate.model.source import Source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.text import corpus
from fp8q.calibrate.text.evaluation import cut
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages import corpus as corpus_stage
from fp8q.stages import measure as measure_stage
from fp8q.stages import quantize as quantize_stage
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared import sources
from fp8q.validate.accuracy.compare import Forward
from fp8q.validate.accuracy.runtimes import float_model

SAMPLES = 32
#: Row -> rows and columns of the weight that one scale is for; 0: all of them.
FORMS = {
    "a scale a channel": (1, 0),
    "a scale a tensor": (0, 0),
    "a scale a block of 128 × 128": (128, 128),
    "a scale a block of 64 × 64": (64, 64),
}
ORIGINAL = "for comparison: FP8 of the BF16 original"


def coded(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a weight [out, in], and the scales of its blocks [rows, columns]."""
    rows, columns = (side or whole for side, whole in zip(block, weight.shape, strict=True))
    bands = [band.split(columns, 1) for band in weight.float().split(rows, 0)]
    scales = torch.stack([torch.stack([part.abs().amax() for part in band]) for band in bands]) / 448
    spread = scales.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[:, : weight.shape[1]]
    return (weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def quantized(source: Source, folder: Path, block: tuple[int, int]) -> Path:
    """The FP8 checkpoint that somebody else might have made of `source`."""
    tensors: dict[str, torch.Tensor] = {}
    weights, strategy = source.weights(), "block" if all(block) else "channel" if any(block) else "tensor"
    for name in weights.names():
        tensor = weights.tensor(name)
        if name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale"] = coded(tensor, block)
        else:
            tensors[name] = tensor
    for path in source.path.glob("*.json"):
        shutil.copy(path, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    of_weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
    group = {
        "targets": ["Linear"],
        "weights": of_weights | ({"block_structure": list(block)} if strategy == "block" else {}),
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    }
    said = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said | {"ignore": ["lm_head"]}}))
    return folder


def losses(source: Source, model: ModelTexts, folder: Path, windows: int, context: int) -> Mapping[str, Any]:
    """KL of FP8 made of `source` and of its weights alone, and what `scales.json` says is lost."""
    tokenizer, notes, run = load_tokenizer(source), Notes(SILENT), Run(folder)
    options = CalibrateOptions(samples=SAMPLES, seq_len=context)
    collected = corpus_stage.collect(source, tokenizer, model.data, model.eval_data, options, notes)
    corpus_stage.write_corpus(run, source, collected, notes)
    measure_stage.measure(run, source, options, notes)
    quantize_stage.quantize(run, source, sources.gemms_of(source, options), options, notes)
    tokens = corpus.encode_texts(corpus.load_texts(model.eval_data), tokenizer)[: windows * context]
    fp8 = load_reference(run.model, "exact", torch.float32).model
    runtimes: dict[str, Forward] = {
        "bf16": float_model(source, torch.float32, "cpu"),
        "fp8": lambda ids: fp8(input_ids=torch.from_numpy(ids)).logits,
        "weights": float_model(sources.opened(str(run.model)), torch.float32, "cpu"),
    }
    found, _ = compare_runtimes(
        cut(tokens, model.eval_data, context, context), runtimes, source.text_config.vocab_size, SILENT
    )
    kl = {name: found.runtimes[name].kl_mean_nats or 0.0 for name in ("fp8", "weights")}
    least = [weight.sqnr_db for weight in load_scales(run).weights.values() if weight.sqnr_db is not None]
    return {
        "kl_mean_nats_times_1e6": round(1e6 * kl["fp8"], 2),
        "weights_kl_mean_nats_times_1e6": round(1e6 * kl["weights"], 2),
        "least_sqnr_db": round(min(least), 2) if least else None,
    }


def measure(model: ModelTexts, windows: int, context: int) -> dict[str, Mapping[str, Any]]:
    """Row -> its losses, of one model."""
    source, found = sources.opened(model.directory), dict[str, Mapping[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found[ORIGINAL] = losses(source, model, folder / "original", windows, context)
        for number, (row, block) in enumerate(FORMS.items()):
            (folder / f"{number}").mkdir()
            given = sources.opened(str(quantized(source, folder / f"{number}", block)))
            found[row] = losses(given, model, folder / f"run-{number}", windows, context)
    return found


if __name__ == "__main__":
    sys.exit(main_of("fp8_input", __doc__, measure, "demo", "llama", "qwen2"))
