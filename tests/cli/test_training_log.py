"""`fp8q inspect LOG` and `fp8q report LOG`: a training that dies, as its user sees it, and wrong use."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation import Emulation, emulate
from torch import nn

from fp8q import api
from fp8q.options import WatchOptions


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a small model whose gradients are E4M3 codes without a scale, so that all become zero."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    names = [f"{layer}.0" for layer in range(3)]
    emulate(model, names, Emulation("e4m3", fixed_gradient_scale=1.0))
    folder, optimizer = tmp_path_factory.mktemp("log"), torch.optim.Adam(model.parameters())
    modules = {name: model.get_submodule(name) for name in names}
    with api.watch(model, folder, WatchOptions(every=1, scaling="none"), modules=modules) as recorder:
        for _ in range(8):
            loss = (model(torch.randn(500, 8)) - 0.5).square().mean()
            loss.backward()
            recorder.step(loss)
            optimizer.step()
            optimizer.zero_grad()
    return folder


def test_inspect_shows_depth_and_verdicts_with_the_worst_last(log: Path, fp8q: Callable[..., Any]) -> None:
    result = fp8q("inspect", log, "--gradients", "e4m3")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].strip() == "By depth"
    assert any("Checklist (8 records, steps 0 to 7" in line for line in lines)
    assert re.search(r"bad +underflow +2\.0\.gradient +100 %", result.out)
    assert re.search(r"bad +inverse_scale +0\.0\.gradient +zero at the end", result.out)
    assert lines[-1].startswith("Training in FP8, gradients in E4M3: bad (")


def test_json_has_every_check(log: Path, fp8q: Callable[..., Any]) -> None:
    result = fp8q("inspect", log / "training.jsonl", "--json")
    found = json.loads(result.out)
    assert (found["gradients"], found["records"], found["last_step"]) == ("e5m2", 8, 7)
    assert found["checks"][0]["verdict"] == "bad"
    assert {each["check"] for each in found["checks"]} == {
        "not_finite", "loss", "gradient_norm", "saturation", "underflow", "energy_lost", "training_jumps",
        "inverse_scale",
    }  # fmt: skip


def test_report_writes_one_page_that_asks_the_network_for_nothing(log: Path, fp8q: Callable[..., Any]) -> None:
    result = fp8q("report", log, "--gradients", "e4m3")
    assert (result.code, result.out) == (0, f"Wrote {log}/training.html.\n")
    page = (log / "training.html").read_text(encoding="utf-8")
    assert page.count('<div class="wide" role="img"') == 4
    assert "Training in FP8, gradients in E4M3</strong>: bad" in page
    assert "default-src 'none'" in page
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert json.loads(fp8q("report", log, "--json").out) == {"page": f"{log}/training.html"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("inspect", "--delayed"), "--delayed: is for a run, and this is a training log; leave it out"),
        (("inspect", "--against", "text.txt"), "--against: is for a run, and this is a training log; leave it out"),
        (("report", "--compare", "other"), "--compare: is for a run, and this is a training log; leave it out"),
    ],
)
def test_options_of_runs_are_refused(log: Path, fp8q: Callable[..., Any], words: tuple[str, ...], line: str) -> None:
    assert fp8q(words[0], log, *words[1:]).complaint() == line


def test_gradients_are_of_a_log_alone(tmp_path: Path, fp8q: Callable[..., Any]) -> None:
    for command in ("inspect", "report"):
        line = fp8q(command, tmp_path, "--gradients", "e5m2").complaint()
        assert line == (
            f"--gradients e5m2: is for a training log, and {tmp_path} has no training.jsonl; `fp8q.api.watch` writes "
            "one"
        )
