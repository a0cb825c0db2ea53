"""What the choice of weight scales and of rounding gives, and what it costs.

    python benchmarks/weight_rounding.py [MODEL=CALIBRATION,EVALUATION …] [--samples 128] [--context 256] [--windows 16]

Two figures for each way to quantize weights, both mean KL(FP32 || quantized) on the evaluation text, in FP32. With
activations that lose nothing (two terms), in nats × 10⁶; and with activations of one term, clipped at their amax, over
that of one amax scale for the whole weight. Weights that lose nothing bound the second. Second moments are those of the
BF16 model, as `calibrate` measures them; `sequential` rounds the layers once for either. Seconds are processor time, of
all threads: of rounding the whole model, of `sequential` with its passes through the layers, activations exact. Limits:
the demo's best with exact activations; `gptq` over `nearest` at amax scales with one term. Prints one JSON line; exit
status 1 when one is not met.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
from loaded_runtimes import compare_runtimes
from models import ModelTexts, model_arguments, small_models
from result import described, publish
from transformers import PreTrainedModel

from fp8q.calibrate.measure.moments import load_moments
from fp8q.calibrate.measure.statistics import load_statistics
from fp8q.calibrate.model.gemms import observed_gemms, output_channel_axis
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.text.evaluation import Evaluation, cut
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, WeightRounding
from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.scales.activation_scales import group_of
from fp8q.quantize.scales.choose_scales import choose_scales
from fp8q.quantize.scales.clip import lost_share, scale_of
from fp8q.quantize.scales.decisions import Scales
from fp8q.quantize.weights.channels import WeightMethod, WeightScaling, channel_scales
from fp8q.quantize.weights.gptq import (
    DAMPING,
    Compensation,
    compensation,
    descend,
    gptq_round,
    ridge_weights,
)
from fp8q.quantize.weights.sequential import SequentialRounding, gemm_input
from fp8q.stages import corpus as corpus_stage
from fp8q.stages import measure as measure_stage
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared import sources
from fp8q.validate.accuracy.compare import Forward

LIMIT_DEMO, LIMIT_RATIO = 400.0, 0.95
MEASURED: tuple[WeightRounding, ...] = ("nearest", "gptq")
WHOLE, SEQUENTIAL, LOSSLESS = "amax of the whole weight", "mse, sequential", "lossless weights"
MADE_UP_FOR = "lossless weights, made up for"
#: A weight [out, in] in BF16, its input's moments and the share of them that rounding takes -> the numbers its codes
#: stand for, float32 [out, in].
Step = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
Weights = dict[str, torch.Tensor]


def scales_by(weight: torch.Tensor, method: WeightMethod) -> torch.Tensor:
    """The scales of a weight that is not zero."""
    scale = channel_scales(weight, method)
    assert scale is not None
    return scale


def whole_weight(weight: torch.Tensor, moments: torch.Tensor, lost: float) -> torch.Tensor:
    """Each weight to its nearest code under one amax scale."""
    scale = torch.from_numpy(scale_of([float(weight.abs().max())], E4M3))
    return encode(weight, scale).float() * scale


def nearest(method: WeightMethod) -> Step:
    """Each weight to its nearest code."""

    def step(weight: torch.Tensor, moments: torch.Tensor, lost: float) -> torch.Tensor:
        scale = scales_by(weight, method)[:, None]
        return encode(weight, scale).float() * scale

    return step


def as_the_paper(moments: torch.Tensor, lost: float) -> Compensation:
    """Inputs in the order they come in, as if they were exact."""
    damped = moments.double()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean())
    factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True).float()
    return Compensation(torch.arange(len(moments)), None, damped.float(), factor)


def goal(weight: torch.Tensor, found: Compensation) -> torch.Tensor:
    """What is rounded, float32 [in, out], in the order of `found`."""
    return ridge_weights(weight[:, found.order].float().T.contiguous(), found)


def in_turn(method: WeightMethod, compensate: Callable[[torch.Tensor, float], Compensation], passes: bool) -> Step:
    """GPTQ in the order of `compensate`, and codes changed afterwards or not."""

    def step(weight: torch.Tensor, moments: torch.Tensor, lost: float) -> torch.Tensor:
        found, scale = compensate(moments, lost), scales_by(weight, method)
        wanted = goal(weight, found)
        values = gptq_round(wanted.clone(), scale, found.factor)
        if passes:
            descend(wanted, values, scale, found.moments)
        return (values * scale)[torch.argsort(found.order)].T

    return step


def unrounded(weight: torch.Tensor, moments: torch.Tensor, lost: float) -> torch.Tensor:
    """Weights that lose nothing, and make up for what their inputs lose."""
    found = compensation(moments, lost)
    return goal(weight, found)[torch.argsort(found.order)].T


STEPS: dict[str, Step] = {
    WHOLE: whole_weight,
    "amax, nearest": nearest("amax"),
    "amax, gptq": in_turn("amax", compensation, True),
    "mse, nearest": nearest("mse"),
    "mse, one after the other": in_turn("mse", as_the_paper, False),
    "mse, in falling order": in_turn("mse", compensation, False),
    "mse, gptq": in_turn("mse", compensation, True),
    LOSSLESS: lambda weight, moments, lost: weight.float(),
    MADE_UP_FOR: unrounded,
}


def changed(model: PreTrainedModel, made: Weights, scales: Scales | None = None) -> Forward:
    """`model` with other weights [out, in], and its activations rounded to one term by `scales`."""
    other = deepcopy(model)
    for name, module in observed_gemms(other).items():
        if name in made:
            module.weight.data = made[name].movedim(0, output_channel_axis(module)).contiguous()
        if scales and name in scales.activations:
            activation = scales.activations[name]
            module.register_forward_pre_hook(lambda m, given, own=activation: (gemm_input(given[0], own),))
    return lambda ids: other(input_ids=torch.from_numpy(ids), use_cache=False).logits


class ExactInputs(SequentialRounding):
    """Rounds layer by layer as if activations lost nothing."""

    def input_values(self, x: torch.Tensor, module: str) -> torch.Tensor:
        """`x` itself."""
        return x.float()


def sequential(
    source: Source, scales: Scales, run: Run, options: CalibrateOptions, kind: type[SequentialRounding]
) -> Weights:
    """Round the run's modules as `--weight-rounding sequential` does, by `kind`."""
    windows = corpus_stage.load_tokens(run, run.calibration)
    size = options.batch_size
    batches = {batch: windows[start : start + size] for batch, start in enumerate(range(0, len(windows), size))}
    with tempfile.TemporaryDirectory() as folder:
        rounded = kind(source, scales.activations, WeightScaling("mse"), batches, Path(folder)).run(SILENT)
        codes_and_scales = {module: rounded.get(module) for module in scales.activations}
    return {module: pair[0].float() * pair[1][:, None] for module, pair in codes_and_scales.items() if pair}


