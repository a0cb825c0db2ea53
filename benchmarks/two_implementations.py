"""Two implementations, one model: ONNX Runtime on the exported graph against the torch reference in exact FP32 mode.

    python benchmarks/two_implementations.py [MODEL=CALIBRATION,EVALUATION …] [--kv-cache off fp8] [--optimized]

Two correct implementations agree to the last digits until one value, somewhere, lies so near to a midpoint that it
rounds to the other code; from then on they walk apart. So logits are compared before the first differing code (limit
1e-4), then by the share of codes that differ, by perplexity (limits: 0.1 % between the two, 0.5 % between ONNX Runtime
and the reference in BF16) and by KL, whose ceiling is what FP8 itself costs: KL(reference || ONNX Runtime) may be a
tenth of KL(BF16 || FP8). Greedy continuations may part only where the two best tokens are closer than the logits of the
two runtimes. Prints one JSON line; exit status 1 when a limit is not met.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from models import ModelTexts, model_arguments, small_models
from result import described, publish
from transformers.cache_utils import DynamicLayer

from fp8q.api import CalibrateOptions, calibrate
from fp8q.calibrate.measure.scoring import divergences, losses
from fp8q.core.run import Run
from fp8q.options import KvCache
from fp8q.quantize.codes.encoding import CODE, encode
from fp8q.quantize.reference.fp8_model import Reference, load_reference
from fp8q.quantize.reference.linear import FP8Linear
from fp8q.serve.loop.cache import BLOCK, HostCache
from fp8q.serve.loop.host_batch import LOGITS_INDICES, last_indices
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import source_of
from fp8q.validate.accuracy.runtimes import float_model, reference

LIMITS = {
    "logit_difference": 1e-4,
    "perplexity_difference": 0.001,
    "perplexity_difference_bf16": 0.005,
    "kl_share": 0.1,
}
Codes = dict[str, np.ndarray]
ONNX_E4M3 = onnx.TensorProto.FLOAT8E4M3FN


@dataclass
class Outcome:
    """What one implementation made of a batch: logits float32 [windows, context, vocabulary] and codes uint8 [windows,
    context, …] by tensor.
    """

    logits: np.ndarray
    codes: Codes


class OnnxWithCodes:
    """The FP32 graph, with the output of every QuantizeLinear made an output of the graph, run as it is written.

    ONNX Runtime's own rewriting (`--optimized`) folds weights and merges transposes into products, which sums in
    another order: more codes differ then.
    """

    def __init__(self, directory: Path, optimized: bool = False, graph: str = "model.fp32.onnx"):
        """Load the `graph` in `directory` with the added outputs."""
        model = onnx.load(directory / graph, load_external_data=False)
        kept = {value.name for value in model.graph.output}
        self.codes = {
            node.name.removesuffix(".quantize"): node.output[0]
            for node in model.graph.node
            if node.op_type == "QuantizeLinear" and not node.name.endswith(".first.quantize")  # again with the second
        }
        model.graph.output.extend(
            onnx.helper.make_tensor_value_info(name, ONNX_E4M3, None)
            for name in self.codes.values()
            if name not in kept
        )
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if not optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(directory))
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

        self.past = [value for value in self.session.get_inputs() if value.name.startswith("past")]

    def __call__(self, ids: np.ndarray) -> Outcome:
        """Run windows `ids` int64 [windows, context], each a prompt of its own."""
        positions = np.ascontiguousarray(np.broadcast_to(np.arange(ids.shape[1]), ids.shape))
        return self.step(ids, np.ones_like(ids), positions, self.buffers(len(ids), 0))[0]

    def buffers(self, rows: int, capacity: int) -> list[np.ndarray]:
        """An empty past for `rows` sequences: uint8 codes or float32, [rows, heads, capacity, size] each; `capacity` in
        whole blocks of 64.
        """
        sizes = {value.name.removeprefix("new_"): value.shape for value in self.session.get_outputs()}
        return [
            np.zeros(
                (rows, sizes[value.name.removeprefix("past_")][1], capacity, value.shape[-1]),
                np.uint8 if "float8" in value.type else np.float32,
            )
            for value in self.past
        ]

    def past_inputs(self, past: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Name of each input -> its buffer in blocks, [rows · heads · blocks, 64, size]."""
        return {
            value.name: array.reshape(-1, BLOCK, array.shape[-1]) for value, array in zip(self.past, past, strict=True)
        }

    def step(
        self, ids: np.ndarray, mask: np.ndarray, positions: np.ndarray, past: list[np.ndarray]
    ) -> tuple[Outcome, list[np.ndarray]]:
        """One step with a past, as `Session.forward` takes it: what was made of it, and the new keys and values."""
        wrap = onnxruntime.OrtValue
        feeds = {
            name: wrap.ortvalue_from_numpy(array)
            for name, array in (("input_ids", ids), ("attention_mask", mask), ("position_ids", positions))
        }
        feeds[LOGITS_INDICES] = wrap.ortvalue_from_numpy(last_indices(ids.shape, ids.shape[1]))
        feeds |= {
            name: wrap.ortvalue_from_numpy_with_onnx_type(array, ONNX_E4M3 if array.dtype == np.uint8 else 1)
            for name, array in self.past_inputs(past).items()
        }
        new = [value.name.replace("past_", "new_") for value in self.past]
        results = [
            value.numpy() for value in self.session.run_with_ort_values(["logits", *self.codes.values(), *new], feeds)
        ]
        codes = zip(self.codes, results[1 : 1 + len(self.codes)], strict=True)
        return Outcome(results[0], {name: by_position(value, ids.shape) for name, value in codes}), results[
            1 + len(self.codes) :
        ]


