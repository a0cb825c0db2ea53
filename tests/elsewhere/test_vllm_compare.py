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


@pytest.mark.parametrize("name", CASES)
def test_compare_tells_what_vllm_serves(
    name: str, run: Run, checkpoints: dict[str, Path], vllm_python: Path, paths: tuple[Path, Path], tmp_path: Path
) -> None:
    case = CASES[name]
    try:
        with vllm_server(vllm, checkpoints[case.checkpoint], case.plugin, tmp_path / "log.txt", case.words) as url:
            found = api.compare(run.root, api.CompareOptions(url=url, windows=WINDOWS))
    except UnsupportedError as error:
        pytest.skip(f"an FP8 cache: this CPU lacks what vLLM {error}")
    assert (found.verdict, found.form) == (case.verdict, "prompt_logprobs")
    assert re.fullmatch(case.sentence, found.sentence), found.sentence
    assert found.requests == WINDOWS + 1  # its models first
    assert found.positions == WINDOWS * 127
    assert found.perplexity is not None
