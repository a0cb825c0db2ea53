"""What FP8 makes of each architecture: perplexity in BF16, in the FP8 reference and on ONNX Runtime, with and without
an FP8 cache, and FP8 products by target.

    python benchmarks/architectures.py CHECKPOINTS DATA [--names llama,gpt2] [--windows 40] [--context 256]

CHECKPOINTS holds a folder for each model of `MODELS`, DATA their texts. Calibrates each on 64 windows, validates on
`--windows` windows of `--context` tokens, each scored alone, and builds engines with TensorRT-RTX; then again with an
FP8 cache, from the same statistics. The ceiling is BF16's own perplexity, beside the others. Prints a table in Markdown
and last one line of JSON; exit status 1 when a promised product is not FP8 in an engine, or ONNX Runtime's perplexity
is more than 0.5 % from the reference's (1 % for heads of 8, whose attention is ill-conditioned).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from fp8q.api import (
    CalibrateOptions,
    EngineOptions,
    RescaleOptions,
    ValidateOptions,
    build_engine,
    calibrate,
    scales,
    validate,
)
from fp8q.options import KvCache
from fp8q.quantize.scales import load_scales
from fp8q.record import library_versions
from fp8q.run import Run

PYTHON, STORIES = (
    ("python-calibration.txt", "python-evaluation.txt"),
    ("tinystories-train-1000.txt", "tinystories-valid-excerpt.txt"),
)
MODELS = {"llama": PYTHON, "qwen2": PYTHON, "gemma": PYTHON, "gpt2": PYTHON, "opt": PYTHON, "stories260k": STORIES}
TARGETS = ("sm89", "sm120")
LIMITS = {"stories260k": 0.01}
LIMIT = 0.005
COLUMNS = (
    "BF16",
    "FP8 reference",
    "ONNX Runtime",
    "FP8 reference, FP8 cache",
    "ONNX Runtime, FP8 cache",
    "promised products",
    *(f"FP8 on {target}" for target in TARGETS),
)


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


def beginning(text: str, checkpoint: Path, tokens: int) -> str:
    """As much of `text` as the checkpoint's tokenizer makes `tokens` of."""
    ends = AutoTokenizer.from_pretrained(checkpoint)(text, return_offsets_mapping=True)["offset_mapping"]
    return text[: ends[min(tokens, len(ends)) - 1][1]]


def measure(
    checkpoint: Path, calibration: Path, evaluation: Path, windows: int, context: int
) -> dict[KvCache, dict[str, object]]:
    """`outcome` of one checkpoint with the cache in BF16 and in FP8."""
    with tempfile.TemporaryDirectory() as directory:
        held_out = Path(directory) / evaluation.name
        held_out.write_text(
            beginning(evaluation.read_text(encoding="utf-8"), checkpoint, windows * context), encoding="utf-8"
        )
        run = calibrate(
            str(checkpoint),
            str(calibration),
            Path(directory) / "run",
            str(held_out),
            CalibrateOptions(samples=64, seq_len=256),
        )
        options = ValidateOptions(context=context)
        off = outcome(run, options)
        return {"off": off, "fp8": outcome(scales(run.root, RescaleOptions(kv_cache="fp8")), options)}


def row(name: str, result: dict[KvCache, dict[str, object]]) -> str:
    """A row of the table."""
    off, fp8 = (result[cache] for cache in ("off", "fp8"))
    plain, cached = off["perplexity"], fp8["perplexity"]
    assert isinstance(plain, dict)
    assert isinstance(cached, dict)
    assert isinstance(fp8["fp8_products"], dict)
    bf16 = plain["bf16"]
    shown = [
        f"{bf16:.3f}",
        *(
            f"{value:.3f} ({value / bf16 - 1:+.2%})"
            for value in (plain["reference"], plain["onnxruntime"], cached["reference"], cached["onnxruntime"])
        ),
    ]
    products = [str(fp8["promised_products"]), *(str(fp8["fp8_products"][target]) for target in TARGETS)]
    return f"| {' | '.join([name, *shown, *products])} |"


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--names", default=",".join(MODELS))
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--context", type=int, default=256)
    arguments = parser.parse_args()
    print(f"| model | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}", flush=True)
    results = {}
    for name in arguments.names.split(","):
        calibration, evaluation = (arguments.data / text for text in MODELS[name])
        results[name] = measure(
            arguments.checkpoints / name, calibration, evaluation, arguments.windows, arguments.context
        )
        print(row(name, results[name]), flush=True)
    good = all(passed(name, result) for name, result in results.items())
    print(
        json.dumps(
            {
                "results": results,
                "context": arguments.context,
                "limit": LIMIT,
                "limits": LIMITS,
                "passed": good,
                "versions": library_versions(),
            }
        )
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
