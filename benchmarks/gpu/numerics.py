"""Numerics: is what `FP8Linear` computes on the GPU what the reference on the CPU stands for?

Codes byte by byte; sums of codes against FP64 and, bit for bit, against the adders of `quantize.reference.adder`, with
`use_fast_accum` and without; how many bits the adder keeps (`adder_bits`); whole layers, of widths that are no
multiples of 16 too; perplexity of the demo; and Transformer Engine's scales for those of `delayed`.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fp8q.calibrate.model.launching import has_triton, launched
from fp8q.options import CalibrateOptions, Clipping
from fp8q.quantize.codes.encoding import encode, encode_terms, encode_two
from fp8q.quantize.codes.formats import E4M3, TWO_TERMS
from fp8q.quantize.codes.gemm import scaled_gemm
from fp8q.quantize.reference.adder import accumulated_gemm
from fp8q.quantize.reference.linear import FP8Linear, Mode
from fp8q.quantize.scales.clip import amax_in_use, scale_of

from .adder_bits import cuts, kept_bits
from .timing import Kind, Part, Setting

#: Inputs of the products of Llama 3 8B and 70B, and one that is no multiple of 16.
LENGTHS, ODD = (4096, 14_336, 28_672), 172
DISTANCES = (1, 32, 128, 1024)
DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"


def measure(setting: Setting, part: Part) -> None:
    """All of it, what takes longest last."""
    steps: dict[str, tuple[Callable[[Setting, Part], None], Kind]] = {
        "codes": (codes, Kind("codes", 20)),
        "bits kept": (bits, Kind("bits kept", 40)),
    }
    for length in setting.pick(LENGTHS, (96, 256)):
        steps[f"sums, K = {length}"] = partial(sums, length), Kind("sums", 20, length / LENGTHS[0])
    for length in (*setting.pick(LENGTHS, (64,)), ODD):
        steps[f"layers, K = {length}"] = partial(layers, length), Kind("layers", 20, length / LENGTHS[0])
    steps["Transformer Engine as oracle of `delayed`"] = transformer_engine, Kind("Transformer Engine", 40)
    steps["perplexity"] = perplexity, Kind("perplexity", 60)
    for name, (step, kind) in steps.items():
        part.step(setting, name, partial(step, setting, part), kind)


def codes(setting: Setting, part: Part) -> None:
    """Codes of all BF16 patterns that are others than the CPU's; of NaN only that it is one is asked."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    if not has_triton():
        part.skipped["codes by the kernel"] = "Triton is not installed"
    for scale in map(torch.tensor, (0.0371, 2.0**-6)):
        for terms in (1, 2) if scale == 2.0**-6 else (1,):
            right = torch.stack(encode_two(patterns, scale) if terms == 2 else (encode(patterns, scale),))
            given = patterns.to(setting.device), scale.to(setting.device)
            by_torch = torch.stack(encode_two(*given) if terms == 2 else (encode(*given),))
            for way, found in {"torch": by_torch, "FP8Linear": encode_terms(*given, terms, launched)}.items():
                differing = different(found.cpu(), right)
                part.row("codes of 65,536 BF16 patterns", way=way, scale=float(scale), terms=terms, differing=differing)
                part.target(f"codes by {way}, {terms} terms, scale {scale:g}: others than the CPU's", differing, 0)


def different(found: torch.Tensor, right: torch.Tensor) -> int:
    """How many codes are others."""
    ours, theirs = found.view(torch.uint8), right.view(torch.uint8)
    nan = (ours & 0x7F == 0x7F) & (theirs & 0x7F == 0x7F)
    return int(((ours != theirs) & ~nan).sum())


def bits(setting: Setting, part: Part) -> None:
    """Bits that the adder keeps, beside those of the adders that `--accumulator` has."""
    length, size = setting.pick((4096, 512), (2048, 16))
    ways = {f"GPU, use_fast_accum={fast}": partial(scaled_gemm, fast=fast) for fast in (True, False)}
    simulated = {f"--accumulator {name}": partial(accumulated_gemm, accumulator=name) for name in ("fp22", "two-level")}
    for name, product in {**ways, **simulated}.items():
        on = setting.device if name in ways else "cpu"
        rows, outputs = length, size if name in ways else 16
        found = {f"{distance} behind": kept_bits(product, distance, rows, outputs, on) for distance in DISTANCES}
        part.row("bits kept behind the leading one", sums=name, **found, cuts=cuts(product, 1, rows, outputs, on))


def drawn(rows: int, length: int, seed: int) -> torch.Tensor:
    """Normal deviates as codes."""
    values = torch.randn(rows, length, generator=torch.Generator().manual_seed(seed))
    return encode(values, torch.tensor(4 / E4M3.max))


