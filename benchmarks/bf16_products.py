"""BF16 products by FP32 arithmetic: the time they save on processors without BF16 units, and how close they come.

    python benchmarks/bf16_products.py [--windows 128] [--rounds 3] [--models demo llama]

First this processor as it is, then the same processor told to have AVX2 alone (`ONEDNN_MAX_CPU_ISA=AVX2
ATEN_CPU_CAPABILITY=avx2`), each in a process of its own. On both: calibration's pass over windows of 256 tokens, in
batches of four, to the plain BF16 forward pass as transformers runs it, and `fp8q validate` with torch's own BF16
products and with these, all in processor time, by one thread. The ceiling is the plain pass in FP32
throughout, which is faster and another model.

Where there are BF16 units, their logits are held against widened ones: KL between the two, beside BF16's own from FP32,
and beside what the units give when the inputs of each product stand in another order, which changes sums alone. And
both are calibrated: how many tensors have another amax, how many scales differ. Prints one JSON line; `limit_ratio` is
of calibration.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import ModelTexts, small_models
from result import arguments, described, publish
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8q.api import ValidateOptions, calibrate, validate
from fp8q.calibrate.measure.measurement import Measurement, measure_in_memory
from fp8q.calibrate.measure.scoring import divergences, log_softmax
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity, Statistics
from fp8q.calibrate.model import bf16_gemms
from fp8q.calibrate.model.source import load_model, open_source
from fp8q.core.reporter import SILENT
from fp8q.options import CalibrateOptions
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.scales.clip import scale_of

WINDOW, BATCH = 256, 4
#: Of calibration to the plain BF16 forward pass: without BF16 units, and with them.
LIMIT = {"avx2": 0.55, "native": 1.05}
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@contextmanager
def units(there: bool) -> Iterator[None]:
    """Let fp8q take the processor for one with BF16 units, or without, in this block."""
    known = bf16_gemms.has_bf16_units
    bf16_gemms.has_bf16_units = lambda: there  # type: ignore[assignment]
    try:
        yield
    finally:
        bf16_gemms.has_bf16_units = known


def seconds(work: Callable[[], object]) -> float:
    """Processor time of `work`."""
    start = time.process_time()
    work()
    return time.process_time() - start


def text(texts: ModelTexts, windows: int) -> np.ndarray:
    """The calibration text's first windows, int64 [windows, WINDOW]."""
    ids = AutoTokenizer.from_pretrained(texts.directory)(Path(texts.data).read_text(encoding="utf-8"))["input_ids"]
    return np.resize(np.asarray(ids, np.int64), (windows, WINDOW))


