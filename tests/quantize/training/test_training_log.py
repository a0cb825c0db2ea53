"""Reading a training log: one whose run ended while it wrote, and what is no such log."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8q.core.errors import InputError
from fp8q.quantize.training.training_log import COLUMNS, Head, Line, append_line, begin_log, is_log, read_log

HEAD = Head(model="Net", every=10, history=16, scaling="delayed", tensors=["0.input", "0.weight"], columns=[*COLUMNS])


def line(step: int) -> Line:
    return Line(
        step=step, loss=1.5, loss_finite=True, gradient_norm=None, gradient_finite=True, seconds=0.1,
        rows=[[1.0] * len(COLUMNS), None],
    )  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "training.jsonl"
    begin_log(path, HEAD, 0)
    for step in (0, 10):
        append_line(path, line(step))
    return path


def test_a_log_has_its_steps_and_the_tensors_that_were_there(log: Path) -> None:
    found = read_log(log.parent)
    assert found.steps.tolist() == [0, 10]
    assert found.tensors == ["0.input"]
    assert found.column("amax").tolist() == [[1.0], [1.0]]
    assert is_log(log)
    assert is_log(log.parent)
    assert not is_log(log.parent.parent)


def test_a_last_line_that_was_cut_short_is_left_out(log: Path) -> None:
    text = log.read_text()
    log.write_text(text[:-40])
    assert read_log(log).steps.tolist() == [0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: "", "line 1 is no head of a training log that fp8q.api.watch writes"),
        (lambda text: text.replace('"schema":1', '"schema":2'), "line 1 is no head of a training log that fp8q"),
        (lambda text: text.replace('"step":0', '"stp":0'), "line 2 is no record of a training step"),
        (lambda text: text.replace('"step":10', '"stp":10'), "line 3 is no record of a training step"),
        (lambda text: text.split("\n")[0] + "\n", "has no recorded step yet; train on, and call watch.step() once"),
        (lambda text: text.replace('"step":10', f'"step":{10**30}'), "line 3 is no record of a training step"),
        (lambda text: text.replace('"step":10', '"step":-10'), "line 3 is no record of a training step"),
        (lambda text: text.replace('"loss":1.5', '"loss":1e999'), "line 2 is no record of a training step"),
        (
            lambda text: text.replace('"rows":[[1.0,', '"rows":[['),
            f"line 2 has other rows than the {len(COLUMNS)} columns of 2 tensors that line 1 names",
        ),
        (
            lambda text: text.replace("],null]}", "],[]]}"),
            f"line 2 has other rows than the {len(COLUMNS)} columns of 2 tensors that line 1 names",
        ),
        (
            lambda text: text.replace("],null]}", "]]}"),
            f"line 2 has other rows than the {len(COLUMNS)} columns of 2 tensors that line 1 names",
        ),
        (lambda text: text.replace('"history":16', f'"history":{10**30}'), "line 1 is no head of a training log"),
        (lambda text: text.replace("e4m3_lost", "e4m3_gone"), "has other columns than this version of fp8q writes"),
    ],
)
def test_what_is_no_log_is_refused(log: Path, change: Callable[[str], str], why: str) -> None:
    log.write_text(change(log.read_text()))
    with pytest.raises(InputError, match=re.escape(f"{log}: {why}")):
        read_log(log)


def test_a_pipe_in_the_place_of_a_log_is_not_waited_for(log: Path) -> None:
    log.unlink()
    os.mkfifo(log)
    with pytest.raises(InputError) as refused:
        read_log(log)
    assert str(refused.value) == f"{log}: is a pipe; name a file"
