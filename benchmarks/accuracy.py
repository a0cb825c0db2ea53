"""What FP8 costs, by everybody's recipe: KL against the FP32 model, on one protocol, beside what BF16 itself costs.

    python benchmarks/accuracy.py [MODEL=CALIBRATION,EVALUATION …] [--windows 40] [--context 256]
        [--samples 256] [--llmcompressor PYTHON] [--again PATTERN --save accuracy]

Calibrated on `--samples` windows of the context's length, nearly all of the demo's text, and evaluated on another text.
Mean KL(FP32 || model) × 10⁶ twice: with every model's quantized values computed in FP32 arithmetic, so that nothing but
quantization is seen (fp8q's own graph on ONNX Runtime), and in BF16 arithmetic, as served. The yardstick is the BF16
model itself. Peers: ModelOpt's FP8_DEFAULT_CFG, on the modules that fp8q quantizes too (what it takes besides is
named), and llm-compressor's scheme FP8, in an environment of its own (`--llmcompressor`), whose checkpoint transformers
runs. Beside each what it costs where it is served: bytes that a decode step reads at the end of a window, and
multiplications for each token of a prompt (those of FP8 codes; one in BF16 takes as long as two). `--again` measures
our rows whose name matches, and BF16's, and leaves the others as the saved result has them, with the commit that they
are of; BF16's must come out as it was, or nothing is saved. Prints one JSON line; exit status 1 when a limit is missed.
"""

import argparse
import copy
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from loaded_runtimes import compare_runtimes
from models import ModelTexts, model_arguments, small_models
from pages.accuracy import BF16, COMPRESSOR, MODELOPT, name_of
from result import RESULTS, described, publish
from torch import nn
from transformers import AutoModelForCausalLM

from fp8q.api import CalibrateOptions, RescaleOptions, calibrate, scales
from fp8q.calibrate.model.gemms import attention_modules, cache_shapes, gemm_modules
from fp8q.calibrate.model.source import Source, meta_model
from fp8q.calibrate.text.evaluation import Evaluation, cut
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import KvCache, WeightRounding
from fp8q.quantize.reading.run_checkpoint import vocabulary_size
from fp8q.quantize.scales.decisions import Scales, load_scales
from fp8q.quantize.scales.serving_cost import Cost, cost_of
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import source_of
from fp8q.validate.accuracy.as_served import LogitsPart
from fp8q.validate.accuracy.compare import AnyForward
from fp8q.validate.accuracy.runtimes import float_model, reference
from fp8q.validate.accuracy.session_logits import session

CACHES: tuple[KvCache, ...] = ("off", "v", "fp8")
ROUNDINGS: tuple[WeightRounding, ...] = ("nearest", "gptq")
TERMS: tuple[Literal[1, 2], ...] = (1, 2)
PEER = Path(__file__).with_name("peer_checkpoint.py")


@dataclass(frozen=True)
class Limits:
    """What may be lost without a cache: `kl` × 10⁶ (None: BF16's own) by two terms and `rounding`, and by two terms
    with `gptq` and `nearest` so much of what ModelOpt loses.
    """

    kl: float | None
    rounding: WeightRounding
    gptq: float
    nearest: float


LIMITS = {
    **dict.fromkeys(("llama", "qwen2", "gemma", "opt"), Limits(None, "gptq", 0.06, 0.20)),
    "demo": Limits(400.0, "sequential", 0.17, 0.40),
}


def ours(run: Run, wanted: Callable[[str], bool]) -> Iterator[tuple[str, AnyForward, AnyForward]]:
    """Each of our `wanted` ways that can be made of the one measured run: its name, in FP32 and in BF16 arithmetic."""
    for terms, cache, rounding in product(TERMS, CACHES, ROUNDINGS):
        if not wanted(name_of(terms, rounding, cache)):
            continue
        scales(run.root, RescaleOptions(activation_terms=terms, kv_cache=cache, weight_rounding=rounding))
        yield name_of(terms, rounding, cache), session(run, "onnxruntime"), reference(run, "cpu")


