"""What `make triton` runs, and what it says where it cannot."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tritonserver
from clients import Http
from environments import UnavailableError

from fp8q.core.reporter import SILENT
from fp8q.options import TritonOptions
from fp8q.serve.triton.repository import write_repository

if TYPE_CHECKING:
    from tritonserver import Server

    from fp8q.core.run import Run

SCRIPT = Path(tritonserver.__file__)


@pytest.fixture
def repository(counting_run_at: Callable[[Path, int], Run], tmp_path: Path) -> Path:
    run = counting_run_at(tmp_path / "run", 1_000_000)
    write_repository(run, TritonOptions(name="counting"), SILENT)
    return run.triton


def test_the_line_to_try_works_and_ctrl_c_stops_it_in_seconds(triton: Server, repository: Path) -> None:
    """Even while it answers."""
    command = [sys.executable, str(SCRIPT), str(repository), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(3)]
        assert said[2] == "Ctrl-C stops it.\n"
        curl, quiet, url, data, asked = shlex.split(said[1])
        assert (curl, quiet, data) == ("curl", "-sN", "-d")
        address, model = url.removesuffix("/generate_stream").split("/v2/models/")
        with Http(address) as http:
            assert len(list(http.stream(model, **json.loads(asked)))) == 48
            assert next(http.stream(model, text_input="t0", max_tokens=999_999, stream=True)) == {"text_output": " t0"}
            process.send_signal(signal.SIGINT)
            begun = time.monotonic()
            assert process.wait(30) == 0
            assert time.monotonic() - begun < 10


def test_a_port_that_is_taken_is_told(triton: Server, repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, str(SCRIPT), str(repository), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, f"tritonserver: port {port} is taken; name another\n")


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (
        1,
        f"tritonserver: {tmp_path}: holds no model that runs in Python; `fp8q triton` writes one\n",
    )


def test_a_model_without_its_program_is_not_handed_to_the_server(repository: Path) -> None:
    (repository / "counting" / "1" / "model.py").rename(repository / "counting" / "model.txt")
    with pytest.raises(UnavailableError) as raised:
        tritonserver.check(repository)
    assert str(raised.value) == f"{repository / 'counting'}: has no model.py, and the server would wait for it"


def test_where_no_package_index_has_the_server_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_ARGS", "--isolated --no-index")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(UnavailableError) as raised:
        tritonserver.install(tmp_path / "triton")
    assert str(raised.value) == "pip: ERROR: No matching distribution found for nvidia-pytriton==0.7.0"
    assert not (tmp_path / "triton" / "installed").exists()
