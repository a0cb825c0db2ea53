"""What stands out, on statistics made by hand: every number can be worked out on paper."""

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from fp8q.calibrate.measure.histogram import Histogram
from fp8q.calibrate.measure.statistics import (
    Corpus,
    ModelIdentity,
    Statistics,
    StatisticsRecord,
    TensorStatistics,
    replace_record,
)
from fp8q.core.errors import InputError
from fp8q.options import TWO, Clipping
from fp8q.quantize.scales.activation_scales import activation_scales
from fp8q.quantize.scales.cache_scales import kv_cache_scales, scaled_by_head
from fp8q.quantize.scales.decisions import Scales
from fp8q.validate.advice.findings import (
    AgainstRow,
    DelayedRow,
    against_rows,
    converged_after,
    delayed_rows,
    findings,
    jumps,
    largest_share,
    late_growth,
    outlier_channels,
    prospective_scales,
)
from fp8q.validate.report.rows import bf16_cache_rows


def tensor(values: list[float], batches: list[float], channels: list[float]) -> TensorStatistics:
    histogram = Histogram.from_dense(np.bincount(np.array(values, np.float32).view(np.uint32) >> 16, minlength=1 << 15))
    return TensorStatistics(histogram, np.array(batches, np.float32), np.array(channels, np.float32))


def statistics(**tensors: TensorStatistics) -> Statistics:
    identity = ModelIdentity(name="tiny", architecture="LlamaForCausalLM", fingerprint="a" * 64)
    corpus = Corpus(name="text", fingerprint="b" * 64, windows=4, seq_len=8, batch_size=1)
    record = StatisticsRecord(model=identity, corpus=corpus, tokens=32, groups={name: [name] for name in tensors})
    return Statistics(record, {f"{name}.input": found for name, found in tensors.items()})


def chosen(measured: Statistics, clipping: Clipping = Clipping()) -> Scales:
    activations, skipped = activation_scales(measured, measured.record.groups, clipping)
    assert not skipped
    return Scales(weights={}, activations=activations, skipped={})


CALM = tensor([448, 224, 224, 1], [448, 448, 448, 448], [448, 300, 448])
RARE = tensor([448, 0.0005, 0.0005, 0.0005], [1, 2, 2, 448], [1, 2, 448])


def test_a_tensor_within_every_limit_is_not_mentioned() -> None:
    measured = statistics(calm=CALM)
    assert findings(measured, chosen(measured)) == []


def test_a_scale_of_what_was_not_measured_is_refused_by_name() -> None:
    measured = statistics(calm=CALM)
    with pytest.raises(InputError) as refused:
        findings(replace(measured, tensors={}), chosen(measured))
    assert str(refused.value) == (
        "calm.input: has a scale, and the statistics have no such tensor; restore statistics.safetensors and "
        "scales.json, or calibrate again"
    )


def test_a_group_is_named_by_one_of_its_members() -> None:
    with pytest.raises(ValidationError, match="ml.gate is none of the modules that it stands for"):
        replace_record(statistics(calm=CALM).record, groups={"ml.gate": ["mlp.gate", "mlp.up"]})


def test_findings_are_ranked_by_how_far_they_lie_beyond_their_limit() -> None:
    measured = statistics(calm=CALM, rare=RARE)
    found = [
        (finding.tensor, finding.what, finding.value, round(finding.severity, 2))
        for finding in findings(measured, chosen(measured))
    ]
    assert found == [
        ("rare.input", "amax over that of the first three quarters", 224.0, 203.64),
        ("rare.input", "largest channel over the median", 224.0, 22.4),
        ("rare.input", "amax over the batch before's", 224.0, 22.4),
        ("rare.input", "share of non-zero values that become zero", 0.75, 3.0),
    ]


def test_a_clip_far_below_the_amax_is_told_with_what_to_do() -> None:
    measured = statistics(calm=CALM)
    found = {finding.what: finding for finding in findings(measured, chosen(measured, Clipping(margin=-1)))}
    saturated = found["share of values beyond the clip"]
    assert (saturated.value, saturated.remedy) == (0.25, "clip less: --method amax, or --margin 1")
    assert (
        found["dB of signal to noise below the best scale"].remedy
        == "two codes lose nothing of it: --form 'MODULE=two'"
    )


#: Of 100 values 6 round to zero at the scale of its amax, as of what `down_proj` reads in the demo; its other values
#: are codes.
CROWDED = tensor([448, *[1] * 93, *[2**-11] * 6], [448, 448, 448, 448], [448, 448, 448])


@pytest.mark.parametrize("clipping", [Clipping(), Clipping("mse")])
def test_underflow_that_no_other_scale_takes_off_is_not_mentioned(clipping: Clipping) -> None:
    measured = statistics(crowded=CROWDED)
    scales = chosen(measured, clipping)
    assert scales.activations["crowded"].underflow == pytest.approx(0.06)
    assert findings(measured, scales) == []


def test_underflow_is_told_with_what_takes_it_off() -> None:
    measured = statistics(rare=RARE, crowded=CROWDED)
    found = findings(measured, chosen(measured, Clipping(margin=10)))
    assert {finding.tensor: finding.remedy for finding in found if "become zero" in finding.what} == dict.fromkeys(
        ("rare.input", "crowded.input"), "a smaller --margin"
    )
    found = findings(measured, chosen(measured))
    assert {finding.tensor: finding.remedy for finding in found if "become zero" in finding.what} == {
        "rare.input": "a few huge values set its scale: keep it in BF16 with --skip"
    }


