"""The scale of an expert that saw too little, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from fp8q.calibrate.measure.histogram import Histogram
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity, Statistics, StatisticsRecord, TensorStatistics
from fp8q.options import Clipping
from fp8q.quantize.scales.activation_scales import activation_scales
from fp8q.quantize.scales.expert_scales import starved, starved_remarks

PRODUCTS = [f"mlp.experts.{number}.down_proj" for number in range(4)]
TAKEN = "their last GEMMs take the largest amax of the layer's other experts"
#: 1.0, 2.0, 3.0 and 64.0 as BF16 patterns.
ONE, TWO, THREE, MANY, INF, NAN = 0x3F80, 0x4000, 0x4040, 0x4280, 0x7F80, 0x7FC0


def tensor(tokens: int, *patterns: int) -> TensorStatistics:
    """Of width 2: `patterns` once each, and as many of the first as are left."""
    counts = np.zeros(1 << 15, np.int64)
    if tokens:
        counts[list(patterns)] = 1
        counts[patterns[0]] += 2 * tokens - len(patterns)
    amax = np.full(1, np.nan if not tokens else 1.0, np.float32)
    return TensorStatistics(Histogram.from_dense(counts), amax, np.zeros(2, np.float32))


def statistics(*tensors: TensorStatistics) -> Statistics:
    record = StatisticsRecord(
        model=ModelIdentity(name="m", architecture="M", fingerprint="0"),
        corpus=Corpus(name="t", fingerprint="0", windows=1, seq_len=8, batch_size=1),
        tokens=8,
        groups={name: [name] for name in PRODUCTS},
        experts={"mlp.experts": PRODUCTS},
    )
    return Statistics(record, {f"{name}.input": each for name, each in zip(PRODUCTS, tensors, strict=True)})


def chosen(found: Statistics, least: int, clipping: Clipping = Clipping()) -> tuple[dict[str, float], dict[str, str]]:
    scales, skipped = activation_scales(found, PRODUCTS, clipping, starved=starved(found, least))
    assert scales.keys() | skipped.keys() == set(PRODUCTS)
    return {name: scale.clip for name, scale in scales.items()}, {
        name: scale.method for name, scale in scales.items()
    } | {name: each.reason for name, each in skipped.items()}


def test_a_starved_expert_takes_the_largest_amax_of_those_that_saw_enough() -> None:
    found = statistics(tensor(10, ONE), tensor(10, ONE, TWO), tensor(3, ONE), tensor(0))
    clips, methods = chosen(found, 4)
    assert list(clips.values()) == [1.0, 2.0, 2.0, 2.0]
    assert list(methods.values()) == [
        "amax", "amax", "amax of other experts (3 tokens)", "amax of other experts (0 tokens)",
    ]  # fmt: skip


def test_what_it_saw_itself_saturates_no_more_than_before() -> None:
    clips, _ = chosen(statistics(tensor(10, ONE), tensor(10, TWO), tensor(3, ONE, MANY), tensor(9, ONE)), 4)
    assert list(clips.values()) == [1.0, 2.0, 64.0, 1.0]


def test_another_starved_expert_is_not_asked_while_one_saw_enough() -> None:
    clips, _ = chosen(statistics(tensor(10, ONE), tensor(3, MANY), tensor(3, ONE), tensor(0)), 4)
    assert list(clips.values()) == [1.0, 64.0, 1.0, 1.0]


def test_where_all_starve_the_largest_of_all_is_taken() -> None:
    clips, _ = chosen(statistics(tensor(3, ONE), tensor(3, THREE), tensor(2, ONE), tensor(0)), 4)
    assert list(clips.values()) == [3.0, 3.0, 3.0, 3.0]


def test_where_none_saw_anything_all_stay_in_bf16() -> None:
    clips, reasons = chosen(statistics(*[tensor(0)] * 4), 4)
    assert not clips
    assert set(reasons.values()) == {"never observed: no token of the calibration text reached it"}


@pytest.mark.parametrize(
    ("pattern", "reason"), [(NAN, "NaN in 1 of 6 input values"), (INF, "Inf in 1 of 6 input values")]
)
def test_a_starved_expert_that_saw_no_number_stays_in_bf16_and_lends_nothing(pattern: int, reason: str) -> None:
    clips, reasons = chosen(statistics(tensor(10, ONE), tensor(9, ONE), tensor(3, ONE, pattern), tensor(0)), 4)
    assert clips == {PRODUCTS[0]: 1.0, PRODUCTS[1]: 1.0, PRODUCTS[3]: 1.0}
    assert reasons[PRODUCTS[2]] == reason


def test_the_margin_and_the_grid_hold_for_it_too_and_the_method_does_not() -> None:
    found = statistics(tensor(10, ONE), tensor(10, THREE), tensor(10, ONE), tensor(0))
    assert chosen(found, 4, Clipping(method="percentile", percentile=1.0, margin=1))[0][PRODUCTS[3]] == 6.0
    scales, _ = activation_scales(found, PRODUCTS, Clipping(scale_grid="power-of-two"), starved=starved(found, 4))
    assert scales[PRODUCTS[3]].scale == 2**-7  # 3 / 448, rounded up
    assert (scales[PRODUCTS[3]].amax, scales[PRODUCTS[3]].saturation, scales[PRODUCTS[3]].sqnr_db) == (0.0, 0.0, None)


def test_zero_asks_nothing_of_an_expert_and_only_experts_are_asked() -> None:
    found = statistics(tensor(10, ONE), tensor(1, TWO), tensor(1, ONE), tensor(0))
    assert not starved(found, 0)
    dense = replace(found, record=found.record.model_copy(update={"experts": None}))
    assert not starved(dense, 1000)
    _, reasons = chosen(dense, 1000)
    assert reasons[PRODUCTS[3]] == "never observed: no token of the calibration text reached it"


def test_the_note_names_those_that_saw_least_first() -> None:
    found = statistics(tensor(10, ONE), tensor(3, ONE), tensor(2, ONE), tensor(0))
    assert starved_remarks(found, starved(found, 4), 4, compensated=True) == [
        "mlp.experts: 3 of 4 experts saw fewer than 4 tokens (experts 3 (0), 2 (2), 1 (3))",
        f"{TAKEN} and their codes are each weight's nearest; measure more --samples, or --all-experts",
    ]
    assert starved_remarks(found, starved(found, 1), 1, compensated=False) == [
        "mlp.experts: 1 of 4 experts saw fewer than 1 tokens (expert 3 (0))",
        f"{TAKEN}; measure more --samples, or --all-experts",
    ]
