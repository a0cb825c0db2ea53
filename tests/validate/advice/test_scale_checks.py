"""The checks that need no model, on histograms made by hand: each verdict, and the command that helps."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from fp8q.calibrate.measure.histogram import Histogram
from fp8q.core.run import Run
from fp8q.options import Clipping, ScaleOptions
from fp8q.quantize.checkpoint.hf_layout import UNLOADABLE
from fp8q.quantize.scales.activation_scales import tensor_scale
from fp8q.quantize.scales.decisions import Scales, WeightScales
from fp8q.validate.advice import criteria
from fp8q.validate.advice.checkup import Check, Remedies, graded, verdict_of, worst_first
from fp8q.validate.advice.criteria import Criterion, Limit
from fp8q.validate.advice.scale_checks import ScaledTensor, judged_scale, layer_order, served_cache, stored_checks

REMEDIES = Remedies("RUN", "a model", "text.txt", 64, ScaleOptions(two_terms=("a.*",), skip=("b.*",)))
NONE = Scales(weights={}, activations={}, skipped={})
NORMAL = np.abs(np.random.default_rng(5).normal(size=20_000)).astype(np.float32)
BATCHES = np.array([3, 4, 4, 4], np.float32)
CRITERION = Criterion("check", "what", Limit(1.0, 2.0), "why")


def tensor(
    values: "np.ndarray", name: str = "0.down_proj", smaller: float = 1.0, batches: "np.ndarray" = BATCHES
) -> ScaledTensor:
    """A tensor at the scale of its amax, or at one so many times smaller."""
    histogram = Histogram.from_dense(
        np.bincount(np.asarray(values, np.float32).view(np.uint32) >> 16, minlength=1 << 15)
    )
    chosen = tensor_scale(histogram, Clipping(), amax_batches=batches)
    return ScaledTensor(name, histogram, batches, chosen, chosen.scale / smaller)


def checks(*tensors: ScaledTensor, scales: Scales = NONE) -> dict[str, Check]:
    """The first entry of each check."""
    found: dict[str, Check] = {}
    for each in stored_checks(tensors, scales, REMEDIES):
        found.setdefault(each.check, each)
    return found


def test_of_a_cache_by_heads_the_worst_head_is_judged() -> None:
    chosen = tensor(NORMAL).chosen.model_copy(update={"scale": 2.0, "heads": [2.0, 0.5]})
    for stored, expected in (([2, 0.5], 2.0), ([2, 0.125], 0.5), ([2.5, 0.125], 0.5), ([2, 4], 16.0)):
        assert judged_scale(np.array(stored, np.float32), chosen) == expected
    assert judged_scale(np.array([1], np.float32), chosen.model_copy(update={"heads": None})) == 1.0


def test_a_value_is_good_up_to_the_limit_and_no_number_is_bad() -> None:
    limit = Limit(1.0, 2.0)
    assert [verdict_of(value, limit) for value in (0.5, 1.0, 1.5, 2.0, 3.0)] == [
        "good",
        "good",
        "watch",
        "watch",
        "bad",
    ]
    assert verdict_of(float("nan"), limit) == verdict_of(float("inf"), limit) == "bad"


def test_every_module_beyond_the_limit_has_an_entry_and_the_first_tells_all_by_depth() -> None:
    values = [("a", 0.5), ("b", 9.0), ("c", float("nan")), ("d", 1.5)]
    entries = graded(CRITERION, values, str, lambda name, value: f"mend {name}")
    assert [(each.verdict, each.module, each.value) for each in entries] == [
        ("bad", "c", None), ("bad", "b", 9.0), ("watch", "d", 1.5),
    ]  # fmt: skip
    assert [(at.module, at.value) for at in entries[0].by_depth] == [("a", 0.5), ("b", 9.0), ("c", None), ("d", 1.5)]
    assert entries[1].by_depth == []
    (good,) = graded(CRITERION, values[:1], str, lambda name, value: "nothing")
    assert (good.verdict, good.module, good.remedy) == ("good", "a", None)
    (unknown,) = graded(CRITERION, [], str, lambda name, value: "nothing")
    assert (unknown.verdict, unknown.said) == ("unknown", "why")


def test_the_worst_come_first_and_layers_in_the_order_of_the_model() -> None:
    made = [Check(check=str(i), verdict=v, what="", said="") for i, v in enumerate(("good", "unknown", "bad", "watch"))]  # type: ignore[arg-type]
    assert [each.check for each in worst_first(made)] == ["2", "3", "1", "0"]
    assert sorted(["h.10.k", "h.2.v", "h.2.k"], key=layer_order) == ["h.2.k", "h.2.v", "h.10.k"]


def test_a_normal_tensor_at_its_own_scale_is_good_in_all() -> None:
    found = checks(tensor(NORMAL))
    assert {name: each.verdict for name, each in found.items()} == dict.fromkeys(
        ("saturation", "scale", "underflow", "inverse_scale", "amax_jumps"), "good"
    )
    assert found["saturation"].value == 0
    assert found["amax_jumps"].said == "1.33-fold"


def test_a_scale_ten_times_too_small_is_bad_and_is_chosen_again() -> None:
    found = checks(tensor(NORMAL), tensor(NORMAL, "1.down_proj", smaller=10))
    for name in ("saturation", "scale"):
        assert (found[name].verdict, found[name].module) == ("bad", "1.down_proj")
        assert found[name].remedy == ("the scale is not that of its amax; `rm RUN/scales.json`, then `fp8q scales RUN`")
    share = float((NORMAL.max() / 10 < NORMAL).mean())
    assert found["saturation"].value == pytest.approx(share, rel=0.02)


def test_a_clip_that_was_chosen_too_low_is_taken_back_by_the_method() -> None:
    histogram = tensor(NORMAL).histogram
    low = tensor_scale(histogram, Clipping("percentile", percentile=99.0))
    found = checks(ScaledTensor("0.down_proj", histogram, BATCHES, low, low.scale))
    assert (found["saturation"].verdict, found["saturation"].remedy) == ("watch", "`fp8q scales RUN --method amax`")


def test_values_that_vanish_beside_a_few_huge_ones_are_bad_and_take_two_terms() -> None:
    huge = np.concatenate([NORMAL, [2.0**20] * 3])
    found = checks(tensor(huge, "0.gate_proj"), tensor(huge, "0.attn.k"), tensor(NORMAL))["underflow"]
    assert (found.verdict, found.module) == ("bad", "0.gate_proj")
    assert found.value is not None
    assert found.value > 0.9
    assert found.remedy == (
        "a few huge values set its scale; `fp8q scales RUN --two-terms 'a.*' --two-terms 0.gate_proj`"
    )
    assert "--kv-cache v`" in str(checks(tensor(huge, "0.attn.k"))["underflow"].remedy)
    assert "--kv-cache off`" in str(checks(tensor(huge, "0.attn.v"))["underflow"].remedy)


def test_a_scale_whose_reciprocal_fp16_cannot_hold_is_to_be_watched_and_then_bad() -> None:
    """448 · 2¹⁵ and 448 · 2²⁶: reciprocals of 2⁻¹⁵, which is subnormal in FP16, and of 2⁻²⁶, which is zero there."""
    found = checks(tensor(NORMAL), tensor(np.array([448.0 * 2**15]), "1.q"))["inverse_scale"]
    assert (found.verdict, found.module, found.value, found.said) == ("watch", "1.q", 2.0**-15, "3.05e-05")
    found = checks(tensor(np.array([448.0 * 2**26]), "1.q"))["inverse_scale"]
    assert (found.verdict, found.value) == ("bad", 2.0**-26)
    assert found.remedy == "its values reach 3.006e+10; `fp8q scales RUN --skip 'b.*' --skip 1.q`"


def test_of_weights_the_largest_channel_counts() -> None:
    weight = WeightScales(method="amax", axis=0, channels=2, scale_min=1.0, scale_max=2.0**15, sqnr_db=30.0)
    scales = Scales(weights={"0.up": weight}, activations={}, skipped={})
    found = checks(tensor(NORMAL), scales=scales)["inverse_scale"]
    assert (found.verdict, found.module) == ("watch", "0.up")


@pytest.mark.parametrize(("batches", "verdict"), [([1, 5], "good"), ([1, 20], "watch"), ([1, 200], "bad")])
def test_an_amax_that_jumps_wants_more_text(batches: list[float], verdict: str) -> None:
    found = checks(tensor(NORMAL, batches=np.array(batches, np.float32)))["amax_jumps"]
    assert found.verdict == verdict
    if verdict != "good":
        assert found.remedy == "`fp8q calibrate 'a model' --data text.txt --out OTHER --samples 128`"


def test_one_batch_tells_of_no_jump() -> None:
    found = checks(tensor(NORMAL, batches=np.array([4, np.nan], np.float32)))["amax_jumps"]
    assert (found.verdict, found.value) == ("unknown", None)
    assert found.said == "the calibration text was one batch; two are needed"


def test_what_is_lost_below_bf16_s_own_rounding_is_nothing() -> None:
    assert criteria.db_below_best(30.0, 38.0) == 8.0
    assert criteria.db_below_best(30.0, None) == float("inf")
    assert criteria.db_below_best(31.0, 30.0) == 0.0
    assert criteria.db_below_best(criteria.LOSSLESS_DB, None) == 0.0  # two terms: 150 dB, and 160 at the best scale
    assert criteria.db_below_best(None, None) == 0.0


FIRST = "model.layers.0.self_attn"


@pytest.fixture
def model(demo_run: Run, tmp_path: Path) -> Path:
    """The demo's checkpoint, whose cache is FP8."""
    return Path(shutil.copytree(demo_run.model, tmp_path / "model", ignore=shutil.ignore_patterns("*.onnx")))


