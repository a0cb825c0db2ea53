"""What adding codes with 14 bits costs: models, and single products of the shapes of large ones.

    python benchmarks/accumulator.py [MODEL=CALIBRATION,EVALUATION …] [--windows 3] [--context 256]
    python benchmarks/accumulator.py --mmaemu

Models: calibrated on 64 windows of 256 tokens, with one term an activation and with two; the reference, its wide parts
in FP32 so that nothing but quantization is seen, its sums made in FP32, as Hopper's adder makes them, and promoted to
FP32 every 128 products (`fp8q.quantize.reference.adder`); beside them each product rounded once to BF16, which is as
near as two correct programs come. KL of each against the FP32 model and against sums in FP32, and the BF16 model's own.
Products: rows of activations (normal, Student's t with 3 degrees of freedom, and normal magnitudes against weights of
one sign, where nothing cancels) through normal weights in per-channel scales; root mean square of the error over that
of the sums, beside what rounding the operands to E4M3 makes, both of them or the weights alone, and what rounding the
sum to BF16 makes. `ada` is the adder of 16 products at a time. Prints one JSON line; exit status 1 where one term gives
the very sums of FP32. `--mmaemu` instead holds the adders bit for bit against the package mmaemu 0.1.0 (installed by
hand), whose own results are those of an H100 and an RTX 4060; exit status 1 where a sum differs.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import torch
from loaded_runtimes import compare_runtimes
from models import ModelTexts, cut_text, model_arguments, small_models
from result import described, publish

from fp8q.api import CalibrateOptions, RescaleOptions, calibrate, scales
from fp8q.calibrate.model.source import open_source
from fp8q.calibrate.text.evaluation import cut
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import Accumulator, Terms
from fp8q.quantize.codes.encoding import CODE, encode
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.reading.run_checkpoint import vocabulary_size
from fp8q.quantize.reference.adder import ADDERS, Adder, add_in
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.reference.linear import FP8Linear
from fp8q.quantize.scales.clip import scale_of
from fp8q.stages.corpus import load_tokens
from fp8q.validate.accuracy.compare import BASELINE, Forward
from fp8q.validate.accuracy.runtimes import float_model, logits_of

#: Of activations, in whole windows.
TERMS: tuple[Terms, ...] = (1, 2)
#: The longest sums of Llama 3.1 8B (4,096 and 14,336) and 70B (8,192 and 28,672), and shorter ones.
LENGTHS = (512, 1024, 4096, 8192, 14_336, 28_672)
ROWS, OUTPUTS = 32, 128
ROUNDED, OWN = "fp32, rounded to bf16", "the BF16 model"


def model(texts: ModelTexts, windows: int, context: int) -> dict[str, Any]:
    """The BF16 model's own KL, and terms -> sums -> KL against the FP32 model and against sums in FP32, in nats."""
    with tempfile.TemporaryDirectory() as directory:
        evaluation = cut_text(texts, windows * context, Path(directory))
        options = CalibrateOptions(samples=64, seq_len=256)
        run = calibrate(texts.directory, texts.data, Path(directory) / "run", str(evaluation), options)
        source = open_source(texts.directory)
        tokens = cut(load_tokens(run, run.evaluation), evaluation.name, context, context)
        wide = {dtype: float_model(source, dtype, "cpu") for dtype in (torch.float32, torch.bfloat16)}
        own, _ = compare_runtimes(
            tokens, {BASELINE: wide[torch.float32], OWN: wide[torch.bfloat16]}, vocabulary_size(run), SILENT
        )
        found: dict[str, Any] = {OWN: own.runtimes[OWN].kl_mean_nats}
        for terms in TERMS:
            scales(run.root, RescaleOptions(activation_terms=terms))
            runtimes = {BASELINE: wide[torch.float32], **sums(run)}
            accuracy, _ = compare_runtimes(tokens, runtimes, vocabulary_size(run), SILENT)
            found[str(terms)] = {
                name.removeprefix("reference-"): {"kl_nats": each.kl_mean_nats, "kl_sums_nats": each.kl_sums_nats}
                for name, each in accuracy.runtimes.items()
                if name != BASELINE
            }
            print(f"{texts.name}: {terms}: {found[str(terms)]}", file=sys.stderr, flush=True)
    return found


def sums(run: Run) -> dict[str, Forward]:
    """The exact reference in FP32, its codes added in each way; a reference has one way at a time."""
    names: dict[str, Accumulator] = {name: name for name in get_args(Accumulator)}
    exact = {name: load_reference(run.model, "exact", torch.float32) for name in (*names, ROUNDED)}
    for layer in exact[ROUNDED].model.modules():
        if isinstance(layer, FP8Linear):
            layer.register_forward_hook(lambda _, given, made: made.bfloat16().float())
    for name, reference in exact.items():
        reference.sum_in(names.get(name, "fp32"))
    return {f"reference-{name}": logits_of(reference) for name, reference in exact.items()}


