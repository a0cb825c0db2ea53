"""What a repository's model runs on: the engine for the GPU that is there, or ONNX Runtime, and that not in silence."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import pytest

from fp8q.serve.loop import here
from fp8q.serve.loop.cuda import CudaError
from fp8q.serve.loop.sessions import OnnxRuntimeSession, SessionError
from tests.serve.counting_model import write_counting_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version's folder with the counting model, and engines that are no more than names."""
    write_counting_model(tmp_path / "weights", "fp8", 40)
    for runtime, target in (("tensorrt-rtx", "sm89"), ("tensorrt-rtx", "sm90"), ("tensorrt", "sm90")):
        plan = here.plan_path(tmp_path, runtime, target)  # type: ignore[arg-type]  # the loop widens it
        plan.parent.mkdir(parents=True, exist_ok=True)
        plan.write_bytes(b"a plan")
    return tmp_path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str]]:
    """The engines that are opened, instead of opening them: that takes their GPU."""
    found: list[tuple[Path, str]] = []
    monkeypatch.setattr(here, "EngineSession", lambda plan, runtime, gpu: found.append((plan, runtime)))
    return found


def on(gpu: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "cuda_target", lambda index: gpu)


@pytest.mark.parametrize(
    ("gpu", "runtime", "taken"),
    [
        ("sm90", "auto", "tensorrt/sm90"),
        ("sm89", "auto", "tensorrt-rtx/sm89"),
        ("sm90", "tensorrt-rtx", "tensorrt-rtx/sm90"),
    ],
)
def test_the_engine_of_the_gpu_is_taken(
    version: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch, gpu: str, runtime: str, taken: str
) -> None:
    on(gpu, monkeypatch)
    here.open_here(version, "weights", runtime)
    assert opened == [(version / "engines" / f"{taken}.plan", taken.partition("/")[0])]


def test_without_a_gpu_it_is_onnx_runtime(version: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    on(None, monkeypatch)
    assert isinstance(here.open_here(version, "weights"), OnnxRuntimeSession)
    on("sm90", monkeypatch)
    assert isinstance(here.open_here(version, "weights", "onnxruntime"), OnnxRuntimeSession)
    assert opened == []


def test_a_gpu_without_its_engine_is_told_of(
    version: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on("sm120", monkeypatch)
    missing = f"there is no engine for sm120 in {version / 'engines'} (there are: tensorrt/sm90, tensorrt-rtx/sm89, "
    with caplog.at_level(logging.WARNING, "fp8q"):
        assert isinstance(here.open_here(version, "weights"), OnnxRuntimeSession)
    assert [record.getMessage() for record in caplog.records] == [
        missing + "tensorrt-rtx/sm90); the model runs on ONNX Runtime, on the CPU"
    ]
    with pytest.raises(SessionError, match=f"^tensorrt: {re.escape(missing.partition(', ')[0])}\\)$"):
        here.open_here(version, "weights", "tensorrt")
    assert opened == []


def test_an_engine_that_does_not_load_is_an_error_and_not_passed_over(
    version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("sm89", monkeypatch)
    with pytest.raises(
        SessionError, match=r"^tensorrt-rtx: runs engines on an NVIDIA GPU|^tensorrt-rtx is not installed"
    ):
        here.open_here(version, "weights")


def test_a_machine_without_a_driver_has_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(index: int) -> Any:
        raise CudaError("there is no NVIDIA driver here")

    monkeypatch.setattr(here, "CudaDevice", missing)
    assert here.cuda_target() is None
