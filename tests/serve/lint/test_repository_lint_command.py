"""`fp8q lint` of folders as its users meet it: what is taken, exit codes, one form of JSON."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8q.core.run import Run

Fp8q = Callable[..., Any]
NEITHER = (
    "is a directory that holds neither run.json nor config.json nor models of Triton (folders with config.pbtxt); name "
    "an ONNX file, a Triton repository, a checkpoint or a run"
)


def test_a_repository_is_named_with_its_models_and_what_breaks_is_exit_3(fp8q: Fp8q, good: Run) -> None:
    result = fp8q("lint", good.triton)
    assert (result.code, result.err) == (0, "")
    assert result.out == f"{good.triton}: a Triton repository of chat, chat_engine\nno findings\n"
    (good.triton / "chat" / "1" / "model.py").unlink()
    line = (
        "R105 model-file: chat/1/model.py: there is no such file; a server waits for minutes for a model without it; "
        "run `fp8q triton` again"
    )
    broken = fp8q("lint", good.triton)
    assert (broken.code, broken.err) == (3, f"fp8q: {good.triton}: {line}\n")
    assert broken.out.splitlines()[1:] == [f"error   {line}"]


def test_the_json_has_one_form_for_graphs_and_repositories(fp8q: Fp8q, good: Run) -> None:
    (good.triton / "chat" / "1" / "model.py").unlink()
    (finding,) = json.loads(fp8q("lint", good.triton, "--json").out)["findings"]
    assert finding == {
        "file": str(good.triton),
        "rule": "R105",
        "severity": "error",
        "node": "chat/1/model.py",
        "module": None,
        "message": (
            "there is no such file; a server waits for minutes for a model without it; run `fp8q triton` again"
        ),
    }


def test_a_warning_alone_is_exit_0(fp8q: Fp8q, good: Run) -> None:
    (good.triton / "README.md").chmod(0o600)
    result = fp8q("lint", good.triton)
    assert (result.code, result.err) == (0, "")
    assert "warning R118 permissions: README.md: " in result.out


def test_what_is_neither_graph_nor_repository_nor_run_is_exit_2(fp8q: Fp8q, good: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert fp8q("lint", tmp_path / "empty").complaint() == f"{tmp_path / 'empty'}: {NEITHER}"
    # one model of a repository, not the repository
    assert fp8q("lint", good.triton / "chat").complaint() == f"{good.triton / 'chat'}: {NEITHER}"
    # a checkpoint, of numbers that are not quantized
    assert fp8q("lint", good.model).complaint().startswith(f"{good.model}: is a checkpoint that says nothing of quant")


def test_a_run_is_for_a_graph_alone(fp8q: Fp8q, good: Run) -> None:
    assert fp8q("lint", good.triton, "--run", good.root).complaint() == (
        f"--run {good.root}: is for an ONNX file, and {good.triton} is a directory; leave it out"
    )


def test_a_repository_is_linted_with_the_base_install(
    base_install: Callable[..., subprocess.CompletedProcess[str]], good: Run
) -> None:
    shown = base_install("lint", good.triton)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.endswith("a Triton repository of chat, chat_engine\nno findings\n")
