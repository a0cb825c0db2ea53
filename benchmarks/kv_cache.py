"""What an FP8 KV cache costs: keys alone, values alone, both, and keys less the calibrated mean of each of their
channels.

    python benchmarks/kv_cache.py [MODEL=CALIBRATION,EVALUATION …] [--samples 64] [--windows 40] [--context 256]

KL(BF16 weights || the same with that cache), everything else computed in FP32, so that nothing but the cache's rounding
is seen; beside it the cost of all W8A8 products with a wide cache. Subtracting a constant vector m from every key of a
head changes each of a query's scores by the same q·m, which the softmax does not see; what remains has smaller
magnitudes where a channel is far from zero, and so smaller errors. Prints one JSON line.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import ModelTexts, model_arguments, small_models
from result import described, publish
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from fp8q.calibrate.model.source import load_model, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.text import corpus
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, ScaleOptions
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.reference.kv_cache import FP8Layer
from fp8q.quantize.scales.clip import scale_of
from fp8q.stages import corpus as corpus_stage
from fp8q.stages import measure as measure_stage
from fp8q.stages import quantize as quantize_stage
from fp8q.stages.pipeline.steps import Notes
from fp8q.stages.shared import sources
from fp8q.validate.accuracy.compare import Forward, compare_runtimes
from fp8q.validate.accuracy.perplexity import cut

#: Row -> which parts of the cache are codes, and whether keys are stored less their channels' means.
CACHES = {
    "K": ("k", False),
    "V": ("v", False),
    "K and V": ("kv", False),
    "K less its channels' means": ("k", True),
    "K less its channels' means, and V": ("kv", True),
}
PRODUCTS = "for comparison: all W8A8 products, cache wide"


class Seen(DynamicLayer):
    """A cache layer that shows keys and values [batch, heads, seq, head_size] and keeps nothing."""

    def __init__(self, see: Callable[[torch.Tensor, torch.Tensor], None]):
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        self.see = see

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Show both; return them as they are."""
        self.see(key_states, value_states)
        return key_states, value_states


class Centred(FP8Layer):
    """Keys are rounded less `means` [heads, 1, head_size]."""

    def __init__(self, means: torch.Tensor, key_scale: float | None, value_scale: float | None):
        super().__init__(key_scale, value_scale)
        self.means = means

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the difference; attention may see it too, since the softmax does not."""
        return super().update(key_states - self.means, value_states, *args, **kwargs)


def cache_of(layers: Iterable[DynamicLayer]) -> DynamicCache:
    """A cache of these layers."""
    cache = DynamicCache()
    cache.layers = list(layers)
    return cache


def watched(
    model: PreTrainedModel, windows: np.ndarray, see: Callable[[int], Callable[[torch.Tensor, torch.Tensor], None]]
) -> None:
    """Run `model` on `windows`, showing what each layer writes."""
    with torch.inference_mode():
        for ids in torch.from_numpy(windows).split(8):
            cache = cache_of(Seen(see(layer)) for layer in range(model.config.get_text_config().num_hidden_layers))
            model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)


def measured(model: PreTrainedModel, windows: np.ndarray) -> tuple[list[torch.Tensor], list[dict[str, float]]]:
    """For each layer the keys' means [heads, 1, head_size], and the scales of `k`, `v` and `centred` by their amax."""
    layers = range(model.config.get_text_config().num_hidden_layers)
    means: list[Any] = [0.0 for _ in layers]
    amax = [dict.fromkeys(("k", "v", "centred"), 0.0) for _ in layers]

    def add(layer: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def see(keys: torch.Tensor, values: torch.Tensor) -> None:
            means[layer] = means[layer] + keys.double().sum((0, 2), keepdim=True)[0] / (windows.size)

        return see

    def extremes(layer: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def see(keys: torch.Tensor, values: torch.Tensor) -> None:
            for name, tensor in {"k": keys, "v": values, "centred": keys - means[layer].float()}.items():
                amax[layer][name] = max(amax[layer][name], float(tensor.abs().max()))

        return see

    watched(model, windows, add)
    watched(model, windows, extremes)
    return [mean.float() for mean in means], [
        {name: float(scale_of(value, E4M3)) for name, value in layer.items()} for layer in amax
    ]


def benchmark(model: ModelTexts, options: argparse.Namespace) -> dict[str, float]:
    """Row -> mean KL in nats × 10⁶, on one model."""
    source = open_source(model.directory)
    tokenizer, notes = load_tokenizer(source), Notes(SILENT)
    # never: evaluated in windows cut from the plain text, as calibrated
    calibration = CalibrateOptions(samples=options.samples, seq_len=options.context, bos="never")
    evaluation = cut(
        corpus.encode_texts(corpus.load_texts(model.eval_data), tokenizer)[: options.windows * options.context],
        model.eval_data,
        options.context,
        options.context,
    )
    original = load_model(source, torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "run")
        collected = corpus_stage.collect(source, tokenizer, model.data, model.eval_data, calibration, notes)
        corpus_stage.write_corpus(run, source, collected, notes)
        measure_stage.measure(run, source, calibration, notes)
        quantize_stage.quantize(run, source, sources.products_of(source), calibration, notes)
        reference = load_reference(run.model, "exact", torch.float32).model
        means, scales = measured(original, collected.windows)

        def forward(made: PreTrainedModel, parts: str, centred: bool) -> Forward:
            def cache() -> DynamicCache:
                layers = []
                for mean, scale in zip(means, scales, strict=True):
                    key = (scale["centred"] if centred else scale["k"]) if "k" in parts else None
                    layers.append(
                        Centred(mean if centred else torch.zeros(()), key, scale["v"] if "v" in parts else None)
                    )
                return cache_of(layers)

            return lambda ids: made(input_ids=torch.from_numpy(ids), past_key_values=cache(), use_cache=True).logits

        runtimes = (
            {"bf16": forward(original, "", False)}
            | {name: forward(original, *how) for name, how in CACHES.items()}
            | {PRODUCTS: forward(reference, "", False)}
        )
        accuracy, _ = compare_runtimes(evaluation, runtimes, source.text_config.vocab_size, SILENT)
    return {
        name: round(1e6 * found.kl_mean_nats, 2)
        for name, found in accuracy.runtimes.items()
        if found.kl_mean_nats is not None
    }


def main() -> int:
    """Measure and print."""
    options = model_arguments(__doc__, samples=64).parse_args()
    head = described("kv_cache", (ScaleOptions,))
    found = {
        model.name: benchmark(model, options)
        for model in options.models or small_models("demo", "stories260k", "qwen2", "llama", "opt", "gemma")
    }
    protocol = {"samples": options.samples, "windows": options.windows, "context": options.context}
    return publish(head, {**protocol, "kl_mean_nats_times_1e6": found}, options.save)


if __name__ == "__main__":
    sys.exit(main())
