"""Describe one measurement, in memory or streamed (`stream`), and measure a model that fits in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ...core.reporter import Reporter
from ..model.expert_modules import routed_gemms
from ..model.gemms import observed_gemms, output_channel_axis
from .moments import SecondMoments
from .observe import Watch, probe_groups
from .saved_batches import SavedBatches
from .statistics import Corpus, ModelIdentity, Statistics, StatisticsRecord, TensorStatistics, added_tensors


@dataclass(frozen=True, eq=False)
class Measurement:
    """A measurement of the model `identity` on `windows` int64 [windows, seq_len] of `corpus`, in batches of its size.

    `batches`: indices of the batches to run, in that order; None for all. `moments`: the store that second moments of
    the inputs are added to; None for none. `all_experts`: run every expert on every token.
    """

    windows: npt.NDArray[np.int64]
    identity: ModelIdentity
    corpus: Corpus
    batches: Sequence[int] | None = None
    moments: SecondMoments | None = None
    all_experts: bool = False

    @cached_property
    def parts(self) -> dict[int, npt.NDArray[np.int64]]:
        """Index of a batch -> its windows int64 [at most batch_size, seq_len], in the order in which they run."""
        size = self.corpus.batch_size
        chosen = range(self.corpus.batches) if self.batches is None else self.batches
        return {batch: self.windows[batch * size : (batch + 1) * size] for batch in chosen}

    @property
    def tokens(self) -> int:
        """The number of tokens that run through the model."""
        return sum(ids.size for ids in self.parts.values())

    def statistics(
        self,
        groups: dict[str, list[str]],
        tensors: dict[str, TensorStatistics],
        weights: Mapping[str, npt.NDArray[np.float32]],
        experts: dict[str, list[str]],
    ) -> Statistics:
        """Make statistics of the measured `tensors` and `weights`, with their record; `experts` as in
        `StatisticsRecord`.
        """
        record = StatisticsRecord(
            model=self.identity,
            corpus=self.corpus,
            tokens=self.tokens,
            groups=groups,
            experts=experts or None,
            all_experts=self.all_experts or None,
        )
        return Statistics(record, tensors, dict(weights))


def measure_in_memory(
    model: PreTrainedModel, what: Measurement, report: Reporter, folder: Path | None = None
) -> Statistics:
    """Run `model` on the windows of `what` and observe each tensor that can be quantized, without the output head.

    `folder`, which exists, keeps the progress: a call with the same arguments goes on from what a killed one saved.
    """
    modules = observed_gemms(model)
    groups = probe_groups(model, modules)
    watch = Watch(model, modules, groups, what.corpus.batches, what.moments, what.all_experts)
    saved = None if folder is None else SavedBatches(folder, what.moments)
    done, before = saved.load(what.corpus.batches) if saved else (0, {})
    if done:
        report.note(f"going on behind batch {done} of {len(what.parts)}, where an earlier call stopped")
    remaining = [*what.parts.items()][done:]
    with report.track("Calibrating", sum(ids.size for _, ids in remaining), "tokens") as advance:
        for number, (batch, ids) in enumerate(remaining, done + 1):
            watch.forward(torch.from_numpy(ids), batch)
            advance(ids.size)
            if saved and number < len(what.parts) and saved.is_due():
                saved.save(number, added_tensors(before, watch.statistics()))
    weights = {name: weight_amax(module) for name, module in modules.items()}
    return what.statistics(groups, added_tensors(before, watch.statistics()), weights, routed_gemms(model))


def weight_amax(module: torch.nn.Module) -> npt.NDArray[np.float32]:
    """The largest magnitude of each output channel of a linear layer's weight, float32 [output channels]."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor), "a GEMM has a weight"
    amax: npt.NDArray[np.float32] = weight.detach().abs().amax(1 - output_channel_axis(module)).float().cpu().numpy()
    return amax