def costs(source: Source) -> Callable[[Scales | None], Cost]:
    """What scales (None: none, the BF16 model) cost on the model."""
    model = meta_model(source)
    weights = {name: tuple(module.get_parameter("weight").shape) for name, module in gemm_modules(model).items()}
    values = dict(zip("kv", map(math.prod, cache_shapes(source.text_config)), strict=True))
    cache = {f"{name}.{part}": values[part] for name in attention_modules(model).values() for part in "kv"}
    return lambda scales: cost_of(weights, cache, scales)


def remembered(forward: AnyForward) -> AnyForward:
    """Keep the logits of every batch, float32, so that a yardstick runs once for all that it is compared with."""
    pieces: dict[bytes, list[LogitsPart]] = {}

    def run(ids: np.ndarray) -> Iterator[LogitsPart]:
        key = ids.tobytes()
        if key not in pieces:
            logits = forward(ids)
            all_rows = (LogitsPart(logits, slice(0, len(ids))),)
            pieces[key] = [
                replace(piece, logits=torch.as_tensor(piece.logits).clone())
                for piece in (logits if isinstance(logits, Iterator) else all_rows)
            ]
        return iter(pieces[key])

    return run


def logits_of(model: nn.Module) -> AnyForward:
    """Logits of a model of transformers'."""
    return lambda ids: model(input_ids=torch.from_numpy(ids), use_cache=False).logits


def modelopt(directory: str, windows: np.ndarray, modules: set[str], dtype: torch.dtype) -> tuple[Any, list[str]]:
    """ModelOpt's default, on `modules` alone; and what it would quantize besides."""
    import modelopt.torch.quantization as mtq

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    def calibrated(model: nn.Module) -> None:
        for ids in torch.from_numpy(windows).split(8):
            model(input_ids=ids, use_cache=False)

    with torch.inference_mode():
        mtq.quantize(model, copy.deepcopy(mtq.FP8_DEFAULT_CFG), calibrated)
    besides = []
    for name, quantizer in model.named_modules():
        module, _, kind = name.rpartition(".")
        if kind.endswith("_quantizer") and getattr(quantizer, "is_enabled", False) and module not in modules:
            besides.append(name)
            quantizer.disable()
    return model, besides


