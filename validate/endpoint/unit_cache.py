"""Compute what the run's model answers where a server writes its FP8 cache by 1.0, as one does that never loads the
scales of the cache: a runtime to hold a server's answers against that `fp8q validate` does not measure.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from ...calibrate.measure.scoring import log_softmax, losses
from ...core.reporter import Reporter
from ...core.run import Run
from ..accuracy.runtimes import logits_of, open_reference
from ..accuracy.top_logits import TopTokens, joined_top, top_of
from .judgement import UNIT_CACHE


def with_unit_cache(run: Run, tops: TopTokens, device: str, report: Reporter) -> TopTokens:
    """Return `tops` with one more runtime: the reference, whose cache is written by 1.0 in place of its scales."""
    loaded = open_reference(run, "fast", device)
    forward = logits_of(replace(loaded, cache_scales=_units(loaded.cache_scales)))
    windows = np.flatnonzero(tops.positions.any(axis=1))
    parts = []
    nll = []
    with torch.inference_mode(), report.track("Trying a cache without scales", len(windows), "windows") as advance:
        for window in windows:
            positions = torch.from_numpy(np.flatnonzero(tops.positions[window])).to(device)
            ids = tops.ids[window : window + 1]
            logits = forward(ids)[0, positions - 1].float()
            targets = torch.from_numpy(ids[0]).to(device)[positions]
            nll.append(losses(log_softmax(logits), targets).cpu().numpy())
            parts.append(top_of(logits))
            advance(1)
    return replace(
        tops,
        runtimes={**tops.runtimes, UNIT_CACHE: joined_top(parts)},
        nll={**tops.nll, UNIT_CACHE: np.concatenate(nll).astype(np.float32)},
    )


def _units(scales: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(scale) for name, scale in scales.items()}
