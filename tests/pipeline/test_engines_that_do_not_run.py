"""Engines that this machine does not run, through each command that runs one: one line, and nothing left behind."""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fp8q.core.files import sha256_file
from fp8q.core.run import Run
from fp8q.export.engine.targets import MODULES, Runtime
from fp8q.validate.accuracy.document import load_token_losses
from tests.noise import check_one_model

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'")

from tests.stand_in.driver import Driver
from tests.stand_in.runtime import Machine, machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Fp8q = Callable[..., Any]


@dataclass(frozen=True)
class Built:
    """A run with an engine of a runtime."""

    run: Run
    runtime: Runtime


COMMANDS = {
    "validate": ("--runtimes", "{}"),
    "generate": ("--runtime", "{}", "--prompt", "def f(", "--max-tokens", "4"),
    "serve": ("--runtime", "{}", "--port", "0"),
    "bench": ("--runtime", "{}", "--batch-sizes", "1", "--prompt-lengths", "32", "--tokens", "8", "--rounds", "1"),
}
RUNTIMES = tuple(MODULES)
pytestmark = pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX 1.2:DeprecationWarning")


@pytest.fixture(scope="module", params=RUNTIMES)
def built(request: pytest.FixtureRequest, demo_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The demo with an engine of a runtime for an Ada GPU, of 256 positions and two rows."""
    from fp8q import api

    run = Run(Path(shutil.copytree(demo_run.root, tmp_path_factory.mktemp("engine") / "run")))
    shutil.rmtree(run.engines)
    with machine(Driver(), *MODULES.values()):
        api.build_engine(run.root, api.EngineOptions(runtime=request.param, max_batch=2, max_seq_len=256))
    return Built(run, request.param)


@contextmanager
def host(built: Built, driver: Driver | None = None, known: bool = True) -> Iterator[Machine]:
    """A machine with both runtimes, which run the engine of a run where it is `known`."""
    with machine(driver or Driver(), *MODULES.values()) as here:
        if known:
            here.knows(built.run.engines / "sm89.plan", built.run.onnx_fp32)
        yield here


def contents(run: Run) -> dict[Path, bytes]:
    """The files of `run`, but for kernels that TensorRT-RTX compiled, which are as good later."""
    files = (path for path in run.root.rglob("*") if path.is_file() and path.suffix != ".kernels")
    return {path: path.read_bytes() for path in files}


def lines(fp8q: Fp8q, built: Built, code: int) -> dict[str, str]:
    """The line that each command ends with, in that exit code; nothing may change."""
    found, run = {}, built.run
    for command, words in COMMANDS.items():
        before = contents(run)
        result = fp8q(command, run.root, *(word.format(built.runtime) for word in words))
        assert contents(run) == before, command
        found[command] = result.complaint(code)
    return found


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was to be refused does not begin to serve, and wait."""

    def opened(*given: Any) -> None:
        raise AssertionError("it was to be refused")

    monkeypatch.setattr("fp8q.stages.serve.Server", opened)


def all_say(fp8q: Fp8q, built: Built, code: int) -> str:
    """The one line that all commands end with."""
    (line,) = {*lines(fp8q, built, code).values()}
    return line


def test_an_engine_of_another_gpu(fp8q: Fp8q, built: Built) -> None:
    with host(built, Driver(9, 0)):
        assert all_say(fp8q, built, 2) == (
            f"{built.run.engines}: holds no engine of {built.runtime} for sm90, this GPU (there are: sm89); run `fp8q "
            f"build-engine {built.run.root} --runtime {built.runtime} --target sm90`"
        )


def test_an_engine_of_another_runtime(fp8q: Fp8q, built: Built) -> None:
    other = next(name for name in MODULES if name != built.runtime)
    with host(built):
        assert all_say(fp8q, Built(built.run, other), 2) == (
            f"{built.run.engines}: holds no engine of {other} for sm89, this GPU (there are: none); run `fp8q "
            f"build-engine {built.run.root} --runtime {other} --target sm89`"
        )


def test_an_engine_of_another_version(fp8q: Fp8q, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT's are of one version; of TensorRT-RTX's the runtime says whether it loads them."""
    with host(built, known=False), monkeypatch.context() as patch:
        version = sys.modules[MODULES[built.runtime]].__version__
        patch.setattr(sys.modules[MODULES[built.runtime]], "__version__", "99.1")
        said, plan = all_say(fp8q, built, 4), built.run.engines / "sm89.plan"
    assert said == (
        f"{plan}: TensorRT {version} built it, and runs it; TensorRT 99.1 is installed and does not: install that one "
        f"(`pip install tensorrt=={version}`), or run `fp8q build-engine {built.run.root} --runtime tensorrt --target "
        "sm89` here"
        if built.runtime == "tensorrt"
        else f"{plan}: tensorrt-rtx 99.1 does not load it on this GPU; build it here with `fp8q build-engine` (version "
        f"{version} built it)"
    )


def test_a_driver_that_is_too_old(fp8q: Fp8q, built: Built) -> None:
    with host(built) as here:
        here.starts = False
        said, version = all_say(fp8q, built, 4), sys.modules[MODULES[built.runtime]].__version__
    assert said == (
        f"{built.runtime} {version} does not start on this machine's driver; update it (built for CUDA 13 it needs "
        "r580 or newer, for CUDA 12 r535)"
    )


def test_a_plan_that_is_cut_off(fp8q: Fp8q, built: Built) -> None:
    """Cut off on its way, and, as its record then says, before it was written."""
    plan, record, again = built.run.engines / "sm89.plan", built.run.record_file, f"fp8q build-engine {built.run.root}"
    whole, recorded = plan.read_bytes(), record.read_text(encoding="utf-8")
    try:
        plan.write_bytes(whole[:1000])
        with host(built, known=False):
            assert all_say(fp8q, built, 2) == (
                f"{plan}: is not the file that `{again}` wrote (its SHA-256 differs from run.json); restore it, or "
                f"delete it and run `{again}` again"
            )
            changed = json.loads(recorded)
            changed["stages"]["build-engine"]["outputs"]["engines/sm89.plan"] = sha256_file(plan)
            record.write_text(json.dumps(changed), encoding="utf-8")
            version = sys.modules[MODULES[built.runtime]].__version__
            assert all_say(fp8q, built, 4) == (
                f"{plan}: {built.runtime} {version} does not load it on this GPU; build it here with `fp8q "
                "build-engine`"
            )
    finally:
        plan.write_bytes(whole)
        record.write_text(recorded, encoding="utf-8")


def test_memory_that_does_not_hold_the_cache(fp8q: Fp8q, built: Built) -> None:
    """A row of 256 positions is 262 kB here: one line says that there is no room beside what the engine works in."""
    with host(built, Driver(total=1 << 17)):
        said = lines(fp8q, built, 4)
    for command, rows, takes in (("validate", "1 sequence", 262), ("serve", "2 sequences", 524)):
        remedy = "give a smaller --context, or end" if command == "validate" else "end"
        assert re.search(
            rf"a cache of {rows} of 256 positions takes {takes} kB and the engine \d{{3}} kB to work in, and this GPU "
            rf"has 131 kB free, room for no position of one; {remedy} what else runs ",
            said[command],
        ), said[command]
    for command in ("generate", "bench"):
        assert "room for no position of one; " in said[command]
        assert "0.00 GB" not in said[command]


def test_windows_run_one_by_one_where_memory_holds_no_two_caches(fp8q: Fp8q, built: Built, tmp_path: Path) -> None:
    """Of two windows, which the engine takes together, the logits alone are 4 MB."""
    copied = Built(Run(Path(shutil.copytree(built.run.root, tmp_path / "run"))), built.runtime)
    with host(copied, Driver(total=7 << 19)):
        validated = fp8q("validate", copied.run.root, "--runtimes", copied.runtime)
        assert validated.code == 0, validated.err
    check_one_model(load_token_losses(copied.run), copied.runtime, "onnxruntime")
