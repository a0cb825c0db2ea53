"""What each step of rounding weights gives where activations are exact, and what it costs.

    python benchmarks/weights_alone.py [MODEL=CALIBRATION,EVALUATION …] [--samples 128] [--context 256] [--windows 40]
        [--shapes 4096x4096 …]

Weights alone are quantized; the rest is the FP32 model, and mean KL(FP32 || quantized) on the evaluation text is in
nats × 10⁶. Second moments are those of the BF16 model, as `calibrate` measures them; `sequential` runs with exact
activations. Seconds are those of rounding the whole model (of `sequential` with its passes through the layers), on the
threads that the result names. `shapes`: seconds and peak memory of rounding one random matrix OUTxIN by `gptq`. The
limit is the demo's by the best of all. Prints one JSON line; exit status 1 when it is not met.
"""

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from multiprocessing import get_context
from pathlib import Path

import torch
from models import Given, given, small_models
from result import arguments, described, publish
from transformers import PreTrainedModel

from fp8q.calibrate.model.products import observed_products, output_axis
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.options import CalibrateOptions
from fp8q.quantize.linear import encode
from fp8q.quantize.scales import Scales, group_of
from fp8q.quantize.sequential import Sequence, exact_input
from fp8q.quantize.weight_descent import descend
from fp8q.quantize.weight_rounding import DAMPING, Compensation, compensated_codes, compensation, rounded_in_turn
from fp8q.quantize.weights import WeightMethod, channel_scales
from fp8q.reporter import SILENT
from fp8q.run import Run
from fp8q.stages import choosing, corpora, measuring, sources
from fp8q.stages.steps import Notes
from fp8q.validate.compare import Forward, compare
from fp8q.validate.perplexity import Evaluation, cut

LIMIT_DEMO = 400.0
#: A weight [out, in] and its input's moments -> the numbers its codes stand for, float32 [out, in].
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def scale_of(weight: torch.Tensor, method: WeightMethod) -> torch.Tensor:
    """The scales of a weight that is not zero."""
    scale = channel_scales(weight, method)
    assert scale is not None
    return scale


def nearest(method: WeightMethod) -> Step:
    """Each weight to its nearest code."""

    def step(weight: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
        scale = scale_of(weight, method)[:, None]
        return encode(weight, scale).float() * scale

    return step


def as_the_paper(moments: torch.Tensor) -> Compensation:
    """Inputs in the order they come in."""
    damped = moments.double()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean())
    factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True).float()
    return Compensation(torch.arange(len(moments)), damped.float(), factor)


