"""A real Triton server on this machine, for the tests of `serve/` and for `make triton`: installed, started, stopped.

    python tests/serve/real/rig/tritonserver.py RUN/triton [--port 8000]      serve that repository until Ctrl-C

NVIDIA ships the server in container images, and one wheel has it outside of them, Python backend included:
`nvidia-pytriton`, of which only the server is used. It is of an older make than today's images (2.51), and hands
tensors over by NumPy 1, so it gets an environment of its own, `.venv/triton`: the wheel's server and what the Python
model imports, in the versions of constraints.txt.

What it does badly, and what is done about it: a model without its model.py, and a stub that cannot start, hang it for
minutes, SIGINT ignored, so both are looked at before; and it runs in a process group that is killed when it does not
stop, and after a lifetime in any case (`timeout`, which outlives a test run that was killed).
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from environments import HOME as ENVIRONMENTS
from environments import UnavailableError, kept_environment, pip, pip_for

ROOT = Path(__file__).resolve().parents[4]
HOME = ENVIRONMENTS / "triton"
WHEEL = "nvidia-pytriton==0.7.0 --hash=sha256:21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df\n"
#: What the Python model imports: of constraints.txt, but for NumPy, with whose second version outputs have no bytes.
PACKAGES, NUMPY = ("onnxruntime", "tokenizers"), "numpy==1.26.4"
SERVER, LIBRARIES = "pytriton/tritonserver/", "nvidia_pytriton.libs/"
BACKENDS = SERVER + "backends"
READY_S, GRACE_S, STOP_S = 60, 3, 10
#: Past any proxy that the environment names.
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def install(home: Path = HOME) -> Path:
    """Install server and environment into `home`, if they are not there; returns `home`.

    Raises UnavailableError where there is no wheel for this platform or Python, no package index, or a library is
    missing.
    """

    def fill(home: Path) -> None:
        unpack(home)
        pip_for(home, *requirements())

    return kept_environment(home, [requirements(), WHEEL], fill)


def requirements() -> list[str]:
    """The packages of the server's environment."""
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [NUMPY, *(line for line in pinned if line.partition("==")[0] in PACKAGES)]


def unpack(home: Path) -> None:
    """Put the wheel's server into `home`, with the stub of this Python where the Python backend looks for it."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text(WHEEL)
        pip("download", "--no-deps", "--require-hashes", "--requirement", str(wanted), "--dest", folder)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith((SERVER, LIBRARIES))]
            archive.extractall(home, names)
    server, version = home / SERVER, f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise UnavailableError(f"{WHEEL.split(maxsplit=1)[0]} has no stub for Python {version}")
    for program in (server / "bin" / "tritonserver", Path(shutil.copy(stub, home / BACKENDS / "python"))):
        program.chmod(0o755)
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, env=environment(home)).stdout
        if missing := re.findall(r"(\S+) => not found", linked):
            raise UnavailableError(f"{program.name} needs {', '.join(missing)}")


def environment(home: Path) -> dict[str, str]:
    """Variables of the server: the stub finds its environment by PATH, and its libpython beside this interpreter."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR") or ""),
    }


@dataclass(frozen=True)
class Server:
    """A server that answers: its process, where it listens, and what it says."""

    process: subprocess.Popen[bytes]
    repository: Path
    log: Path
    http: str
    grpc: str

    @property
    def alive(self) -> bool:
        """Whether the process runs and answers."""
        return self.process.poll() is None and _healthy(self.http, "live")


@contextmanager
def serving(
    repository: Path, log: Path, words: Sequence[str] = (), ports: Sequence[int] = (), life_s: int = 0
) -> Iterator[Server]:
    """Serve `repository` on loopback for at most `life_s` seconds (0: any time); stopped, or killed, at the end.

    `words`: options that go after these; `ports`: of HTTP, gRPC and metrics, without them any that are free. Raises
    UnavailableError as `install` does, and when the server does not get ready.
    """
    home = install()
    check(repository)
    ports = ports or free_ports(3)
    for port in ports:
        _check_free(port)
    shared = f"fp8q-{os.getpid()}-{ports[0]}-"
    command = [
        *("timeout", "--kill-after=5", str(life_s), str(home / SERVER / "bin" / "tritonserver")),
        f"--backend-config=python,shm-region-prefix-name={shared}",
        *options(home, repository, ports),
        *words,
    ]
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment(home), start_new_session=True
        )
    server = Server(process, repository, log, f"http://127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}")
    try:
        _wait(server)
        yield server
    finally:
        stop(process)
        for left in Path("/dev/shm").glob(f"{shared}*"):  # what a stub that was killed leaves
            left.unlink(missing_ok=True)


def options(home: Path, repository: Path, ports: Sequence[int]) -> list[str]:
    """The server's options: models are loaded by name, everything listens on loopback alone."""
    return [
        f"--model-repository={repository}",
        f"--backend-directory={home / BACKENDS}",
        "--model-control-mode=explicit",
        "--allow-gpu-metrics=false",
        "--pinned-memory-pool-byte-size=0",
        f"--exit-timeout-secs={GRACE_S}",
        *(f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")),
        *(f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)),
    ]


def check(repository: Path) -> None:
    """Raise UnavailableError for a model in `repository` that would hang the server."""
    for config in repository.glob("*/config.pbtxt"):
        if 'backend: "python"' in config.read_text(encoding="utf-8") and not [*config.parent.glob("*/model.py")]:
            raise UnavailableError(f"{config.parent}: has no model.py, and the server would wait for it")


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens at."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _check_free(port: int) -> None:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        raise UnavailableError(f"port {port} is taken; name another") from None


def _healthy(http: str, what: str) -> bool:
    try:
        with DIRECTLY.open(f"{http}/v2/health/{what}", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _wait(server: Server) -> None:
    end = time.monotonic() + READY_S
    while not _healthy(server.http, "ready"):
        if server.process.poll() is not None or time.monotonic() > end:
            said = server.log.read_text(errors="replace").splitlines()[-20:]
            raise UnavailableError("the server did not get ready:\n" + "\n".join(said))
        time.sleep(0.05)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its stubs; kill what is left of them."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def models(repository: Path) -> list[str]:
    """The models that run in Python; an engine's wants a GPU and the TensorRT backend."""
    return sorted(path.parent.parent.name for path in repository.glob("*/1/model.py"))


def end_on_signals() -> None:
    """Let SIGINT, were it ignored before, and SIGTERM end this process as exceptions do, which stops the server."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def main() -> int:
    """Serve a repository until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--port", type=int, default=8000, help="of HTTP; gRPC and metrics take the next two; 0: any")
    given = parser.parse_args()
    end_on_signals()
    names = models(given.repository)
    words = [f"--load-model={name}" for name in names]
    ports = [given.port + offset for offset in range(3)] if given.port else []
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        try:
            if not names:
                raise UnavailableError(
                    f"{given.repository}: holds no model that runs in Python; `fp8q triton` writes one"
                )
            with serving(given.repository, Path(folder) / "log.txt", words, ports) as server:
                tell(f"Triton serves {', '.join(names)} at {server.http}, gRPC at {server.grpc}; its log: {server.log}")
                asked = json.dumps({"text_input": "def read_file(path):\n", "max_tokens": 48, "stream": True})
                tell(f"    curl -sN {server.http}/v2/models/{names[0]}/generate_stream -d '{asked}'")
                tell("Ctrl-C stops it.")
                return server.process.wait()
        except UnavailableError as error:
            tell(f"tritonserver: {error}")
            return 1
    return 0


def tell(line: str) -> None:
    """Print a line now, whoever reads it."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
