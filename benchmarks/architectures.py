"""What FP8 makes of each architecture: perplexity in BF16, in the FP8 reference and on ONNX Runtime, with and without
an FP8 cache, and FP8 products by target.

    python benchmarks/architectures.py [MODEL=CALIBRATION,EVALUATION …] [--windows 40] [--context 256]

Calibrates each on 64 windows, validates on
`--windows` windows of `--context` tokens, each scored alone, and builds engines with TensorRT-RTX; then again with an
FP8 cache, from the same statistics. The ceiling is BF16's own perplexity, beside the others. Prints one
line of JSON; exit status 1 when a promised product is not FP8 in an engine, or ONNX Runtime's perplexity
is more than 0.5 % from the reference's (1 % for heads of 8, whose attention is ill-conditioned).
"""

import sys
import tempfile
from pathlib import Path

from models import Given, cut_text, given, small_models
from result import arguments, described, publish

from fp8q.api import (
    CalibrateOptions,
    EngineOptions,
    RescaleOptions,
    ScaleOptions,
    ValidateOptions,
    build_engine,
    calibrate,
    scales,
    validate,
)
from fp8q.options import KvCache
from fp8q.quantize.scales import load_scales
from fp8q.run import Run

MODELS = ("llama", "qwen2", "gemma", "gpt2", "opt", "stories260k")
TARGETS = ("sm89", "sm120")
LIMITS = {"stories260k": 0.01}
LIMIT = 0.005


def outcome(run: Run, options: ValidateOptions) -> dict[str, object]:
    """Perplexities of the run as it is, and the FP8 products of its engines."""
    runtimes = validate(run.root, options=options).runtimes
    built = build_engine(
        run.root, EngineOptions(runtime="tensorrt-rtx", targets=TARGETS, max_seq_len=512, min_fp8_share=0)
    )
    return {
        "perplexity": {name: runtime.perplexity for name, runtime in runtimes.items()},
        "kl_reference_nats": runtimes["reference"].kl_mean_nats,
        "promised_products": len(load_scales(run).promised),
        "fp8_products": {engine.target: engine.fp8_products for engine in built},
    }


def measure(model: Given, windows: int, context: int) -> dict[KvCache, dict[str, object]]:
    """`outcome` of one checkpoint with the cache in BF16 and in FP8."""
    with tempfile.TemporaryDirectory() as directory:
        held_out = cut_text(model, windows * context, Path(directory))
        calibration = CalibrateOptions(samples=64, seq_len=256)
        run = calibrate(model.directory, model.data, Path(directory) / "run", str(held_out), calibration)
        options = ValidateOptions(context=context)
        off = outcome(run, options)
        return {"off": off, "fp8": outcome(scales(run.root, RescaleOptions(kv_cache="fp8")), options)}


def passed(name: str, result: dict[KvCache, dict[str, object]]) -> bool:
    """Whether every promised product is FP8 in every engine and the two runtimes agree."""
    for each in result.values():
        perplexity, products = each["perplexity"], each["fp8_products"]
        assert isinstance(perplexity, dict)
        assert isinstance(products, dict)
        if abs(perplexity["onnxruntime"] / perplexity["reference"] - 1) > LIMITS.get(name, LIMIT) or set(
            products.values()
        ) != {each["promised_products"]}:
            return False
    return True


def main() -> int:
    """Measure, print, and say by the exit status whether every limit was met."""
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", type=given, metavar="MODEL=CALIBRATION,EVALUATION")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--context", type=int, default=256)
    options = parser.parse_args()
    head = described("architectures", (ScaleOptions, EngineOptions))
    models = options.models or small_models(*MODELS)
    results = {model.name: measure(model, options.windows, options.context) for model in models}
    good = all(passed(name, result) for name, result in results.items())
    limits = {"context": options.context, "limit": LIMIT, "limits": LIMITS, "passed": good}
    return publish(head, {"results": results, **limits}, options.save)


if __name__ == "__main__":
    sys.exit(main())
