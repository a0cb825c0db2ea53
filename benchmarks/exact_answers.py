"""Measure what each form of activations loses on the tokens that are decoded behind a prompt.

    python benchmarks/exact_answers.py [MODEL=CALIBRATION,EVALUATION …] [--windows 16] [--decoded 128] [--samples 128]
        [--save exact_answers]

Mean KL(FP32 || model) × 10⁶ over the decoded tokens, and over each quarter of them in order, in FP32 arithmetic, so
that nothing but quantization is seen. What a position gives depends on those before it alone: one pass over a window,
with the terms that each position has where a server reads it, is the prompt's call and a call for each decoded token
(tests/pipeline/test_tail.py holds one against the other).

Forms: one term or two throughout; tails of 1, 16, 64 and 128 positions; weights alone (activations as they are).
Weights: rounded to nearest, by GPTQ as for one term (with the ridge that makes up for the rounding of activations),
and by GPTQ as for two. Caches: BF16, values in FP8, both in FP8. Prompts: 64, 128, 256, and all but the decoded tokens
of the model's positions. All forms are measured behind a prompt of 128 with a cache in BF16; other caches and prompts
with GPTQ. Prints one JSON line; exit status 1 when a limit is missed.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fp16 import exact_inputs
from models import ModelTexts, model_arguments, small_models
from result import described, publish
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fp8q.api import CalibrateOptions, RescaleOptions, calibrate, scales
from fp8q.calibrate.measure.scoring import divergences, log_softmax
from fp8q.core.run import Run
from fp8q.options import Clipping, KvCache, Terms, WeightRounding
from fp8q.quantize.codes.encoding import code_tables
from fp8q.quantize.reference.fp8_model import Reference, experts_around, load_reference
from fp8q.quantize.reference.linear import FP8Linear, Tail
from fp8q.quantize.scales.decisions import CACHE_PARTS

TAILS = (1, 16, 64, 128)
ONE, TWO, WIDE = "one term", "two terms", "weights alone"
FORMS = (ONE, *(f"tail of {length}" for length in TAILS), TWO, WIDE)
PROMPT, PROMPTS = 128, (64, 128, 256)
MODELS = ("demo", "llama", "qwen2", "gemma", "opt", "gpt2", "mixtral", "stories260k")
#: A tail of 64 with gptq loses at most so much of one term's `nearest`, and of two terms' with gptq (demo).
OF_ONE_TERM, OF_TWO_TERMS = 0.25, 1.3
JUDGED = ("demo", "llama", "qwen2", "gemma", "opt")
#: Windows in a batch.
BATCH = 8


@dataclass(frozen=True)
class Weights:
    """How weights are rounded, and for how many terms of their inputs."""

    rounding: WeightRounding
    terms: Terms

    @property
    def name(self) -> str:
        """What results call it."""
        ridge = {1: ", with the ridge", 2: ""} if self.rounding == "gptq" else {1: "", 2: ""}
        return f"{self.rounding}{ridge[1 if self.terms == 1 else 2]}"


class Served:
    """A reference whose layers take any form, over windows of a prompt and decoded tokens."""

    def __init__(self, directory: Path):
        """Load the checkpoint in `directory`, whose scales are powers of two."""
        self.loaded: Reference = load_reference(directory, "exact", torch.float32)
        self.caches = dict(self.loaded.cache_scales)
        self.layers = {name: layer for name, layer in self.loaded.model.named_modules() if isinstance(layer, FP8Linear)}
        for layer in self.layers.values():
            layer.tables = code_tables(layer.input_scale, 2)

    def take(self, form: str, decoded: int, cache: KvCache) -> None:
        """Give every layer a form, and the cache its parts in FP8; the last `decoded` positions stand for decoding."""
        self.loaded.call.decoded = decoded
        parts = CACHE_PARTS[cache]
        self.loaded.cache_scales.clear()
        self.loaded.cache_scales.update({name: scale for name, scale in self.caches.items() if name[-1] in parts})
        for name, layer in self.layers.items():
            layer.terms = 1 if form == ONE else 2
            layer.tail = None
            if form.startswith("tail"):
                experts = experts_around(self.loaded.model, name)
                layer.tail = Tail(int(form.rpartition(" ")[2]), self.loaded.call, experts)

    @torch.inference_mode()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits float32 [windows, context, vocabulary] of `ids` int64 [windows, context]."""
        found: torch.Tensor = self.loaded.model(
            input_ids=ids, past_key_values=self.loaded.new_cache(), use_cache=True
        ).logits
        return found