def by_position(codes: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Codes as [windows, context, …], `shape` the first two: keys and values come as [windows, heads, context, size],
    OPT joins windows and context, and the second of two terms comes below the first.
    """
    if codes.ndim == 4:
        return codes.swapaxes(1, 2)
    return np.concatenate([*codes.reshape(-1, *shape, codes.shape[-1])], axis=-1)


@contextmanager
def recording(loaded: Reference) -> Iterator[Codes]:
    """Keep the codes of every quantized input while the reference runs."""
    codes: Codes = {}

    def keep(name: str) -> Callable[[FP8Linear, tuple[torch.Tensor, ...]], None]:
        return lambda module, inputs: codes.update({f"{name}.input": np.concatenate([*codes_of(module, inputs[0])])})

    def codes_of(module: FP8Linear, x: torch.Tensor) -> np.ndarray:
        return module.input_codes(x).to(CODE).view(torch.uint8).numpy()

    handles = [
        module.register_forward_pre_hook(keep(name))
        for name, module in loaded.model.named_modules()
        if isinstance(module, FP8Linear)
    ]
    try:
        yield codes
    finally:
        for handle in handles:
            handle.remove()


def run_reference(loaded: Reference, ids: np.ndarray) -> Outcome:
    """Run windows `ids` through the exact reference."""
    cache = loaded.new_cache()
    with recording(loaded) as codes, torch.inference_mode():
        logits = (
            loaded.model(input_ids=torch.from_numpy(ids), past_key_values=cache, use_cache=True).logits.float().numpy()
        )
    codes = {name: by_position(values, ids.shape) for name, values in codes.items()}
    if loaded.cache_scales:
        names = [name.removesuffix(".k") for name in loaded.cache_scales if name.endswith(".k")]
        for name, layer in zip(names, cache.layers, strict=True):
            assert isinstance(layer, DynamicLayer), "every layer attends"
            for part, values in (("k", layer.keys), ("v", layer.values)):
                assert values is not None, "the model has run"
                codes[f"{name}.{part}"] = by_position(
                    encode(values, loaded.cache_scales[f"{name}.{part}"]).view(torch.uint8).numpy(),
                    ids.shape,
                )
    return Outcome(logits, codes)


def first_difference(left: Codes, right: Codes, shape: tuple[int, int]) -> tuple[np.ndarray, int, int]:
    """For each window the first position where any code differs (its length where none does), codes that differ, codes
    compared.

    `left` has one entry for each distinct tensor; `right` may name a tensor once for each module that receives it.
    """
    differs, count, total = np.zeros(shape, bool), 0, 0
    for name, codes in left.items():
        other = (codes != right[name]).reshape(*shape, -1)
        differs |= other.any(-1)
        count, total = count + int(other.sum()), total + other.size
    return np.where(differs.any(1), differs.argmax(1), shape[1]), count, total


def log_probabilities(logits: np.ndarray) -> torch.Tensor:
    """Log-softmax in float64 of the logits that predict a token of the window."""
    return torch.log_softmax(torch.from_numpy(logits[:, :-1]).double(), -1)


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean KL(p || q) over tokens, in nats."""
    return float(divergences(p, q).mean())


def nll(p: torch.Tensor, ids: np.ndarray) -> float:
    """Mean negative log-likelihood of the windows' tokens, in nats."""
    return float(losses(p, torch.from_numpy(ids[:, 1:])).mean())


def compare(run: Run, ids: np.ndarray, optimized: bool = False) -> dict[str, float]:
    """All figures but the continuations, over windows `ids`."""
    runtime, loaded = OnnxWithCodes(run.model, optimized), load_reference(run.model, "exact", torch.float32)
    bf16, fast = float_model(source_of(run), torch.bfloat16, "cpu"), reference(run, "cpu")
    sums: dict[str, float] = dict.fromkeys(("onnxruntime", "exact", "bf16", "fast", "kl_runtime", "kl_fp8"), 0.0)
    largest, before, differing, total = 0.0, 0, 0, 0
    parts = np.array_split(ids, max(1, len(ids) // 4))
    for part in parts:
        left, right = runtime(part), run_reference(loaded, part)
        first, count, codes = first_difference(left.codes, right.codes, part.shape)
        differing, total = differing + count, total + codes
        clean = np.arange(part.shape[1]) < first[:, None]
        before += int(clean.sum())
        largest = max(largest, float(np.abs(left.logits - right.logits).max(-1)[clean].max(initial=0)))
        with torch.inference_mode():
            others = {"bf16": bf16(part).float().numpy(), "fast": fast(part).float().numpy()}
        logs = {
            name: log_probabilities(logits)
            for name, logits in {"onnxruntime": left.logits, "exact": right.logits, **others}.items()
        }
        share = len(part) / len(ids)
        for name, log in logs.items():
            sums[name] += nll(log, part) * share
        sums["kl_runtime"] += kl(logs["exact"], logs["onnxruntime"]) * share
        sums["kl_fp8"] += kl(logs["bf16"], logs["exact"]) * share
    perplexity = {name: float(np.exp(sums[name])) for name in ("bf16", "fast", "exact", "onnxruntime")}
    return {
        "tokens": int(ids.size),
        "tokens_before_first_difference": before,
        "logit_difference": largest,
        "codes_differing_share": differing / total,
        **{f"perplexity_{name}": value for name, value in perplexity.items()},
        "perplexity_difference": abs(perplexity["onnxruntime"] / perplexity["exact"] - 1),
        "perplexity_difference_bf16": abs(perplexity["onnxruntime"] / perplexity["fast"] - 1),
        "kl_reference_onnxruntime_nats": sums["kl_runtime"],
        "kl_bf16_fp8_nats": sums["kl_fp8"],
        "kl_share": sums["kl_runtime"] / sums["kl_fp8"],
    }


def continuations(run: Run, prompts: np.ndarray, steps: int) -> dict[str, int]:
    """Continue `prompts` int64 [prompts, length] greedily in both; count those that part, and those that part for no
    reason.

    A reason: at that step, with the same tokens before it, the two best logits of a runtime are closer than the logits
    of the two runtimes.
    """
    session, loaded = (
        OnnxRuntimeSession(run.model / "model.fp32.onnx"),
        load_reference(run.model, "exact", torch.float32),
    )
    rows, length = prompts.shape
    capacity = -(-(length + steps) // BLOCK) * BLOCK
    past, cache = HostCache(session.layout, rows, capacity), loaded.new_cache()
    together, parted, unexplained = np.ones(rows, bool), 0, 0
    step_ids, filled = prompts, 0
    for _ in range(steps):
        width = step_ids.shape[1]
        positions = np.ascontiguousarray(np.broadcast_to(np.arange(filled, filled + width), (rows, width)))
        mask = np.concatenate([np.arange(capacity) < filled, np.ones(width, bool)]).astype(np.int64)
        left, new = session.forward(step_ids, np.tile(mask, (rows, 1)), positions, past.past(0, rows))
        past.write(0, positions, new)
        with torch.inference_mode():
            right = loaded.model(
                input_ids=torch.from_numpy(step_ids), past_key_values=cache, use_cache=True
            ).logits.numpy()
        filled += width
        ours, theirs = left[:, -1], right[:, -1]
        parts = together & (ours.argmax(-1) != theirs.argmax(-1))
        gap = np.minimum(*(np.diff(np.sort(logits, -1)[:, -2:], axis=-1)[:, 0] for logits in (ours, theirs)))
        parted += int(parts.sum())
        unexplained += int((parts & (gap > np.abs(ours - theirs).max(-1))).sum())
        together &= ~parts
        step_ids = theirs.argmax(-1)[:, None]
    return {"continuations": rows, "continuations_parted": parted, "continuations_unexplained": unexplained}


def measure(model: ModelTexts, kv_cache: KvCache, options: argparse.Namespace) -> dict[str, object]:
    """All figures of one model with one form of the cache, and whether each limit is met."""
    with tempfile.TemporaryDirectory() as directory:
        calibration = CalibrateOptions(kv_cache=kv_cache, samples=64, seq_len=256)
        run = calibrate(model.directory, model.data, Path(directory) / "run", model.eval_data, calibration)
        ids = load_tokens(run, run.evaluation)[: options.windows * options.context].reshape(-1, options.context)
        result = compare(run, ids, options.optimized) | continuations(run, ids[:16, :32], 64)
    passed = (
        all(result[name] <= limit for name, limit in LIMITS.items())
        and result["tokens_before_first_difference"] > 0
        and not result["continuations_unexplained"]
    )
    described_as = {"model": model.name, "kv_cache": kv_cache, "optimized": options.optimized}
    return {**described_as, **result, "limits": LIMITS, "passed": passed}


def main() -> int:
    """Measure, print, and say by the exit status whether every limit was met."""
    parser = model_arguments(__doc__)
    parser.add_argument("--kv-cache", choices=("off", "fp8"), nargs="+", default=("off", "fp8"))
    parser.add_argument("--optimized", action="store_true", help="let ONNX Runtime rewrite the graph")
    options = parser.parse_args()
    head = described("two_implementations")
    models = options.models or small_models("demo", "llama", "qwen2")
    results = [measure(model, kv_cache, options) for model in models for kv_cache in options.kv_cache]
    passed = all(result["passed"] for result in results)
    return publish(head, {"results": results, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
