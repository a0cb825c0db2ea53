"""What each way of choosing scales costs: KL(BF16 || FP8 reference) and perplexity, on small trained checkpoints.

    python benchmarks/choosing_scales.py [MODEL=CALIBRATION,EVALUATION …] [--windows 40] [--context 256]

Each checkpoint is measured once; every row then changes one choice and leaves the rest at the default (activations by
amax, margin 0, BF16 grid, weights per channel by mse, E4M3). The floor is what no choice of activation scales goes
below in a static engine: the cost of the weights alone. Prints one JSON line. These models have no
large outliers; a column named `outliers` is the first model with some made: 4 channels of every input norm 64 times
larger, the next matrices' columns as much smaller, so that in exact arithmetic it is the same function.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
import torch
from loaded_runtimes import compare_runtimes
from models import ModelTexts, model_arguments, small_models
from result import described, publish
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from fp8q.calibrate.measure.measurement import Measurement, measure_in_memory
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity, Statistics
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.text import corpus
from fp8q.calibrate.text.evaluation import Evaluation, cut, sha256_of
from fp8q.core.reporter import SILENT
from fp8q.options import METHODS, Clipping, ScaleOptions, WeightMethod
from fp8q.quantize.codes.encoding import code_tables, encode
from fp8q.quantize.codes.formats import E4M3, E5M2, Format
from fp8q.quantize.reference.fp8_model import fp8_cache
from fp8q.quantize.reference.linear import FP8Linear, replace_linears
from fp8q.quantize.scales.activation_scales import group_of, tensor_scale
from fp8q.quantize.scales.clip import SMALLEST_SCALE, scale_of
from fp8q.quantize.weights.channels import channel_scales
from fp8q.stages.shared import sources
from fp8q.validate.accuracy.compare import Forward

OUTLIER, OUTLIER_CHANNELS = 64.0, 4


@dataclass(frozen=True)
class Choice:
    """One row: how the activations' scales and the weights' are chosen.

    `bf16_inputs` leaves activations as they are; `just_in_time` takes the amax of each call's own input; `cache`
    chooses the scales of an FP8 cache.
    """

    clip: Clipping = Clipping()
    weights: WeightMethod = ScaleOptions.weight_method
    per_tensor_weights: bool = False
    format: Format = E4M3
    just_in_time: bool = False
    bf16_inputs: bool = False
    cache: Clipping | None = None


CHOICES: dict[str, Choice] = {
    "activations by amax, weights by mse (the default)": Choice(),
    "percentile 99.9": Choice(Clipping("percentile", 99.9)),
    "percentile 99.99": Choice(Clipping("percentile", 99.99)),
    "percentile 99.999": Choice(Clipping("percentile", 99.999)),
    "activations by mse": Choice(Clipping("mse")),
    "activations by entropy": Choice(Clipping("entropy")),
    "delayed, history 1024": Choice(Clipping("delayed")),
    "delayed, most recent": Choice(Clipping("delayed", amax_compute_algo="most_recent")),
    "current (just in time)": Choice(just_in_time=True),
    "amax, margin -1": Choice(Clipping(margin=-1)),
    "amax, margin 1": Choice(Clipping(margin=1)),
    "amax, margin 3": Choice(Clipping(margin=3)),
    "amax, power of two": Choice(Clipping(scale_grid="power-of-two")),
    "weights by amax": Choice(weights="amax"),
    "weights by amax, activations by mse": Choice(Clipping("mse"), weights="amax"),
    "weights per tensor, by amax": Choice(per_tensor_weights=True),
    "activations in E5M2": Choice(format=E5M2),
    "activations in BF16 (the floor)": Choice(bf16_inputs=True),
    "FP8 cache too, by amax": Choice(cache=Clipping()),
    "FP8 cache, percentile 99.99": Choice(cache=Clipping("percentile", 99.99)),
    "FP8 cache by mse": Choice(cache=Clipping("mse")),
    "FP8 cache by entropy": Choice(cache=Clipping("entropy")),
    "FP8 cache, delayed, most recent": Choice(cache=Clipping("delayed", amax_compute_algo="most_recent")),
    "FP8 cache, amax, margin 1": Choice(cache=Clipping(margin=1)),
    "FP8 cache, amax, power of two": Choice(cache=Clipping(scale_grid="power-of-two")),
}
#: Methods that no row above has, with their own defaults.
CHOICES |= {
    f"activations by {method}": Choice(Clipping(method))
    for method in METHODS
    if method not in {choice.clip.method for choice in CHOICES.values()}
}


class Layer(FP8Linear):
    """A layer of the reference whose inputs may be codes of another format, or BF16."""

    def input_codes(self, x: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """The reference's codes; `x` itself where there is no table."""
        return x[None] if not len(self.tables) else super().input_codes(x, count)


class JustInTimeLayer(Layer):
    """A layer whose input scale follows from the amax of each call's own input: Transformer Engine's current scaling.

    No file could hold such a scale: it is here to measure what static scales give away.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in] to [..., out] in x's type; zeros take the smallest normal number for a scale."""
        self.input_scale = torch.tensor(max(float(scale_of(x.abs().amax().item(), E4M3)), SMALLEST_SCALE))
        self.tables = code_tables(self.input_scale, self.terms)
        return super().forward(x)


def layer(linear: nn.Linear, codes: torch.Tensor, weight_scale: torch.Tensor, scale: float, choice: Choice) -> Layer:
    """`linear` as the reference computes it under `choice`."""
    kind = JustInTimeLayer if choice.just_in_time else Layer
    made = kind(codes, weight_scale, torch.tensor(1.0 if choice.bf16_inputs else scale), linear.bias, "fast")
    if choice.bf16_inputs:
        made.tables = made.tables[:0]
    elif choice.format is not E4M3:
        patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float().numpy()
        with np.errstate(all="ignore"):
            codes = torch.from_numpy(choice.format.decode(choice.format.encode(patterns / np.float32(scale))))
            made.tables = codes.to(torch.bfloat16)[None]
    return made