def measured(
    run: Run, source: Source, texts: ModelTexts, options: argparse.Namespace
) -> tuple[Evaluation, CalibrateOptions, dict[str, float]]:
    """Calibrate without and with second moments; the evaluation text, cut, and the seconds of both."""
    chosen, notes = CalibrateOptions(samples=options.samples, seq_len=options.context), Notes(SILENT)
    collected = corpus_stage.collect(source, load_tokenizer(source), texts.data, texts.eval_data, chosen, notes)
    corpus_stage.write_corpus(run, source, collected, notes)
    seconds = dict[str, float]()
    for rounding in MEASURED:
        measure_stage.measure(run, source, chosen, notes, moments=rounding == "gptq")
        seconds[rounding] = round(run.record().stages["measure"].seconds, 2)
    tokens = collected.evaluation[: options.windows * options.context]
    return cut(tokens, Path(texts.eval_data).name, options.context, options.context), chosen, seconds


def stored_weights(model: PreTrainedModel, scales: Scales) -> Weights:
    """The weights to quantize, BF16 [out, in]."""
    modules = {name: module for name, module in observed_gemms(model).items() if name in scales.activations}
    return {
        name: torch.as_tensor(module.weight)
        .detach()
        .movedim(output_channel_axis(module), 0)
        .to(torch.bfloat16)
        .contiguous()
        for name, module in modules.items()
    }