def compressor(python: str, directory: str, windows: np.ndarray, folder: Path) -> dict[torch.dtype, Any]:
    """llm-compressor's checkpoint, as a model of transformers' in either type."""
    np.save(folder / "windows.npy", windows)
    command = [python, str(PEER), directory, str(folder / "windows.npy"), str(folder / "peer")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return {
        dtype: AutoModelForCausalLM.from_pretrained(folder / "peer", dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    }


def kl(evaluation: Evaluation, exact: AnyForward, found: dict[str, AnyForward], size: int) -> dict[str, float]:
    """Mean KL(FP32 || each) in nats × 10⁶."""
    accuracy, _ = compare_runtimes(evaluation, {"bf16": exact, **found}, size, SILENT)
    means = {name: accuracy.runtimes[name].kl_mean_nats for name in found}
    return {name: round(1e6 * mean, 2) for name, mean in means.items() if mean is not None}


def measure(model: ModelTexts, options: argparse.Namespace, before: dict[str, Any] | None) -> dict[str, Any]:
    """Row -> KL × 10⁶ in FP32 and in BF16 arithmetic, and its costs; what ModelOpt quantizes besides.

    `before`: what was found of the model, of which the rows stay that are not to be measured `--again`.
    """
    rows: dict[str, dict[str, float]] = dict(before["rows"]) if before else {}

    def wanted(name: str) -> bool:
        return before is None or bool(re.search(options.again, name))

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        asked = CalibrateOptions(  # never: all recipes calibrate and are evaluated in windows of the plain text
            samples=options.samples, seq_len=options.context, weight_rounding="gptq", bos="never"
        )
        run = calibrate(model.directory, model.data, folder / "run", model.eval_data, asked)
        source, size = source_of(run), vocabulary_size(run)
        tokens = load_tokens(run, run.evaluation).ravel()[: options.windows * options.context]
        evaluation = cut(tokens, Path(model.eval_data).name, options.context, options.context)
        exact, windows = remembered(float_model(source, torch.float32, "cpu")), load_tokens(run, run.calibration)
        cost, plain = costs(source), load_scales(run)

        def add(name: str, in_fp32: AnyForward | None, in_bf16: AnyForward, chosen: Scales | None) -> None:
            forwards = {"fp32": in_fp32, "bf16 arithmetic": in_bf16}
            made = {key: forward for key, forward in forwards.items() if forward is not None}
            spent = cost(chosen)
            found = kl(evaluation, exact, made, size) | {
                "step_bytes": spent.step_bytes(options.context),
                "prefill_operations": spent.prefill_operations,
            }
            if name == BF16 and rows.get(name, found) != found:
                raise SystemExit(f"{model.name}: {name}: was {rows[name]} and is {found}; measure all rows again")
            rows[name] = found
            print(f"{model.name}: {name}: {rows[name]}", file=sys.stderr, flush=True)

        add(BF16, None, float_model(source, torch.bfloat16, "cpu"), None)
        modules, besides = set(plain.weights), before["modelopt_besides"] if before else []
        if wanted(MODELOPT):
            in_fp32, besides = modelopt(model.directory, windows, modules, torch.float32)
            in_bf16, _ = modelopt(model.directory, windows, modules, torch.bfloat16)
            add(MODELOPT, logits_of(in_fp32), logits_of(in_bf16), plain)
        if options.llmcompressor and wanted(COMPRESSOR):
            peer = compressor(options.llmcompressor, model.directory, windows, folder)
            add(COMPRESSOR, logits_of(peer[torch.float32]), logits_of(peer[torch.bfloat16]), plain)
        for name, graph, served in ours(run, wanted):
            add(name, graph, served, load_scales(run))
        name = name_of(2, "sequential", "off")
        if wanted(name):
            asked = replace(asked, weight_rounding="sequential", activation_terms=2)
            run = calibrate(model.directory, model.data, folder / "sequential", model.eval_data, asked)
            add(name, session(run, "onnxruntime"), reference(run, "cpu"), load_scales(run))
    return {"rows": rows, "modelopt_besides": besides, "missed": missed(model.name, rows)}


def missed(model: str, rows: dict[str, dict[str, float]]) -> list[str]:
    """The limits that a model misses, with the figures."""
    if model not in LIMITS:
        return []
    limits = LIMITS[model]
    found, peer = rows[name_of(2, limits.rounding, "off")]["fp32"], rows[MODELOPT]["fp32"]
    limit = rows[BF16]["bf16 arithmetic"] if limits.kl is None else limits.kl
    shares = {(2, "gptq"): limits.gptq, (2, "nearest"): limits.nearest, (1, "gptq"): 0.92}
    checks = {f"two terms, {limits.rounding}: {found} over {limit}": found <= limit}
    for (terms, rounding), share in shares.items():
        ratio = rows[name_of(terms, rounding, "off")]["fp32"] / peer
        checks[f"{terms} terms, {rounding}, over ModelOpt's: {ratio:.3f} over {share}"] = ratio <= share
    return [text for text, met in checks.items() if not met]


def main() -> int:
    """Measure and print."""
    parser = model_arguments(__doc__, samples=256)
    parser.add_argument("--llmcompressor", metavar="PYTHON", help="the interpreter of an environment that has it")
    parser.add_argument("--again", metavar="PATTERN", help="a regular expression; needs --save and a saved result")
    options = parser.parse_args()
    head = described("accuracy")
    protocol = {"samples": options.samples, "windows": options.windows, "context": options.context}
    before = json.loads((RESULTS / f"{options.save}.json").read_text(encoding="utf-8")) if options.again else {}
    if options.again and protocol != {name: before[name] for name in protocol}:
        parser.error("--again: the saved result is of another protocol; measure all rows again")
    models = options.models or small_models("demo", "llama", "qwen2", "gemma", "opt", "stories260k")
    found = before.get("results", {})
    results = {model.name: measure(model, options, found.get(model.name)) for model in models}
    kept = {"kept": {"commit": before["commit"], "not": options.again}} if options.again else {}
    peers = json.loads(versions(options.llmcompressor)) if options.llmcompressor else before.get("peer_versions", {})
    passed = not any(each["missed"] for each in results.values())
    figures = {**protocol, **kept, "peer_versions": peers, "results": results, "passed": passed}
    return publish(head, figures, options.save)


def versions(python: str) -> str:
    """The versions of llm-compressor and what it runs on, as JSON."""
    return subprocess.run([python, str(PEER), "--versions"], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
