"""The engine of a run for this machine's GPU, and what is said where there is none, on a stand-in for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from fp8q.core.errors import BackendError, InputError
from fp8q.core.run import Run
from fp8q.export.engine.targets import MODULES
from fp8q.serve.local.generation import engine_here, open_generator, open_run_engine
from tests.serve.counting_model import record_engine
from tests.stand_in.driver import Driver
from tests.stand_in.runtime import VERSION, Machine, machine

if TYPE_CHECKING:
    from fp8q.export.engine.targets import Runtime

Fp8q = Callable[..., Any]


@pytest.fixture
def hopper() -> Iterator[Machine]:
    with machine(Driver(9, 0), *MODULES.values()) as found:
        yield found


@pytest.fixture
def built(wide_run: Run) -> Run:
    """A run with an engine of TensorRT's for sm90, of the version that is installed."""
    record_engine(wide_run, VERSION)
    return wide_run


def test_the_engine_for_this_gpu_answers_and_gives_its_memory_back(hopper: Machine, built: Run, fp8q: Fp8q) -> None:
    plan, info = engine_here(built, "tensorrt")
    assert (plan, info.target) == (built.engines / "sm90.plan", "sm90")
    hopper.knows(plan, built.onnx_fp32)
    words = ("generate", built.root, "--prompt", "t3 t1 t4", "--max-tokens", "3")
    assert fp8q(*words, "--runtime", "tensorrt").out == fp8q(*words).out


@pytest.mark.parametrize(
    ("runtime", "target", "told"),
    [
        ("tensorrt", (8, 9), "tensorrt for sm89, this GPU (there are: sm90)"),
        ("tensorrt-rtx", (9, 0), "tensorrt-rtx for sm90, this GPU (there are: none)"),
    ],
)
def test_an_engine_of_another_gpu_or_runtime_is_not_taken(
    hopper: Machine, built: Run, runtime: Runtime, target: tuple[int, int], told: str
) -> None:
    hopper.driver.capability = target
    sm = "sm{}{}".format(*target)
    with pytest.raises(InputError) as refused:
        engine_here(built, runtime)
    assert str(refused.value) == (
        f"{built.engines}: holds no engine of {told}; run `fp8q build-engine {built.root} --runtime {runtime} --target "
        f"{sm}`"
    )


def test_an_engine_of_another_version_of_tensorrt_is_named_before_it_is_loaded(
    hopper: Machine, engine_run: Run, fp8q: Fp8q
) -> None:
    line = fp8q("generate", engine_run.root, "--prompt", "t1", "--runtime", "tensorrt").complaint(4)
    assert line == (
        f"{engine_run.engines / 'sm90.plan'}: TensorRT 10.16.1.11 built it, and runs it; TensorRT 11.4.0.1 is "
        "installed and does not: install that one (`pip install tensorrt==10.16.1.11`), or run `fp8q build-engine "
        f"{engine_run.root} --runtime tensorrt --target sm90` here"
    )


def test_a_plan_that_was_cut_off_is_not_the_one_that_was_built(hopper: Machine, built: Run, fp8q: Fp8q) -> None:
    plan = built.engines / "sm90.plan"
    plan.write_bytes(plan.read_bytes()[:-1])
    line = fp8q("generate", built.root, "--prompt", "t1", "--runtime", "tensorrt").complaint(2)
    assert line.startswith(f"{plan}: is not the file that `fp8q build-engine {built.root}` wrote")


def test_a_plan_that_does_not_load_and_a_runtime_that_does_not_start_are_backend_errors(
    hopper: Machine, built: Run
) -> None:
    with pytest.raises(
        BackendError, match=r"sm90\.plan: tensorrt 11\.4\.0\.1 does not load it on this GPU; build it here"
    ):
        open_run_engine(built, "tensorrt")
    hopper.starts = False
    with pytest.raises(BackendError, match=r"^tensorrt 11\.4\.0\.1 does not start on this machine's driver; update it"):
        open_run_engine(built, "tensorrt")


def test_an_engine_of_another_tensorrt_rtx_is_tried_and_its_version_named(hopper: Machine, wide_run: Run) -> None:
    record_engine(wide_run, "1.2.0", "tensorrt-rtx")
    with pytest.raises(BackendError, match=r"build it here with `fp8q build-engine` \(version 1\.2\.0 built it\)$"):
        open_run_engine(wide_run, "tensorrt-rtx")


def test_a_server_that_has_no_room_for_its_cache_does_not_begin(hopper: Machine, built: Run) -> None:
    hopper.knows(built.engines / "sm90.plan", built.onnx_fp32)
    session = open_run_engine(built, "tensorrt")
    hopper.driver.total = 3 * 32 * 64 + 45_000
    with pytest.raises(BackendError) as refused:
        open_generator(built, session, 4)
    assert str(refused.value) == (
        "a cache of 4 sequences of 40 positions takes 10.2 kB and the engine 45.8 kB to work in, and this GPU has 51.1 "
        "kB free, room for 2 of them; take --max-batch 2"
    )
    assert hopper.driver.held == {}
