"""What GPTQ costs experts that see few tokens, and what judging their codes on held-out tokens wins back.

    python benchmarks/expert_rounding.py [MODEL=CALIBRATION,EVALUATION …] [--samples 64] [--windows 24] [--context 256]
        [--experts 16]

A dense Llama is made a mixture: each of `--experts` experts is a copy of its MLP ("sparse upcycling", Komatsuzaki et
al. 2022, arXiv 2212.05055), and the router sends each token to the centre that it is most like, of centres of the MLP's
own inputs. The logits are those of the dense model, bit for bit, and each expert sees tokens that are like one another.
A model that is a mixture is taken as it is. Weights alone are quantized (scales by `mse`), and all is computed in FP32.
KL from the float model and the increase of its perplexity on other text: `nearest`; `gptq` as it was, by all tokens and
unjudged; and `judged`, as calibration does it now. Differences of KL are paired by window, with the interval of 95 % of
a bootstrap. Of each weight of an expert the error on the tokens that the evaluation text routes to it, by `gptq` over
that by nearest. Prints one JSON line; exit status 1 where `judged` loses more than one of the others beyond chance.
"""

import json
import math
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from models import ModelTexts, model_arguments, small_models
from result import described, publish
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from weight_rounding import changed, stored_weights

from fp8q.calibrate.measure.held_out import EVERY, HeldOutTokens, input_name
from fp8q.calibrate.measure.scoring import divergences, losses
from fp8q.calibrate.measure.statistics import coverage, load_statistics
from fp8q.calibrate.model.expert_modules import experts_of
from fp8q.calibrate.model.gemms import observed_gemms
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.text import corpus
from fp8q.calibrate.text.evaluation import Evaluation, cut
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions
from fp8q.quantize.scales.activation_scales import group_of
from fp8q.quantize.scales.choose_scales import choose_scales
from fp8q.quantize.scales.expert_scales import starved
from fp8q.quantize.weights.channels import LEAST_HELD_OUT, QuantizedWeight, WeightScaling, gemm_error
from fp8q.quantize.weights.code_sources import FloatWeight, GptqCodes, Rounding
from fp8q.quantize.weights.gptq import Compensations
from fp8q.stages import corpus as corpus_stage
from fp8q.stages import measure as measure_stage
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared import sources
from fp8q.validate.accuracy.bootstrap import Bootstrap

#: Windows of the calibration text whose tokens centres are made of, and rounds of k-means.
CENTRE_WINDOWS, ROUNDS = 64, 8
Weights = dict[str, QuantizedWeight]
Key = TypeVar("Key")


