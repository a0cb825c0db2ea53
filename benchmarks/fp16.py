"""What two terms keep of a graph in FP16, whose activations have eleven significant bits: the model's KL against FP32.

    python benchmarks/fp16.py [MODEL=CALIBRATION,EVALUATION …] [--windows 16] [--context 256]

Calibrated on 64 windows of 256 tokens. For wide parts in BF16, in FP16 and in FP32 mean KL(FP32 || model) × 10⁶ of the
model itself, and of the reference with one term, with two, and with the same codes of the weights and activations as
they are, which is the floor. The reference stands for the graph: ONNX Runtime's QuantizeLinear takes no FP16 values
under an FP32 scale. Prints one JSON line.
"""

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from loaded_runtimes import compare_runtimes
from models import ModelTexts, main_of

from fp8q.api import CalibrateOptions, RescaleOptions, calibrate, scales
from fp8q.calibrate.text.evaluation import cut
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import Terms
from fp8q.quantize.reading.run_checkpoint import vocabulary_size
from fp8q.quantize.reference.fp8_model import Reference, load_reference
from fp8q.quantize.reference.linear import FP8Linear
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import source_of
from fp8q.validate.accuracy.compare import BASELINE, Forward
from fp8q.validate.accuracy.runtimes import float_model, logits_of

TYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}
ITSELF, AS_THEY_ARE = "the model itself", "activations as they are"
TERMS: dict[Terms, str] = {1: "one term", 2: "two terms"}


def exact_inputs(reference: Reference) -> Reference:
    """`reference` (changed in place), whose products take x / s instead of its codes; s is a power of two."""
    for layer in reference.model.modules():
        if isinstance(layer, FP8Linear):
            layer.terms = 1
            object.__setattr__(layer, "input_codes", partial(quotients, layer))
    return reference


def quotients(layer: FP8Linear, x: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """`x` over the scale of a layer's input, float32 [1, ..., in], in the place of codes."""
    return (x.float() / layer.input_scale)[None]


def forwards(run: Run) -> Iterator[tuple[str, str, Forward]]:
    """Each row and column, and its logits."""
    for name, dtype in TYPES.items():
        if dtype != torch.float32:
            yield ITSELF, name, float_model(source_of(run), dtype, "cpu")
    for terms, row in TERMS.items():
        scales(run.root, RescaleOptions(activation_terms=terms))
        for name, dtype in TYPES.items():
            yield row, name, logits_of(load_reference(run.model, "exact", dtype))
    for name, dtype in TYPES.items():
        yield AS_THEY_ARE, name, logits_of(exact_inputs(load_reference(run.model, "exact", dtype)))


def measure(model: ModelTexts, windows: int, context: int) -> dict[str, dict[str, float]]:
    """Row -> column -> mean KL(FP32 || it) × 10⁶."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        options = CalibrateOptions(samples=64, seq_len=256)
        run = calibrate(model.directory, model.data, Path(directory) / "run", model.eval_data, options)
        tokens = load_tokens(run, run.evaluation).ravel()[: windows * context]
        evaluation = cut(tokens, Path(model.eval_data).name, context, context)
        runtimes = {f"{row}: {column}": (row, column, forward) for row, column, forward in forwards(run)}
        named: dict[str, Forward] = {name: forward for name, (*_, forward) in runtimes.items()}
        named[BASELINE] = float_model(source_of(run), torch.float32, "cpu")
        accuracy, _ = compare_runtimes(evaluation, named, vocabulary_size(run), SILENT)
    for name, (row, column, _) in runtimes.items():
        mean = accuracy.runtimes[name].kl_mean_nats
        assert mean is not None, "it is compared with FP32"
        found.setdefault(row, {})[column] = round(1e6 * mean, 2)
    print(f"{model.name}: {found}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main_of("fp16", __doc__, measure, "demo", "llama", windows=16))
