"""Measure a model on windows of tokens: the stage between the corpus and the statistics."""

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ...reporter import Reporter
from ..model.products import observed_products, output_axis
from .moments import SecondMoments
from .observe import Watch, probe_groups
from .statistics import Corpus, ModelIdentity, Statistics, StatisticsRecord


def measure(
    model: PreTrainedModel,
    windows: npt.NDArray[np.int64],
    identity: ModelIdentity,
    corpus: Corpus,
    report: Reporter,
    batches: list[int] | None = None,
    moments: SecondMoments | None = None,
) -> Statistics:
    """Run `model` on `windows` int64 [windows, seq_len] in batches of `corpus.batch_size`, watching every tensor that
    could be quantized.

    `batches`: indices of the batches to run, in that order; all of them by default. `moments`: where to add up the
    second moments of the inputs too. The output head is not run.
    """
    modules = observed_products(model)
    groups = probe_groups(model, modules)
    watch = Watch(model, modules, groups, corpus.batches, moments)
    parts = cut_batches(windows, corpus, batches)
    tokens = sum(ids.size for ids in parts.values())
    with report.track("Calibrating", tokens, "tokens") as advance:
        for batch, ids in parts.items():
            watch.forward(torch.from_numpy(ids), batch)
            advance(ids.size)
    record = StatisticsRecord(model=identity, corpus=corpus, tokens=tokens, groups=groups)
    return Statistics(record, watch.statistics(), {name: weight_amax(module) for name, module in modules.items()})


def cut_batches(
    windows: npt.NDArray[np.int64], corpus: Corpus, batches: list[int] | None
) -> dict[int, npt.NDArray[np.int64]]:
    """Index of a batch -> its windows int64 [at most batch_size, seq_len], in the order of `batches` (None: all of
    them).
    """
    chosen = range(corpus.batches) if batches is None else batches
    return {batch: windows[batch * corpus.batch_size : (batch + 1) * corpus.batch_size] for batch in chosen}


def weight_amax(module: torch.nn.Module) -> npt.NDArray[np.float32]:
    """Largest magnitude of each output channel of a linear layer's weight, float32 [output channels]."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor), "a matrix product has a weight"
    amax: npt.NDArray[np.float32] = weight.detach().abs().amax(1 - output_axis(module)).float().cpu().numpy()
    return amax
