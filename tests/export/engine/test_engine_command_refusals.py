"""`fp8q engine` without a fitting plan, run or GPU."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.files import sha256_file
from fp8q.core.run import Run

from .engine_views import Fp8q, shown

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'")


def test_engines_of_other_files_than_the_run_has_now_are_refused(fp8q: Fp8q, demo_run: Run, tmp_path: Path) -> None:
    run, plan = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run"))), demo_run.engines / "sm89.plan"
    api.scales(run.root, api.RescaleOptions(clip=api.Clipping(margin=2)))
    assert fp8q("engine", run.root).complaint() == (
        f"{run.root}: what the stage build-engine wrote is of other files than are there now, which were made anew "
        f"since; run `fp8q build-engine {run.root}` again"
    )
    # a plan from elsewhere has no record: its weights' codes are the same at any margin, its scales are not
    code, view, error = shown(fp8q, run, "sm89", plan)
    assert (code, view["fp8_products"], view["codes_found"], view["factors_found"]) == (3, 28, 28, 0)
    assert f"{plan} is not the engine of this run: model.layers.0.self_attn.q_proj: its GEMM is scaled by " in error


def test_targets_and_plans_that_do_not_fit(fp8q: Fp8q, demo_run: Run, tmp_path: Path) -> None:
    root = demo_run.root
    for arguments, message in (
        (
            ["--target", "sm121"],
            (
                f"--target sm121: {root} has no engine for it; choose from sm89, sm120, or build it with `fp8q "
                f"build-engine {root} --target sm121`"
            ),
        ),
        (["--plan", "x"], "--plan x: belongs to one target; name it with --target, one of sm89, sm120"),
        (["--plan", tmp_path / "x", "--target", "sm89"], f"--plan {tmp_path}/x: there is no such file"),
        (
            ["--min-fp8-share", "2"],
            "--min-fp8-share 2: is no share of the GEMMs; give one from 0 to 1, or in percent, such as 96% or 0.96",
        ),
    ):
        result = fp8q("engine", root, *arguments)
        assert (result.code, result.out, result.err) == (2, "", f"fp8q: {message}\n")


def test_a_checkpoint_cut_short_or_gone_is_one_line(fp8q: Fp8q, demo_run: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    (shard,) = run.model.glob("*.safetensors")
    os.truncate(shard, 2_000_000)
    result = fp8q("engine", run.root)
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(
        rf"fp8q: {run.onnx}: F403 external-bounds: \S+\.weight: its data end at byte \d+ of {shard.name}, "
        r"which has 2000000; copy the graph's whole directory again\n",
        result.err,
    )
    shard.unlink()
    assert re.fullmatch(
        rf"fp8q: {run.onnx}: F402 external-missing: \S+\.weight: its file {shard.name} is missing "
        r"\(tensors in it: \d+\); copy the graph's whole directory again\n",
        fp8q("engine", run.root).err,
    )


def test_a_run_without_engines_says_what_to_run(fp8q: Fp8q, demo_run: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    record = json.loads(run.record_file.read_text())
    del record["stages"]["build-engine"]
    run.record_file.write_text(json.dumps(record))
    with pytest.raises(InputError, match=f"holds no engine; run `fp8q build-engine {run.root}` first"):
        api.engine(run.root)


def as_tensorrts(demo_run: Run, root: Path, inspected: Path | None = None) -> Run:
    """A copy of the run whose engine for sm89 is said to be TensorRT's, with what its inspector said of it."""
    run = Run(Path(shutil.copytree(demo_run.root, root)))
    info = run.engines / "sm89.json"
    info.write_text(info.read_text().replace('"tensorrt-rtx"', '"tensorrt"'))
    record = json.loads(run.record_file.read_text())
    outputs = record["stages"]["build-engine"]["outputs"]
    outputs["engines/sm89.json"] = sha256_file(info)
    if inspected:
        beside = run.engines / "sm89.layers.json"
        shutil.copy(inspected, beside)
        outputs["engines/sm89.layers.json"] = sha256_file(beside)
    run.record_file.write_text(json.dumps(record))
    return run


def test_tensorrts_own_engine_without_its_gpu_is_unknown_and_says_why(
    fp8q: Fp8q, demo_run: Run, tmp_path: Path
) -> None:
    run = as_tensorrts(demo_run, tmp_path / "run")
    result = fp8q("engine", run.root, "--target", "sm89", "--json", "--min-fp8-share", "1")
    (view,) = json.loads(result.out)["engines"]
    assert (result.code, view["evidence"], view["codes_found"]) == (3, "unknown", None)
    assert view["unknown"].startswith(
        "TensorRT's inspector has to be asked, on the GPU that it was built for: TensorRT cann"
    )
    shown = fp8q("engine", run.root, "--target", "sm89")
    assert shown.code == 0
    assert "an unknown number of 28 expected GEMMs on FP8 codes on both sides (UNKNOWN: TensorRT's" in shown.out


def test_what_the_inspector_said_on_the_gpu_is_read_where_there_is_none(
    fp8q: Fp8q, demo_run: Run, tmp_path: Path
) -> None:
    """The dump has the demo's first layer of four."""
    run = as_tensorrts(demo_run, tmp_path / "run", Path(__file__).parent / "layers" / "dq-10.layers.json")
    result = fp8q("engine", run.root, "--target", "sm89", "--json")
    (view,) = json.loads(result.out)["engines"]
    assert (result.code, view["evidence"], view["unknown"]) == (0, "inspector", None)
    assert (view["fp8_products"], len(view["untold"]), len(view["narrow"])) == (7, 21, 7)
    assert fp8q("engine", run.root, "--target", "sm89", "--min-fp8-share", "1").err == (
        "fp8q: sm89: 7 of 28 expected GEMMs take FP8 on both sides, less than --min-fp8-share 1; unknown: "
        f"{', '.join(view['untold'][:8])} and 13 more; `fp8q export` and `fp8q build-engine` again, or accept it with "
        "a smaller share\n"
    )


def test_engines_are_read_with_the_base_install_alone(
    base_install: Callable[..., subprocess.CompletedProcess[str]], demo_run: Run
) -> None:
    shown = base_install("engine", demo_run.root, "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert [view["fp8_products"] for view in json.loads(shown.stdout)["engines"]] == [28, 28]
