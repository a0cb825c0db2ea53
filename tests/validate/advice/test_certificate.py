"""Whether the calibration text is enough: worked out on paper, and held against what the next batches did."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8q.calibrate.measure.histogram import Histogram
from fp8q.calibrate.measure.statistics import (
    Corpus,
    ModelIdentity,
    Statistics,
    StatisticsRecord,
    TensorStatistics,
    TextSource,
)
from fp8q.core.run import Run
from fp8q.options import METHODS, Clipping
from fp8q.quantize.scales.activation_scales import activation_scales
from fp8q.quantize.scales.decisions import Scales, WeightScales
from fp8q.validate.advice.certificate import (
    HARMLESS,
    Certificate,
    Record,
    SetBy,
    batch_texts,
    certificate,
    next_exceeds,
    octaves_beyond,
    record_table,
    records,
    text_table,
)
from fp8q.validate.report.report import render

IDENTITY = ModelIdentity(name="tiny", architecture="LlamaForCausalLM", fingerprint="a" * 64)


def corpus(windows: int, batch_size: int = 1, **more: Any) -> Corpus:
    return Corpus(
        **{"name": "text", "fingerprint": "b" * 64, **more}, windows=windows, seq_len=8, batch_size=batch_size
    )


def statistics(text: Corpus, **batches: Sequence[float]) -> Statistics:
    """Tensors that hold nothing but the amax of each batch."""
    record = StatisticsRecord(model=IDENTITY, corpus=text, tokens=8, groups={name: [name] for name in batches})
    tensors = {}
    for name, amax in batches.items():
        values = np.array(amax, np.float32)
        counts = np.bincount(values[~np.isnan(values)].view(np.uint32) >> 16, minlength=1 << 15)
        tensors[f"{name}.input"] = TensorStatistics(Histogram.from_dense(counts), values, values[:1])
    return Statistics(record, tensors)


def certified(measured: Statistics, clipping: Clipping = Clipping()) -> Certificate:
    activations, skipped = activation_scales(measured, measured.record.groups, clipping)
    assert not skipped
    return certificate(measured, Scales(weights={}, activations=activations, skipped={}))


def array(*values: float) -> "np.ndarray[Any, np.dtype[np.float32]]":
    return np.array(values, np.float32)


def test_octaves_are_those_beyond_the_second_largest_and_a_tie_exceeds_nothing() -> None:
    assert octaves_beyond(array(1, 8, 2)) == 2.0
    assert octaves_beyond(array(8, 1, 8)) == 0.0
    assert octaves_beyond(array(0, 3, 0)) == float("inf")
    assert octaves_beyond(array(5)) == 0.0
    assert octaves_beyond(array(np.nan, 4, 1)) == 2.0


def test_the_next_batch_exceeds_with_the_share_over_one_more_batch() -> None:
    assert next_exceeds(np.array([0, 0.5, 1, 3]), 9, 0.0) == pytest.approx(0.75 / 10)
    assert next_exceeds(np.array([0, 0.5, 1, 3]), 9, 1.0) == pytest.approx(0.25 / 10)


def test_records_are_counted_in_the_last_three_quarters() -> None:
    for amax, seen, first in ((array(1, 2, 2, 3), 2, 2), (array(9, 1, 2, 3, 4, 5, 6, 10), 1, 3)):
        found, expected = records(amax)
        assert found == seen
        assert expected == pytest.approx(sum(1 / k for k in range(first, len(amax) + 1)))


def test_a_text_whose_amax_is_a_tie_in_every_tensor_is_enough() -> None:
    found = certified(statistics(corpus(4), a=[448, 448, 224, 448], b=[448, 448, 1, 1]))
    assert (found.verdict, found.exceeded, found.exceeds, found.harmful, found.more_windows) == ("good", 0, 0, 0, 0)
    assert found.sentence == (
        "Enough text: the next window exceeds a tensor's clip by more than rounding costs with a probability of 0 "
        "(limit 1 %), and by more than an octave with 0 (limit 0.1 %)."
    )


def test_an_outlier_in_one_batch_of_ten_is_bad_and_says_how_many_windows_would_settle_it() -> None:
    """One of two tensors leapt two octaves: 1/2 of 1/11 by an octave is 4.5 %, and 0.1 % wants 500 batches."""
    found = certified(statistics(corpus(20, 2), a=[448] * 9 + [112], b=[112] * 3 + [448] + [112] * 6))
    assert found.large == found.harmful == found.exceeds == pytest.approx(1 / 22)
    assert found.verdict == "bad"
    assert found.more_windows == (500 - 11) * 2
    assert found.records[0] == Record("b.input", 448.0, 2.0, 0.0, "text", 3, (6, 7))
    assert found.sentence == (
        "Too little text: the next batch of 2 windows exceeds a tensor's clip by more than rounding costs with a "
        "probability of 4.55 % (limit 1 %), and by more than an octave with 4.55 % (limit 0.1 %); 978 more windows "
        "would bring it under."
    )


def test_a_rare_octave_alone_asks_for_more_text_and_says_so() -> None:
    """One of 40 tensors leapt: 1/40 of 1/9 is 0.28 %, under the limit of small excesses and over that of octaves."""
    alike = {f"t{number}": [448.0] * 8 for number in range(39)}
    found = certified(statistics(corpus(8), leaps=[112] * 7 + [448], **alike))
    assert found.verdict == "watch"
    assert found.more_windows == 25 - 9, "1/40 over 25 is 0.1 %"
    assert found.sentence == (
        "More text would help: the next window exceeds a tensor's clip by more than rounding costs with a probability "
        "of 0.28 % (limit 1 %), and by more than an octave with 0.28 % (limit 0.1 %); 16 more windows would bring it "
        "under."
    )


FEW = (
    "64 calibration tokens are few for inputs of 16 numbers, as that of a: codes fit other text less than they could; "
    "--samples 12 takes the 96 that they want"
)
ENOUGH = (
    "enough text: the next window exceeds a tensor's clip by more than rounding costs with a probability of 0 (limit "
    "1 %), and by more than an octave with 0 (limit 0.1 %)."
)


def weighed(windows: int, rounding: str, width: int = 16, method: str = "amax") -> Certificate:
    """The certificate of a run of windows of 8 tokens whose weight `a` reads inputs of `width` numbers."""
    measured = statistics(corpus(windows), a=[448] * windows)
    tensors = {"a.input": replace(measured.tensors["a.input"], amax_channels=np.full(width, 448, np.float32))}
    measured = Statistics(measured.record, tensors)
    activations, _ = activation_scales(measured, measured.record.groups, Clipping(method))
    fields = {"method": "amax", "axis": 0, "channels": 1, "scale_min": 1.0, "scale_max": 1.0, "sqnr_db": 30.0}
    weight = WeightScales.model_validate({**fields, "rounding": rounding})
    return certificate(measured, Scales(weights={"a": weight}, activations=activations, skipped={}))


def test_text_that_is_enough_for_scales_and_not_for_codes_is_not_called_enough() -> None:
    """Once "16,384 tokens are few … give 29,184" before, and "enough" in the report."""
    found = weighed(8, "gptq")
    assert (found.verdict, found.more_windows) == ("watch", 4)
    assert found.sentence == f"More text would help: {FEW}. For scales: {ENOUGH}"
    assert weighed(12, "gptq").sentence == f"E{ENOUGH[1:]}"
    assert weighed(8, "nearest").sentence == f"E{ENOUGH[1:]}"


def test_few_tokens_for_codes_are_said_where_nothing_is_known_of_scales() -> None:
    found = weighed(8, "sequential", method="mse")
    assert found.verdict == "watch"
    assert found.sentence == (
        f"More text would help: {FEW}. For scales: cannot be told: a clip by mse is not the amax of batches, and of "
        "each batch that alone is kept."
    )


def test_a_leap_that_costs_no_more_than_rounding_harms_nothing() -> None:
    """By 1/16: from 16 to 17, which is exactly what rounding may cost."""
    found = certified(statistics(corpus(8), a=[16] * 7 + [17]))
    assert found.exceeds == pytest.approx(1 / 9)
    assert found.harmful == 0.0
    assert found.records[0].octaves == pytest.approx(HARMLESS)


def test_a_margin_is_room_for_what_comes() -> None:
    measured = statistics(corpus(8), a=[224] * 7 + [448], b=[448] * 8)
    assert certified(measured).harmful == pytest.approx(1 / 18)
    assert certified(measured, Clipping(margin=1)).harmful == 0.0
    assert certified(measured, Clipping(margin=1)).records[0].room_octaves == 1.0


def test_a_clip_that_batches_exceeded_is_exceeded_as_often_again() -> None:
    """At half the amax one batch of eight of `a` saturates, and all of `b` do."""
    measured = statistics(corpus(8), a=[64] * 7 + [448], b=[448] * 8)
    assert certified(measured, Clipping(margin=-1)).harmful == pytest.approx((1 / 8 + 1) / 2)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.by_batch_amax])
def test_nothing_is_said_of_a_clip_that_needs_the_whole_histogram(method: str) -> None:
    found = certified(statistics(corpus(8), a=[224] * 7 + [448]), Clipping(method))
    assert (found.verdict, found.harmful, found.records) == ("unknown", None, ())
    assert found.sentence == (
        f"Cannot be told: a clip by {method} is not the amax of batches, and of each batch that alone is kept."
    )


def test_nothing_is_said_of_a_method_that_is_not_known_here() -> None:
    """As of scales that another quantizer chose, or of a method that is added later."""
    measured = statistics(corpus(8), a=[224] * 7 + [448])
    activations, _ = activation_scales(measured, measured.record.groups, Clipping())
    inherited = {name: scale.model_copy(update={"method": "inherited"}) for name, scale in activations.items()}
    found = certificate(measured, Scales(weights={}, activations=inherited, skipped={}))
    assert (found.verdict, found.sentence) == (
        "unknown",
        "Cannot be told: a clip by inherited is not the amax of batches, and of each batch that alone is kept.",
    )


def test_nothing_is_said_of_three_batches_or_of_no_scale() -> None:
    found = certified(statistics(corpus(3), a=[1, 2, 3]))
    assert (found.verdict, found.sentence) == (
        "unknown", "Cannot be told: the text was measured in 3 batches, and 4 are needed.",
    )  # fmt: skip
    measured = statistics(corpus(8), a=[1.0] * 8)
    nothing = certificate(measured, Scales(weights={}, activations={}, skipped={}))
    assert nothing.sentence == "Cannot be told: no tensor has a scale."


def test_text_that_grows_louder_is_told_and_no_number_of_windows_is_promised() -> None:
    """Every batch a record: 12 where 1.45 are expected of exchangeable ones."""
    growing = [1.03**k for k in range(16)]
    found = certified(statistics(corpus(16), a=[float(round(each * 64)) for each in growing], b=list(range(64, 80))))
    assert found.drift is not None
    assert found.drift > 5
    assert found.verdict == "watch"
    assert found.more_windows is None
    assert "amax grew late" in found.sentence


@pytest.mark.parametrize(("late", "drift", "verdict"), [(2, 1.54, "good"), (3, 2.31, "watch")])
def test_twice_as_many_records_as_expected_are_drift(late: int, drift: float, verdict: str) -> None:
    """Of 16 exchangeable batches 1/5 + 1/6 + … + 1/16 = 1.2974 of the last twelve set a record; a record of one BF16
    step costs nothing, and the last amax is a tie.
    """
    amax = [16 + step / 8 for step in range(late + 1) for _ in range(4)]
    found = certified(statistics(corpus(16), a=[*amax, *[amax[-1]] * (16 - len(amax))]))
    assert (found.verdict, found.harmful, found.large) == (verdict, 0, 0)
    assert found.drift == pytest.approx(drift, abs=5e-3)
    assert ("amax grew late 2.3 times as often" in found.sentence) == (verdict == "watch")


def test_each_batch_is_of_its_text_and_of_its_sources() -> None:
    def source(name: str, windows: int) -> TextSource:
        return TextSource(name=name, weight=1, windows=windows, tokens=99, fingerprint="c" * 64, chat=False)

    mixed = corpus(6, 1, name="code and prose", sources=[source("code", 2), source("prose", 4)])
    assert [name for name, _, _ in batch_texts(mixed)] == ["prose", "code", "prose", "prose", "code", "prose"]
    assert [name for name, _, _ in batch_texts(mixed.model_copy(update={"batch_size": 3}))] == ["code or prose"] * 2
    other = corpus(3, 2, name="other", fingerprint="d" * 64)
    merged = corpus(5, 2).model_copy(update={"windows": 2}).merge(other)
    assert batch_texts(merged) == [("text", 0, (0, 1)), ("other", 0, (0, 1)), ("other", 1, (2, 2))]


def test_which_text_set_each_amax_is_counted() -> None:
    other = corpus(4, 1, name="loud", fingerprint="d" * 64)
    both = corpus(4, 1, name="quiet").merge(other)
    found = certified(statistics(both, a=[1, 1, 1, 1, 1, 1, 3, 1], b=[1] * 8, c=[1, 1, 1, 1, 5, 1, 1, 1]))
    assert found.texts == (SetBy("quiet", 4, 1), SetBy("loud", 4, 2))
    assert [cell.text for cell in text_table(found).cells()[1]] == ["loud", "4", "2"]
    first = record_table(found).cells()[0]
    assert [cell.text for cell in first] == ["c.input", "5", "2.32 octaves", "0.00 octaves", "loud, windows 0 to 0"]


def test_batches_that_were_not_measured_are_passed_over() -> None:
    nan = float("nan")
    found = certified(statistics(corpus(8), a=[nan, 448, nan, 448, 448, 224, nan, nan]))
    assert (found.batches, found.verdict) == (4, "good")


@pytest.mark.parametrize("beyond", [0.0, HARMLESS, 0.5])
@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0])
def test_the_predicted_rate_is_that_of_the_next_batches(sigma: float, beyond: float) -> None:
    """Independent lognormal amax: 4,000 tensors of 24 batches, and the share in which a 25th exceeds."""
    draw = np.random.default_rng(3)
    batches, tensors = 24, 4000
    amax = np.exp(sigma * draw.normal(size=(tensors, batches + 1))).astype(np.float32)
    octaves = np.array([octaves_beyond(row[:-1]) for row in amax])
    predicted = next_exceeds(octaves, batches, beyond)
    happened = float((np.log2(amax[:, -1] / amax[:, :-1].max(1)) > beyond).mean())
    error = (max(predicted, 1 / tensors) / tensors) ** 0.5
    assert abs(predicted - happened) < 4 * error + 0.15 * predicted


@given(st.lists(st.floats(2**-6, 1024, width=16), min_size=4, max_size=20), st.integers(1, 40))
def test_the_scale_of_the_values_and_their_order_change_no_probability(values: list[float], octave: int) -> None:
    amax = np.array(values, np.float32)
    assert octaves_beyond(amax) == octaves_beyond(amax[::-1]) == octaves_beyond(amax * np.float32(2.0**octave))
    assert octaves_beyond(amax) >= 0


def test_inspect_shows_the_certificate(demo_run: Run, fp8q: Callable[..., Any]) -> None:
    """24 windows in batches of 8 are three batches: too few to tell."""
    sentence = "Cannot be told: the text was measured in 3 batches, and 4 are needed."
    assert f"Calibration text: unknown. {sentence}" in fp8q("inspect", demo_run.root).out
    found = json.loads(fp8q("inspect", demo_run.root, "--json").out)["certificate"]
    assert (found["verdict"], found["sentence"], found["batches"]) == ("unknown", sentence, 3)


def test_the_report_says_it_too(calibrated_run: Run) -> None:
    page = render(calibrated_run)
    assert "Was the calibration text enough?" in page
    assert "<p>Cannot be told: the text was measured in 2 batches, and 4 are needed.</p>" in page
