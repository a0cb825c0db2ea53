"""Ask vLLM for the losses of checkpoints, in an environment of its own, with fp8q-vllm or without it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from result import ROOT

#: No job takes longer, on a busy machine either.
LIFE_S = 900


def job(
    model: Path, ids: npt.NDArray[np.int64], exact: Path | None = None, adapter: Path | None = None, **more: Any
) -> dict[str, Any]:
    """What `vllm_losses.py` reads; `more`: of its fields."""
    paths = {"model": str(model), "exact": exact and str(exact), "adapter": adapter and str(adapter)}
    plain = {"cache": "auto", "wide_experts": False, "engine": {}, "steps": 0, "again": False}
    return plain | paths | {"windows": ids.tolist()} | more


def log_probabilities(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    """Of every position but the last, float32 [windows, context - 1, vocabulary]."""
    found: npt.NDArray[np.float32] = logits[:, :-1].float().log_softmax(-1).numpy()
    return found


def mean_kl(exact: npt.NDArray[np.float32], logits: torch.Tensor) -> float:
    """The mean KL in nats of the log-probabilities `exact` from those of `logits`."""
    return float((np.exp(exact) * (exact - log_probabilities(logits))).sum(-1).mean())


class Vllm:
    """A process of vLLM, which answers one job after the other (`vllm_losses.py`).

    `plugin`: the folder that fp8q-vllm is installed into; None for vLLM as it is. `folder`: to which paths of the jobs
    are relative, where they are.
    """

    def __init__(self, python: Path, plugin: Path | None = None, folder: Path | None = None) -> None:
        path = {"PYTHONPATH": str(plugin)} if plugin else {"VLLM_PLUGINS": "none"}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [python.absolute(), "-P", Path(__file__).resolve().with_name("vllm_losses.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=os.environ | path, cwd=folder,
            text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer to `job`.

        Raises RuntimeError, with the end of what vLLM said, where the process ended or took longer than `LIFE_S`.
        """
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        limit = Timer(LIFE_S, self._process.kill)
        limit.start()
        try:
            with suppress(BrokenPipeError):
                print(json.dumps(job), file=questions, flush=True)
            line = answers.readline()
        finally:
            limit.cancel()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"vLLM ended with status {status}: {self._log.read()[-4000:].decode(errors='replace')}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def ask(
    python: Path, jobs: Iterable[dict[str, Any]], plugin: Path | None = None, folder: Path | None = None
) -> list[dict[str, Any]]:
    """The answer of one process of vLLM to each of `jobs`; arguments as `Vllm` takes them."""
    with Vllm(python, plugin, folder) as vllm:
        return [vllm.ask(job) for job in jobs]


def installed_plugin(python: Path, folder: Path) -> Path:
    """Let pip install the plugin for `python` into a part of `folder`, which gets pip's `report.json` too."""
    copy, target = folder / "source", folder / "plugin"
    unneeded = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "integrations" / "vllm", copy, ignore=unneeded)  # links followed
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        python,
        "install",
        "--quiet",
    ]
    install = [*pip, "--no-build-isolation", "--target", target, "--report", folder / "report.json", copy]
    done = subprocess.run(install, capture_output=True, check=False, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return target
