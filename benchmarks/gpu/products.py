"""Speed of the products of Llama 3 8B and 70B: BF16, FP8 alone, FP8 with the quantization of its activations, with two
terms, and BF16 with weights that are dequantized in each call, the other exact product of FP8 weights.

Beside each stands its share of the peak that was measured here (a BF16, or FP8, product of 8,192 cubed) and of the
bandwidth that was measured here (a copy of 2 GB): the larger of both is what bounds it. `FP8Linear` is the package's
layer, whose kernels encode, multiply and scale; `rowwise` is the product that scales in its own epilogue and writes
BF16, which a serving engine would take. The break-even size is the least number of tokens from which FP8, quantization
included, is faster than BF16 up to the largest. The vLLM plugin's products are another part (`plugin`).
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import linear

from fp8q.calibrate.model import launching
from fp8q.calibrate.model.launching import has_triton
from fp8q.quantize.codes.encoding import CODE, encode, encode_two
from fp8q.quantize.reference.linear import FP8Linear

from .decoder import profiled
from .timing import Kind, Part, Setting, Work, copies, seconds

#: Product -> outputs and inputs.
SHAPES = {
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate/up": (28_672, 4096), "8B down": (4096, 14_336),
    "70B qkv": (10_240, 8192), "70B o": (8192, 8192), "70B gate/up": (57_344, 8192), "70B down": (8192, 28_672),
}  # fmt: skip
TINY = {"tiny qkv": (48, 32), "tiny odd": (24, 172)}
#: Those with limits first, of all products, so that a limit of time leaves what was asked for.
TOKENS = ((16, 2048), (1, 64, 128, 256, 512, 8192))
BF16, ALONE, LAYER, TWO = "bf16", "fp8 alone", "FP8Linear", "FP8Linear, two terms"
#: The product in BF16 with weights that are stored as codes, each of them dequantized in each call.
DEQUANTIZED = "bf16, dequantized weights"
PEAK_SIZE, COPY_BYTES = 8192, 2 * 10**9
#: Seconds of a step, where none of its kind was measured: torch.compile's, of whatever product.
FIRST_S = 20.0


def measure(setting: Setting, part: Part) -> None:
    """Ceilings, quantization alone, then every product; what is over the part's time is left out."""
    peaks, bandwidth = ceilings(setting, part)
    encoding = partial(quantization, setting, part, bandwidth)
    part.step(setting, "quantization alone", encoding, Kind("quantization", 15))
    part.step(setting, "kernels of a product", partial(kernels, setting, part), Kind("kernels", 20))
    shapes = setting.pick(SHAPES, TINY)
    every: dict[str, dict[str, dict[int, float]]] = {name: {} for name in shapes}
    for sizes, (name, (outputs, width)) in itertools.product(setting.pick(TOKENS, ((16,), (1,))), shapes.items()):
        torch.compiler.reset()  # a function keeps eight programs, and each width is one
        for tokens in sizes:
            work = partial(ways, outputs, width, tokens, setting, part, name)
            took_each = part.step(setting, f"{name}, {tokens} tokens", work, Kind(f"{tokens} tokens", FIRST_S))
            for way, took in (took_each or {}).items():
                every[name].setdefault(way, {})[tokens] = took
                row(part, name, way, (tokens, outputs, width), took, peaks, bandwidth)
    for name, found in every.items():
        conclusions(name, found, part)
    decode_step(part)


