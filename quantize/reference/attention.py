"""Attention in FP8: both of its GEMMs take E4M3 codes on both sides, queries by keys and probabilities by values.

    scores = (Σ q·k) · (s_q · s_k · scaling)        out = (Σ p·v) · (s_p · s_v)

Queries, keys and values of a layer have one static scale each, chosen by the run's method. Probabilities lie in [0, 1]
for any text, so their scale is that of a clip of 1, and they are not measured. Keys and values from an FP8 cache have
the same scale there and become the same codes again. Queries and probabilities may take two codes each (`linear`), so
that attention loses only what keys and values lose.

A call of one token, a decode step, is bound by reading the cache, and not by its GEMMs: there queries and probabilities
stay as they are, and keys and values are what the cache holds, as in the graph (`export.modules.cached_attention`).

The second GEMM is the long one: as many terms as the text has tokens, all of one sign where values are. Its sums may
be those of a tensor core (`adder`), in the order of the tokens, of probabilities that are normalized before, as the
exported graph has them. A fused kernel rescales its sums as it goes, and is not modelled.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ...calibrate.measure.statistics import TensorStatistics
from ...core.errors import InputError
from ...options import Accumulator, ScaleOptions
from ..codes.encoding import code_values, two_code_values
from ..codes.formats import TWO_TERMS
from ..scales.activation_scales import tensor_scale, unfit
from ..scales.decisions import GRIDS, PROBABILITY_SCALES, AttentionScales, TensorScale
from .adder import accumulated_gemm

#: The name under which transformers knows this attention.
CODES = "fp8q_codes"
PARTS = ("q", "k", "v")


def attention_scales(tensors: Mapping[str, TensorStatistics], options: ScaleOptions) -> AttentionScales:
    """Choose the scales of attention from the statistics of queries, keys and values.

    Queries and probabilities take as many codes a value as `options` say for activations, and two in all positions
    where these have a tail: the last positions of the heads that share a key head are not the last rows. Raises
    InputError naming the first tensor without a scale.
    """
    terms: Literal[1, 2] = 1 if options.form_of_all.terms == 1 else 2
    clipping = options.clip
    modules = sorted({name.removesuffix(".q") for name in tensors if name.endswith(".q")})
    scales: dict[str, TensorScale] = {}
    for name in (f"{module}.{part}" for module in modules for part in PARTS):
        tensor = tensors.get(name)
        reason = unfit(tensor.histogram if tensor else None)
        if tensor is None or reason is not None:
            raise InputError(
                name,
                f"{reason.reason if reason else 'never observed'}",
                "attention in FP8 has no scale for it, leave out --attention fp8",
            )
        grid = GRIDS[terms if name.endswith(".q") else 1]
        scales[name] = tensor_scale(tensor.histogram, clipping, grid, tensor.amax_batches)
    return AttentionScales(tensors=scales, terms=terms, probabilities=PROBABILITY_SCALES[terms])


def save_scales(path: Path, scales: AttentionScales) -> None:
    """Write `<attention>.attention.q_scale`, and those of k, v and p, float32 [1] each, to the file the graph reads."""
    named = {name: scale.scale for name, scale in scales.tensors.items()}
    named |= {f"{name.removesuffix('.q')}.p": scales.probabilities for name in scales.tensors if name.endswith(".q")}
    stored = {
        f"{module}.attention.{part}_scale": torch.tensor([scale])
        for (module, _, part), scale in ((name.rpartition("."), named[name]) for name in named)
    }
    save_file(stored, path, metadata={"format": "pt", "terms": str(scales.terms)})


def attend_in_codes(model: PreTrainedModel, path: Path, device: str | torch.device = "cpu") -> None:
    """Let `model` (changed in place) compute attention on codes, with the scales that `save_scales` wrote to `path`.

    The scales are copied to its `device` once: a copy in each call would be four waits for a GPU.
    """
    scales: dict[str, dict[str, torch.Tensor]] = {}
    for name, scale in load_file(path).items():
        module, _, part = name.removesuffix("_scale").rpartition(".")
        scales.setdefault(module.removesuffix(".attention"), {})[part] = scale[0].to(device)
    with safe_open(path, "pt") as file:
        two = (file.metadata() or {}).get("terms") == "2"
    for module, parts in scales.items():
        object.__setattr__(model.get_submodule(module), "fp8q_scales", parts)
        object.__setattr__(model.get_submodule(module), "fp8q_two_terms", two)
    AttentionInterface.register(CODES, attention_on_codes)
    AttentionMaskInterface.register(CODES, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model.set_attn_implementation(CODES)


def sum_values_in(model: PreTrainedModel, accumulator: Accumulator) -> None:
    """Let attention on codes (`attend_in_codes`) sum its second GEMM as `accumulator` has it, from now on."""
    for module in model.modules():
        if "fp8q_scales" in vars(module):
            object.__setattr__(module, "fp8q_accumulator", accumulator)


def attention_on_codes(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention [batch, heads, length, size] on codes, with sums in FP32, by transformers' interface.

    `attention_mask` is added to the scores, after they are capped where `options` have a `softcap`.
    """
    scales: dict[str, torch.Tensor] = vars(module)["fp8q_scales"]
    repeats = query.shape[1] // key.shape[1]
    step = query.shape[2] == 1
    two = vars(module)["fp8q_two_terms"]
    accumulator = vars(module).get("fp8q_accumulator", "fp32")
    k, v = (
        (x.float() if step else code_values(x, scales[part])).repeat_interleave(repeats, dim=1)
        for part, x in (("k", key), ("v", value))
    )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    factor = scaling if step else scales["q"] * scales["k"] * scaling
    scores = (query.float() @ k.mT if step else _gemm(query, scales["q"], k.mT, two)) * factor
    if (softcap := options.get("softcap")) is not None:
        scores = (scores / softcap).tanh() * softcap
    weights = (scores + attention_mask.float()).softmax(-1)
    output = weights @ v if step else _gemm(weights, scales["p"], v, two, accumulator) * (scales["p"] * scales["v"])
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


def _gemm(
    x: torch.Tensor, scale: torch.Tensor, codes: torch.Tensor, two: bool, accumulator: Accumulator = "fp32"
) -> torch.Tensor:
    """Multiply the codes of `x` [batch, heads, n, k] under `scale`, `two` or one a value, by `codes` [batch, heads, k,
    m], and sum them in `accumulator`; float32.
    """
    if not two:
        return _sum(code_values(x, scale), codes, accumulator)
    first, second = (_sum(term, codes, accumulator) for term in two_code_values(x, scale))
    return first + second / TWO_TERMS.divisor


def _sum(x: torch.Tensor, codes: torch.Tensor, accumulator: Accumulator) -> torch.Tensor:
    """The GEMM of `x` [batch, heads, n, k] and `codes` [batch, heads, k, m], each head by itself."""
    if accumulator == "fp32":
        total: torch.Tensor = x @ codes
        return total
    sums = [accumulated_gemm(*pair, accumulator) for pair in zip(x.flatten(0, 1), codes.mT.flatten(0, 1), strict=True)]
    return torch.stack(sums).view(*x.shape[:-1], codes.shape[-1])
