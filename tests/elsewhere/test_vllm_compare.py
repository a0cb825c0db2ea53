"""`fp8q compare` asks vLLM's own server, and tells with the plugin from without, the original, another seed's model."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from vllm_jobs import installed_plugin

from fp8q import api
from fp8q.core.run import Run

from ..conftest import Texts
from .packages import site_packages

#: Seconds in which a server starts, on a busy machine too.
START_S = 400
WINDOWS = 12


@dataclass(frozen=True)
class Case:
    """A server: the checkpoint's name in `checkpoints`, with the plugin or without, further words, and the verdict."""

    checkpoint: str
    plugin: bool
    verdict: str
    sentence: str
    words: tuple[str, ...] = ()


CASES = {
    "plugin": Case("run", True, "validated", r"the validated model: \S+ nats of KL from reference"),
    "no plugin": Case(
        "run", False, "other-arithmetic", r"the model, but in one term where two were validated: .* from one-term"
    ),
    "original": Case("original", False, "other-arithmetic", r"the model, but in BF16: \S+ nats of KL from bf16"),
    "FP8 cache": Case(
        "run", True, "other-arithmetic", r"the model in an arithmetic that the run does not have .*",
        ("--kv-cache-dtype", "fp8"),
    ),
    "another seed": Case("another seed", False, "other-model", r"another model: .*"),
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path, demo_texts: Texts) -> Run:
    """The demo in two terms, its cache in BF16, validated on 30,000 characters."""
    folder = tmp_path_factory.mktemp("compared")
    evaluation = folder / "evaluation.txt"
    evaluation.write_text(demo_texts.evaluation.read_text(encoding="utf-8")[:30_000], encoding="utf-8")
    options = api.CalibrateOptions(samples=16, seq_len=128, activation_terms=2)
    texts = str(demo_texts.calibration), str(evaluation)
    made = api.calibrate(str(demo_checkpoint), texts[0], folder / "run", texts[1], options)
    api.validate(made.root, options=api.ValidateOptions(("bf16", "reference", "one-term")))
    return made


@pytest.fixture(scope="module")
def checkpoints(
    run: Run, demo_checkpoint: Path, demo_texts: Texts, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The run's checkpoint, what it was made of, and a model of the same shape and tokenizer from another seed."""
    other = tmp_path_factory.mktemp("seed") / "model"
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo_checkpoint), dtype=torch.float32)
    ids = torch.tensor(tokenizer(demo_texts.calibration.read_text(encoding="utf-8")[:60_000])["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(20):
        batch = ids[step * 512 : (step + 1) * 512].view(4, 128)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(other)
    tokenizer.save_pretrained(other)
    return {"run": run.model, "original": demo_checkpoint, "another seed": other}


@pytest.fixture(scope="module")
def paths(
    home_of: Callable[[str], Path], vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The folders of what vLLM's server imports, and of the plugin."""
    server = site_packages(home_of("vllm-server"))
    return server, installed_plugin(vllm_python, tmp_path_factory.mktemp("installed"))


@contextmanager
def served(python: Path, paths: tuple[Path, Path], model: Path, case: Case, log: Path) -> Iterator[str]:
    """The address of vLLM's server of `model`, until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    loaded = {"PYTHONPATH": os.pathsep.join(map(str, paths))} if case.plugin else {
        "PYTHONPATH": str(paths[0]), "VLLM_PLUGINS": "none"
    }  # fmt: skip
    environment = os.environ | loaded | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command: list[str | Path] = [
        python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "demo",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "256", "--enforce-eager",
        "--distributed-executor-backend", "uni", *case.words,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        try:
            wait_for(process, url, log)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of the same group
            process.wait()


def wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until the server answers; a skip where this CPU has no instructions for what is asked."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8", errors="replace")
            if "requires x86 with AVX-512 or AMX" in said:
                pytest.skip("an FP8 cache requires x86 with AVX-512 or AMX")
            raise AssertionError(said[-4000:])
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(f"vLLM's server did not start in {START_S} s")


@pytest.mark.parametrize("name", CASES)
def test_compare_tells_what_vllm_serves(
    name: str, run: Run, checkpoints: dict[str, Path], vllm_python: Path, paths: tuple[Path, Path], tmp_path: Path
) -> None:
    case = CASES[name]
    with served(vllm_python, paths, checkpoints[case.checkpoint], case, tmp_path / "log.txt") as url:
        found = api.compare(run.root, api.CompareOptions(url=url, windows=WINDOWS))
    assert (found.verdict, found.form) == (case.verdict, "prompt_logprobs")
    assert re.fullmatch(case.sentence, found.sentence), found.sentence
    assert found.requests == WINDOWS + 1  # its models first
    assert found.positions == WINDOWS * 127
    assert found.perplexity is not None
