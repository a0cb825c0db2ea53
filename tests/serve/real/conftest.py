"""One real Triton server for all tests of this folder (one a worker), started by the first of them; each model is
loaded where a test first asks for it.

Tests that load a model anew have a server each: Triton 2.51 was seen to end by a segmentation fault meanwhile, and
would take the others' server with it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from clients import Grpc, Http
from environments import UnavailableError
from tritonserver import BACKENDS, Server, install, serving

from fp8q.core.reporter import SILENT
from fp8q.options import TritonOptions
from fp8q.serve.triton.repository import write_repository

if TYPE_CHECKING:
    from fp8q.core.run import Run

RIG = Path(__file__).parent / "rig"
#: A server that was forgotten ends after this. It serves one worker's whole session: the slow tests take an hour where
#: a machine is slow, and those that need the server may be its last.
LIFE_S = 3 * 3600


@contextmanager
def started(folder: Path) -> Iterator[Server]:
    """A server that has no model yet, and the stand-in for its TensorRT backend; its files are in `folder`."""
    try:
        home = install()
    except UnavailableError as error:
        pytest.skip(f"Triton's server cannot be installed here: {error}")
    (folder / "backends" / "tensorrt").mkdir(parents=True)
    (folder / "backends" / "python").symlink_to(home / BACKENDS / "python")
    shutil.copyfile(RIG / "tensorrt_stand_in.py", folder / "backends" / "tensorrt" / "model.py")
    (folder / "models").mkdir()
    words = [f"--backend-directory={folder / 'backends'}"]
    with serving(folder / "models", folder / "log.txt", words, life_s=LIFE_S) as server:
        yield server
        assert server.alive, "the server outlives all that it was asked"


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of all tests."""
    with started(tmp_path_factory.mktemp("triton")) as server:
        yield server


@pytest.fixture
def own_triton(tmp_path: Path) -> Iterator[Server]:
    """A server of one test."""
    with started(tmp_path / "triton") as server:
        yield server


@pytest.fixture(scope="session")
def http(triton: Server) -> Iterator[Http]:
    with Http(triton.http) as client:
        yield client


@pytest.fixture
def grpc(triton: Server) -> Iterator[Grpc]:
    with Grpc(triton.grpc) as stream:
        yield stream


def deploy(server: Server, run: Run, name: str, max_batch: int) -> str:
    """Put the repository of `run` into the server's and load the model; its name."""
    write_repository(run, TritonOptions(name=name, max_batch=max_batch), SILENT)
    shutil.copytree(run.triton / name, server.repository / name)
    with Http(server.http) as client:
        client.load(name)
    return name


@pytest.fixture(scope="session")
def counting_model(
    triton: Server, counting_run_at: Callable[[Path, int], Run], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """The counting model with 200 positions, eight requests at a time."""
    return deploy(triton, counting_run_at(tmp_path_factory.mktemp("counting") / "run", 200), "counting", 8)


@pytest.fixture(scope="session")
def endless_model(
    triton: Server, counting_run_at: Callable[[Path, int], Run], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """The counting model with so many positions that `t0`, to which it answers t0 for ever, takes minutes; two requests
    at a time.
    """
    return deploy(triton, counting_run_at(tmp_path_factory.mktemp("endless") / "run", 1_000_000), "endless", 2)


@pytest.fixture(scope="session")
def demo_model(triton: Server, demo_run: Run) -> str:
    """The demo as `fp8q run` leaves it."""
    (folder,) = (path for path in demo_run.triton.iterdir() if path.is_dir())
    shutil.copytree(folder, triton.repository / folder.name)
    with Http(triton.http) as client:
        client.load(folder.name)
    return folder.name
