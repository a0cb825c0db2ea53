"""Compute what the run's model answers in arithmetics that servers have of their own: runtimes to hold a server's
answers against that `fp8q validate` does not measure.

- A server that never loads the scales of an FP8 cache writes it by 1.0.
- On a CPU with AMX vLLM 0.33 multiplies FP8 weights by inputs in BF16, whatever the checkpoint says of them
  (`CPUFp8ChannelWiseScaledMMLinearKernel`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from ...calibrate.measure.scoring import log_softmax, losses
from ...core.reporter import Reporter
from ...core.run import Run
from ...quantize.reference.fp8_model import Reference
from ..accuracy.runtimes import logits_of, open_reference
from ..accuracy.top_logits import TopTokens, joined_top, top_of
from .judgement import UNIT_CACHE, WEIGHTS_ALONE


def _cache_by_1(loaded: Reference) -> Reference:
    return replace(loaded, cache_scales={name: torch.ones_like(scale) for name, scale in loaded.cache_scales.items()})


def _inputs_in_bf16(loaded: Reference) -> Reference:
    loaded.leave_inputs()
    return loaded


#: The name of an arithmetic -> how the reference becomes one that computes it.
CHANGES: Mapping[str, Callable[[Reference], Reference]] = {UNIT_CACHE: _cache_by_1, WEIGHTS_ALONE: _inputs_in_bf16}


def with_arithmetic(run: Run, tops: TopTokens, name: str, device: str, report: Reporter) -> TopTokens:
    """Return `tops` with one more runtime: the reference in the arithmetic `name`."""
    forward = logits_of(CHANGES[name](open_reference(run, "fast", device)))
    windows = np.flatnonzero(tops.positions.any(axis=1))
    parts = []
    nll = []
    with torch.inference_mode(), report.track(f"Trying {name}", len(windows), "windows") as advance:
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
        runtimes={**tops.runtimes, name: joined_top(parts)},
        nll={**tops.nll, name: np.concatenate(nll).astype(np.float32)},
    )
