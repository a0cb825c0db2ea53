"""What FP8 makes of each architecture: perplexity in BF16, in the FP8 reference and on ONNX Runtime, activations in one
term and in two, with and without an FP8 cache, and FP8 products by target.

    python benchmarks/architectures.py [MODEL=CALIBRATION,EVALUATION …] [--windows 16] [--context 256]

Calibrates each once on 64 windows, and for each choice validates on `--windows` windows of `--context` tokens, each
scored alone, and builds engines with TensorRT-RTX. The ceiling is BF16's own perplexity, beside the others. Prints one
line of JSON; exit status 1 when a promised product is not FP8 in an engine, or not found there in the terms promised,
or ONNX Runtime's perplexity is more than 0.5 % from the reference's (1 % for heads of 8, whose attention is
ill-conditioned).
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from models import ModelTexts, cut_text, model_arguments, small_models
from result import described, publish

from fp8q.api import (
    CalibrateOptions,
    EngineOptions,
    RescaleOptions,
    ValidateOptions,
    build_engine,
    calibrate,
    engine,
    scales,
    validate,
)
from fp8q.core.run import Run
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.scheme import in_two_codes

MODELS = ("demo", "llama", "qwen2", "gemma", "gpt2", "opt", "stories260k")
#: What each is measured with beside "off", the defaults; all from the same statistics.
CHOICES = {
    "fp8": RescaleOptions(kv_cache="fp8"),
    "off, two terms": RescaleOptions(kv_cache="off", activation_terms=2),
    "fp8, two terms": RescaleOptions(kv_cache="fp8", activation_terms=2),
}
TARGETS = ("sm89", "sm120")
LIMITS = {"stories260k": 0.01}
LIMIT = 0.005


def outcome(run: Run, options: ValidateOptions) -> dict[str, object]:
    """Perplexities of the run as it is, the FP8 products of its engines, and those found there in two terms."""
    runtimes = validate(run.root, options=options).runtimes
    build_engine(run.root, EngineOptions(runtime="tensorrt-rtx", targets=TARGETS, max_seq_len=512, min_fp8_share=0))
    views, chosen = engine(run.root), load_scales(run)
    return {
        "perplexity": {name: runtime.perplexity for name, runtime in runtimes.items()},
        "kl_reference_nats": runtimes["reference"].kl_mean_nats,
        "promised_products": len(chosen.fp8_gemms),
        "fp8_products": {view.target: view.fp8_products for view in views},
        "two_terms": len(in_two_codes(chosen.forms)),
        "two_terms_found": {view.target: view.terms_found or 0 for view in views},
    }


def measure(model: ModelTexts, windows: int, context: int) -> dict[str, dict[str, object]]:
    """`outcome` of one checkpoint with the defaults and with each of `CHOICES`."""
    with tempfile.TemporaryDirectory() as directory:
        held_out = cut_text(model, windows * context, Path(directory))
        calibration = CalibrateOptions(samples=64, seq_len=256)
        run = calibrate(model.directory, model.data, Path(directory) / "run", str(held_out), calibration)
        options = ValidateOptions(context=context)
        off = outcome(run, options)
        return {"off": off} | {name: outcome(scales(run.root, choice), options) for name, choice in CHOICES.items()}


def passed(name: str, result: dict[str, dict[str, Any]]) -> bool:
    """Whether every promised product is FP8 in every engine, in the terms promised, and the two runtimes agree."""
    return all(
        abs(each["perplexity"]["onnxruntime"] / each["perplexity"]["reference"] - 1) <= LIMITS.get(name, LIMIT)
        and set(each["fp8_products"].values()) == {each["promised_products"]}
        and set(each["two_terms_found"].values()) == {each["two_terms"]}
        for each in result.values()
    )


def main() -> int:
    """Measure, print, and say by the exit status whether every limit was met."""
    options = model_arguments(__doc__, windows=16).parse_args()
    head = described("architectures")
    models = options.models or small_models(*MODELS)
    results = {}
    for model in models:
        results[model.name] = measure(model, options.windows, options.context)
        print(
            f"{model.name}: {'as promised' if passed(model.name, results[model.name]) else 'misses'}", file=sys.stderr
        )
    good = all(passed(name, result) for name, result in results.items())
    limits = {"context": options.context, "limit": LIMIT, "limits": LIMITS, "passed": good}
    return publish(head, {"results": results, **limits}, options.save)


if __name__ == "__main__":
    sys.exit(main())