def sums(length: int, setting: Setting, part: Part) -> None:
    """Sums of codes: their error against FP64, and the share that is an adder's, bit for bit."""
    rows = setting.pick(256, 4)  # so large that cuBLAS does not split the row
    x, weight = drawn(rows, length, 0), drawn(rows, length, 1)
    exact = x.double() @ weight.double().T
    simulated = {name: accumulated_gemm(x[:16], weight, name) for name in ("fp32", "fp22", "two-level")}
    for fast in (True, False):
        found = scaled_gemm(x.to(setting.device), weight.to(setting.device), fast).cpu()
        error = float((found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
        same = {f"is {name}": float((found[:16] == right).double().mean()) for name, right in simulated.items()}
        part.row("sums of codes", K=length, use_fast_accum=fast, relative_error=error, **same)


def layers(length: int, setting: Setting, part: Part) -> None:
    """`FP8Linear` on the GPU against its `exact` mode in FP32 on the CPU, in BF16 units of the output."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(setting.pick(64, 4), length, generator=generator).to(torch.bfloat16)
    weight = drawn(setting.pick(256, 24) + (12 if length == ODD else 0), length, 3)
    weight_scale = torch.rand(len(weight), generator=generator) + 0.5
    amax = float(x.abs().max())
    for terms in (1, 2):
        given = weight, weight_scale, torch.tensor(float(scale_of(amax, TWO_TERMS if terms == 2 else E4M3)))
        right = FP8Linear(*given, None, "exact", terms)(x.float()).double()
        on_device = [tensor.to(setting.device) for tensor in given]
        there = FP8Linear(on_device[0], on_device[1], on_device[2], None, "fast", terms)
        found = there(x.to(setting.device)).cpu().double()
        size = right.square().mean().sqrt()
        error = (found - right).abs()
        relative = float(error.square().mean().sqrt() / size)
        part.row(
            "FP8Linear against the CPU's exact mode", K=length, outputs=len(weight), terms=terms,
            relative_error=relative, largest=float(error.max() / size),
        )  # fmt: skip
        # BF16's own rounding is 0.17 %; 14 bits in chains of 128 add less than that
        part.target(f"FP8Linear, K = {length}, {terms} terms: relative error", relative, 0.005)


def perplexity(setting: Setting, part: Part) -> None:
    """Perplexity of the demo in FP8: of the reference on the CPU, and of the same on the GPU."""
    from loaded_runtimes import compare_runtimes

    from fp8q.api import calibrate
    from fp8q.calibrate.text.evaluation import Evaluation, cut
    from fp8q.core.reporter import SILENT
    from fp8q.core.run import Run
    from fp8q.quantize.reading.run_checkpoint import vocabulary_size
    from fp8q.quantize.reference.fp8_model import load_reference
    from fp8q.stages.corpus import load_tokens
    from fp8q.validate.accuracy.compare import BASELINE
    from fp8q.validate.accuracy.runtimes import logits_of

    with tempfile.TemporaryDirectory() as directory:
        texts = Path(directory) / "run", str(DEMO / "evaluation.txt"), CalibrateOptions(samples=64, seq_len=256)
        checkpoint, data = str(DEMO / "checkpoint"), str(DEMO / "calibration.txt")
        run = Run(setting.run) if setting.run else calibrate(checkpoint, data, *texts)
        whole = cut(load_tokens(run, run.evaluation), "the demo's evaluation text", 256, 256)
        windows = setting.pick(len(whole.ids), 2)
        tokens = Evaluation(whole.ids[:windows], whole.scored[:windows], whole.protocol)
        kinds: tuple[tuple[str, Mode, str], ...] = (
            (BASELINE, "exact", "cpu"), ("reference, CPU, fast", "fast", "cpu"),
            ("reference, GPU", "fast", setting.device),
        )  # fmt: skip
        forwards = {
            name: logits_of(load_reference(run.model, mode, torch.bfloat16, device)) for name, mode, device in kinds
        }
        found, _ = compare_runtimes(tokens, forwards, vocabulary_size(run), SILENT)
    base = found.runtimes[BASELINE].perplexity
    for name, each in found.runtimes.items():
        named = "reference, CPU, exact" if name == BASELINE else name
        part.row("perplexity of the demo", runtime=named, tokens=int(tokens.scored.sum()), perplexity=each.perplexity,
                 increase=each.perplexity / base - 1, kl_nats=each.kl_mean_nats)  # fmt: skip
    part.target(
        "perplexity on the GPU beside the CPU's, relative difference",
        abs(found.runtimes["reference, GPU"].perplexity / base - 1), 0.0005,
    )  # fmt: skip


def transformer_engine(setting: Setting, part: Part) -> None:
    """The scales that Transformer Engine's DelayedScaling comes to, batch by batch, beside those of `delayed`."""
    if find_spec("transformer_engine") is None:
        part.skipped["Transformer Engine as oracle of `delayed`"] = "transformer_engine is not installed"
        return
    if setting.dry:
        part.skipped["Transformer Engine as oracle of `delayed`"] = "it runs on a GPU alone"
        return
    part.tried("Transformer Engine as oracle of `delayed`", lambda: delayed(part))


def delayed(part: Part) -> None:
    """The same; the amax of each batch is given, and after each the scale of the next is read."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    amax = np.array([1, 3, 2, 0.5, 7, 7, 0.25, 1, 1, 1, 1, 2], np.float32)
    kinds: tuple[tuple[int, Literal["max", "most_recent"]], ...] = ((4, "max"), (1024, "max"), (4, "most_recent"))
    for length, algorithm in kinds:
        recipe = DelayedScaling(fp8_format=Format.E4M3, amax_history_len=length, amax_compute_algo=algorithm, margin=0)
        layer, theirs = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16), []
        for largest in amax:
            x = torch.full((32, 64), float(largest), dtype=torch.bfloat16, device="cuda")
            with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                layer(x)
            theirs.append(float(1 / layer.fp8_meta["scaling_fwd"].scale[0]))
        ours = amax_in_use(amax, Clipping(amax_history_len=length, amax_compute_algo=algorithm))[1:] / E4M3.max
        differing = int((np.abs(np.array(theirs) / ours - 1) > 1e-6).sum())
        part.row("scales of Transformer Engine", history=length, algorithm=algorithm, differing=differing, of=len(amax))
        part.target(f"scales of delayed, {algorithm} of {length}: others than Transformer Engine's", differing, 0)
