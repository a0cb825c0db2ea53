"""How many tokens an expert has to see for an amax of its own: what `--min-expert-tokens` decides.

    python benchmarks/expert_tokens.py [MODEL=CALIBRATION,EVALUATION …] [--windows 40] [--context 256]

What goes into an expert's last product is seen by the tokens that are routed to it. A trained mixture reads all of its
calibration text, and each expert's tokens are kept in order; a stretch of n of them, from evenly spread places, stands
for a calibration that ended there. Of every stretch: its amax over that of all tokens, the share of the values of the
other tokens that its scale clips, and the squared error of all values over the error of the scale by all tokens (1:
nothing lost). Then KL(BF16 || FP8 reference) on another text with every expert at the scale of such a stretch. Beside
them what a starved expert takes instead: the largest amax of its layer's others. The floor of the KL is about that with
all tokens' scales, and of the error about 1 (to clip a little may be better). Prints one JSON line; exit status 1 where
the default is not the least length that loses no more, in the worst tenth of stretches, than what a starved expert
takes.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from loaded_runtimes import compare_runtimes
from models import ModelTexts, model_arguments, small_models
from result import described, publish
from torch import nn

from fp8q.calibrate.measure.histogram import Histogram
from fp8q.calibrate.measure.measurement import Measurement
from fp8q.calibrate.measure.measurement import measure_in_memory as calibrated
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity, Statistics
from fp8q.calibrate.model.expert_modules import routed_gemms
from fp8q.calibrate.model.source import load_model, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.text import corpus
from fp8q.calibrate.text.evaluation import Evaluation, cut, sha256_of
from fp8q.core.reporter import SILENT
from fp8q.options import ScaleOptions
from fp8q.quantize.codes.encoding import code_tables, encode
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.reference.linear import FP8Linear, replace_linears
from fp8q.quantize.scales.activation_scales import group_of
from fp8q.quantize.scales.clip import saturation, scale_of, squared_error
from fp8q.quantize.scales.policy import select
from fp8q.quantize.weights.channels import channel_scales
from fp8q.stages.shared import sources
from fp8q.validate.accuracy.compare import Forward

TOKENS = (32, 64, 128, 256, 512, 1024, 2048)
#: Stretches of each expert, and those of them that the model runs with.
STRETCHES, RUN = 16, (0, 7, 15)
ALL, OTHERS = "all", "others"
Amaxes = Mapping[str, float]


@dataclass(frozen=True)
class Seen:
    """Of one expert's last product: the amax of each of its tokens, float32 [tokens] in order, and all values."""

    tokens: npt.NDArray[np.float32]
    values: Histogram

    def stretches(self, length: int) -> npt.NDArray[np.float32]:
        """The amax of stretches of so many tokens, the first ones first, float32 [STRETCHES]."""
        starts = np.linspace(0, len(self.tokens) - length, STRETCHES).astype(int)
        return np.array([self.tokens[start : start + length].max() for start in starts], np.float32)

    def loss(self, amax: float, length: int) -> tuple[float, float, float]:
        """By an amax found in `length` tokens: it over that of all, the share of the others' values that are clipped,
        and the squared error over that by all tokens' amax.
        """
        scales = [float(scale_of(each, E4M3)) for each in (amax, self.values.amax)]
        error, least = squared_error(self.values, E4M3, scales)
        clipped = saturation(self.values, E4M3, scales[0]) / (1 - length / len(self.tokens))
        return amax / self.values.amax, clipped, float(error / least)


