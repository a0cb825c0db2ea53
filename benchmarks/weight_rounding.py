"""What the choice of weight scales and of rounding gives in KL, and costs in time.

    python benchmarks/weight_rounding.py [MODEL=CALIBRATION,EVALUATION …] [--samples 128] [--context 256] [--windows 40]

Calibrates each with each of {amax, mse} × {nearest, gptq} and holds the FP8 reference, exact and in FP32, against the
BF16 weights in FP32 by mean KL(float || FP8) on the evaluation text. Activations are clipped at their amax throughout,
so that only weights differ. Two more lines bound them: one scale for a whole weight (amax), and weights that lose
nothing, the floor of whatever is done to weights. `ratio` is gptq's KL over nearest's, at amax scales. Prints one JSON
line; exit status 1 when a limit is not met.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from models import Given, given, small_models
from result import arguments, described, publish

from fp8q.calibrate.model.source import Source, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.model.weights import Weights
from fp8q.options import CalibrateOptions, WeightRounding
from fp8q.quantize.clip import scale_of
from fp8q.quantize.formats import E4M3
from fp8q.quantize.linear import FP8Linear, encode
from fp8q.quantize.reference import Reference, load_reference
from fp8q.quantize.scales import group_of
from fp8q.quantize.weight_rounding import Compensations
from fp8q.quantize.weights import Rounding, WeightMethod
from fp8q.reporter import SILENT
from fp8q.run import Run
from fp8q.stages import choosing, corpora, measuring, sources
from fp8q.stages.steps import Notes
from fp8q.validate.compare import Forward, compare
from fp8q.validate.perplexity import Evaluation, cut
from fp8q.validate.runtimes import float_model, vocabulary

LIMIT_RATIO = 0.95
METHODS: tuple[WeightMethod, ...] = ("amax", "mse")
ROUNDINGS: tuple[WeightRounding, ...] = ("nearest", "gptq")


def quantized(run: Run, source: Source, method: WeightMethod, rounding: WeightRounding) -> tuple[Path, float]:
    """A checkpoint of `run` with this choice for its weights, in a folder of the run, and the seconds it took."""
    from fp8q.calibrate.measure.statistics import load_statistics
    from fp8q.quantize.checkpoint import quantize_checkpoint

    statistics, options = load_statistics(run), CalibrateOptions()
    scales = choosing.choose_scales(statistics, sources.products_of(source), options)
    compensations = Compensations(run.moments, group_of(statistics.record.groups)) if rounding == "gptq" else None
    directory, start = run.root / f"{method}-{rounding}", time.perf_counter()
    quantize_checkpoint(source, directory, scales, Rounding(method, compensations), SILENT)
    return directory, time.perf_counter() - start


def forward_of(reference: Reference) -> Forward:
    """Logits of a reference model."""
    return lambda ids: reference.model(input_ids=torch.from_numpy(ids), use_cache=False).logits


def with_weights(directory: Path, source: Source, change: Callable[[FP8Linear, torch.Tensor], None]) -> Forward:
    """The reference of `directory` with each FP8 layer changed, given its weight, float32 [out, in]."""
    reference, weights = load_reference(directory, "exact", torch.float32), Weights(source.weight_files)
    for name, layer in reference.model.named_modules():
        if isinstance(layer, FP8Linear):
            change(layer, weights.tensor(f"{name}.weight").float())
    return forward_of(reference)


def per_tensor(layer: FP8Linear, weight: torch.Tensor) -> None:
    """One amax scale for the whole weight."""
    scale = torch.from_numpy(scale_of([float(weight.abs().max())], E4M3))
    layer.codes, layer.weight_scale = encode(weight, scale).float(), scale


def lossless(layer: FP8Linear, weight: torch.Tensor) -> None:
    """Weights that are not rounded."""
    layer.codes, layer.weight_scale = weight, torch.ones(1)


def measured(
    run: Run, source: Source, texts: Given, options: argparse.Namespace
) -> tuple[Evaluation, dict[str, float]]:
    """Calibrate without and with second moments; the evaluation text, cut, and the seconds of both."""
    calibration, notes = CalibrateOptions(samples=options.samples, seq_len=options.context), Notes(SILENT)
    collected = corpora.collect(source, load_tokenizer(source), texts.data, texts.eval_data, calibration, notes)
    corpora.write_corpus(run, source, collected, notes)
    seconds = dict[str, float]()
    for rounding in ROUNDINGS:
        measuring.measure(run, source, replace(calibration, weight_rounding=rounding), notes)
        seconds[rounding] = run.record().stages["measure"].seconds
    tokens = collected.evaluation[: options.windows * options.context]
    return cut(tokens, Path(texts.eval_data).name, options.context, options.context), seconds


def benchmark(run: Run, source: Source, texts: Given, options: argparse.Namespace) -> dict[str, object]:
    """All choices on one model."""
    evaluation, measure_seconds = measured(run, source, texts, options)
    made = {
        f"{method}, {rounding}": quantized(run, source, method, rounding)
        for method in METHODS
        for rounding in ROUNDINGS
    }
    first = made["amax, nearest"][0]
    runtimes: dict[str, Forward] = {"bf16": float_model(source, torch.float32, "cpu")}
    runtimes |= {
        name: forward_of(load_reference(directory, "exact", torch.float32)) for name, (directory, _) in made.items()
    }
    runtimes |= {
        "amax of the whole weight": with_weights(first, source, per_tensor),
        "lossless weights": with_weights(first, source, lossless),
    }
    accuracy, _ = compare(evaluation, runtimes, vocabulary(first), SILENT)
    kl = {name: runtime.kl_mean_nats for name, runtime in accuracy.runtimes.items() if runtime.kl_mean_nats is not None}
    ratio = kl["amax, gptq"] / kl["amax, nearest"]
    return {
        "parameters": parameters(source),
        "kl_mean_nats": {name: float(f"{value:.4g}") for name, value in kl.items()},
        "kl_over_whole_weight": {name: round(value / kl["amax of the whole weight"], 3) for name, value in kl.items()},
        "perplexity": {name: round(runtime.perplexity, 4) for name, runtime in accuracy.runtimes.items()},
        "measure_s": measure_seconds,
        "quantize_s": {name: round(seconds, 2) for name, (_, seconds) in made.items()},
        "evaluation_tokens": evaluation.protocol.tokens,
        "ratio": round(ratio, 4),
        "limit_ratio": LIMIT_RATIO,
        "passed": ratio <= LIMIT_RATIO,
    }


def parameters(source: Source) -> int:
    """Numbers in the checkpoint."""
    weights = Weights(source.weight_files)
    return sum(int(torch.Size(weights.shape(name)).numel()) for name in weights.names())


def main() -> int:
    """Run, print, judge."""
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", type=given, metavar="MODEL=CALIBRATION,EVALUATION")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--windows", type=int, default=40)
    options = parser.parse_args()
    head, results = described("weight_rounding"), {}
    for model in options.models or small_models("demo", "llama"):
        with tempfile.TemporaryDirectory() as folder:
            results[model.name] = benchmark(Run(Path(folder) / "run"), open_source(model.directory), model, options)
    protocol = {"samples": options.samples, "threads": torch.get_num_threads()}
    passed = all(result["passed"] for result in results.values())
    return publish(head, {**protocol, "results": results, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
