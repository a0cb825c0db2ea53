"""Measure what every recipe loses on the tokens that a server decodes, with everything in BF16 arithmetic.

    python benchmarks/as_served.py [MODEL=CALIBRATION,EVALUATION …] [--windows 32] [--context 256] [--samples 256]
        [--prompt 128] [--llmcompressor PYTHON] [--save as_served]

Each window's first `--prompt` tokens are read in one call, the others one by one over the cache of the model at hand
(`fp8q validate --as-served`). Mean KL(FP32 || model) × 10⁶ of the decoded tokens, of the calibration, recipes and peers
of `accuracy.py`, caches in BF16. Prints one JSON line; exit status 1 where a tail loses more than 0.25 of what
ModelOpt's FP8 loses, on the models that exact_answers.py judges.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accuracy import compressor, kl, modelopt, versions
from exact_answers import JUDGED, OF_ONE_TERM
from models import ModelTexts, model_arguments, small_models
from pages.accuracy import BF16, COMPRESSOR, MODELOPT, TAIL
from result import described, publish

from fp8q.api import CalibrateOptions, RescaleOptions, calibrate, scales
from fp8q.calibrate.text.evaluation import cut
from fp8q.core.run import Run
from fp8q.options import Terms, WeightRounding
from fp8q.quantize.reading.run_checkpoint import vocabulary_size
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import source_of
from fp8q.validate.accuracy.as_served import served, torch_start
from fp8q.validate.accuracy.compare import AnyForward
from fp8q.validate.accuracy.runtimes import decoding_float_model, open_fast_reference


@dataclass(frozen=True)
class Recipe:
    """A row of ours: how weights are rounded, and the codes of an activation."""

    name: str
    terms: Terms
    rounding: WeightRounding


RECIPES = (
    Recipe("fp8q, one term, nearest", 1, "nearest"),
    Recipe("fp8q, one term, gptq", 1, "gptq"),
    Recipe(TAIL, "tail", "gptq"),
    Recipe("fp8q, two terms, gptq", 2, "gptq"),
)


def ours(run: Run, prompt: int) -> Iterator[tuple[str, AnyForward]]:
    """Each of our recipes, made of the one measured run."""
    for recipe in RECIPES:
        scales(run.root, RescaleOptions(activation_terms=recipe.terms, weight_rounding=recipe.rounding))
        yield recipe.name, open_fast_reference(run, "cpu", prompt)


def measure(texts: ModelTexts, options: argparse.Namespace) -> dict[str, float]:
    """Row -> KL × 10⁶ of the decoded tokens."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        asked = CalibrateOptions(samples=options.samples, seq_len=options.context, weight_rounding="gptq", bos="never")
        run = calibrate(texts.directory, texts.data, folder / "run", texts.eval_data, asked)
        source, size = source_of(run), vocabulary_size(run)
        tokens = load_tokens(run, run.evaluation).ravel()[: options.windows * options.context]
        context, prompt = options.context, options.prompt
        evaluation = cut(tokens, Path(texts.eval_data).name, context, context, prompt=prompt)
        exact, rows = decoding_float_model(source, torch.float32, "cpu", prompt), {}

        def add(name: str, forward: AnyForward) -> None:
            rows[name] = kl(evaluation, exact, {name: forward}, size)[name]
            print(f"{texts.name}: {name}: {rows[name]}", file=sys.stderr, flush=True)

        windows, modules = load_tokens(run, run.calibration), set(load_scales(run).weights)
        add(BF16, decoding_float_model(source, torch.bfloat16, "cpu", prompt))
        quantized, _ = modelopt(texts.directory, windows, modules, torch.bfloat16)
        add(MODELOPT, served(torch_start(quantized), prompt))
        if options.llmcompressor:
            quantized = compressor(options.llmcompressor, texts.directory, windows, folder)[torch.bfloat16]
            add(COMPRESSOR, served(torch_start(quantized), prompt))
        for name, forward in ours(run, prompt):
            add(name, forward)
    return rows


def main() -> int:
    """Measure, judge, print."""
    parser = model_arguments(__doc__, windows=32, samples=256, prompt=128)
    parser.add_argument("--llmcompressor", metavar="PYTHON", help="the interpreter of an environment that has it")
    options = parser.parse_args()
    head = described("as_served")
    models = options.models or small_models("demo", "llama", "qwen2", "gemma", "opt", "stories260k")
    results: dict[str, Any] = {texts.name: measure(texts, options) for texts in models}
    passed = all(rows[TAIL] <= OF_ONE_TERM * rows[MODELOPT] for name, rows in results.items() if name in JUDGED)
    figures = {name: getattr(options, name) for name in ("samples", "windows", "context", "prompt")}
    peers = json.loads(versions(options.llmcompressor)) if options.llmcompressor else {}
    return publish(head, {**figures, "peer_versions": peers, "results": results, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
