"""Start vLLM's own OpenAI server on a CPU, with fp8q-vllm or without it, and stop it in the end."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

#: Seconds in which a server starts, on a busy machine too.
START_S = 1500
#: The cache of a server: a few hundred of its longest prompts of a small model.
CACHE_BYTES = 256 << 20
#: What vLLM says where this CPU lacks instructions.
LACKING = "requires x86 with AVX-512 or AMX"


class UnsupportedError(Exception):
    """This CPU has no instructions for what the server is asked to do."""


@dataclass(frozen=True)
class Vllm:
    """vLLM's interpreter, and the folders of what its server imports and of the installed plugin."""

    python: Path
    packages: Path
    plugin: Path


@contextmanager
def vllm_server(vllm: Vllm, model: Path, with_plugin: bool, log: Path, words: Sequence[str] = ()) -> Iterator[str]:
    """The address of vLLM's server of `model` under the name `demo`, until the block ends; `words`: further ones of its
    command line, which come last.

    Raises UnsupportedError where vLLM says that this CPU cannot, RuntimeError with the end of its `log` otherwise.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    loaded = {"PYTHONPATH": os.pathsep.join(map(str, (vllm.packages, vllm.plugin)))} if with_plugin else {
        "PYTHONPATH": str(vllm.packages), "VLLM_PLUGINS": "none"
    }  # fmt: skip
    environment = os.environ | loaded | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command: list[str | Path] = [
        vllm.python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "demo",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "256", "--enforce-eager",
        "--distributed-executor-backend", "uni", "--kv-cache-memory-bytes", str(CACHE_BYTES), *words,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        try:
            _wait_for(process, url, log)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of the same group
            process.wait()


def _wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8", errors="replace")
            if LACKING in said:
                raise UnsupportedError(LACKING)
            raise RuntimeError(said[-4000:])
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise RuntimeError(f"vLLM's server did not start in {START_S} s")