def in_turn(method: WeightMethod, compensate: Callable[[torch.Tensor], Compensation], passes: bool) -> Step:
    """GPTQ in the order of `compensate`, and codes changed afterwards or not."""

    def step(weight: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
        found, scale = compensate(moments), scale_of(weight, method)
        wanted = weight[:, found.order].float().T.contiguous()
        values, _ = rounded_in_turn(wanted.clone(), scale, found.factor)
        if passes:
            descend(wanted, values, scale, found.moments)
        return (values * scale)[torch.argsort(found.order)].T

    return step


STEPS: dict[str, Step] = {
    f"{method}, {title}": step
    for method in ("amax", "mse")
    for title, step in {
        "nearest": nearest(method),
        "one after the other": in_turn(method, as_the_paper, False),
        "in falling order": in_turn(method, compensation, False),
        "gptq": in_turn(method, compensation, True),
    }.items()
}


def with_weights(model: PreTrainedModel, made: dict[str, torch.Tensor]) -> Forward:
    """`model` with other weights [out, in]."""
    other = deepcopy(model)
    for name, module in observed_products(other).items():
        if name in made:
            module.weight.data = made[name].movedim(0, output_axis(module)).contiguous()
    return lambda ids: other(input_ids=torch.from_numpy(ids), use_cache=False).logits


def sequential(source: Source, scales: Scales, run: Run, options: CalibrateOptions) -> dict[str, torch.Tensor]:
    """What `--weight-rounding sequential` makes of the run's modules where activations are exact."""
    windows = corpora.load_tokens(run, run.calibration)
    size = options.batch_size
    batches = {batch: windows[start : start + size] for batch, start in enumerate(range(0, len(windows), size))}
    with tempfile.TemporaryDirectory() as folder:
        rounded = Sequence(source, scales, "mse", batches, Path(folder), seen=exact_input).run(SILENT)
        found = {module: rounded.of(module) for module in scales.activations}
    return {module: pair[0].float() * pair[1][:, None] for module, pair in found.items() if pair}


def measured(
    run: Run, source: Source, texts: Given, options: argparse.Namespace
) -> tuple[Evaluation, CalibrateOptions]:
    """Calibrate with second moments; the evaluation text, cut."""
    chosen = CalibrateOptions(samples=options.samples, seq_len=options.context, weight_rounding="gptq")
    notes = Notes(SILENT)
    collected = corpora.collect(source, load_tokenizer(source), texts.data, texts.eval_data, chosen, notes)
    corpora.write_corpus(run, source, collected, notes)
    measuring.measure(run, source, chosen, notes)
    tokens = collected.evaluation[: options.windows * options.context]
    return cut(tokens, Path(texts.eval_data).name, options.context, options.context), chosen


def benchmark(run: Run, source: Source, texts: Given, options: argparse.Namespace) -> dict[str, object]:
    """All steps on one model."""
    from fp8q.calibrate.measure.moments import load_moments
    from fp8q.calibrate.measure.statistics import load_statistics

    evaluation, chosen = measured(run, source, texts, options)
    statistics = load_statistics(run)
    scales = choosing.choose_scales(statistics, sources.products_of(source), chosen)
    first = group_of(statistics.record.groups)
    model = load_model(source, torch.float32, "cpu")
    modules = {name: module for name, module in observed_products(model).items() if name in scales.activations}
    weights = {
        name: torch.as_tensor(module.weight).detach().movedim(output_axis(module), 0).to(torch.bfloat16).contiguous()
        for name, module in modules.items()
    }
    forwards: dict[str, Forward] = {"bf16": with_weights(model, {})}
    seconds = dict[str, float]()
    with torch.inference_mode():
        for title, step in STEPS.items():
            start = time.perf_counter()
            made = {name: step(weight, load_moments(run.moments, first[name])) for name, weight in weights.items()}
            seconds[title] = time.perf_counter() - start
            forwards[title] = with_weights(model, made)
    start = time.perf_counter()
    made = sequential(source, scales, run, chosen)
    seconds["mse, sequential"] = time.perf_counter() - start
    forwards["mse, sequential"] = with_weights(model, made)
    accuracy, _ = compare(evaluation, forwards, source.text_config.vocab_size, SILENT)
    found = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": options.samples * options.context,
        "kl_mean_micronats": {
            name: round(1e6 * runtime.kl_mean_nats, 1)
            for name, runtime in accuracy.runtimes.items()
            if runtime.kl_mean_nats is not None
        },
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
    }
    print(texts.name, found, file=sys.stderr, flush=True)
    return found


def one_matrix(shape: str, threads: int) -> dict[str, object]:
    """Seconds and peak memory of one random matrix, in a process of its own."""
    torch.set_num_threads(threads)
    out, width = (int(size) for size in shape.split("x"))
    weight = (0.02 * torch.randn(out, width)).to(torch.bfloat16)
    few = torch.randn(width // 4, width)
    moments = few.T @ few + torch.eye(width)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    found = compensation(moments)
    middle = time.perf_counter()
    compensated_codes(weight, scale_of(weight, "mse"), found)
    return {
        "factor_s": round(middle - start, 1),
        "round_s": round(time.perf_counter() - middle, 1),
        "peak_bytes_more": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
    }


def main() -> int:
    """Run, print, judge."""
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", type=given, metavar="MODEL=CALIBRATION,EVALUATION")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--shapes", nargs="*", default=["4096x4096", "14336x4096"])
    options = parser.parse_args()
    head, results, threads = described("weights_alone"), {}, torch.get_num_threads()
    for model in options.models or small_models("demo", "qwen2", "gemma", "opt", "llama"):
        with tempfile.TemporaryDirectory() as folder:
            results[model.name] = benchmark(Run(Path(folder) / "run"), open_source(model.directory), model, options)
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        shapes = {shape: pool.apply(one_matrix, (shape, threads)) for shape in options.shapes}
    demo = results.get("demo", {}).get("kl_mean_micronats")
    passed = not isinstance(demo, dict) or min(demo.values()) <= LIMIT_DEMO
    figures = {"samples": options.samples, "threads": threads, "results": results, "shapes": shapes}
    return publish(head, {**figures, "limit_demo": LIMIT_DEMO, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