def weight_codes(weight: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales [out] of `weight` [out, in]."""
    if choice.per_tensor_weights:
        scale = torch.tensor(float(scale_of(weight.abs().max().item(), E4M3))).expand(len(weight))
    else:
        found = channel_scales(weight, choice.weights)
        assert found is not None, "trained weights are not all zero"
        scale = found
    return encode(weight, scale[:, None]), scale


@contextmanager
def quantized(model: nn.Module, modules: Mapping[str, Any], statistics: Statistics, choice: Choice) -> Iterator[None]:
    """`model` with `modules` in FP8 by `choice`."""
    first, scales = group_of(statistics.record.groups), dict[str, float]()
    for name in {first[name] for name in modules}:
        tensor = statistics.tensors[f"{name}.input"]
        scales[name] = tensor_scale(tensor.histogram, choice.clip, choice.format, tensor.amax_batches).scale
    layers = {
        name: layer(linear, *weight_codes(linear.weight.detach(), choice), scales[first[name]], choice)
        for name, linear in modules.items()
    }
    replace_linears(model, layers)
    try:
        yield
    finally:
        replace_linears(model, dict(modules))


def new_cache(model: PreTrainedModel, statistics: Statistics, clip: Clipping | None) -> DynamicCache | None:
    """An FP8 cache whose scales are chosen by `clip`; None where it stays in BF16."""
    if clip is None:
        return None
    tensors = {name: tensor for name, tensor in statistics.tensors.items() if name.endswith((".k", ".v"))}
    chosen = {
        name: tensor_scale(tensor.histogram, clip, amax_batches=tensor.amax_batches) for name, tensor in tensors.items()
    }
    scales = {name: torch.from_numpy(scale.stored) for name, scale in chosen.items()}
    return fp8_cache(scales, model)


def make_outliers(model: Any) -> None:
    """Scale some channels of each norm up and the columns of the matrices that read them down, by a power of two: the
    function stays the same.
    """
    for block in model.model.layers:
        for norm, readers in (
            ("input_layernorm", ("q_proj", "k_proj", "v_proj")),
            ("post_attention_layernorm", ("gate_proj", "up_proj")),
        ):
            block.get_submodule(norm).weight.data[:OUTLIER_CHANNELS] *= OUTLIER
            for name, module in block.named_modules():
                if name.endswith(readers):
                    module.weight.data[:, :OUTLIER_CHANNELS] /= OUTLIER


def evaluate(
    source: Source, texts: ModelTexts, windows: int, context: int, outliers: bool
) -> dict[str, dict[str, float | None]]:
    """Choice -> perplexity, its increase and mean KL, on `windows` windows of the evaluation text."""
    tokenizer, model = load_tokenizer(source), load_model(source, torch.bfloat16)
    vocabulary = source.text_config.vocab_size
    if outliers:
        make_outliers(model)
    ids = corpus.windows(corpus.encode_texts(corpus.load_texts(texts.data), tokenizer), context, 4 * windows)
    record = Corpus(name=texts.data, fingerprint=sha256_of(ids), windows=len(ids), seq_len=context, batch_size=4)
    identity = ModelIdentity(name=source.name, architecture=source.architecture, fingerprint=source.fingerprint)
    statistics = measure_in_memory(model, Measurement(ids, identity, record), SILENT)
    products = sources.gemms_of(source)
    modules = {name: model.get_submodule(name) for name in products.names if name != products.head}
    evaluation: Evaluation = cut(
        corpus.encode_texts(corpus.load_texts(texts.eval_data), tokenizer)[: windows * context],
        texts.eval_data,
        context,
        context,
    )

    def logits(window_ids: np.ndarray, cache: DynamicCache | None = None) -> torch.Tensor:
        found: torch.Tensor = model(
            input_ids=torch.from_numpy(window_ids), past_key_values=cache, use_cache=cache is not None
        ).logits
        return found

    def forward(choice: Choice) -> Forward:
        def run(window_ids: np.ndarray) -> torch.Tensor:
            with quantized(model, modules, statistics, choice):
                return logits(window_ids, new_cache(model, statistics, choice.cache))

        return run

    accuracy, _ = compare_runtimes(
        evaluation, {"bf16": logits} | {name: forward(choice) for name, choice in CHOICES.items()}, vocabulary, SILENT
    )
    return {
        name: {
            "perplexity": found.perplexity,
            "perplexity_increase": found.perplexity_increase,
            "kl_mean_nats": found.kl_mean_nats,
        }
        for name, found in accuracy.runtimes.items()
    }


def main() -> int:
    """Measure and print."""
    options = model_arguments(__doc__).parse_args()
    head, start = described("choosing_scales"), monotonic()
    found = dict[str, dict[str, dict[str, float | None]]]()
    models = options.models or small_models("demo", "stories260k", "qwen2", "llama", "opt", "gemma")
    for number, model in enumerate(models):
        for name in [model.name, f"{model.name}, outliers"][: 1 if number else 2]:
            found[name] = evaluate(
                open_source(model.directory), model, options.windows, options.context, outliers=name != model.name
            )
    protocol = {"windows": options.windows, "context": options.context, "threads": torch.get_num_threads()}
    return publish(head, {**protocol, "seconds": round(monotonic() - start, 1), "models": found}, options.save)


if __name__ == "__main__":
    sys.exit(main())
