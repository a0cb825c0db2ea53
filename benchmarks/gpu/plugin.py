"""Speed of the vLLM plugin's GEMMs at Llama 3 8B's shapes: exact rows, and one code with a tail, beside one code.

`exact`: all rows in 16 bits, by the plugin's kernel up to 512 rows. `tail of 64`: a prompt in one code whose last 64
rows are the kernel's. `two codes`: what the plugin computes where its kernel does not start. `one code`: an encoding
kernel and the FP8 GEMM that scales in its own epilogue, which vLLM's is; `codes given` is that GEMM alone, as if the
encoding cost nothing. Served in vLLM they are measured by `benchmarks/vllm_8b.py`.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from fp8q_vllm import terms
from fp8q_vllm.codes.epilogue import Epilogue
from fp8q_vllm.launching import launched
from fp8q_vllm.rows import tail_rows
from torch.nn.functional import linear

from fp8q.quantize.codes.encoding import CODE, encode_terms

from .products import SHAPES, ceilings
from .timing import Kind, Part, Setting, copies, seconds

TINY = {"tiny qkv": (48, 32), "tiny odd": (32, 176)}
TOKENS = (1, 32, 2048, 16, 64, 128, 256, 512, 8192)
TAIL = 64
BF16, GIVEN, ONE, TWO, EXACT, TAILED = "bf16", "codes given", "one code", "two codes", "exact", f"tail of {TAIL}"
#: Tokens, and the most times one code's microseconds that a layer's GEMMs may take.
TARGETS = ((1, EXACT, 1.0), (32, EXACT, 1.0), (2048, TAILED, 1.1))


def measure(setting: Setting, part: Part) -> None:
    """Each GEMM of a layer at each number of tokens, and their sums beside one code's."""
    _, bandwidth = ceilings(setting, part)
    shapes = setting.pick({name: shape for name, shape in SHAPES.items() if name.startswith("8B")}, TINY)
    for tokens in setting.pick(TOKENS, (1, 4)):
        for name, (outputs, inputs) in shapes.items():
            work = partial(measure_product, setting, part, name, (tokens, outputs, inputs), bandwidth)
            part.step(setting, f"{name}, {tokens} tokens", work, Kind(f"{tokens} tokens", 5.0))
    for tokens, method, limit in TARGETS:
        ours = layer_us(part, tokens, method, len(shapes))
        one_code = layer_us(part, tokens, ONE, len(shapes))
        ratio = ours / one_code if ours and one_code else None
        part.target(f"8B, {tokens} tokens: {method} over {ONE}", ratio, limit)


def measure_product(setting: Setting, part: Part, name: str, shape: tuple[int, int, int], bandwidth: float) -> None:
    """Time every way to multiply by weights of one shape, which are read from memory and not from the cache."""
    tokens, outputs, inputs = shape
    x = torch.randn(tokens, inputs, device=setting.device).to(torch.bfloat16)
    weights = [
        torch.randn(outputs, inputs, device=setting.device).to(CODE) for _ in range(copies(outputs * inputs, setting))
    ]
    scales = torch.rand(outputs, device=setting.device) + 0.5
    epilogue = Epilogue(torch.tensor(2.0**-6, device=setting.device), scales)
    least_s = (outputs * inputs + 2 * tokens * (inputs + outputs)) / bandwidth
    with torch.inference_mode():
        for method, work in works(x, epilogue, setting.pick(terms.KERNEL_ROWS, 2)).items():
            held = weights if method != BF16 else [weight.to(torch.bfloat16) for weight in weights]
            calls = [partial(work, weight) for weight in held]
            took = part.tried(f"{name}, {tokens} tokens: {method}", partial(seconds, calls, setting))
            if took is not None:
                part.row("the plugin's GEMMs", product=name, tokens=tokens, way=method, us=took * 1e6,
                         bandwidth_share=least_s / took)  # fmt: skip


def works(x: torch.Tensor, epilogue: Epilogue, free_rows: int) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Every way to multiply `x` by a weight; a tail where there are more rows than are exact throughout."""
    one = torch.ones((), device=x.device)
    rows = tail_rows(torch.tensor([0, len(x)], device=x.device), len(x), min(TAIL, free_rows))
    factors = torch.ones(len(x), 1, device=x.device), (epilogue.input_scale * epilogue.weight_scale)[None]

    def scaled(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply codes, scaled in the GEMM's epilogue, with sums in the tensor core's adder, as in vLLM."""
        return torch._scaled_mm(codes, weight.t(), *factors, out_dtype=torch.bfloat16, use_fast_accum=True)

    def encoded(weight: torch.Tensor) -> torch.Tensor:
        return scaled(encode_terms(x, epilogue.input_scale, 1, launched)[0], weight)

    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        BF16: lambda weight: linear(x, weight),
        GIVEN: partial(scaled, x.to(CODE)),
        ONE: encoded,
        TWO: lambda weight: terms.two_code_product(x, weight, epilogue, one),
        EXACT: lambda weight: terms.exact_product(x, weight, epilogue, one),
    }
    if len(x) > free_rows:
        ways[TAILED] = lambda weight: terms.with_exact_rows(encoded(weight), x, weight, epilogue, one, rows)
    return ways


def layer_us(part: Part, tokens: int, method: str, products: int) -> float | None:
    """Microseconds of all GEMMs of a layer; None where one was not measured."""
    rows = part.tables.get("the plugin's GEMMs", [])
    took = [row["us"] for row in rows if (row["tokens"], row["way"]) == (tokens, method)]
    return sum(took) if len(took) == products else None
