"""A run that one machine calibrated and validated, on a host with a GPU and no torch: engine, validation, report.

The host is a process of its own in which everything but the base install is hidden; GPU and runtime are stand-ins.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from packaging.utils import canonicalize_name

from fp8q.core.run import Run
from fp8q.validate.accuracy.document import load_accuracy, load_token_losses
from fp8q.validate.accuracy.top_logits import TOP, load_top_logits
from fp8q.validate.report.accuracy_rows import accuracy_rows
from tests.base_install import base_distributions
from tests.noise import check_one_model

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Fp8q = Callable[..., Any]

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'")

ROOT = Path(__file__).resolve().parents[2]
#: What the stand-in needs beside the base install.
STAND_IN = {"pytest", "pluggy", "iniconfig", "packaging"}
SIZES = ("--max-batch", "2", "--max-seq-len", "256", "--max-prompt", "96")


class Host:
    """A GPU's host without torch: `host("validate", run.root, plans={plan: graph})`."""

    def __init__(self, runtime: str) -> None:
        here = base_distributions("tensorrt-rtx") | STAND_IN
        owners = metadata.packages_distributions()
        modules = {name for name, of in owners.items() if here.isdisjoint(map(canonicalize_name, of))}
        assert {"torch", "transformers", "datasets", "modelopt", "matplotlib"} <= modules
        others = {each.name for each in metadata.distributions() if canonicalize_name(each.name) not in here}
        self.command = [sys.executable, "-m", "tests.stand_in.without_torch"]
        self.command += [",".join(sorted(modules)), ",".join(sorted(others)), runtime]

    def __call__(self, *words: object, plans: Mapping[Path, Path] | None = None) -> subprocess.CompletedProcess[str]:
        graphs = ",".join(f"{plan}={graph}" for plan, graph in (plans or {}).items())
        command = [*self.command, graphs, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=ROOT)


@pytest.fixture
def run(demo_run: Run, tmp_path: Path) -> Run:
    """The demo as it travels to another machine: without engines."""
    copied = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    shutil.rmtree(copied.engines)
    return copied


def files_in(run: Run) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}


def test_an_engine_is_validated_where_there_is_no_torch(fp8q: Fp8q, run: Run) -> None:
    host = Host("tensorrt")
    before, bytes_before = load_accuracy(run), run.top_logits.stat().st_size
    built = host("build-engine", run.root, "--runtime", "tensorrt", *SIZES)
    assert built.returncode == 0, built.stderr
    plans = {run.engines / "sm89.plan": run.onnx_fp32}

    validated = host("validate", run.root, "--runtimes", "tensorrt", plans=plans)
    assert validated.returncode == 0, validated.stderr
    assert "tensorrt: held against bf16, reference, onnxruntime as the run keeps them" in validated.stderr
    after = load_accuracy(run)
    assert after.protocol == before.protocol
    assert {name: after.runtimes[name] for name in before.runtimes} == before.runtimes
    ours = after.runtimes["tensorrt"]
    check_one_model(load_token_losses(run), "tensorrt", "onnxruntime")
    assert ours.perplexity_increase == pytest.approx(ours.perplexity / after.runtimes["bf16"].perplexity - 1, rel=1e-6)
    assert ours.stored is not None
    assert {*ours.stored.runtimes} == {"bf16", "reference", "onnxruntime"}
    for name, distance in ours.stored.runtimes.items():
        assert distance.kl_nats.low <= distance.kl_nats.mean <= distance.kl_nats.high <= distance.kl_most_nats
        increase = np.log(ours.perplexity / after.runtimes[name].perplexity)
        assert distance.nll_increase_nats.mean == pytest.approx(increase, abs=1e-6)
        assert 0.9 < distance.top1_agreement <= 1
    nearest = min(ours.stored.runtimes.items(), key=lambda named: named[1].kl_nats.mean)[0]
    assert nearest == "onnxruntime", "the stand-in runs its graph"
    kept = load_top_logits(run)
    assert kept.runtimes["tensorrt"].tokens.shape == (ours.stored.positions, TOP)
    each = run.top_logits.stat().st_size - bytes_before
    assert each / ours.stored.positions == pytest.approx(8 * TOP + 4, rel=0.01), "what docs/validate.md states"
    row = next(row for row in accuracy_rows(run) if row.runtime == "tensorrt")
    assert row.increase_low is not None
    assert row.kl_least_nats == ours.stored.runtimes["bf16"].kl_nats.mean

    assert f"- `tensorrt`: perplexity {ours.perplexity:.4f}, " in run.card.read_text(encoding="utf-8")

    done = files_in(run)
    assert host("validate", run.root, "--runtimes", "tensorrt", plans=plans).returncode == 0
    assert files_in(run) == done, "the host finds its work done"
    assert fp8q("validate", run.root).code == 0
    assert files_in(run) == done, "and so does the machine that calibrated"

    assert fp8q("report", run.root, "--continuations", "0").code == 0
    assert "held against what the run keeps of bf16" in run.report_html.read_text(encoding="utf-8")

    assert host("build-engine", run.root, "--runtime", "tensorrt", "--max-batch", "1", *SIZES[2:]).returncode == 0
    again = fp8q("validate", run.root)
    assert again.code == 0
    assert "tensorrt: left out of accuracy.json, since the engine has been built again" in again.err
    assert load_accuracy(run) == before
    assert "`tensorrt`" not in run.card.read_text(encoding="utf-8")
    assert {*load_token_losses(run)} == {*before.runtimes}
    assert {*load_top_logits(run).runtimes} == {*before.runtimes}


def test_a_host_without_torch_says_what_to_run_where_nothing_fits(run: Run) -> None:
    host, there = (
        Host("tensorrt"),
        f"`fp8q validate {run.root}{{}}` on the machine that calibrated it, and copy the run again",
    )

    def refused(*words: str, code: int = 2) -> str:
        before = files_in(run)
        found = host("validate", run.root, *words)
        assert found.returncode == code, found.stderr
        assert files_in(run) == before
        (line,) = found.stderr.splitlines()
        return line.removeprefix("fp8q: ")

    assert refused("--runtimes", "onnxruntime", "--context", "64") == (
        f"{run.top_logits}: was kept with --context 256, not 64; run " + there.format(" --context 64")
    )
    assert refused("--runtimes", "onnxruntime", "--as-served", "64") == (
        f"{run.top_logits}: was kept with --as-served whole windows, not 64; run " + there.format(" --as-served 64")
    )
    assert refused(code=4) == (
        "torch is not installed and the runtime bf16 needs it; install it with `pip install 'fp8q[calibrate]'`, or "
        "give --runtimes onnxruntime, or an engine's: they are held against what the run keeps of the others"
    )
    assert refused("--runtimes", "onnxruntime", "--data", "other.txt", code=4) == (
        "--data other.txt: is read and tokenized by libraries of which torch is not installed; leave it out, to "
        "evaluate on the text that was held out, or install them with `pip install 'fp8q[calibrate]'`"
    )
    record = json.loads(run.record_file.read_text(encoding="utf-8"))
    del record["stages"]["validate"]
    run.record_file.write_text(json.dumps(record), encoding="utf-8")
    assert refused("--runtimes", "onnxruntime") == (
        f"{run.top_logits}: is missing, and without torch runtimes are held against what is in it; run "
        + there.format("")
    )
