"""The GPU that a Triton instance runs on, where a host has several: that which Triton made it for, in every thread."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from fp8q.export.engine.profiles import profiles
from fp8q.export.engine.targets import MODULES
from fp8q.serve.loop.cuda import CudaDevice, CudaError
from fp8q.serve.loop.engine_session import RUNTIMES, EngineRuntime, EngineSession
from fp8q.serve.loop.generate import Generator, complete
from fp8q.serve.loop.here import open_here, plan_path
from fp8q.serve.loop.request import Request
from fp8q.serve.loop.sessions import OnnxRuntimeSession, SessionError
from fp8q.serve.loop.text import Vocabulary
from tests.serve.counting_model import PLAN, CountingModel, write_counting_model
from tests.stand_in.driver import Driver
from tests.stand_in.runtime import Machine, machine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def gpus() -> Iterator[Machine]:
    """A machine with three H100."""
    with machine(Driver(9, 0, gpus=3), *MODULES.values()) as found:
        yield found


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version's folder with the counting model and no engine."""
    write_counting_model(tmp_path / "weights", "fp8", 200)
    return tmp_path


def add_engine(gpus: Machine, version: Path, runtime: EngineRuntime, target: str) -> None:
    plan = plan_path(version, runtime, target)
    plan.parent.mkdir(parents=True)
    plan.write_bytes(PLAN)
    plan.with_suffix(".json").write_text('{"branches": false}')
    gpus.knows(plan, version / "weights" / "model.fp32.onnx", profiles(2, 200))


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("gpu", [None, 0, 2])
def test_an_instance_takes_memory_and_runs_on_its_own_gpu_in_every_thread(
    gpus: Machine, version: Path, runtime: EngineRuntime, gpu: int | None
) -> None:
    """The thread that steps is another than the one that loads, and has entered no GPU."""
    add_engine(gpus, version, runtime, "sm90")
    session = open_here(version, "weights", gpu=gpu)
    assert isinstance(session, EngineSession)
    generator = Generator(session, Vocabulary.read(version / "weights"))
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(complete(generator, [Request("t3 t1 t4", 6)])))
    thread.start()
    thread.join(60)
    expected = CountingModel(version / "weights", "fp8", 200).answer("t3 t1 t4", 6)
    assert [list(answer.tokens) for answer in answers] == [expected]
    assert set(gpus.driver.gpu_of.values()) == {gpu or 0}


def test_a_context_is_made_on_the_gpu_of_its_engine_in_a_thread_that_was_on_another(
    gpus: Machine, version: Path
) -> None:
    add_engine(gpus, version, "tensorrt", "sm90")
    session = open_here(version, "weights", gpu=2)
    assert isinstance(session, EngineSession)
    made = []

    def make() -> None:
        gpus.driver.cuCtxSetCurrent(1)  # as libraries leave a thread: on the first GPU
        made.append(session.context("decode"))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join(60)
    assert len(made) == 1, "the stand-in asserts the GPU"


def test_an_index_that_is_not_there_is_refused_in_one_line(gpus: Machine, version: Path) -> None:
    add_engine(gpus, version, "tensorrt", "sm90")
    said = "there is no GPU 3 here: CUDA shows 3, numbered from 0"
    with pytest.raises(SessionError, match=f"^{re.escape(said)}$"):
        open_here(version, "weights", gpu=3)
    with pytest.raises(CudaError, match=f"^{re.escape(said)}$"):
        CudaDevice(3)


def test_a_gpu_that_was_asked_for_and_has_no_engine_is_refused_and_not_passed_over(
    gpus: Machine, version: Path
) -> None:
    add_engine(gpus, version, "tensorrt-rtx", "sm120")
    said = (
        f"there is no engine for sm90, GPU 1, in {version / 'engines'} (there are: tensorrt-rtx/sm120); build it on "
        "that GPU with `fp8q build-engine`, or write the repository again without it in --gpus"
    )
    with pytest.raises(SessionError, match=f"^{re.escape(said)}$"):
        open_here(version, "weights", gpu=1)
    assert isinstance(open_here(version, "weights"), OnnxRuntimeSession)


def test_without_engines_an_instance_of_a_gpu_runs_on_onnx_runtime(gpus: Machine, version: Path) -> None:
    """A configuration that was edited by hand."""
    assert isinstance(open_here(version, "weights", gpu=1), OnnxRuntimeSession)
    assert gpus.driver.gpu_of == {}
