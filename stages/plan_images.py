"""Estimate what the part that sees takes for rows with images.

Its time is that of its GEMMs and of its attention for each patch of an image, of which there are from four to sixteen
to a token. No image runs through it for the plan: a row may take a minute on a CPU.
"""

from collections.abc import Sequence

import torch
from torch import nn

from ..calibrate.model.classes import non_text_modules
from ..calibrate.model.processor import Inputs
from ..calibrate.model.source import Source, meta_model
from ..calibrate.text.image_rows import ImageRow
from .image_inputs import row_inputs


def seeing_products(source: Source, rows: Sequence[ImageRow]) -> float:
    """The products of two numbers that the part that sees computes for each token of `rows`, by the row in their
    middle; 0 without rows.
    """
    if not rows:
        return 0.0
    row = sorted(rows, key=lambda image_row: image_row.tokens)[len(rows) // 2]
    products = products_of(non_text_modules(meta_model(source)), row_inputs(source, [row])[0], len(row.images))
    return products / row.tokens


def products_of(modules: dict[str, nn.Module], inputs: Inputs, images: int) -> float:
    """The products that `modules`, which see, compute of the `inputs` of a row with so many `images`: each patch meets
    all weights, and in attention all patches of its image, though some models have windows there.
    """
    matrices = [weight for module in modules.values() if (weight := _matrix(module)) is not None]
    if not matrices:
        return 0.0
    pixels = max(value.numel() for value in inputs.values() if value.is_floating_point())
    patches = pixels / matrices[0][0].numel()  # by the first, which embeds a patch
    of_weights = sum(weight.numel() for weight in matrices)
    in_attention = 2 * sum(map(_attended, modules.values())) * patches / images
    return patches * (of_weights + in_attention)


def _matrix(module: nn.Module) -> torch.Tensor | None:
    """The weight of a linear layer or convolution; None for other modules."""
    if not isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)):
        return None
    return module.weight


def _attended(module: nn.Module) -> int:
    """The width that the heads of an attention have together; 0 for other modules."""
    if not type(module).__name__.endswith("Attention"):
        return 0
    linear = [child for child in module.children() if isinstance(child, nn.Linear)]
    return linear[-1].in_features if linear else 0
