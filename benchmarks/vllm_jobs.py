"""Ask vLLM for the losses of checkpoints, in an environment of its own, with fp8q-vllm or without it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from result import ROOT

#: No load takes longer, on a busy machine either.
LIFE_S = 2400


def job(
    model: Path, ids: npt.NDArray[np.int64], exact: Path | None = None, adapter: Path | None = None, **more: Any
) -> dict[str, Any]:
    """What `vllm_losses.py` reads; `more`: of its fields."""
    paths = {"model": str(model), "exact": exact and str(exact), "adapter": adapter and str(adapter)}
    plain = {"cache": "auto", "wide_experts": False, "engine": {}, "steps": 0}
    return plain | paths | {"windows": ids.tolist()} | more


def log_probabilities(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    """Of every position but the last, float32 [windows, context - 1, vocabulary]."""
    found: npt.NDArray[np.float32] = logits[:, :-1].float().log_softmax(-1).numpy()
    return found


def mean_kl(exact: npt.NDArray[np.float32], logits: torch.Tensor) -> float:
    """The mean KL in nats of the log-probabilities `exact` from those of `logits`."""
    return float((np.exp(exact) * (exact - log_probabilities(logits))).sum(-1).mean())


def ask(
    python: Path, jobs: Sequence[dict[str, Any]], plugin: Path | None = None, folder: Path | None = None
) -> list[dict[str, Any]]:
    """vLLM's answer to each of `jobs` (`vllm_losses.py`), all in one process of `python`.

    `plugin`: the folder that fp8q-vllm is installed into; None for vLLM as it is. `folder`: to which paths of the jobs
    are relative, where they are.
    """
    path = {"PYTHONPATH": str(plugin)} if plugin else {"VLLM_PLUGINS": "none"}
    done = subprocess.run(
        [python.absolute(), "-P", Path(__file__).resolve().with_name("vllm_losses.py")],
        input=json.dumps([*jobs]), capture_output=True, check=False, text=True, timeout=LIFE_S, env=os.environ | path,
        cwd=folder,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return [json.loads(line) for line in done.stdout.splitlines()]


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