def plain(model: torch.nn.Module, ids: np.ndarray) -> None:
    """The forward pass of the decoder, as transformers runs it."""
    with torch.inference_mode():
        for batch in np.split(ids, len(ids) // BATCH):
            model.base_model(input_ids=torch.from_numpy(batch), use_cache=False)  # type: ignore[operator]


def measured(model: Any, ids: np.ndarray) -> Statistics:
    """What fp8q's calibration measures of `model`."""
    identity = ModelIdentity(name="benchmark", architecture="any", fingerprint="0")
    corpus = Corpus(name="text", fingerprint="0", windows=len(ids), seq_len=WINDOW, batch_size=BATCH)
    return measure_in_memory(model, Measurement(ids, identity, corpus), SILENT)


def timed(texts: ModelTexts, windows: int, rounds: int) -> dict[str, Any]:
    """Ratios to the plain BF16 pass on this kind of processor, medians of rounds in which the contenders take turns."""
    source, ids = open_source(texts.directory), text(texts, windows)
    theirs = AutoModelForCausalLM.from_pretrained(texts.directory, dtype=torch.bfloat16).eval()
    ours, fp32 = load_model(source, torch.bfloat16), load_model(source, torch.float32)
    contenders: dict[str, Callable[[], object]] = {
        "plain": lambda: plain(theirs, ids),
        "calibration": lambda: measured(ours, ids),
        "forward": lambda: plain(ours, ids),
        "fp32": lambda: plain(fp32, ids),
    }
    for model in (theirs, ours, fp32):
        plain(model, ids[:BATCH])
    took: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, work in contenders.items():
            took[name].append(seconds(work))
    ratios = {
        name: statistics.median(mine / base for mine, base in zip(took[name], took["plain"], strict=True))
        for name in contenders
        if name != "plain"
    }
    return {"ratios": ratios, "seconds": took, "validate": validated(texts)}


def validated(texts: ModelTexts) -> dict[str, float]:
    """Processor seconds of `fp8q validate` (BF16 and the reference) by torch's own BF16 products, and by fp8q's."""
    with tempfile.TemporaryDirectory() as folder:
        run = calibrate(
            texts.directory, texts.data, Path(folder) / "run", texts.eval_data, CalibrateOptions(samples=16)
        )
        chosen = ValidateOptions(runtimes=("bf16", "reference"))
        found = {}
        for name, there in (("torch", True), ("fp8q", bf16_gemms.has_bf16_units())):
            with units(there):
                (run.root / "accuracy.json").unlink(missing_ok=True)
                found[name] = seconds(lambda: validate(run.root, options=chosen))
    return found


def logits(model: Any, ids: np.ndarray) -> torch.Tensor:
    """Log-probabilities, float32 [tokens, vocabulary]."""
    with torch.inference_mode():
        parts = [
            log_softmax(model(input_ids=torch.from_numpy(batch)).logits).flatten(0, 1)
            for batch in np.split(ids, len(ids) // BATCH)
        ]
    return torch.cat(parts)


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """KL(p || q) in nats, the mean over tokens."""
    return float(divergences(p, q).mean())


def reordered(model: Any) -> Any:
    """`model` with the inputs of each linear layer in another order, and its weights' columns alike."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            order = torch.randperm(module.in_features, generator=torch.Generator().manual_seed(0))
            module.weight = torch.nn.Parameter(module.weight[:, order], requires_grad=False)
            module.register_forward_pre_hook(lambda _, inputs, order=order: (inputs[0][..., order],))
    return model


def compared(texts: ModelTexts, windows: int) -> dict[str, Any]:
    """BF16 units against widened products: KL, statistics and scales."""
    source, ids = open_source(texts.directory), text(texts, windows)
    native = load_model(source, torch.bfloat16)
    with units(False):
        wide = load_model(source, torch.bfloat16)
    few = ids[: min(16, windows)]
    theirs, mine = logits(native, few), logits(wide, few)
    exact = logits(load_model(source, torch.float32), few)
    other = logits(reordered(load_model(source, torch.bfloat16)), few)
    one, two = measured(native, ids).tensors, measured(wide, ids).tensors
    scales = [[float(scale_of(each.histogram.amax, E4M3)) for each in (one[name], two[name])] for name in one]
    return {
        "kl_native_widened": divergence(theirs, mine),
        "kl_native_reordered": divergence(theirs, other),
        "kl_fp32_native": divergence(exact, theirs),
        "kl_fp32_widened": divergence(exact, mine),
        "tensors": len(one),
        "amax_differ": sum(float(one[name].histogram.amax) != float(two[name].histogram.amax) for name in one),
        "scales_differ": sum(first != second for first, second in scales),
        "largest_scale_ratio": max(max(pair) / min(pair) for pair in scales),
    }


def child(kind: str, windows: int, rounds: int, models: list[str]) -> dict[str, Any]:
    """The figures of one kind of processor, from a process that has been that kind since its start."""
    command = [sys.executable, __file__, "--kind", kind, "--windows", str(windows), "--rounds", str(rounds)]
    # one thread: two that share a busy machine wait for each other, which counts as processor time
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(AVX2 if kind == "avx2" else {})}
    printed = subprocess.run(
        [*command, "--models", *models], check=True, stdout=subprocess.PIPE, text=True, env=environment
    ).stdout
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def of_this_kind(windows: int, rounds: int, models: list[str]) -> dict[str, Any]:
    """What a child measures."""
    there = bf16_gemms.has_bf16_units()
    return {
        "bf16_units": there,
        "threads": torch.get_num_threads(),
        "models": {
            texts.name: timed(texts, windows, rounds) | ({"compared": compared(texts, windows)} if there else {})
            for texts in small_models(*models)
            if texts.name in models
        },
    }


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--windows", type=int, default=128, help="a multiple of four")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=["demo", "llama"])
    parser.add_argument("--kind", choices=["native", "avx2"], help="this process is that kind already")
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(of_this_kind(options.windows, options.rounds, options.models)))
        return 0
    head = described("bf16_products")
    kinds = {kind: child(kind, options.windows, options.rounds, options.models) for kind in ("native", "avx2")}
    worst = {
        kind: max(each["ratios"]["calibration"] for each in found["models"].values()) for kind, found in kinds.items()
    }
    limits = {kind: LIMIT["native" if found["bf16_units"] else "avx2"] for kind, found in kinds.items()}
    result = {
        "ratio": worst,
        "limit_ratio": limits,
        "passed": all(worst[kind] <= limits[kind] for kind in kinds),
        "windows": options.windows,
        "rounds": options.rounds,
        "kinds": kinds,
    }
    return publish(head, result, options.save)


if __name__ == "__main__":
    sys.exit(main())