def mixture_of(texts: ModelTexts, experts: int, context: int, folder: Path) -> Path:
    """Write the dense Llama of `texts` as a Mixtral whose experts are copies of its MLP, one for each token."""
    dense = Path(texts.directory)
    source = open_source(texts.directory)
    ids = tokens_of(source, texts.data, context)[:CENTRE_WINDOWS]
    tensors = {name: tensor for name, tensor in load_file(dense / "model.safetensors").items() if ".mlp." not in name}
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name, tensor in load_file(dense / "model.safetensors").items():
        layer, inside, part = name.partition(".mlp.")
        for expert in range(experts if inside else 0):
            stored = f"{layer}.block_sparse_moe.experts.{expert}.{parts[part.removesuffix('.weight')]}.weight"
            tensors[stored] = tensor.clone()
    for number, inputs in mlp_inputs(load_model(source, torch.float32, "cpu"), ids).items():
        tensors[f"model.layers.{number}.block_sparse_moe.gate.weight"] = centres(inputs, experts).bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((dense / "config.json").read_text(encoding="utf-8"))
    config = {
        key: value for key, value in config.items() if key not in ("mlp_bias", "attention_bias", "pretraining_tp")
    }
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
    config |= {"num_local_experts": experts, "num_experts_per_tok": 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in dense.glob("*token*.json"):
        shutil.copyfile(file, folder / file.name)
    return folder


def tokens_of(source: Source, text: str, context: int) -> npt.NDArray[np.int64]:
    """The text in windows, int64 [windows, context]."""
    stream = corpus.encode_texts(corpus.load_texts(text), load_tokenizer(source))
    return corpus.windows(stream, context, len(stream) // context)


def mlp_inputs(model: PreTrainedModel, ids: npt.NDArray[np.int64]) -> dict[int, torch.Tensor]:
    """The input of each layer's MLP, float32 [tokens, width]."""
    inputs: dict[int, torch.Tensor] = {}
    layers: Any = model.base_model.layers
    watch_inputs(model, dict(enumerate(layer.mlp for layer in layers)), inputs.__setitem__, ids)
    return inputs


def watch_inputs(
    model: PreTrainedModel,
    modules: Mapping[Key, torch.nn.Module],
    take: Callable[[Key, torch.Tensor], None],
    ids: npt.NDArray[np.int64],
) -> None:
    """Run `ids` int64 [windows, context] at once; `take` gets the input [tokens, width] of each of `modules`."""

    def watching(key: Key) -> Any:
        return lambda module, inputs: take(key, inputs[0].flatten(0, -2))

    hooks = [module.register_forward_pre_hook(watching(key)) for key, module in modules.items()]
    with torch.inference_mode():
        model.base_model(input_ids=torch.from_numpy(ids), use_cache=False)
    for hook in hooks:
        hook.remove()


def centres(inputs: torch.Tensor, number: int) -> torch.Tensor:
    """Directions from the mean of `inputs` [tokens, width] to the centres of clusters, by k-means on the sphere."""
    unit = torch.nn.functional.normalize(inputs - inputs.mean(0), dim=-1)
    directions = unit[torch.randperm(len(unit), generator=torch.Generator().manual_seed(0))[:number]]
    for _ in range(ROUNDS):
        nearest = (unit @ directions.T).argmax(1)
        means = [
            unit[nearest == one].mean(0) if bool((nearest == one).any()) else directions[one] for one in range(number)
        ]
        directions = torch.nn.functional.normalize(torch.stack(means), dim=-1)
    return directions


def rounded(
    run: Run, source: Source, options: CalibrateOptions, weights: dict[str, torch.Tensor], judge: bool
) -> Weights:
    """Quantize `weights` as `calibrate` does with `options` from the moments of `run`; experts are judged or not."""
    statistics = load_statistics(run)
    few = starved(statistics, options.min_expert_tokens)
    experts = (statistics.record.experts or {}) if judge else {}
    first = group_of(statistics.record.groups)
    compensations = Compensations(run.moments, first, dict.fromkeys(weights, 0.0), few.keys(), experts)
    scaling = WeightScaling(options.weight_method)
    sources = (GptqCodes(scaling, compensations),) if options.weight_rounding == "gptq" else ()
    rounding = Rounding(scaling, sources)
    made = {name: rounding.quantized(FloatWeight(name, weight.clone)) for name, weight in weights.items()}
    return {name: weight for name, weight in made.items() if isinstance(weight, QuantizedWeight)}


def expert_tokens(model: PreTrainedModel, ids: npt.NDArray[np.int64]) -> HeldOutTokens:
    """Tokens of each expert's inputs on the windows `ids` int64 [windows, context]."""
    experts = tuple(f"{name}." for name in experts_of(model))
    names = {input_name(name) for name in observed_gemms(model) if name.startswith(experts)}
    tokens = HeldOutTokens(EVERY)
    modules = {name: model.get_submodule(name) for name in names}
    watch_inputs(model, modules, lambda name, x: tokens.add(name, x, EVERY - 1), ids)
    return tokens


def over_nearest(
    weights: dict[str, torch.Tensor], nearest: Weights, gptq: Weights, tokens: HeldOutTokens
) -> dict[str, Any]:
    """The error of experts' weights by `gptq` over that by nearest on `tokens`: quantiles, by kind of product."""
    by_kind: dict[str, list[float]] = {"gate and up": [], "down": []}
    for name, weight in weights.items():
        of_expert = tokens.tokens(input_name(name)) if ".experts." in name else None
        if of_expert is not None and len(of_expert) >= LEAST_HELD_OUT:
            errors = [float(gemm_error(weight, made[name].values, of_expert)) for made in (gptq, nearest)]
            by_kind["down" if name.endswith("down_proj") else "gate and up"].append(errors[0] / errors[1])
    return {
        kind: {
            "weights": len(ratios),
            "worse": sum(ratio >= 1 for ratio in ratios),
            **{f"p{part}": round(float(np.percentile(ratios, part)), 3) for part in (10, 50, 90)},
        }
        for kind, ratios in by_kind.items()
    }


def difference(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> dict[str, Any]:
    """The mean difference of KL × 10⁶ [windows] with its interval, and the windows in which `ours` is less."""
    by_window = ours - theirs
    interval = Bootstrap(np.arange(len(by_window))).interval(by_window)
    figures = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    return {name: round(value, 1) for name, value in figures.items()} | {"less_in": int((by_window < 0).sum())}


def accuracy(
    evaluation: Evaluation, model: PreTrainedModel, made: dict[str, Weights]
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, float]]:
    """KL × 10⁶ of weights window from `model`, and the increase of its perplexity in percent, by weights of `made`."""
    forwards = {
        name: changed(model, {module: one.values for module, one in weights.items()}) for name, weights in made.items()
    }
    kl: dict[str, list[float]] = {name: [] for name in forwards}
    nll: dict[str, list[float]] = {name: [] for name in ("", *forwards)}
    float_model = changed(model, {})
    for window in evaluation.ids:
        following = torch.from_numpy(window[1:])
        with torch.inference_mode():
            true = float_model(window[None])[0, :-1].log_softmax(-1)
            nll[""].append(float(losses(true, following).mean()))
            for name, forward in forwards.items():
                other = forward(window[None])[0, :-1].log_softmax(-1)
                kl[name].append(1e6 * float(divergences(true, other).mean()))
                nll[name].append(float(losses(other, following).mean()))
    change = {name: 100 * math.expm1(np.mean(nll[name]) - np.mean(nll[""])) for name in forwards}
    return {name: np.array(values) for name, values in kl.items()}, {k: round(v, 4) for k, v in change.items()}


def measure(texts: ModelTexts, directory: Path, asked: Any, folder: Path) -> dict[str, Any]:
    """One mixture."""
    source, notes = open_source(str(directory)), Notes(SILENT)
    options = CalibrateOptions(samples=asked.samples, seq_len=asked.context, weight_rounding="gptq")
    collected = corpus_stage.collect(source, load_tokenizer(source), texts.data, texts.eval_data, options, notes)
    runs = {name: Run(folder / name) for name in ("gptq", "judged")}
    model = load_model(source, torch.float32, "cpu")
    made: dict[str, Weights] = {}
    for name, run in runs.items():
        corpus_stage.write_corpus(run, source, collected, notes)
        every = patch("fp8q.calibrate.measure.observe.is_held_out", lambda batch, batches: False)
        with every if name == "gptq" else nullcontext():
            measure_stage.measure(run, source, options, notes, moments=True)
        scales = choose_scales(source, load_statistics(run), sources.gemms_of(source), options)
        weights = stored_weights(model, scales)
        if name == "gptq":
            made["nearest"] = rounded(run, source, replace(options, weight_rounding="nearest"), weights, judge=False)
        made[name] = rounded(run, source, options, weights, judge=name == "judged")
        shutil.rmtree(run.moments)
    evaluation = cut(
        collected.evaluation[: asked.windows * asked.context], Path(texts.eval_data).name, asked.context, asked.context
    )
    kl, increase = accuracy(evaluation, model, made)
    entries = [made["judged"][name].summary for name in weights if ".experts." in name]
    seen = [tokens for layer in coverage(load_statistics(runs["judged"])) for tokens in layer.tokens]
    figures = {
        "tokens_of_an_expert": {"fewest": min(seen), "median": int(np.median(seen)), "most": max(seen)},
        "kl_mean_micronats": {name: round(float(values.mean()), 1) for name, values in kl.items()},
        "perplexity_increase_percent": increase,
        "judged_minus": {name: difference(kl["judged"], kl[name]) for name in ("nearest", "gptq")},
        "gptq_minus_nearest": difference(kl["gptq"], kl["nearest"]),
        "gptq_over_nearest": over_nearest(weights, made["nearest"], made["gptq"], expert_tokens(model, evaluation.ids)),
        "judged_weights": dict(
            Counter(
                "shrunk" if one.rounding == "gptq" and one.held_out and one.held_out.shrunk else one.rounding
                for one in entries
            )
        ),
        "evaluation_tokens": evaluation.protocol.tokens,
    }
    print(texts.name, figures, file=sys.stderr, flush=True)
    return figures


def passed(results: dict[str, Any]) -> bool:
    """Tell whether judged codes nowhere lose more than nearest rounding or GPTQ alone, beyond chance."""
    return all(part["low"] <= 0 for result in results.values() for part in result["judged_minus"].values())


def main() -> int:
    """Measure and print."""
    parser = model_arguments(__doc__, windows=24, samples=64)
    parser.add_argument("--experts", type=int, default=16)
    asked = parser.parse_args()
    head, results = described("expert_rounding"), dict[str, Any]()
    for texts in asked.models or small_models("demo", "mixtral"):
        with tempfile.TemporaryDirectory() as folder:
            dense = not experts_of(load_model(open_source(texts.directory), torch.bfloat16))
            directory = Path(texts.directory)
            if dense:
                directory = mixture_of(texts, asked.experts, asked.context, Path(folder) / texts.name)
            results[texts.name] = measure(texts, directory, asked, Path(folder) / "runs")
    figures = {"samples": asked.samples, "experts": asked.experts, "results": results, "passed": passed(results)}
    return publish(head, figures, asked.save)


if __name__ == "__main__":
    sys.exit(main())