def equal(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Name the models whose codes, of one term, give the same sums in two ways: those were not added in both."""
    return [
        f"{model}: {name} is FP32"
        for model, found in results.items()
        for name, sums in found["1"].items()
        if sums["kl_sums_nats"] == 0
    ]


def normal(*shape: int) -> torch.Tensor:
    """Normal deviates."""
    return torch.randn(*shape)


def heavy(*shape: int) -> torch.Tensor:
    """Student's t with 3 degrees of freedom, of unit variance."""
    return torch.randn(*shape) / torch.randn(3, *shape).square().sum(0).sqrt()


def magnitude(*shape: int) -> torch.Tensor:
    """Magnitudes of normal deviates."""
    return torch.randn(*shape).abs()


#: Name -> what draws activations, and weights.
KINDS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "normal": (normal, normal),
    "heavy tails": (heavy, normal),
    "one sign": (magnitude, magnitude),
}


def products(length: int, kind: str) -> dict[str, float]:
    """The relative errors of sums of `length` products."""
    torch.manual_seed(0)
    draw_x, draw_weight = KINDS[kind]
    x, weight = draw_x(ROWS, length).bfloat16().double(), draw_weight(OUTPUTS, length).bfloat16().double()
    scale = torch.from_numpy(scale_of([float(x.abs().amax())], E4M3))
    channel_scales = torch.from_numpy(scale_of(weight.abs().amax(1).numpy(), E4M3))[:, None]
    codes_x, codes = encode(x, scale), encode(weight, channel_scales)
    float_sum, exact = x @ weight.T, codes_x.double() @ codes.double().T
    rounded = codes.double() * channel_scales
    found = {
        "operands": relative(codes_x.double() * scale @ rounded.T, float_sum),
        "weights": relative(x @ rounded.T, float_sum),
        "bf16": relative(exact.bfloat16().double(), exact),
        "fp32": relative((codes_x.float() @ codes.float().T).double(), exact),
    }
    for name, adder in {**ADDERS, "ada": Adder(block=16)}.items():
        sums = add_in(codes_x, codes, adder).double()
        found |= {name: relative(sums, exact), f"{name}, drift": drift(sums, exact)}
    return {name: float(f"{value:.3g}") for name, value in found.items()}


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    """Root mean square of the difference over that of what is `right`."""
    return float((found - right).square().mean().sqrt() / right.square().mean().sqrt())


def drift(found: torch.Tensor, right: torch.Tensor) -> float:
    """How much larger the sums came out, as a share of the `right` ones: below zero where truncation draws them in."""
    return float((found.abs() - right.abs()).sum() / right.abs().sum())


def codes_of_every_kind(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Rows of E4M3 codes: as KINDS draws them, so small that most are subnormal, and all codes but NaN alike."""
    patterns = torch.randint(0, 256, (rows, length), dtype=torch.uint8)
    every = patterns.masked_fill(patterns & 0x7F == 0x7F, 0).view(CODE)
    drawn = {kind: encode(40 * draw(rows, length), torch.ones(1)) for kind, (draw, _) in KINDS.items()}
    return {**drawn, "subnormal": encode(normal(rows, length) / 100, torch.ones(1)), "every code": every}


def against_mmaemu(lengths: tuple[int, ...] = (16, 64, 528, 1024, 4096)) -> dict[str, Any]:
    """Sums of every kind, and how many of them are other numbers in mmaemu."""
    mmaemu = import_module("mmaemu")
    torch.manual_seed(0)
    modes = [(ADDERS["fp22"], "hopper", True), (ADDERS["two-level"], "hopper", False), (Adder(block=16), "ada", True)]
    sums = differing = 0
    for length in lengths:
        weights = codes_of_every_kind(OUTPUTS, length)
        for kind, x in codes_of_every_kind(ROWS, length).items():
            for adder, profile, fast in modes:
                theirs = mmaemu.accumulate(x, weights[kind], use_fast_accum=fast, splitk=1, profile=profile)
                differing += int((theirs.view(torch.int32) != add_in(x, weights[kind], adder).view(torch.int32)).sum())
                sums += theirs.numel()
    return {"mmaemu": mmaemu.__version__, "sums": sums, "differing": differing, "passed": not differing}


def main() -> int:
    """Measure and print."""
    parser = model_arguments(__doc__, windows=3)
    parser.add_argument("--mmaemu", action="store_true")
    options = parser.parse_args()
    if options.mmaemu:
        return publish(described("accumulator"), against_mmaemu(), options.save)
    head = described("accumulator")
    found = {kind: {str(length): products(length, kind) for length in LENGTHS} for kind in KINDS}
    models = options.models or small_models("demo", "llama", "qwen2", "gemma", "opt")
    results = {each.name: model(each, options.windows, options.context) for each in models}
    protocol = {"windows": options.windows, "context": options.context, "rows": ROWS, "outputs": OUTPUTS}
    figures = {**protocol, "results": results, "products": found, "missed": equal(results)}
    return publish(head, {**figures, "passed": not figures["missed"]}, options.save)


if __name__ == "__main__":
    sys.exit(main())
