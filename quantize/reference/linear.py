"""The reference: a linear layer that computes as an FP8 tensor core does.

    y = cast( (Σ_k code_x[k] · code_w[n, k]) · (s_x · s_w[n]) + bias[n] )

Codes are small integers times a power of two, so products of codes are exact in BF16's eight bits of factor and FP32's
sum; the sum is accumulated in FP32, scaled once in FP32 and cast once. Simulating FP8 by rounding to the grid and
multiplying dequantized BF16 values ("fake quantization") instead rounds s_x·code_x and s_w·code_w to BF16 before the
GEMM: another number, and not the engine's.

`exact` computes just this. `fast` multiplies BF16 matrices, which rounds the sum to BF16 once more (the CPU has no BF16
GEMM with an FP32 result); perplexity uses it. Where the processor has no BF16 units, that GEMM is computed in
FP32 (`calibrate.model.bf16_gemms`). On a GPU with FP8 units (compute capability 8.9 and up) both modes call
`torch._scaled_mm` on the codes, which one kernel makes where Triton is installed (`codes.kernels`). An `accumulator`
replaces the sum by that of `adder`. With two terms the input is s·(a + b/16), where b is the code of sixteen times the
error of a (`codes.formats.TwoTerms`); a and b are rows of one GEMM:

    y = cast( (Σ a·code_w + (Σ b·code_w) / 16) · (s_x · s_w[n]) + bias[n] )

In dynamic form s_x is a column of a scale for each row of the input, computed there (`codes.encoding.token_scales`).

With a tail only the last positions of a call have second terms b (`CallPositions`); their rows lie behind those of all
a. An input without a scale is not encoded: it is multiplied as it is, and the weight alone is codes,

    y = cast( (Σ_k x[k] · code_w[n, k]) · s_w[n] + bias[n] )

That is also how the plugin for vLLM multiplies the rows that have second terms here. Both codes together are x itself
from s/64 to 476·s, so the reference's two terms stand for the plugin's answers, or lose slightly more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ...calibrate.model.bf16_gemms import gemms_in_fp32
from ...calibrate.model.expert_modules import Experts
from ...calibrate.model.launching import launched
from ...options import Accumulator
from ..codes.blocks import block_values, group_values
from ..codes.encoding import CODE, code_tables, code_values, encode, encode_terms, two_code_values
from ..codes.epilogue import Epilogue
from ..codes.formats import TWO_TERMS
from ..codes.gemm import scale_sums, scaled_gemm
from ..scales.clip import powers_of_two
from .adder import accumulated_gemm

Mode = Literal["exact", "fast"]


@dataclass
class CallPositions:
    """The shape of the call that a model computes: `positions` of each sequence, of which the last `decoded` stand for
    tokens that a server decodes one by one.

    What a position gives depends on those before it alone. So one call over a whole window is the same model as a
    prompt's call and a call for each decoded token, if every position has the terms that it would have there.
    """

    positions: int = 0
    decoded: int = 0


@dataclass
class Tail:
    """The positions of a `call` whose inputs have second terms: its last `length`, and all decoded tokens.

    `experts`: the experts that the layer is a part of, which get the rows that were routed to them; None for a layer
    that gets all positions, in their order.
    """

    length: int
    call: CallPositions
    experts: Experts | None = None

    def rows(self, x: torch.Tensor) -> torch.Tensor | None:
        """The numbers of the rows of `x` [rows, in] with second terms, int64; None for all rows.

        The rows of whole sequences follow from their number, and those of experts are found for all of them at once: a
        search on a GPU is a wait of the host.
        """
        positions = self.call.positions
        first = positions - self.call.decoded - self.length
        if first <= 0:
            return None
        if self.experts is not None:
            return self.experts.rows_from(first, positions)
        return torch.arange(len(x), device=x.device).view(-1, positions)[:, first:].flatten()


class FP8Linear(nn.Module):
    """A linear layer on E4M3 codes: weight scales per output channel, and an input scale, static or per token."""

    def __init__(
        self,
        codes: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        mode: Mode,
        terms: int = 1,
    ):
        """Hold `codes` float8_e4m3fn [out, in], `weight_scale` float32 [out], `input_scale` float32 [] and `bias` [out]
        or None; the input takes one code a value, or two (`terms`). Without an `input_scale` it is not encoded, unless
        `run_time_scales` are.
        """
        super().__init__()
        self.mode = mode
        self.terms = terms if input_scale is not None else 0
        self.run_time_scales: Callable[[torch.Tensor], torch.Tensor] | None = None  # the input takes one code a value
        self.tail: Tail | None = None
        self.accumulator: Accumulator | None = None
        on_fp8_gpu = codes.is_cuda and torch.cuda.get_device_capability(codes.device) >= (8, 9)
        held = CODE if on_fp8_gpu else torch.float32 if mode == "exact" else torch.bfloat16
        self.register_buffer("codes", codes.to(held), persistent=False)
        self.register_buffer("weight_scale", weight_scale.float(), persistent=False)
        scale = None if input_scale is None else input_scale.float()
        self.register_buffer("input_scale", scale, persistent=False)
        self.register_buffer("tables", None if scale is None else code_tables(scale, terms), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.float(), persistent=False)
        self.register_buffer("one", torch.ones((), device=codes.device) if on_fp8_gpu else None, persistent=False)

    codes: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor
    tables: torch.Tensor
    bias: torch.Tensor | None
    one: torch.Tensor | None

    def input_codes(self, x: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """The first `count` terms of `x` [..., in] (None: all), E4M3 codes as numbers of the type that `codes` are held
        in, [count, ..., in].
        """
        count = self.terms if count is None else count
        if x.dtype == torch.bfloat16 and self.codes.dtype != CODE:
            patterns = x.contiguous().view(torch.uint16).flatten().to(torch.int32)
            terms = [table.index_select(0, patterns).view(x.shape) for table in self.tables[:count]]
            return (torch.stack(terms) if count > 1 else terms[0][None]).to(self.codes.dtype)
        if self.codes.dtype == CODE:
            return encode_terms(x, self.input_scale, count, launched)
        values = two_code_values(x, self.input_scale) if count > 1 else (code_values(x, self.input_scale),)
        return torch.stack(values).to(self.codes.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in] to [..., out] in x's type."""
        rows = x.flatten(0, -2)
        if self.run_time_scales:
            scales = self.run_time_scales(rows)
            assert scales.shape[-1] == 1, "scales of parts of a token need a layer as BlockLinear is"
            sums = self._gemm(encode(rows, scales).to(self.codes.dtype))
            y = Epilogue(scales, self.weight_scale, self.bias).of_sums(sums, x.dtype)
        elif self.terms:
            sums, terms = self._sums(rows)
            epilogue = Epilogue(self.input_scale, self.weight_scale, self.bias)
            y = scale_sums(sums, epilogue, terms, x.dtype, launched)
        else:
            held = x.dtype if self.codes.dtype == CODE else self.codes.dtype
            with gemms_in_fp32():
                sums = torch.nn.functional.linear(rows.to(held), self.codes.to(held)).float()
            y = sums * self.weight_scale
            y = (y if self.bias is None else y + self.bias).to(x.dtype)
        return y.view(*x.shape[:-1], len(self.codes))  # x may have no rows

    def _sums(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The sums of products of the codes of `x` [rows, in] and the weight's, float32 [terms · rows, out], and in how
        many terms they are: one where those of a tail are added already.
        """
        rows = None if self.tail is None else self.tail.rows(x)
        if rows is None:
            return self._gemm(self.input_codes(x)).flatten(0, 1), self.terms
        second = self.input_codes(x[rows])[1]
        total = self._gemm(torch.cat([self.input_codes(x, 1)[0], second]))
        return total[: len(x)].index_add_(0, rows, total[len(x) :] / TWO_TERMS.divisor), 1

    def _gemm(self, codes: torch.Tensor) -> torch.Tensor:
        """The sums of products of `codes` [..., in] and the weight's, float32 [..., out]."""
        if self.accumulator:
            return accumulated_gemm(codes, self.codes, self.accumulator)
        if self.codes.dtype == CODE:
            sums = scaled_gemm(codes.flatten(0, -2), self.codes, one=self.one)
            return sums.view(*codes.shape[:-1], len(self.codes))
        with gemms_in_fp32():
            return torch.nn.functional.linear(codes, self.codes).float()


class BlockLinear(FP8Linear):
    """A linear layer on E4M3 codes, with a scale for each block of 128 x 128 of its weight and for each 128 values of a
    token.

    Servers sum the codes of 128 values, and add these sums under both scales in FP32. Code × scale is exact enough in
    FP32 to stand for that, so the layer multiplies such numbers in FP32, in both modes. Where the weight's scales are
    powers of two, so are the input's.

    Invariant: `codes` holds code × scale, and `weight_scale` is one.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, mode: Mode):
        """Hold `codes` float8_e4m3fn [out, in] under `scale` float32 [blocks, blocks], and `bias` [out] or None."""
        super().__init__(codes[:, :0], torch.ones(len(codes), device=codes.device), None, bias, mode)
        self.codes = block_values(codes, scale.float())
        self.powers = powers_of_two(scale.float().cpu().numpy())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in] to [..., out] in x's type."""
        y = torch.nn.functional.linear(group_values(x, self.powers), self.codes, self.bias)
        return y.to(x.dtype)


def replace_linears(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Replace modules of `model` by `layers`: module name -> its replacement."""
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