def benchmark(run: Run, source: Source, texts: ModelTexts, options: argparse.Namespace) -> dict[str, object]:
    """All steps on one model."""
    evaluation, chosen, measure_seconds = measured(run, source, texts, options)
    statistics = load_statistics(run)
    scales, first = (
        choose_scales(source, statistics, sources.gemms_of(source), chosen),
        group_of(statistics.record.groups),
    )
    model = load_model(source, torch.float32, "cpu")
    weights, seconds = stored_weights(model, scales), dict[str, float]()
    lost = {name: lost_share(found.sqnr_db) for name, found in scales.activations.items()}
    exact: dict[str, Weights] = {}
    one_term: dict[str, Weights] = {}
    for title, step in STEPS.items():
        for made, share in ((one_term, lost), (exact, dict.fromkeys(lost, 0.0))):
            start = time.process_time()
            with torch.inference_mode():
                made[title] = {
                    name: step(own, load_moments(run.moments, first[name]), share[name])
                    for name, own in weights.items()
                }
            seconds[title] = round(time.process_time() - start, 2)
    one_term[SEQUENTIAL] = sequential(source, scales, run, chosen, SequentialRounding)
    start = time.process_time()
    exact[SEQUENTIAL] = sequential(source, scales, run, chosen, ExactInputs)
    seconds[SEQUENTIAL] = round(time.process_time() - start, 2)
    kl = means(evaluation, model, {name: changed(model, own) for name, own in exact.items()}, source)
    rounded = means(evaluation, model, {name: changed(model, own, scales) for name, own in one_term.items()}, source)
    found = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": options.samples * options.context,
        "kl_mean_micronats": {name: round(1e6 * value, 1) for name, value in kl.items()},
        "one_term_over_whole_weight": {name: round(value / rounded[WHOLE], 3) for name, value in rounded.items()},
        "one_term_gptq_over_nearest": round(rounded["amax, gptq"] / rounded["amax, nearest"], 4),
        "seconds": seconds,
        "measure_s": measure_seconds,
        "evaluation_tokens": evaluation.protocol.tokens,
    }
    print(texts.name, found, file=sys.stderr, flush=True)
    return found


def means(
    evaluation: Evaluation, model: PreTrainedModel, forwards: dict[str, Forward], source: Source
) -> dict[str, float]:
    """Mean KL(`model` || each) in nats."""
    accuracy, _ = compare_runtimes(
        evaluation, {"bf16": changed(model, {}), **forwards}, source.text_config.vocab_size, SILENT
    )
    return {name: kl for name in forwards if (kl := accuracy.runtimes[name].kl_mean_nats) is not None}


def missed(results: dict[str, dict[str, object]]) -> list[str]:
    """The limits that are missed, with the figures."""
    found = []
    for name, result in results.items():
        kl, ratio = result["kl_mean_micronats"], result["one_term_gptq_over_nearest"]
        if (
            name == "demo"
            and isinstance(kl, dict)
            and (best := min(kl[row] for row in kl if row not in (LOSSLESS, MADE_UP_FOR))) > LIMIT_DEMO
        ):
            found.append(f"{name}: {best} over {LIMIT_DEMO}")
        if isinstance(ratio, float) and ratio > LIMIT_RATIO:
            found.append(f"{name}: {ratio} over {LIMIT_RATIO}")
    return found


def main() -> int:
    """Run, print, judge."""
    options = model_arguments(__doc__, windows=16, samples=128).parse_args()
    head, results, threads = described("weight_rounding"), {}, torch.get_num_threads()
    for model in options.models or small_models("demo", "llama", "qwen2", "gemma", "opt"):
        with tempfile.TemporaryDirectory() as folder:
            results[model.name] = benchmark(Run(Path(folder) / "run"), open_source(model.directory), model, options)
    over = missed(results)
    figures = {"samples": options.samples, "threads": threads, "results": results}
    return publish(head, {**figures, "missed": over, "passed": not over}, options.save)


if __name__ == "__main__":
    sys.exit(main())
