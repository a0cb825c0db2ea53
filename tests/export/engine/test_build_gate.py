"""The gate of a build: the share of expected GEMMs that an engine is known to run in FP8."""

import pytest

from fp8q.core.errors import GateError
from fp8q.export.engine.build import remarks
from fp8q.export.engine.info import EngineInfo, check_share
from fp8q.export.engine.plan import Evidence
from fp8q.export.engine.profiles import profiles


def info(**changes: object) -> EngineInfo:
    known = {
        "runtime": "tensorrt-rtx",
        "version": "1.8",
        "target": "sm89",
        "bytes": 1,
        "promised_products": 12,
        "fp8_products": 12,
        "wide_products": [],
    }
    return EngineInfo.model_validate(
        known | {"evidence": "plan", "profiles": [*profiles(1, 64)], "build_seconds": 1.0} | changes
    )


def test_evidence_that_cannot_be_read_does_not_meet_a_share() -> None:
    unknown = info(evidence="unknown", fp8_products=0, unknown_products=["a"])
    with pytest.raises(GateError) as refused:
        check_share([info(), unknown], 0.5)
    assert str(refused.value) == (
        "sm89: what the engine of TensorRT-RTX 1.8 runs cannot be told from it, which does not meet --min-fp8-share "
        "0.5; "
        "use the version that fp8q pins, or accept it with --min-fp8-share 0"
    )
    check_share([unknown], 0)


def test_what_tensorrts_inspector_does_not_tell_fails_a_share_that_was_asked_for_alone() -> None:
    on_hopper = {"runtime": "tensorrt", "version": "11.4.0.1", "target": "sm90"}
    nothing = info(**on_hopper, evidence="unknown", fp8_products=0, unknown_products=["a"])
    check_share([nothing], None)
    check_share([nothing], 0)
    with pytest.raises(GateError) as refused:
        check_share([nothing], 1.0)
    assert str(refused.value) == (
        "sm90: what the engine of TensorRT 11.4.0.1 runs cannot be told from it, which does not meet --min-fp8-share "
        "1; its inspector's words are in sm90.layers.json, which a report should have, or accept it with "
        "--min-fp8-share 0"
    )
    some = info(**on_hopper, evidence="inspector", fp8_products=11, unknown_products=["a"])
    check_share([some], None)
    check_share([some], 0.9)
    with pytest.raises(GateError) as short:
        check_share([some], 1.0)
    assert str(short.value) == (
        "sm90: 11 of 12 expected GEMMs take FP8 on both sides, less than --min-fp8-share 1; unknown: a; the engine "
        "is kept, `fp8q export` again or accept it with a smaller share"
    )
    wide = info(**on_hopper, evidence="inspector", fp8_products=10, unknown_products=["a"], wide_products=["b"])
    with pytest.raises(GateError, match="^sm90: 10 of 12 .*, less than --min-fp8-share 1; wide: b; the engine is kept"):
        check_share([wide], None)
    with pytest.raises(GateError, match="^sm89: what the engine of TensorRT-RTX 1.8 runs cannot be told from it"):
        check_share([info(evidence="unknown")], None)


def test_a_narrow_answer_is_short_of_the_promise_in_a_plan_and_not_with_the_inspector() -> None:
    narrow = ["a", "b"]
    check_share([info(runtime="tensorrt", evidence="inspector", narrow_products=narrow)], 1.0)
    with pytest.raises(
        GateError, match="and 2 of them answer in less than FP32, less than --min-fp8-share 1; narrow: a, b"
    ):
        check_share([info(narrow_products=narrow)], None)


def test_what_is_not_told_is_noted_in_one_line_and_so_is_what_is_only_remarked() -> None:
    of = info(runtime="tensorrt", target="sm90", evidence="inspector", unknown_products=["a"], narrow_products=["b"])
    found = Evidence(
        "inspector", frozenset("b"), narrow=frozenset("b"), unknown={"a": "fp8 × unknown -> bf16 in profile 0"}
    )
    assert remarks(of, found) == [
        (
            "sm90: whether 1 of 12 expected GEMMs are FP8 on both sides cannot be told (as a: fp8 × unknown -> bf16 "
            "in profile 0); sm90.layers.json has what its inspector says"
        ),
        (
            "sm90: 1 FP8 GEMMs (as b) answer in less than FP32: a kernel that scales by itself rounds its sum once, "
            "to the graph's next type"
        ),
    ]


def test_what_an_earlier_version_wrote_of_an_engine_still_reads() -> None:
    assert info().narrow_products == []
    check_share([info()], 1.0)


def test_wide_and_narrow_products_are_both_named() -> None:
    with pytest.raises(GateError) as short:
        check_share([info(fp8_products=11, wide_products=["a"], narrow_products=["b", "c"])], 0.8)
    assert str(short.value) == (
        "sm89: 11 of 12 expected GEMMs take FP8 on both sides and 2 of them answer in less than FP32, less than "
        "--min-fp8-share 0.8; wide: a; narrow: b, c; the engine is kept, `fp8q export` again or accept it with a "
        "smaller share"
    )
    check_share([info(fp8_products=11, wide_products=["a"], narrow_products=["b", "c"])], 0.75)


def test_a_gate_names_the_first_wide_products_and_counts_the_rest() -> None:
    wide = [f"layers.{index}" for index in range(10)]
    with pytest.raises(
        GateError,
        match=r"sm89: 2 of 12 expected GEMMs .* wide: layers\.0, .*, layers\.7 and 2 more; the engine is kept",
    ):
        check_share([info(fp8_products=2, wide_products=wide)], 1.0)