def configured(model: Path, **fields: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


def test_a_cache_whose_scales_are_read_is_good(model: Path) -> None:
    (check,) = served_cache(model)
    assert (check.verdict, check.value, check.said, check.remedy) == ("good", 0, "none", None)


def test_layers_that_a_server_must_be_told_of_are_named_with_its_option(model: Path) -> None:
    own = json.loads((model / "config.json").read_text(encoding="utf-8")).get("fp8q", {})
    configured(model, fp8q=own | {"wide_cache": [FIRST]})
    (check,) = served_cache(model)
    assert (check.verdict, check.module, check.value) == ("watch", "config.json", 1)
    assert check.said == "C126: has 1 layer whose cache stays in BF16, and other loaders store it in FP8"
    assert check.remedy == "give vLLM --kv-cache-dtype-skip-layers 0"


def test_scales_of_heads_are_told_of_with_the_gpus_that_read_them(model: Path) -> None:
    quantization = json.loads((model / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    quantization["kv_cache_scheme"]["strategy"] = "attn_head"
    configured(model, quantization_config=quantization)
    (check,) = served_cache(model)
    assert (check.verdict, check.module, check.value) == ("watch", "config.json", 1)
    assert check.said.startswith(
        "C127: says a scale for each head of the cache, which vLLM has attention for on Hopper"
    )
    assert check.remedy == "give one a layer for those"


@pytest.mark.parametrize("said", [None, UNLOADABLE], ids=["none", "of Conv1D"])
def test_a_checkpoint_that_no_other_server_loads_is_unknown(model: Path, said: dict[str, str] | None) -> None:
    """The second is GPT-2's, at whose run `fp8q doctor` ended with an error."""
    configured(model, quantization_config=said)
    (check,) = served_cache(model)
    assert check.verdict == "unknown"
    assert check.said == "other servers do not load this checkpoint, and fp8q's own read every scale"