def test_a_cache_tensor_is_taken_out_of_fp8_by_the_option_of_the_cache() -> None:
    measured = replace(statistics(), tensors={"0.k": RARE, "0.v": RARE})
    scales = Scales(weights={}, activations={}, kv_cache=kv_cache_scales(measured, Clipping()), skipped={})
    remedies = {(finding.tensor, finding.what): finding.remedy for finding in findings(measured, scales)}
    assert (
        remedies["0.k", "largest channel over the median"]
        == "harmless while little underflows; else keep its layer's cache in BF16 with --kv-skip, or all keys with "
        "--kv-cache v"
    )
    assert (
        remedies["0.v", "largest channel over the median"]
        == "harmless while little underflows; else keep its layer's cache in BF16 with --kv-skip, or all with "
        "--kv-cache off"
    )
    assert not any("--skip" in remedy for remedy in remedies.values())


def test_a_cache_in_bf16_is_judged_by_the_scale_that_it_would_have() -> None:
    unfit = tensor([float("nan"), 1], [1], [1])
    measured = replace(statistics(calm=CALM), tensors={"calm.input": CALM, "0.k": RARE, "0.v": CALM, "1.k": unfit})
    wide = chosen(measured)
    prospective = prospective_scales(measured, wide, Clipping(margin=1))
    assert {name: scale.scale for name, scale in prospective.items()} == {"0.k": 2.0, "0.v": 2.0}
    remedies = {
        finding.what: finding.remedy for finding in findings(measured, wide, prospective) if finding.tensor == "0.k"
    }
    assert remedies["largest channel over the median"] == (
        "in BF16; before it goes into FP8: harmless while little underflows; else keep its layer's cache in BF16 with "
        "--kv-skip, or all keys with --kv-cache v"
    )
    clipped = findings(measured, wide, prospective_scales(measured, wide, Clipping(margin=-1)))
    lost = {finding.tensor: finding.remedy for finding in clipped if finding.what.startswith("dB of signal")}
    assert lost["0.v"] == (
        "in BF16; before it goes into FP8: keep its layer's cache in BF16 with --kv-skip, or all with --kv-cache off"
    )
    assert bf16_cache_rows(measured, prospective)[0].underflow == 0.75
    values = Scales(weights={}, activations={}, kv_cache=kv_cache_scales(measured, Clipping(), "v"), skipped={})
    assert prospective_scales(measured, values, Clipping()).keys() == {"0.k"}


def test_outlier_channels_are_counted_against_the_median_of_those_that_are_not_zero() -> None:
    assert outlier_channels(np.array([0, 0, 1, 1, 1, 30, 10], np.float32)) == (1, 30.0)
    assert outlier_channels(np.zeros(4, np.float32)) == (0, 1.0)


def test_convergence_is_where_the_amax_was_first_reached() -> None:
    assert converged_after(np.array([1, 5, 2, 5], np.float32)) == 0.5
    assert converged_after(np.array([np.nan, 1, np.nan, 5], np.float32)) == 1.0
    assert late_growth(np.array([1, 5, 2, 6], np.float32)) == pytest.approx(1.2)
    assert late_growth(np.array([1, 5], np.float32)) == 1.0


def test_delayed_scaling_ranks_those_that_saturate_most_and_warns_of_jumps() -> None:
    measured = statistics(calm=CALM, rare=RARE)
    rows = delayed_rows(measured, chosen(measured), Clipping("delayed"))
    assert rows == [DelayedRow("rare.input", 3, 2 / 3, 224.0), DelayedRow("calm.input", 3, 0.0, 1.0)]
    assert jumps(rows) == [
        (
            "rare.input: its amax jumps 224-fold from one batch to the next; a scale made from the batches before "
            "saturates there"
        )
    ]


def test_other_text_is_held_against_the_scales_that_were_chosen() -> None:
    measured = statistics(calm=CALM, rare=RARE)
    other = statistics(calm=tensor([448, 1], [448], [448]), rare=tensor([896, 1, 1, 1], [896], [896]))
    assert against_rows(measured, chosen(measured), other) == [
        AgainstRow("rare.input", 448.0, 896.0, 2.0, 0.25, 0.0),
        AgainstRow("calm.input", 448.0, 448.0, 1.0, 0.0, 0.0),
    ]


def test_other_text_is_held_against_the_head_that_is_nearest_to_its_clip() -> None:
    """The second head's values lie far below the layer's clip, and at four times its own."""
    scale = scaled_by_head("0.k", tensor([448, 7], [448], [448, 7]), Clipping(), 2)
    assert scale.heads == [1.0, 0.015625]
    assert largest_share(tensor([448, 28], [448], [448, 28]), scale) == (28.0, 7.0)
    assert largest_share(tensor([500, 7], [500], [500, 7]), scale) == (500.0, 448.0)


def test_a_tensor_in_two_terms_is_held_against_the_limits_of_two_terms() -> None:
    """448 + 448/16 = 476 is the largest sum of both codes at scale 1; one code ends at 448."""
    measured, other = statistics(calm=CALM), statistics(calm=tensor([476, 1], [476], [476]))
    activations, _ = activation_scales(measured, ["calm"], Clipping(), forms={"calm": TWO})
    scales = Scales(weights={}, activations=activations, skipped={})
    assert against_rows(measured, scales, other) == [AgainstRow("calm.input", 476.0, 476.0, 1.0, 0.0, 0.0)]


def test_a_history_of_a_tensor_in_two_terms_saturates_beyond_both_codes() -> None:
    measured = statistics(calm=tensor([476, 1], [448, 476], [476]))
    activations, _ = activation_scales(measured, ["calm"], Clipping(), forms={"calm": TWO})
    two_terms = Scales(weights={}, activations=activations, skipped={})
    assert [row.saturated for row in delayed_rows(measured, chosen(measured), Clipping("delayed"))] == [1.0]
    assert [row.saturated for row in delayed_rows(measured, two_terms, Clipping("delayed"))] == [0.0]