@dataclass(frozen=True)
class Windows:
    """Windows of one length, and the FP32 model's log-probabilities of the tokens behind their prompt."""

    ids: torch.Tensor
    prompt: int
    truth: Sequence[torch.Tensor]

    def loss(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        """KL × 10⁶ of the decoded tokens: mean, then each quarter's."""
        parts = []
        for batch, right in zip(self.ids.split(BATCH), self.truth, strict=True):
            answer = log_softmax(logits(batch)[:, self.prompt - 1 : -1])
            parts.append(divergences(right, answer))
        each = torch.cat(parts).double().mean(0)
        return [round(float(part.mean()) * 1e6, 3) for part in (each, *each.chunk(4))]


def float_logits(directory: str, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """The logits of the model itself in `dtype`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    @torch.inference_mode()
    def logits(ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return found

    return logits


def windows_of(texts: ModelTexts, count: int, decoded: int) -> Iterator[Windows]:
    """The first windows of the evaluation text for each prompt."""
    text = Path(texts.eval_data).read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(texts.directory)(text)["input_ids"]
    positions = AutoConfig.from_pretrained(texts.directory).max_position_embeddings
    wide = float_logits(texts.directory, torch.float32)
    for prompt in sorted({*PROMPTS, positions - decoded}):
        context = prompt + decoded
        windows = torch.tensor(ids[: min(count, len(ids) // context) * context]).view(-1, context)
        truth = [log_softmax(wide(batch)[:, prompt - 1 : -1]) for batch in windows.split(BATCH)]
        yield Windows(windows, prompt, truth)


def losses(served: Served, windows: Windows, forms: Sequence[str], cache: KvCache = "off") -> dict[str, list[float]]:
    """Form -> KL × 10⁶ of the decoded tokens."""
    found, decoded = {}, windows.ids.shape[1] - windows.prompt
    for form in forms:
        served.take(form, decoded, cache)
        found[form] = windows.loss(served.logits)
    return found


def runs_of(texts: ModelTexts, options: argparse.Namespace, folder: Path) -> Iterator[tuple[Weights, Run]]:
    """The run with each kind of weights in turn; activations have scales that are powers of two, or one term's own."""
    run = Run(folder / "run")
    calibrate(
        texts.directory, texts.data, run.root, texts.eval_data,
        CalibrateOptions(samples=options.samples, seq_len=256, weight_rounding="gptq", kv_cache="fp8"),
    )  # fmt: skip
    both: tuple[WeightRounding, ...] = ("nearest", "gptq")
    powers = Clipping(scale_grid="power-of-two")
    for rounding in both:
        scales(run.root, RescaleOptions(activation_terms=1, weight_rounding=rounding, clip=Clipping()))
        yield Weights(rounding, 1), run
    scales(run.root, RescaleOptions(activation_terms=1, weight_rounding="gptq", clip=powers))
    yield Weights("gptq", "tail"), run
    for rounding in both:
        scales(run.root, RescaleOptions(activation_terms=2, weight_rounding=rounding, clip=Clipping()))
        yield Weights(rounding, 2), run


def benchmark(texts: ModelTexts, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Weights -> form -> losses, behind a prompt of `PROMPT`; the same of gptq by cache and by prompt."""
    all_windows = {each.prompt: each for each in windows_of(texts, options.windows, options.decoded)}
    windows = all_windows[PROMPT]
    found: dict[str, Any] = {
        "windows": len(windows.ids), "bf16": windows.loss(float_logits(texts.directory, torch.bfloat16)),
        "nearest": {}, "gptq": {}, "gptq, with the ridge": {},
    }  # fmt: skip
    for weights, run in runs_of(texts, options, folder):
        if weights.terms == 1:
            served = Served(run.model)
            found[weights.rounding] |= losses(served, windows, [ONE])
            if weights.rounding == "gptq":
                found["one term by prompt"] = {
                    str(prompt): losses(served, each, [ONE])[ONE] for prompt, each in all_windows.items()
                }
        else:
            name = "gptq, with the ridge" if weights.terms == "tail" else weights.rounding
            forms = [form for form in FORMS if form not in (ONE, WIDE)]
            found[name] |= losses(Served(run.model), windows, forms)
            found[name][WIDE] = losses_of_weights(run, windows)
        print(texts.name, weights, found, file=sys.stderr, flush=True)
    served = Served(run.model)
    some = [form for form in FORMS if form not in (ONE, WIDE)]
    found["by prompt"] = {str(prompt): losses(served, each, some) for prompt, each in all_windows.items()}
    caches: tuple[KvCache, ...] = ("off", "v", "fp8")
    found["by cache"] = {cache: losses(served, windows, [ONE, *some], cache) for cache in caches}
    return found


def losses_of_weights(run: Run, windows: Windows) -> list[float]:
    """KL × 10⁶ with the run's weights and activations as they are."""
    served = Served(run.model)
    served.take(TWO, 0, "off")
    exact_inputs(served.loaded)
    return windows.loss(served.logits)


def shares(found: dict[str, Any]) -> dict[str, float]:
    """A tail of 64 with gptq, over one term rounded to nearest and over two terms with gptq."""
    tail = found["gptq"]["tail of 64"][0]
    return {
        "of_one_term": round(tail / found["nearest"][ONE][0], 4),
        "of_two_terms": round(tail / found["gptq"][TWO][0], 4),
    }


def main() -> int:
    """Run, print, judge."""
    parser = model_arguments(__doc__, windows=16, samples=128, decoded=128)
    options = parser.parse_args()
    head, results = described("exact_answers"), {}
    for texts in options.models or small_models(*MODELS):
        with tempfile.TemporaryDirectory() as folder:
            found = benchmark(texts, options, Path(folder))
        results[texts.name] = found | shares(found)
    passed = all(
        found["of_one_term"] <= OF_ONE_TERM and (name != "demo" or found["of_two_terms"] <= OF_TWO_TERMS)
        for name, found in results.items()
        if name in JUDGED
    )
    protocol = {name: getattr(options, name) for name in ("windows", "decoded", "samples")}
    return publish(head, {**protocol, "results": results, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