def tokens_seen(model: nn.Module, products: list[str], ids: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
    """The amax of each token that reaches each of `products`, in order."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in products}

    def watching(name: str) -> Any:
        return lambda _, inputs: found[name].append(inputs[0].abs().amax(-1).float())

    hooks = [model.get_submodule(name).register_forward_pre_hook(watching(name)) for name in products]
    with torch.no_grad():
        for start in range(0, len(ids), 4):
            model(input_ids=torch.from_numpy(ids[start : start + 4]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts).numpy() for name, parts in found.items()}


def of_others(layers: Mapping[str, list[str]], seen: Mapping[str, Seen]) -> dict[str, float]:
    """What each expert would take if it had seen nothing: the largest amax of its layer's others."""
    return {
        name: max(seen[other].values.amax for other in products if other != name)
        for products in layers.values()
        for name in products
    }


def spread(losses: list[tuple[float, float, float]]) -> dict[str, float]:
    """Medians, and the worse tenths, of what stretches lose."""
    ratios, clipped, errors = np.array(losses).T
    return {
        "amax_median": float(np.median(ratios)),
        "amax_p10": float(np.percentile(ratios, 10)),
        "clipped_median": float(np.median(clipped)),
        "clipped_p90": float(np.percentile(clipped, 90)),
        "error_median": float(np.median(errors)),
        "error_p90": float(np.percentile(errors, 90)),
    }


class Reference:
    """The model in FP8 with the default's scales, where experts' last products may have others."""

    def __init__(self, model: nn.Module, modules: Mapping[str, Any], statistics: Statistics):
        """Quantize `modules` of `model` by their own amaxes."""
        self.model, self.modules = model, modules
        first = group_of(statistics.record.groups)
        self.layers = {}
        for name, linear in modules.items():
            weight = linear.weight.detach()
            channels = channel_scales(weight, ScaleOptions.weight_method)
            assert channels is not None, "trained weights are not all zero"
            scale = input_scale(statistics.tensors[f"{first[name]}.input"].histogram.amax)
            self.layers[name] = FP8Linear(encode(weight, channels[:, None]), channels, scale, linear.bias, "fast")

    def forward(self, amaxes: Amaxes) -> Forward:
        """The logits with those amaxes."""
        tables = {name: code_tables(input_scale(amax), 1) for name, amax in amaxes.items()}

        def run(ids: npt.NDArray[np.int64]) -> torch.Tensor:
            for name, amax in amaxes.items():
                self.layers[name].input_scale, self.layers[name].tables = input_scale(amax), tables[name]
            replace_linears(self.model, self.layers)
            logits = logits_of(self.model, ids)
            replace_linears(self.model, dict(self.modules))
            return logits

        return run


def input_scale(amax: float) -> torch.Tensor:
    """The static scale of an amax."""
    return torch.tensor(float(scale_of(amax, E4M3)))


def logits_of(model: Any, ids: npt.NDArray[np.int64]) -> torch.Tensor:
    """Of windows of tokens, [windows, context, vocabulary]."""
    logits: torch.Tensor = model(input_ids=torch.from_numpy(ids), use_cache=False).logits
    return logits


def by_values(layers: Mapping[str, list[str]], seen: Mapping[str, Seen]) -> dict[str, dict[str, float]]:
    """What each length loses, and `others`, of the values themselves."""
    found = {
        str(length): spread([one.loss(float(amax), length) for one in seen.values() for amax in one.stretches(length)])
        for length in TOKENS
    }
    others = of_others(layers, seen)
    return found | {OTHERS: spread([seen[name].loss(amax, 0) for name, amax in others.items()])}


def by_model(
    reference: Reference, evaluation: Evaluation, vocabulary: int, choices: Mapping[str, Amaxes]
) -> dict[str, float]:
    """KL(BF16 || FP8) in nats under each of `choices` of the amaxes of experts' last products."""
    runtimes: dict[str, Forward] = {"bf16": lambda ids: logits_of(reference.model, ids)}
    runtimes |= {name: reference.forward(amaxes) for name, amaxes in choices.items()}
    accuracy, _ = compare_runtimes(evaluation, runtimes, vocabulary, SILENT)
    return {name: accuracy.runtimes[name].kl_mean_nats or 0.0 for name in choices}


def measure(texts: ModelTexts, windows: int, context: int) -> dict[str, Any]:
    """One mixture."""
    source = open_source(texts.directory)
    tokenizer, model = load_tokenizer(source), load_model(source, torch.bfloat16)
    stream = corpus.encode_texts(corpus.load_texts(texts.data), tokenizer)
    ids = corpus.windows(stream, context, len(stream) // context)
    record = Corpus(name=texts.data, fingerprint=sha256_of(ids), windows=len(ids), seq_len=context, batch_size=4)
    identity = ModelIdentity(name=source.name, architecture=source.architecture, fingerprint=source.fingerprint)
    statistics = calibrated(model, Measurement(ids, identity, record), SILENT)
    layers = routed_gemms(model)
    amaxes = tokens_seen(model, [name for names in layers.values() for name in names], ids)
    seen = {name: Seen(each, statistics.tensors[f"{name}.input"].histogram) for name, each in amaxes.items()}
    fewest = min(len(each.tokens) for each in seen.values())
    if fewest <= max(TOKENS):
        raise SystemExit(
            f"{texts.directory}: an expert has {fewest} tokens, and stretches of {max(TOKENS)} are asked for"
        )
    choices: dict[str, Amaxes] = {ALL: {name: each.values.amax for name, each in seen.items()}}
    choices[OTHERS] = of_others(layers, seen)
    for length, at in product(TOKENS, RUN):
        choices[f"{length} {at}"] = {name: float(each.stretches(length)[at]) for name, each in seen.items()}
    products = sources.gemms_of(source)
    modules = {name: model.get_submodule(name) for name in select(products, ())[0]}
    held_out = corpus.encode_texts(corpus.load_texts(texts.eval_data), tokenizer)[: windows * context]
    evaluation = cut(held_out, texts.eval_data, context, context)
    reference = Reference(model, modules, statistics)
    kl = by_model(reference, evaluation, source.text_config.vocab_size, choices)
    found = by_values(layers, seen)
    for name, each in found.items():
        ran = [kl[choice] for choice in choices if choice.partition(" ")[0] == name]
        each |= {"kl_nats": float(np.mean(ran)), "kl_worst_nats": max(ran)}
    return {
        "experts": len(seen),
        "tokens": int(ids.size),
        "tokens_of_an_expert": int(np.median([len(each.tokens) for each in seen.values()])),
        "kl_nats": kl[ALL],
        "taken": found,
    }


def passed(results: Mapping[str, Any]) -> bool:
    """Whether the default is the least of the lengths at which nine in ten experts' own amaxes lose no more than nine
    in ten of those of others.
    """
    for found in results.values():
        error = {name: each["error_p90"] for name, each in found["taken"].items()}
        enough = [length for length in TOKENS if error[str(length)] <= error[OTHERS]]
        if not enough or enough[0] != ScaleOptions.min_expert_tokens:
            return False
    return True


def main() -> int:
    """Measure and print."""
    asked = model_arguments(__doc__).parse_args()
    head, models = described("expert_tokens"), asked.models or small_models("mixtral")
    results = {model.name: measure(model, asked.windows, asked.context) for model in models}
    protocol = {"windows": asked.windows, "context": asked.context, "stretches": STRETCHES, "run": len(RUN)}
    return publish(head, {**protocol, "results": results, "passed": passed(results)}, asked.save)


if __name__ == "__main__":
    sys.exit(main())
