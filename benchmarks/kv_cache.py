"""What an FP8 KV cache costs: keys alone, values alone, both; with scales per head; and keys in other bases.

    python benchmarks/kv_cache.py [MODEL=CALIBRATION,EVALUATION …] [--samples 64] [--windows 40] [--context 256]

KL(BF16 weights || the same with that cache), everything else computed in FP32, so that nothing but the cache's rounding
is seen; beside it the cost of all W8A8 products with a wide cache.

The softmax does not see two changes of a head's keys. Less a constant vector m, each of a query's scores changes by the
same q·m; and where keys are multiplied by a matrix B and queries by its inverse transposed, scores stay what they are.
E4M3's error is relative, so the error of a score is about ε² Σ (q_c k_c)² over the channels c. A rotation R alone
makes it ε² |q|² |k|² / n, which may be more. Balanced first, B = R D with D = sqrt(rms q_c / rms k_c), it is
ε² (Σ |q_c| |k_c|)² / n, which is never more. R is Hadamard's matrix, or a random rotation where no power of two is the
head size. Prints one JSON line.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from loaded_runtimes import compare_runtimes
from models import ModelTexts, model_arguments, small_models
from result import described, publish
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from fp8q.calibrate.measure.queries import recorded_queries
from fp8q.calibrate.model.gemms import attention_modules
from fp8q.calibrate.model.source import load_model, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.text import corpus
from fp8q.calibrate.text.evaluation import Evaluation, cut
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions
from fp8q.quantize.codes.encoding import code_values
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.clip import scale_of
from fp8q.stages import corpus as corpus_stage
from fp8q.stages import measure as measure_stage
from fp8q.stages import quantize as quantize_stage
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared import sources
from fp8q.validate.accuracy.compare import Forward

Basis = Literal["own", "rotated", "balanced"]


@dataclass(frozen=True)
class CacheForm:
    """The `parts` of a cache that are codes; whether keys are stored less their channels' means; the basis that they
    are stored in; whether each head has a scale of its own.
    """

    parts: str
    centred: bool = False
    basis: Basis = "own"
    per_head: bool = False


WIDE = CacheForm("")
CACHES = {
    "K": CacheForm("k"),
    "V": CacheForm("v"),
    "K and V": CacheForm("kv"),
    "K, a scale per head": CacheForm("k", per_head=True),
    "V, a scale per head": CacheForm("v", per_head=True),
    "K and V, a scale per head": CacheForm("kv", per_head=True),
    "K less its channels' means": CacheForm("k", centred=True),
    "K less its channels' means, and V": CacheForm("kv", centred=True),
    "K rotated": CacheForm("k", basis="rotated"),
    "K balanced and rotated": CacheForm("k", basis="balanced"),
    "K balanced and rotated, and V": CacheForm("kv", basis="balanced"),
    "K less its means, balanced and rotated": CacheForm("k", centred=True, basis="balanced"),
}
#: Both parts in FP8, but for the layer that loses most by itself on a part of the calibration text.
LEFT = "K and V, without the layer that loses most"
#: Windows of the calibration text that tell which layer that is.
CHOOSING = 8
PRODUCTS = "for comparison: all W8A8 products, cache wide"


def rotation(size: int) -> torch.Tensor:
    """Hadamard's matrix of that size by Sylvester's construction, orthogonal; a random rotation for no power of two."""
    if size & (size - 1):
        turned: torch.Tensor = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(0)))[0]
        return turned
    matrix: torch.Tensor = torch.ones(1, 1) / size**0.5
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


class LayerSeen:
    """What is known of the keys and values of one layer, and its forms' scales.

    `sums` of keys, and of the squares of keys and of queries (of all heads that read a key head), are
    [heads, 1, head_size]; `amax` by form and part, [heads, 1, 1].
    """

    def __init__(self) -> None:
        self.sums: dict[str, Any] = dict.fromkeys(("k", "kk", "qq"), 0.0)
        self.tokens = 0
        self.amax: dict[tuple[CacheForm, str], torch.Tensor] = {}

    def add(self, keys: torch.Tensor, queries: torch.Tensor) -> None:
        """Count keys [batch, heads, seq, size] and queries [batch, seq, query heads · size]."""
        batch, heads, seq, size = keys.shape
        grouped = queries.unflatten(-1, (heads, -1, size)).double()
        self.tokens += batch * seq
        self.sums["k"] = self.sums["k"] + keys.double().sum((0, 2))[:, None]
        self.sums["kk"] = self.sums["kk"] + keys.double().square().sum((0, 2))[:, None]
        self.sums["qq"] = self.sums["qq"] + grouped.square().mean(3).sum((0, 1))[:, None]

    def stored(self, keys: torch.Tensor, form: CacheForm) -> torch.Tensor:
        """Keys as `form` stores them."""
        stored: torch.Tensor = keys - (self.sums["k"] / self.tokens).float() if form.centred else keys
        if form.basis != "own":
            stored = stored * self._balance(form) @ rotation(keys.shape[-1])
        return stored

    def read(self, stored: torch.Tensor, form: CacheForm) -> torch.Tensor:
        """Keys of which `stored` is made, less their means; the softmax does not see these."""
        if form.basis != "own":
            stored = stored @ rotation(stored.shape[-1]).T / self._balance(form)
        return stored

    def _balance(self, form: CacheForm) -> torch.Tensor:
        if form.basis == "rotated":
            return torch.ones(())
        least = 1e-6 * max(float(self.sums[name].max()) for name in ("kk", "qq"))
        ratio: torch.Tensor = (self.sums["qq"].clamp_min(least) / self.sums["kk"].clamp_min(least)) ** 0.25
        return ratio.float()

    def extremes(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Count what each form stores."""
        for form in CACHES.values():
            for part, tensor in (("k", self.stored(keys, form)), ("v", values)):
                seen = tensor.abs().amax((0, 2, 3))[:, None, None]
                self.amax[form, part] = torch.maximum(self.amax.get((form, part), seen), seen)

    def rounded(self, tensor: torch.Tensor, form: CacheForm, part: str) -> torch.Tensor:
        """The values of the codes of what is stored."""
        amax = self.amax[form, part].numpy()
        scale = torch.from_numpy(scale_of(amax if form.per_head else amax.max(keepdims=True), E4M3)).float()
        return code_values(tensor, scale) * scale


