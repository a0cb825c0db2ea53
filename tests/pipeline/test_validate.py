"""`fp8q validate` on the finished demo: runtimes by name, one that fails half-way."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8q import api
from fp8q.errors import UnfinishedError
from fp8q.run import Run
from fp8q.serve.sessions import OnnxRuntimeSession
from fp8q.validate import compare, runtimes
from fp8q.validate.accuracy import load_accuracy, load_tokens, save_accuracy

SHORT = ("bf16", "reference", "onnxruntime")


@pytest.fixture
def run(demo_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A copy of the demo, evaluated in batches of eight windows of 64."""
    monkeypatch.setattr(compare, "LOGITS_BYTES", 8 * 64 * 2048 * 4)
    return Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))


@pytest.fixture
def text(demo_texts: Any, tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(demo_texts.evaluation.read_text(encoding="utf-8")[:5000], encoding="utf-8")
    return str(path)


def options(*names: str, **more: Any) -> api.ValidateOptions:
    return api.ValidateOptions(names, context=64, **more)


def test_fp32_and_the_checkpoints_own_type_run_by_name(run: Run, text: str) -> None:
    found = api.validate(run.root, text, options("reference", "fp32", "bf16", "original")).runtimes
    assert list(found) == ["reference", "fp32", "bf16", "original"]
    assert found["original"].perplexity == found["bf16"].perplexity  # the demo is stored in BF16
    assert (found["original"].kl_mean_nats, found["original"].top1_agreement) == (0, 1)
    own, fp8 = found["bf16"].kl_fp32_nats, found["reference"].kl_fp32_nats
    assert own is not None
    assert fp8 is not None
    assert 0 < own < fp8 / 5
    assert found["fp32"].kl_mean_nats == pytest.approx(own, rel=0.2)  # small divergences are the same either way
    assert found["fp32"].kl_fp32_nats is None


def broken(after: int) -> Callable[..., Any]:
    """`OnnxRuntimeSession.forward` that dies at the call `after`."""
    whole, calls = OnnxRuntimeSession.forward, list[int]()

    def forward(self: OnnxRuntimeSession, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == after:
            raise OSError("bad allocation")
        return whole(self, *given)

    return forward


def test_a_runtime_that_fails_leaves_the_others_numbers_and_is_tried_again(
    run: Run, text: str, fp8q: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("validate", run.root, "--data", text, "--context", "64", "--runtimes", ",".join(SHORT))
    with monkeypatch.context() as patch:
        patch.setattr(OnnxRuntimeSession, "forward", broken(after=2))
        found = fp8q(*asked)
    assert found.code == 4
    assert found.err.splitlines()[-1] == (
        "fp8q: onnxruntime: failed at window 9 to 16 of 22 (OSError: bad allocation); what bf16, reference gave is "
        "written, and the same command tries onnxruntime again: free memory or give a smaller --context, or leave "
        "onnxruntime out of --runtimes"
    )
    assert "reference" in found.out
    written = load_accuracy(run).runtimes
    assert list(written) == ["bf16", "reference"]
    assert load_tokens(run).keys() == {"bf16", "reference"}
    assert run.record().stages["validate"].unfinished == ("onnxruntime",)

    loaded = list[Run]()
    monkeypatch.setattr(runtimes, "reference", lambda run, device: loaded.append(run))
    again = api.validate(run.root, text, options(*SHORT)).runtimes
    assert list(again) == list(SHORT)
    assert {name: again[name] for name in written} == written
    assert loaded == []  # what the reference gave was kept
    assert run.record().stages["validate"].unfinished is None
    assert not [path for path in run.root.iterdir() if path.name.startswith(".validate")]


def test_where_all_fail_nothing_is_written_over(run: Run, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run.accuracy.read_bytes()
    monkeypatch.setattr(OnnxRuntimeSession, "forward", broken(after=1))
    with pytest.raises(
        api.Fp8qError, match=r"^onnxruntime: failed at window 1 to 8 of 22 \(OSError: bad allocation\)$"
    ):
        api.validate(run.root, text, options("onnxruntime"))
    assert run.accuracy.read_bytes() == before
    api.report_tables(run.root)


def test_a_whole_run_ends_its_other_stages_when_a_runtime_fails(
    run: Run, demo_checkpoint: Path, demo_texts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = list[str]()
    for name in ("build_engine", "triton", "report"):
        monkeypatch.setattr(api, name, lambda *given, name=name: stages.append(name))
    monkeypatch.setattr(api, "_calibrate", lambda *given: run)
    monkeypatch.setattr(OnnxRuntimeSession, "forward", broken(after=1))
    with pytest.raises(UnfinishedError, match=r"^onnxruntime: failed at window 1 to 8 of \d+ "):
        api.run(
            str(demo_checkpoint),
            str(demo_texts.calibration),
            run.root,
            options=api.RunOptions(validate=options(*SHORT)),
        )
    assert stages == ["build_engine", "triton", "report"]


def test_an_accuracy_of_before_is_read(run: Run) -> None:
    """`source` was what `original` is called now; the fields of today may be absent."""
    accuracy, nll = load_accuracy(run), load_tokens(run)
    old = {"source": accuracy.runtimes["bf16"], **accuracy.runtimes}
    with run.stage("validate", {}, {"context": 64}) as log:
        log.outputs += save_accuracy(run, accuracy.model_copy(update={"runtimes": old}), nll | {"source": nll["bf16"]})
    assert list(load_accuracy(run).runtimes) == ["original", *accuracy.runtimes]
    np.testing.assert_array_equal(load_tokens(run)["original"], nll["bf16"])
    api.report_tables(run.root)
