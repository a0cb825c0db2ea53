"""How vLLM computes a checkpoint on a CPU without the plugin, where that is not as fp8q's reference does: the reference
made to do the same, for what is compared with vLLM.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from fp8q.calibrate.model.expert_modules import Experts
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.reference import fp8_model
from fp8q.quantize.reference.fp8_model import Reference
from fp8q.quantize.reference.linear import FP8Linear


def truncated(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values of `x` under `scale`, each rounded toward zero to E4M3, as vLLM's cache on a CPU rounds them."""
    quotient = (x.float() / scale).clamp(-E4M3.max, E4M3.max)
    binade = quotient.abs().clamp_min(2.0 ** (1 - E4M3.bias)).view(torch.int32) >> 23 << 23
    steps = binade.view(torch.float32) / (1 << E4M3.mantissa_bits)
    return ((quotient / steps).trunc() * steps * scale).to(x.dtype)


@contextmanager
def cache_toward_zero() -> Iterator[None]:
    """Let the reference's cache round as vLLM's on a CPU does."""
    with patch.object(fp8_model, "round_to_codes", truncated):
        yield


def widen_experts(reference: Reference) -> None:
    """Let the layers of experts take their inputs as they are, and not as codes."""
    for module in reference.model.modules():
        if isinstance(module, Experts):
            for layer in module.modules():
                if isinstance(layer, FP8Linear):
                    layer.terms = 0