class Shown(DynamicLayer):
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


class Rounded(DynamicLayer):
    """A cache layer in a form, for a whole window at once."""

    def __init__(self, layer: LayerSeen, form: CacheForm):
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        self.layer, self.form = layer, form

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round what is codes."""
        if "k" in self.form.parts:
            stored = self.layer.rounded(self.layer.stored(key_states, self.form), self.form, "k")
            key_states = self.layer.read(stored, self.form)
        if "v" in self.form.parts:
            value_states = self.layer.rounded(value_states, self.form, "v")
        return key_states, value_states


def cache_of(layers: Iterable[DynamicLayer]) -> DynamicCache:
    """A cache of these layers."""
    cache = DynamicCache()
    cache.layers = list(layers)
    return cache


def measured(model: PreTrainedModel, windows: np.ndarray) -> list[LayerSeen]:
    """What every layer writes for `windows`: sums in a first pass, the extremes of each form in a second."""
    modules = attention_modules(model)
    layers = [LayerSeen() for _ in modules]
    keys: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        return lambda key, value: keys.update({layer: key})

    with torch.inference_mode():
        for extremes in (False, True):
            for ids in torch.from_numpy(windows).split(8):
                see = [seen.extremes if extremes else keep(index) for index, seen in enumerate(layers)]
                with recorded_queries(model) as queries:
                    model.base_model(input_ids=ids, past_key_values=cache_of(map(Shown, see)), use_cache=True)
                of = {id(module): query for module, query in queries}
                for index, name in modules.items() if not extremes else ():
                    layers[index].add(keys[index], of[id(model.get_submodule(name))])
    return layers


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
        quantize_stage.quantize(run, source, sources.gemms_of(source), calibration, notes)
        reference = load_reference(run.model, "exact", torch.float32).model
        layers = measured(original, collected.windows)

        part = cut(collected.windows[:CHOOSING].ravel(), model.data, options.context, options.context)
        size, numbers = source.text_config.vocab_size, range(len(layers))
        alone = losses(
            part, {str(at): forward(original, layers, CACHES["K and V"], at) for at in numbers}, original, size
        )
        rest = [at for at in numbers if str(at) != max(alone, key=lambda name: alone[name])]
        forms = {name: forward(original, layers, form) for name, form in CACHES.items()}
        forms[LEFT] = forward(original, layers, CACHES["K and V"], *rest)
        forms[PRODUCTS] = forward(reference, layers, WIDE)
        found = losses(evaluation, forms, original, size)
    return {name: round(1e6 * kl, 2) for name, kl in found.items()}


def forward(made: PreTrainedModel, layers: Sequence[LayerSeen], form: CacheForm, *those: int) -> Forward:
    """Token ids to the logits of `made`, with the cache of `those` layers (none: of all) in `form`."""

    def cache() -> DynamicCache:
        return cache_of(Rounded(layer, form if at in (those or [at]) else WIDE) for at, layer in enumerate(layers))

    return lambda ids: made(input_ids=torch.from_numpy(ids), past_key_values=cache(), use_cache=True).logits


def losses(text: Evaluation, forms: dict[str, Forward], original: PreTrainedModel, vocabulary: int) -> dict[str, float]:
    """The mean KL in nats of each of `forms` from the original."""
    accuracy, _ = compare_runtimes(text, {"bf16": forward(original, (), WIDE)} | forms, vocabulary, SILENT)
    return {name: kl for name, found in accuracy.runtimes.items() if (kl := found.kl_mean_nats) is not None}


def main() -> int:
    """Measure and print."""
    options = model_arguments(__doc__, samples=64).parse_args()
    head = described("kv_cache")
    found = {
        model.name: benchmark(model, options)
        for model in options.models or small_models("demo", "stories260k", "qwen2", "llama", "opt", "gemma")
    }
    protocol = {"samples": options.samples, "windows": options.windows, "context": options.context}
    return publish(head, {**protocol, "kl_mean_nats_times_1e6": found}, options.save)


if __name__ == "__main__":
    sys.exit(main())
