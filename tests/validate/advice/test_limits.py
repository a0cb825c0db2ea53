"""Where each verdict of doctor changes: the largest value that is good, one beyond it, the largest that is to be
watched, and one beyond that, all of them numbers that can be checked by hand.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from fp8q.calibrate.measure.histogram import Histogram
from fp8q.calibrate.model.decoder import Layers
from fp8q.options import Clipping
from fp8q.quantize.scales.activation_scales import tensor_scale
from fp8q.quantize.scales.decisions import Scales, TensorScale
from fp8q.validate.advice import criteria, model_checks
from fp8q.validate.advice.activation_watch import LargestValues
from fp8q.validate.advice.checkup import Check, Remedies, verdict_of
from fp8q.validate.advice.hidden_states import Divergences, Sums
from fp8q.validate.advice.scale_checks import ScaledTensor, stored_checks

REMEDIES = Remedies("RUN", "MODEL", "TEXT", 8)
NONE = Scales(weights={}, activations={}, skipped={})
CHOSEN = TensorScale(method="amax", amax=448, clip=448, scale=1, saturation=0, underflow=0, sqnr_db=None)


def stored(
    check: str, values: Sequence[tuple[float, int]], batches: Sequence[float] = (1, 1), scale: float = 1.0
) -> Check:
    """That check of one tensor under a scale of 1, whose clip is 448; `values`: magnitudes and how often each is."""
    patterns = np.repeat(*(np.array(each) for each in zip(*values, strict=True))).astype(np.float32).view(np.uint32)
    histogram = Histogram.from_dense(np.bincount(patterns >> 16, minlength=1 << 15))
    tensor = ScaledTensor("0.up", histogram, np.array(batches, np.float32), CHOSEN, scale)
    return next(each for each in stored_checks([tensor], NONE, REMEDIES) if each.check == check)


def saturating(count: float) -> Check:
    """So many of 10,000 values beyond the clip."""
    return stored("saturation", [(400, 10_000 - int(count)), (900, int(count))])


def underflowing(count: float) -> Check:
    """So many of 100 values at half of the smallest code, 2^-9, which round to zero."""
    return stored("underflow", [(0, 50), (2**-10, int(count)), (1, 100 - int(count))])


def jumping(amax: float) -> Check:
    """A batch of that amax after one of 1."""
    return stored("amax_jumps", [(1, 1)], batches=(1, amax))


def scaled(scale: float) -> Check:
    """A tensor of that scale."""
    return stored("inverse_scale", [(1, 1)], scale=scale)


def normed(largest: float) -> Check:
    return model_checks.norm_inputs(LargestValues(norms={"0.norm": largest}), False, REMEDIES)[0]


def normed_in_fp16(largest: float) -> Check:
    return model_checks.norm_inputs(LargestValues(norms={"0.norm": largest}), True, REMEDIES)[0]


def attending(logit: float) -> Check:
    seen = LargestValues(logits={"0.attn": logit}, hot={"0.attn": (0, 1)})
    return model_checks.attention_logits(seen, [], REMEDIES)[0]


def standing_out(amax: float) -> Check:
    """A token of that amax among others of 1, in a cache of codes."""
    seen = LargestValues(tokens={"0.attn.k": [torch.tensor([[1.0, 1.0, amax, 1.0]])]}, ids=[torch.arange(4)[None]])
    return model_checks.cache_tokens(seen, ["0.attn.k"], str, REMEDIES)[0]


def product_off(thousandths: float) -> Check:
    """A GEMM of length 1,000 that is off by so much."""
    parted = Divergences(gemms={"0.up": Sums(thousandths**2, 1e6)})
    return model_checks.gemm_errors(parted, {"0.up": CHOSEN}, REMEDIES)[0]


def hidden_off(thousandths: float) -> Check:
    """Hidden states 3 and 4, of length 5, the second of them off by so many thousandths of that."""
    parted, exact = Divergences(gemms={"h.0.up": Sums(1, 1)}), torch.tensor([[[3.0, 4.0]]])
    parted.add(0, exact + torch.tensor([0.0, 5e-3 * thousandths]), exact)
    return model_checks.hidden_states(parted, Layers("h", 1), [], REMEDIES)[0]


@pytest.mark.parametrize(
    ("check", "values"),
    [
        (saturating, (10, 11, 100, 101)),  # a thousandth, a hundredth
        (underflowing, (25, 26, 50, 51)),  # a quarter, half
        (jumping, (10, 10.5, 100, 101)),
        (scaled, (2**14, 1.01 * 2**14, 2**25, 1.01 * 2**25)),  # 2^-14 is FP16's smallest normal number, 2^-25 zero
        (normed, (65504, 65536, 2**64, 1.01 * 2**64)),  # FP16's largest number; from 2^64 on squares overflow FP32
        (normed_in_fp16, (16376, 16384, 65504, 65536)),  # a quarter of it
        (attending, (128, 129, 1024, 1025)),  # 2^7 and 2^10 nats
        (standing_out, (10, 10.5, 100, 101)),
        (product_off, (75, 76, 150, 151)),  # E4M3 errs by 2.6 % rms, two factors by 3.7 %: twice, four times that
        (hidden_off, (149, 151, 249, 251)),
    ],
)
def test_verdicts_change_at_their_limits(check: Callable[[float], Check], values: tuple[float, ...]) -> None:
    assert [check(value).verdict for value in values] == ["good", "watch", "watch", "bad"]


def test_a_scale_may_lose_a_decibel_and_six_are_bad() -> None:
    """Four times the best scale's squared error are 10 log 4 = 6.02 dB."""
    lost = [criteria.db_below_best(own, 30.0) for own in (29.0, 28.9, 24.0, 23.98)]
    assert [verdict_of(each, criteria.DB_LOST.limit) for each in lost] == ["good", "watch", "watch", "bad"]
    histogram = Histogram.from_dense(np.bincount([0x3F80, 0x3F80, 0x3F81], minlength=1 << 15))
    chosen = tensor_scale(histogram, Clipping(), amax_batches=np.ones(2, np.float32))
    halved = ScaledTensor("0.up", histogram, np.ones(2, np.float32), chosen, chosen.scale / 4)
    found = next(each for each in stored_checks([halved], NONE, REMEDIES) if each.check == "scale")
    assert (found.verdict, found.module) == ("bad", "0.up")


def test_the_median_token_stands_for_a_layer() -> None:
    """Errors of 1 %, 2 % and 300 %: a token of massive activations is no layer that diverges."""
    parted, exact = Divergences(), torch.tensor([[[3.0, 4.0]] * 3])
    parted.add(0, exact + torch.tensor([[[0.0, 0.05], [0.0, 0.1], [0.0, 15.0]]]), exact)
    assert parted.error(0) == pytest.approx(0.02, rel=1e-5)
    parted.add(0, torch.full((1, 4, 2), float("nan")), torch.ones(1, 4, 2))
    assert np.isnan(parted.error(0)), "more than half are no numbers"
