"""Choose one scale for a whole weight (`--weight-scale tensor`), shared by the weights that a server joins.

vLLM, SGLang and TensorRT-LLM make one GEMM of q, k and v, and one of gate and up. Where such weights have one scale
each, they take the largest for all and round the codes of the others again (vLLM's `requantize_with_max_scale`), so
that what is served was never validated. Weights that read one tensor and lie in one module therefore share a scale from
the start: the codes are those that are served.

Experts keep a scale for each channel: with tensor weights vLLM takes the largest input scale of all experts of a layer
for each of them, and refuses inputs with a scale for each token.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from ...options import WeightMethod
from ..codes.formats import E4M3
from ..scales.clip import SMALLEST_SCALE, scale_of
from .mse import mse_scale


def joined_families(modules: Collection[str], groups: Iterable[Sequence[str]]) -> list[list[str]]:
    """Split `modules` into those whose weights share a scale: those of a group that lie in one module.

    `groups`: modules that receive the same tensor.
    """
    families: dict[tuple[str, str], list[str]] = {}
    first = {member: members[0] for members in groups for member in members}
    for module in modules:
        families.setdefault((first.get(module, module), module.rpartition(".")[0]), []).append(module)
    return [*families.values()]


def tensor_scales(
    families: Iterable[Sequence[str]], read: Callable[[str], torch.Tensor], method: WeightMethod
) -> Mapping[str, float]:
    """Choose one scale for the weights of each family by `method`; module -> its scale.

    `read` gives the finite BF16 weight of a module. A family of zeros has none.
    """
    scales: dict[str, float] = {}
    for family in families:
        weights = [read(module) for module in family]
        amax = max(float(weight.abs().max()) for weight in weights)
        if (largest := float(scale_of(amax, E4M3))) >= SMALLEST_SCALE:
            scale = largest if method == "amax" else float(mse_scale(weights)[0])
            scales |= dict.fromkeys(family, scale)
    return scales
