"""What the tests of serving share: the counting model in every form of the cache, its sessions and runs."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fp8q.core.run import Run
from fp8q.export.engine.profiles import profiles
from fp8q.export.engine.targets import MODULES
from fp8q.serve.loop.device_batch import DeviceBatch
from fp8q.serve.loop.device_kernels import load_kernels
from fp8q.serve.loop.engine_session import RUNTIMES, EngineRuntime, EngineSession
from fp8q.serve.loop.sessions import Batch
from tests.stand_in.driver import Driver
from tests.stand_in.runtime import Machine, machine

from .counting_model import PLAN, CountingModel, make_counting_run, make_wide_run, record_engine, write_counting_model
from .host_engine import HostDevice, HostProgram

OpenEngine = Callable[..., EngineSession]


@pytest.fixture(scope="session", params=["off", "v", "fp8"])
def counting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CountingModel:
    """With each kind of cache, and one of them with a graph that gives the logits of all positions."""
    directory = tmp_path_factory.mktemp("counting") / "model"
    write_counting_model(directory, request.param, positions=200, asks=request.param != "v")
    return CountingModel(directory, request.param, 200)


@pytest.fixture
def host_device() -> type[HostDevice]:
    """`host_device()`: a device in host memory."""
    return HostDevice


@pytest.fixture(params=["host", "device", *RUNTIMES])
def open_batch(request: pytest.FixtureRequest, open_engine: OpenEngine) -> Callable[..., Batch]:
    """`open_batch(counting, rows)`: a batch of the counting model in host memory, one on a device, and one of an engine
    on each runtime.
    """

    def opened(counting: CountingModel, rows: int = 4) -> Batch:
        if request.param in RUNTIMES:
            return open_engine(counting, request.param, rows).open_batch(rows, counting.positions)
        session = counting.session()
        if request.param == "host":
            return session.open_batch(rows, counting.positions)
        device = HostDevice()
        kernels = load_kernels(device, session.layout)
        return DeviceBatch(HostProgram(session, device), device, rows, counting.positions, kernels)

    return opened


@pytest.fixture
def gpu() -> Iterator[Machine]:
    """A machine with a GPU and both runtimes, by stand-ins for the driver and for them."""
    with machine(Driver(), *MODULES.values()) as found:
        yield found


@pytest.fixture
def open_engine(gpu: Machine, tmp_path: Path) -> OpenEngine:
    """`open_engine(counting, "tensorrt", rows)`: an engine of the counting model for so many rows, on a runtime."""

    def opened(counting: CountingModel, runtime: EngineRuntime, rows: int = 4) -> EngineSession:
        plan = tmp_path / "counting.plan"
        plan.write_bytes(PLAN)
        plan.with_suffix(".json").write_text(json.dumps({"branches": False}))
        gpu.knows(plan, counting.directory / "model.fp32.onnx", profiles(rows, counting.positions))
        return EngineSession(plan, runtime)

    return opened


@pytest.fixture
def on_device() -> Callable[..., tuple[DeviceBatch, HostDevice, HostProgram]]:
    """`on_device(counting, rows, positions, captures)`: a batch on a device, with that and its program."""

    def opened(
        counting: CountingModel, rows: int = 4, positions: int | None = None, captures: bool = True
    ) -> tuple[DeviceBatch, HostDevice, HostProgram]:
        device = HostDevice()
        program = HostProgram(counting.session(), device)
        program.captures = captures
        kernels = load_kernels(device, program.layout)
        device.captures = 0  # those of their example
        device.launched.clear()
        return DeviceBatch(program, device, rows, positions or counting.positions, kernels), device, program

    return opened


@pytest.fixture(scope="session")
def counting_run_at() -> Callable[[Path, int], Run]:
    """`counting_run_at(root, positions)`: a run of the counting model there."""
    return make_counting_run


@pytest.fixture
def counting_run(tmp_path: Path) -> Run:
    """A run of the counting model with 40 positions."""
    return make_counting_run(tmp_path / "run", 40)


@pytest.fixture
def wide_run(tmp_path: Path) -> Run:
    """Such a run of a test's own."""
    return make_wide_run(tmp_path / "run")


@pytest.fixture
def engine_run(wide_run: Run) -> Run:
    """`wide_run` with an engine of TensorRT."""
    record_engine(wide_run)
    return wide_run