def ceilings(setting: Setting, part: Part) -> tuple[dict[str, float], float]:
    """Operations a second of a large BF16 and FP8 product, and bytes a second of a copy."""
    size, moved = setting.pick(PEAK_SIZE, 64), setting.pick(COPY_BYTES, 1 << 16)
    x = torch.randn(size, size, device=setting.device).to(torch.bfloat16)
    codes, one = x.to(CODE), torch.ones((), device=setting.device)
    works = {
        "bf16": lambda: linear(x, x),
        "fp8": lambda: torch._scaled_mm(codes, codes.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        "fp8 promoted": lambda: torch._scaled_mm(codes, codes.t(), one, one, out_dtype=torch.bfloat16),
    }
    peaks = {name: 2 * size**3 / seconds([work], setting) for name, work in works.items()}
    source = torch.zeros(moved, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    bandwidth = 2 * moved / seconds([lambda: target.copy_(source)], setting)
    part.row("measured ceilings", **{f"{name}, TFLOP/s": peak / 1e12 for name, peak in peaks.items()},
             **{"memory, GB/s": bandwidth / 1e9})  # fmt: skip
    return peaks, bandwidth


def quantization(setting: Setting, part: Part, bandwidth: float) -> None:
    """Encoding alone: as torch operations, by torch.compile, by the kernel; bytes read and written once over the
    measured bandwidth are the least that it can take.
    """
    scale = torch.tensor(2.0**-6, device=setting.device)
    ways: dict[str, Callable[[torch.Tensor, int], Any]] = {
        "torch": lambda x, terms: encode_two(x, scale) if terms == 2 else encode(x, scale)
    }
    ways["torch.compile"] = setting.compiled(ways["torch"])
    if has_triton() and not setting.dry:
        from fp8q.quantize.codes.kernels import triton_encode

        ways["kernel"] = lambda x, terms: triton_encode(x, scale, terms)
    else:
        skipped = "it runs on a GPU alone" if has_triton() else "Triton is not installed"
        part.skipped["quantization by the kernel"] = skipped
    for tokens in setting.pick((1, 16, 2048, 8192), (4,)):
        width = setting.pick(4096, 32)
        inputs = [
            torch.randn(tokens, width, device=setting.device).to(torch.bfloat16) for _ in range(setting.pick(4, 2))
        ]
        for terms in (1, 2):
            least = tokens * width * (2 + terms) / bandwidth
            for way, work in ways.items():
                calls = [partial(work, x, terms) for x in inputs]
                took = part.tried(f"quantization by {way}, {tokens} tokens", partial(seconds, calls, setting))
                part.row("quantization alone", way=way, tokens=tokens, width=width, terms=terms,
                         us=took and took * 1e6, bandwidth_share=took and least / took)  # fmt: skip


def kernels(setting: Setting, part: Part) -> None:
    """Count the kernels that `FP8Linear` launches for 16 rows, and time them as a CUDA graph.

    It takes Triton's kernels, or torch's operations as on hosts without a C compiler.
    """
    outputs, width = setting.pick(SHAPES["8B qkv"], (48, 32))
    codes = torch.randn(outputs, width, device=setting.device).to(CODE)
    x = torch.randn(16, width, device=setting.device).to(torch.bfloat16)
    given = torch.full((outputs,), 0.5, device=setting.device), torch.tensor(2.0**-6, device=setting.device), None
    with torch.inference_mode():
        for terms in (1, 2):
            layer = FP8Linear(codes, *given, "fast", terms)
            for by in ("Triton's kernels", "torch's operations"):
                with mock.patch.object(
                    launching, "has_triton", lambda by=by: by == "Triton's kernels" and has_triton()
                ):
                    took = seconds([partial(layer, x)], setting)
                    part.row("kernels of a product of 16 rows, 8B qkv", by=by, terms=terms, us=took * 1e6,
                             **profiled(partial(layer, x), setting))  # fmt: skip


def ways(outputs: int, width: int, tokens: int, setting: Setting, part: Part, name: str) -> dict[str, float]:
    """Way -> seconds of one product."""
    x = torch.randn(tokens, width, device=setting.device).to(torch.bfloat16)
    codes = [
        torch.randn(outputs, width, device=setting.device).to(CODE) for _ in range(copies(outputs * width, setting))
    ]
    scales = torch.full((outputs,), 0.5, device=setting.device)
    every: dict[str, list[Work]] = wide(x, codes, setting) | (
        alone(x, codes, scales) if setting.dry or not (outputs % 16 or width % 16) else {}
    )
    for terms, way in ((1, LAYER), (2, TWO)):
        input_scale = torch.tensor(2.0**-6, device=setting.device)
        layers = [FP8Linear(each, scales, input_scale, None, "fast", terms) for each in codes]
        every[way] = [partial(layer, x) for layer in layers]
    dequantized = setting.compiled(lambda each: linear(x, (each.float() * scales[:, None]).to(x.dtype)))
    every[DEQUANTIZED] = [partial(dequantized, each) for each in codes]
    found: dict[str, float] = {}
    with torch.inference_mode():
        for way, calls in every.items():
            took = part.tried(f"{name}, {tokens} tokens: {way}", partial(seconds, calls, setting))
            found |= {} if took is None else {way: took}
    return found


def wide(x: torch.Tensor, codes: list[torch.Tensor], setting: Setting) -> dict[str, list[Work]]:
    """The product in BF16; half as many weights exceed the cache."""
    weights = [each.to(torch.bfloat16) for each in codes[: copies(2 * codes[0].numel(), setting)]]
    return {BF16: [partial(linear, x, weight) for weight in weights]}


def alone(x: torch.Tensor, codes: list[torch.Tensor], scales: torch.Tensor) -> dict[str, list[Work]]:
    """The product in FP8 of activations that are codes already, to BF16."""
    given, one = x.to(CODE), torch.ones((), device=x.device)
    rows = torch.ones(len(x), 1, device=x.device)

    def product(weight: torch.Tensor, fast: bool, rowwise: bool = False) -> Work:
        scale = (rows, scales[None]) if rowwise else (one, one)
        return lambda: torch._scaled_mm(given, weight.t(), *scale, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return {
        ALONE: [product(each, True) for each in codes],
        "fp8 alone, promoted": [product(each, False) for each in codes],
        "fp8 alone, rowwise": [product(each, True, True) for each in codes],
    }


def row(
    part: Part, name: str, way: str, shape: tuple[int, int, int], took: float, peaks: dict[str, float], bandwidth: float
) -> None:
    """One product beside its ceilings: operations and bytes are those that the product itself asks for."""
    tokens, outputs, width = shape
    terms = 2 if way == TWO else 1
    operations = 2 * tokens * outputs * width * terms
    bytes_ = (2 if way == BF16 else 1) * outputs * width + 2 * tokens * (width + outputs)
    part.row(
        "products", product=name, tokens=tokens, way=way, us=took * 1e6, tflops=operations / took / 1e12,
        peak_share=operations / took / peaks["bf16" if way in (BF16, DEQUANTIZED) else "fp8"],
        bandwidth_share=bytes_ / took / bandwidth,
    )  # fmt: skip


def conclusions(name: str, found: dict[str, dict[int, float]], part: Part) -> None:
    """Break-even sizes, and what two terms add."""
    base = found.get(BF16, {})
    for way in (ALONE, LAYER, TWO):
        part.row(
            "faster than BF16 from so many tokens on",
            product=name,
            way=way,
            tokens=break_even(base, found.get(way, {})),
        )
    least = break_even(found.get(TWO, {}), found.get(DEQUANTIZED, {}))
    part.row("dequantized weights in BF16 are faster than two terms from so many tokens on", product=name, tokens=least)
    two, one = found.get(TWO, {}), found.get(LAYER, {})
    for tokens in sorted(two.keys() & one.keys() & base.keys()):
        part.row(
            "two terms",
            product=name,
            tokens=tokens,
            over_fp8=two[tokens] / one[tokens],
            over_bf16=two[tokens] / base[tokens],
        )


def break_even(base: dict[int, float], ours: dict[int, float]) -> int | None:
    """The least of the sizes from which on `ours` takes less, None where it does not at the largest."""
    least = None
    for tokens in sorted(base.keys() & ours.keys(), reverse=True):
        if ours[tokens] >= base[tokens]:
            break
        least = tokens
    return least


def decode_step(part: Part) -> None:
    """Two terms over one term, summed over a layer's products: asked for at up to 32 rows; over BF16 in prefill."""
    rows = part.tables.get("products", [])
    for size, limit, against in ((16, 1.05, LAYER), (2048, 1.0, BF16)):
        for model in ("8B", "70B"):
            took = {
                way: [
                    each["us"]
                    for each in rows
                    if (each["tokens"], each["way"]) == (size, way) and each["product"].startswith(model)
                ]
                for way in (TWO, against)
            }
            whole = len(took[TWO]) == len(took[against]) == 4
            found = sum(took[TWO]) / sum(took[against]) if whole else None
            part.target(f"{model}, {size} tokens: products in two terms over {against}", found, limit)
