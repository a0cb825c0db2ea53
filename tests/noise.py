"""How far two right implementations of one model part on this machine, by measurement.

Other kernels, other shapes and other processors add a GEMM's products in another order. In FP32 that changes the
seventh digit, everywhere alike: a test of anything but arithmetic compares there. In BF16 it changes a last bit of a
hundred and twenty-eight, in FP8 a code, and how far that carries depends on the model, the text and the processor: a
constant that holds on one fails on the next. So BF16 is held to its own distance from FP32 on the same tokens, and FP8
to its distance from the model that it must not be taken for.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from fp8q.calibrate.model.source import load_model
from fp8q.core.run import Run
from fp8q.stages.shared.sources import source_of

from .pipeline.other_models import SHARE, mean_kl

#: Perplexities of one model in FP32 part by less, relatively: a hundred times what another order of sums does.
OTHER_SUMS = 1e-5
#: Each of two implementations lies on its own side of the exact value, and the other's kernels may round more often.
#: As many standard errors, too: a mean beyond them is no chance.
MARGIN = 4
#: In logits of the size of 1 to 30, of the same codes by sums of another order, which have FP32's seventh digit.
SAME_CODES = 1e-4


def largest_noise(rounded: torch.Tensor, exact: torch.Tensor) -> float:
    """Return how far, in a log-probability, two implementations may be from each other whose logits are `rounded`,
    where `exact` are those of FP32: [..., vocabulary].
    """
    difference = rounded.float().log_softmax(-1) - exact.float().log_softmax(-1)
    return MARGIN * float(difference.abs().max())


def bf16_noise(checkpoint: Path, ids: torch.Tensor) -> float:
    """Return how far, in a log-probability, two implementations of `checkpoint` in BF16 may part on ids [batch, seq].

    By transformers alone.
    """
    logits = []
    for dtype in (torch.bfloat16, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
        with torch.inference_mode():
            logits.append(model(input_ids=ids, use_cache=False).logits)
    return largest_noise(*logits)


def mean_noise(difference: float, tokens: int) -> float:
    """Return how far, in nats, the mean losses of two implementations may part by chance whose losses of single tokens
    differ by `difference`, the root of the mean square.
    """
    return MARGIN * difference / float(np.sqrt(tokens))


def root_mean_square(one: np.ndarray, other: np.ndarray) -> tuple[float, int]:
    """Return by how much two arrays of a number a token differ, and of how many tokens: NaN is of none."""
    difference = one.astype(np.float64) - other
    known = difference[np.isfinite(difference)]
    return float(np.sqrt(np.square(known).mean())), known.size


def check_one_model(losses: Mapping[str, np.ndarray], one: str, other: str, apart: str = "bf16") -> None:
    """Assert that two runtimes compute one model: token by token they are nearer to each other than to `apart`, in the
    square, with which KL goes too; and no further from each other on average than such differences make by chance, or
    other sums in FP32 do, which may all lean one way.
    """
    between, tokens = root_mean_square(losses[one], losses[other])
    beyond, _ = root_mean_square(losses[one], losses[apart])
    assert between**2 < SHARE * beyond**2
    parted = abs(np.nanmean(losses[one] - losses[other], dtype=np.float64))
    assert parted <= mean_noise(between, tokens) + OTHER_SUMS


def check_codes(run: Run, ids: np.ndarray, logits: np.ndarray, expected: np.ndarray) -> None:
    """Assert that two implementations of `run` in FP32 compute one FP8 model: to ids [rows, positions] they say
    `logits` and `expected`, [rows, positions, vocabulary].

    A sum of another order is the next code once in some hundred thousand values, so in one first position of twenty;
    later positions read its keys and values. So the first position of one row at least is the same, and the rest as
    near as `SHARE` has it.
    """
    first = np.abs(logits - expected)[:, 0].max(-1)
    assert first.min() < SAME_CODES * max(1, float(np.abs(expected).max()) / 30)
    model = load_model(source_of(run), torch.float32, "cpu")
    with torch.inference_mode():
        unquantized = model(input_ids=torch.from_numpy(ids), use_cache=False).logits.numpy()
    assert mean_kl([*expected], [*logits]) < SHARE * mean_kl([*expected], [*unquantized])
