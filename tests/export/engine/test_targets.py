"""Targets and runtimes: which there are, which are taken, and which are refused before any work."""

from typing import Any

import pytest

from fp8q.core.errors import BackendError, InputError
from fp8q.export.engine import targets
from fp8q.export.engine.build import resolve
from fp8q.options import EngineOptions

RTX = pytest.mark.skipif(
    "tensorrt-rtx" not in targets.available_runtimes(),
    reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'",
)


@pytest.mark.parametrize("target", ["sm75", "sm80", "sm86"])
def test_a_gpu_too_old_for_fp8_is_refused_before_any_work(target: str) -> None:
    with pytest.raises(InputError) as refused:
        resolve(EngineOptions(runtime="tensorrt-rtx", targets=("sm89", target)))
    assert (
        str(refused.value)
        == f"--target {target}: cannot do FP8, whose tensor cores begin with sm89; choose a newer one"
    )


@RTX
@pytest.mark.parametrize("target", ["sm99", "ada", "sm8", ""])
def test_a_target_that_the_runtime_does_not_know_is_refused_with_those_it_does(target: str) -> None:
    with pytest.raises(InputError) as refused:
        resolve(EngineOptions(runtime="tensorrt-rtx", targets=(target,)))
    assert str(refused.value) == f"--target {target}: TensorRT-RTX does not know it; choose from sm89, sm120, sm121"


@RTX
@pytest.mark.parametrize(
    ("target", "generation"),
    [("sm90", "Hopper"), ("sm100", "data-centre Blackwell"), ("sm103", "data-centre Blackwell")],
)
def test_a_data_centre_gpu_is_sent_to_tensorrt(target: str, generation: str) -> None:
    with pytest.raises(InputError) as refused:
        resolve(EngineOptions(targets=(target,)))
    assert str(refused.value) == (
        f"--target {target}: {generation} is none of TensorRT-RTX's GPUs (sm89, sm120, sm121); TensorRT builds for it, "
        "on that GPU: install it there with `pip install 'fp8q[tensorrt]'`, and run `fp8q build-engine RUN "
        "--runtime tensorrt`"
    )


@RTX
def test_without_a_gpu_tensorrt_rtx_builds_for_ada_and_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "gpu_target", lambda: None)
    resolved = resolve(EngineOptions())
    assert (resolved.runtime, resolved.targets) == ("tensorrt-rtx", ("sm89", "sm120"))
    assert resolve(EngineOptions(targets=("sm120", "sm120"))).targets == ("sm120",)


def test_auto_is_tensorrt_where_its_gpu_is_here_and_meant() -> None:
    both: Any = ("tensorrt", "tensorrt-rtx")
    assert targets.choose_runtime("auto", (), both, "sm90") == "tensorrt"
    assert targets.choose_runtime("auto", ("sm90",), both, "sm90") == "tensorrt"
    assert targets.choose_runtime("auto", ("sm89",), both, "sm90") == "tensorrt-rtx"
    assert targets.choose_runtime("auto", (), both, None) == "tensorrt-rtx"
    assert targets.choose_runtime("auto", (), ("tensorrt-rtx",), "sm90") == "tensorrt-rtx"


def test_default_targets_are_the_gpu_that_is_here_or_those_built_ahead_of_time() -> None:
    known = ("sm75", "sm86", "sm89", "sm120")
    assert targets.default_targets("tensorrt", "sm90", ("sm90",)) == ("sm90",)
    assert targets.default_targets("tensorrt-rtx", "sm120", known) == ("sm120",)
    assert targets.default_targets("tensorrt-rtx", "sm90", known) == ("sm89", "sm120")
    assert targets.default_targets("tensorrt-rtx", "sm86", known) == ("sm89", "sm120")
    with pytest.raises(
        BackendError,
        match=(
            "TensorRT builds on the GPU that will run the engine, and there is none here; --runtime tensorrt-rtx "
            "builds ahead of time"
        ),
    ):
        targets.default_targets("tensorrt", None, ())


@pytest.mark.parametrize(
    ("asked", "title", "extra"),
    [
        ("tensorrt", "TensorRT", "tensorrt"),
        ("tensorrt-rtx", "TensorRT-RTX", "tensorrt-rtx"),
        ("auto", "TensorRT-RTX", "tensorrt-rtx"),
    ],
)
def test_a_missing_runtime_names_its_extra(asked: Any, title: str, extra: str) -> None:
    with pytest.raises(BackendError) as missing:
        targets.choose_runtime(asked, (), (), None)
    assert (
        str(missing.value)
        == f"{title} is not installed and this command needs it; install it with `pip install 'fp8q[{extra}]'`"
    )


def test_tensorrt_is_told_to_build_for_another_gpu() -> None:
    with pytest.raises(InputError) as refused:
        targets.check_target("sm89", "tensorrt", ("sm90",))
    assert (
        str(refused.value)
        == "--target sm89: TensorRT does not know it; it builds for the GPU in this machine; choose from sm90"
    )


def test_capabilities_are_read_off_names() -> None:
    assert [targets.capability(name) for name in ("sm89", "sm120", "sm90a", "89")] == [(8, 9), (12, 0), None, None]
    assert [targets.can_do_fp8(name) for name in ("sm80", "sm87", "sm89", "sm90", "sm120")] == [
        False,
        False,
        True,
        True,
        True,
    ]
