"""Measure a model that fits in memory on windows of tokens."""

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ...core.reporter import Reporter
from ..model.expert_modules import routed_products
from ..model.products import observed_products, output_channel_axis
from .measurement import Measurement
from .observe import Watch, probe_groups
from .statistics import Statistics


def measure_in_memory(model: PreTrainedModel, what: Measurement, report: Reporter) -> Statistics:
    """Run `model` on the windows of `what` and observe each tensor that can be quantized, without the output head."""
    modules = observed_products(model)
    groups = probe_groups(model, modules)
    watch = Watch(model, modules, groups, what.corpus.batches, what.moments, what.all_experts)
    with report.track("Calibrating", what.tokens, "tokens") as advance:
        for batch, ids in what.parts.items():
            watch.forward(torch.from_numpy(ids), batch)
            advance(ids.size)
    weights = {name: weight_amax(module) for name, module in modules.items()}
    return what.statistics(groups, watch.statistics(), weights, routed_products(model))


def weight_amax(module: torch.nn.Module) -> npt.NDArray[np.float32]:
    """The largest magnitude of each output channel of a linear layer's weight, float32 [output channels]."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor), "a matrix product has a weight"
    amax: npt.NDArray[np.float32] = weight.detach().abs().amax(1 - output_channel_axis(module)).float().cpu().numpy()
    return amax
