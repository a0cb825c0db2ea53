"""Commands on a finished run of the demo, and on one that was killed."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8q import api
from fp8q.core.run import Run
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.serving_cost import cost_of
from fp8q.validate.accuracy.document import load_accuracy
from fp8q.validate.accuracy.document import load_token_losses as load_nll
from fp8q.validate.bench.document import gemm_shapes
from fp8q.validate.report.gains import gains
from fp8q.validate.report.rows import size_rows

pytestmark = pytest.mark.slow


@pytest.fixture
def copied(demo_run: Run, tmp_path: Path) -> Run:
    """A copy of the run that a test may change."""
    return Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))


def test_a_finished_run_does_nothing_again(copied: Run, demo_checkpoint: Path, demo_texts: Any) -> None:
    before = {
        path: path.stat().st_mtime_ns for path in copied.root.rglob("*") if path.is_file() and path.name != ".lock"
    }
    api.validate(copied.root, options=api.ValidateOptions())
    api.build_engine(copied.root, api.EngineOptions(runtime="tensorrt-rtx", max_seq_len=256))
    api.triton(copied.root)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_other_sums_are_two_more_rows_of_some_windows_and_what_they_take_is_a_note(
    copied: Run, demo_texts: Any, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(demo_texts.evaluation.read_text(encoding="utf-8")[:6000], encoding="utf-8")
    options = api.ValidateOptions(("bf16", "reference"), accumulator="two-level", accumulator_windows=2)
    runtimes = api.validate(copied.root, str(text), options).runtimes
    assert list(runtimes) == ["bf16", "reference", "reference-fp32", "reference-two-level"]
    context = load_accuracy(copied).protocol.context
    assert [runtime.tokens for runtime in runtimes.values()] == [None, None, 2 * (context - 1), 2 * (context - 1)]
    exact, two_level = runtimes["reference-fp32"], runtimes["reference-two-level"]
    assert two_level.kl_sums_nats is not None
    assert exact.kl_mean_nats is not None
    assert 0 < two_level.kl_sums_nats < exact.kl_mean_nats
    notes = copied.record().stages["validate"].notes
    said = next(note for note in notes if note.startswith("--accumulator two-level: the reference on 2 of "))
    assert f"the sums of {2 * context} tokens of 2,949,120 products take about " in said
    before = copied.accuracy.stat().st_mtime_ns
    api.validate(copied.root, str(text), options)
    assert copied.accuracy.stat().st_mtime_ns == before


def test_a_gate_that_is_not_met_names_the_runtime_and_the_numbers(copied: Run) -> None:
    with pytest.raises(
        api.GateError,
        match=(
            r"^(reference|onnxruntime): perplexity is \d+\.\d+% above BF16's, more than --max-ppl-increase 0%; "
            rf"`fp8q tune {copied.root} --max-ppl-increase 0%` finds"
        ),
    ):
        api.validate(copied.root, options=api.ValidateOptions(max_ppl_increase=0.0))


def test_another_limit_is_judged_again_and_nothing_is_evaluated_again(copied: Run) -> None:
    before = copied.record().stages["validate"]
    found = api.validate(copied.root, options=api.ValidateOptions(max_ppl_increase=0.5))
    assert found.verdict is not None
    assert (found.verdict.kind, found.verdict.limit, found.verdict.limit_is_default) == ("acceptable", 0.5, False)
    after = copied.record().stages["validate"]
    assert load_accuracy(copied) == found
    assert after.outputs["accuracy.json"] != before.outputs["accuracy.json"]
    assert after == before.model_copy(update={"outputs": after.outputs})
    card = copied.card.read_text(encoding="utf-8")
    assert "(limit 50 %)" in card
    assert card.count("<!-- accuracy -->") == 1
    with pytest.raises(api.GateError):
        api.validate(copied.root, options=api.ValidateOptions(max_ppl_increase=0.0))
    assert "(limit 0 %)" in copied.card.read_text(encoding="utf-8")
    again = api.report_verdict(copied.root)
    assert (again.kind, again.limit) == ("worse", 0.0)


def test_fewer_tokens_are_another_evaluation_of_evenly_spaced_windows(copied: Run) -> None:
    options = api.ValidateOptions(runtimes=("bf16", "reference"), max_tokens=1000)
    protocol = api.validate(copied.root, options=options).protocol
    whole = load_accuracy(copied).protocol
    assert protocol == whole
    assert protocol.of_tokens is not None
    assert protocol.tokens <= 1000 < protocol.of_tokens
    ids = load_nll(copied)["bf16"]
    assert int((~np.isnan(ids)).sum()) == protocol.tokens


def test_what_is_gained_is_said_by_bytes_and_operations(copied: Run) -> None:
    rows = {row.what.partition(" at ")[0]: row for row in gains(copied)}
    assert list(rows) == ["weights", "read by a decode step", "operations of a prompt, a token"]
    wide, codes = (
        cost_of(gemm_shapes(copied, 2048), {}),
        cost_of(gemm_shapes(copied, 2048), {}, load_scales(copied)),
    )
    head = 2048 * 256
    assert wide.prefill_operations - codes.prefill_operations == (wide.prefill_operations - 2 * head) // 2
    assert rows["operations of a prompt, a token"].gain == (
        f"prompts at most {wide.prefill_operations / codes.prefill_operations:.2f}×"
    )
    engine = next(row for row in size_rows(copied) if row.what == "engine for sm89")
    assert engine.share_of_bf16 is None
    assert str(engine.contents).endswith(" of compiled program, which does not grow with the size of a GEMM")


def test_a_damaged_file_is_refused_by_name(copied: Run) -> None:
    copied.onnx.write_bytes(copied.onnx.read_bytes()[:1000])
    with pytest.raises(
        api.InputError,
        match=(
            rf"^{copied.onnx}: is not the file that `fp8q export {copied.root}` wrote \(its SHA-256 differs from "
            r"run.json\); "
        ),
    ):
        api.build_engine(copied.root)


def test_a_run_of_another_model_is_refused(
    copied: Run, shared_checkpoint: Callable[[str], Path], demo_texts: Any
) -> None:
    with pytest.raises(api.InputError, match=rf"^{copied.root}: is a run of another model \(demo, fingerprint "):
        api.calibrate(
            str(shared_checkpoint("llama")), str(demo_texts.calibration), copied.root, str(demo_texts.evaluation)
        )


@pytest.mark.parametrize("command", ["inspect", "triton", "build-engine"])
def test_the_serving_hosts_commands_need_no_torch(copied: Run, base_install: Any, command: str) -> None:
    options = ["--target", "sm89", "--max-seq-len", "128"] if command == "build-engine" else []
    done = base_install(command, copied.root, *options, "--json", extras=("tensorrt-rtx",))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_a_missing_runtime_names_its_extra(demo_run: Run, base_install: Any) -> None:
    done = base_install("build-engine", demo_run.root)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == (
        "fp8q: TensorRT-RTX is not installed and this command needs it; install it with `pip install "
        "'fp8q[tensorrt-rtx]'`\n"
    )


def test_a_killed_run_goes_on_and_ends_the_same(
    demo_run: Run, demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    """SIGKILL while it measures, then again while it writes; the third attempt finishes with the bytes of an
    undisturbed run.
    """
    evaluation = demo_run.root.parent / "evaluation.txt"
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "fp8q",
        "calibrate",
        str(demo_checkpoint),
        "--data",
        str(demo_texts.calibration),
        "--eval-data",
        str(evaluation),
        "--out",
        str(out),
        "--kv-cache",
        "fp8",
        "--samples",
        "24",
        "--seq-len",
        "256",
    ]
    for sign in (out / "calibration.npz", out / "statistics.json"):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not sign.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sign.exists()
        process.kill()
        process.wait()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in (
        "calibration.npz",
        "statistics.safetensors",
        "scales.json",
        "model/model-00001-of-00001.safetensors",
        "model/model.onnx",
    ):
        assert (out / name).read_bytes() == (demo_run.root / name).read_bytes(), name
    assert not list(out.rglob(".*.partial"))
