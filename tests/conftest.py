"""What all tests share: the demo, the checkpoints beside the repository, a base install, a GPU or none.

`OMP_NUM_THREADS` is set before anything can import torch: the number of threads decides in which order a GEMM is
summed, so that tests see the same values on every machine; and the threads of two processes would wait for each other.
"""

import ctypes
import functools
import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from packaging.utils import canonicalize_name

from fp8q.core.run import Run

from .base_install import HIDING, base_distributions
from .command_result import Result
from .tiers import (
    by_commit,
    mark_slow,
    pytest_addoption,
    pytest_configure,
    pytest_runtest_setup,
    pytest_terminal_summary,
)
from .traces import cache_of, kept_in, make_once

if TYPE_CHECKING:
    import numpy as np


__all__ = ["pytest_addoption", "pytest_configure", "pytest_runtest_setup", "pytest_terminal_summary"]  # hooks

MadeOnce = Callable[[str, Callable[[Path], object]], Path]
KeepingGraphs = Callable[[], AbstractContextManager[None]]
WithoutGraphs = Callable[[], AbstractContextManager[None]]

gc.set_threshold(100_000, 50, 50)  # torch's exporter makes millions of objects: 7 to 8 % less of the processor, by hand
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # some tests import ONNX Runtime themselves

# The same examples every time: a property that fails must fail for whoever looks at it. A slow machine is no failure.
hypothesis.settings.register_profile(
    "fp8q", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("fp8q")

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "demo"
SHARED = ROOT.parent / "shared"

#: Is set where `make test-isas` holds the suite to fewer instructions than the processor has.
LEVEL = "ATEN_CPU_CAPABILITY"

#: `make test-elsewhere` asks for it by name: it installs packages.
collect_ignore = ["elsewhere"]


#: What takes longest, begun in this order where several workers are at it, so that none has half a minute's work left
#: when the others have done; each the beginning of a group's name, of which the longest counts. Those that read the
#: demo's run come after the file that makes it: beside it they would wait for it.
LONGEST = (
    "faults/test_campaign", "pipeline/test_demo_run", "architecture", "pipeline", "calibrate/ranks", "test_merge",
    "cli/test_signals", "cli/test_scales", "docs/test_commands", "quantize/reference/test_kv_cache", "export/engine",
    "benchmarks/test_gpu", "validate/tuning/test_culprits", "validate", "pipeline/test_compare_endpoint",
    "serve/web/test_serve_demo",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow, skip what is marked `gpu` where the driver finds none, and let several workers begin with the
    longest.
    """
    mark_slow(items)
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="there is no NVIDIA GPU here (cuInit fails)"))
    if hasattr(config, "workerinput"):
        groups = {item: group_of(item.nodeid) for item in items}
        if config.getoption("minutes") is not None:
            later = set() if LEVEL not in os.environ else {*groups.values()} - computing(groups)
            items.sort(key=lambda item: (groups[item] in later, by_commit(groups[item])))
            return
        items.sort(key=lambda item: turn(groups[item]))


def turn(group: str) -> int:
    """Return the place of a group's tests by `LONGEST`; those that it does not name come last."""
    names = [name for name in LONGEST if group.startswith(name)]
    return LONGEST.index(max(names, key=len)) if names else len(LONGEST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each group to one worker. By marks pytest-xdist 3.8 does not: with pytest 9.2 it passes them over without a
    word (pytest-dev/pytest-xdist#1386), and every worker made what a file shares.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # the order is that of `LONGEST`, not of the numbers of tests
    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Let the garbage collector look no more through the libraries that are imported, and the tests themselves: of a
    graph's trace that is one part in twenty.
    """
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let it look again: what is still frozen at the end, Triton's bindings tell of as leaked, in hundreds of lines."""
    gc.unfreeze()


def computing(groups: Mapping[pytest.Item, str]) -> set[str]:
    """The groups whose tests compute with torch themselves, or are `pipeline`'s: all others hardly depend on the
    processor's instructions.
    """
    return {
        group
        for item, group in groups.items()
        if hasattr(getattr(item, "module", None), "torch") or group.startswith(("architecture", "pipeline/"))
    }


def group_of(nodeid: str) -> str:
    """Which tests share what is made once: those of a finished run of an architecture, whose parameter is its name and
    what it is (`pipeline/conftest.py`), and those of a file.
    """
    path = nodeid.partition("::")[0].removeprefix("tests/")
    finished = re.match(
        r"pipeline/test_(?:architectures|forms|stamped)\.py::\w+\[(\w+), ", nodeid.removeprefix("tests/")
    )
    return f"architecture {finished[1]}" if finished else path


@functools.cache
def has_gpu() -> bool:
    """Whether NVIDIA's driver is here and finds a device."""
    try:
        driver, devices = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(devices)) == 0 and devices.value > 0


if not has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: its kernels then run on the CPU


@pytest.fixture(scope="session", autouse=LEVEL in os.environ and "AMX" not in os.environ.get("ONEDNN_MAX_CPU_ISA", ""))
def codes_without_amx() -> Iterator[None]:
    """Under a level below AMX, let PyTorch multiply codes as it does on such a processor: it asks this one, and then
    oneDNN, which may not.
    """
    import torch

    multiply = torch._scaled_mm

    def without_onednn(*arguments: Any, **named: Any) -> torch.Tensor:
        torch._C._set_mkldnn_enabled(False)
        try:
            return multiply(*arguments, **named)
        finally:
            torch._C._set_mkldnn_enabled(True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", without_onednn)
        yield


@pytest.fixture(scope="session", autouse=True)
def validators_made_once() -> Iterator[None]:
    """Let pydantic make the validator of an option's type once: cyclopts asks for those of all options at every command
    line, which takes a third of it or more.
    """
    import pydantic
    from cyclopts.argument import Argument

    validate: Any = Argument.validate
    made_anew = pydantic.TypeAdapter
    made_once = functools.cache(made_anew)

    def adapter(hint: Any) -> Any:
        try:
            return made_once(hint)
        except TypeError:  # it has no hash
            return made_anew(hint)

    def validated(argument: Argument, value: Any) -> Any:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(pydantic, "TypeAdapter", adapter)
            return validate(argument, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Argument, "validate", validated)
        yield


@dataclass(frozen=True)
class Texts:
    """Two disjoint texts that the demo checkpoint was not trained on."""

    calibration: Path
    evaluation: Path


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    """The trained Llama of `examples/demo`."""
    return DEMO / "checkpoint"


@pytest.fixture(scope="session")
def opening_demo(made_once: MadeOnce, demo_checkpoint: Path) -> Path:
    """The demo with a tokenizer that puts BOS in front of a text, as the demo's were in training."""

    def make(folder: Path) -> None:
        copy = Path(shutil.copytree(demo_checkpoint, folder / "checkpoint"))
        tokenizer = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
        front = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        tokenizer["post_processor"]["single"].insert(0, front)
        tokenizer["post_processor"]["special_tokens"] = {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")

    return made_once("opening-demo", make) / "checkpoint"


@pytest.fixture(scope="session")
def made_adapter() -> Callable[..., Path]:
    """`made_adapter(base, folder, r=4)`: an adapter of `base` as PEFT saves it, with a `LoraConfig` of these fields and
    a B of random numbers, `size` large and begun with `seed`.
    """
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    def make(base: Path, folder: Path, size: float = 0.02, seed: int = 0, **fields: Any) -> Path:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **fields))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, size)
        adapted.save_pretrained(str(folder))
        return folder

    return make


@pytest.fixture(scope="session")
def demo_texts() -> Texts:
    """The demo's calibration and evaluation texts."""
    return Texts(DEMO / "calibration.txt", DEMO / "evaluation.txt")


def _shared(path: Path) -> Path:
    if not path.exists():
        pytest.skip(
            f"{os.path.relpath(path, ROOT)} is not here: the other trained checkpoints and their texts lie beside the "
            "repository, not in it"
        )
    return path


@pytest.fixture(scope="session")
def shared_checkpoint() -> Callable[[str], Path]:
    """`shared_checkpoint("llama")`: the directory of that checkpoint beside the repository, or a skip that says why."""
    return lambda name: _shared(SHARED / "checkpoints" / name)


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """`shared_data("python-evaluation.txt")`: that text beside the repository, or a skip that says why."""
    return lambda name: _shared(SHARED / "data" / name)


@pytest.fixture(scope="session")
def base_install() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`base_install("doctor", "--json")`: run fp8q as if only the base install (and `extras`) were there, in a process
    of its own.

    Everything installed that no requirement of the base leads to is hidden, so that an undeclared dependency fails as
    well.
    """

    def run(*arguments: str | Path, extras: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        base = base_distributions(*extras)
        hidden = {
            module
            for module, names in metadata.packages_distributions().items()
            if base.isdisjoint(map(canonicalize_name, names))
        }
        assert {"torch", "transformers", "datasets", "modelopt", "matplotlib"} <= hidden
        beyond = {found.name for found in metadata.distributions() if canonicalize_name(found.name) not in base}
        command = [
            sys.executable,
            "-c",
            HIDING,
            ",".join(sorted(hidden)),
            ",".join(sorted(beyond)),
            *map(str, arguments),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    return run


@pytest.fixture
def fp8q(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`fp8q("inspect", run, "--json")`: the command line, in this process."""
    from fp8q.cli.main import command

    def run(*arguments: object) -> Result:
        monkeypatch.setattr("sys.argv", ["fp8q", *map(str, arguments)])
        code = command()
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def quick_work_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work of less than a second is worth a line too: whether it takes that long is a matter of the machine."""
    monkeypatch.setattr("fp8q.core.reporter.WORTH_A_LINE_S", 0.0)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """`made_once("demo", make)`: the folder `demo`, which `make` has filled, in this worker or in another. All read it,
    and none changes it.
    """
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    return functools.partial(make_once, shared)


@pytest.fixture(scope="session")
def keeping_graphs(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> KeepingGraphs:
    """`with keeping_graphs():` graphs that were traced before, in this session or in an earlier one of the same code,
    are taken and not traced again: for tests of what lies around them (`traces.py`).
    """
    if not pytestconfig.pluginmanager.hasplugin("cacheprovider"):
        return functools.partial(kept_in, tmp_path_factory.mktemp("graphs"))
    return functools.partial(kept_in, cache_of(pytestconfig))


@pytest.fixture(scope="session")
def without_graphs() -> WithoutGraphs:
    """`with without_graphs():` the stage `export` makes nothing: for tests of what comes before it."""

    @contextmanager
    def without() -> Iterator[None]:

        from fp8q.stages import export as export_stage

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(export_stage, "export", lambda *_: None)
            yield

    return without


@pytest.fixture(scope="session")
def demo_run(
    made_once: MadeOnce, keeping_graphs: KeepingGraphs, tmp_path_factory: pytest.TempPathFactory,
    demo_checkpoint: Path, demo_texts: Texts,
) -> Run:  # fmt: skip
    """A finished run of the demo with an FP8 cache, made once for all tests; they read it and copy it, and change
    nothing in it. Each worker has a copy, since two processes do not work in one run.
    """
    from fp8q import api

    def make(folder: Path) -> None:
        evaluation = folder / "evaluation.txt"
        evaluation.write_text(demo_texts.evaluation.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
        options = api.RunOptions(
            calibrate=api.CalibrateOptions(kv_cache="fp8", samples=24, seq_len=256),
            engine=api.EngineOptions(runtime="tensorrt-rtx", max_seq_len=256),
        )
        with keeping_graphs():
            api.run(str(demo_checkpoint), str(demo_texts.calibration), folder / "run", str(evaluation), options)

    return Run(Path(shutil.copytree(made_once("demo", make), tmp_path_factory.mktemp("demo") / "demo")) / "run")


@pytest.fixture
def exact_logits() -> Callable[[Run, "np.ndarray"], "np.ndarray"]:
    """`exact_logits(run, ids)`: what the FP8 reference in exact FP32 says to ids [batch, seq] at once, through its own
    cache: [batch, seq, vocabulary].
    """
    import torch

    from fp8q.quantize.reference.fp8_model import load_reference

    def logits(run: Run, ids: "np.ndarray") -> "np.ndarray":
        reference = load_reference(run.model, "exact", torch.float32)
        with torch.inference_mode():
            found: np.ndarray = reference.model(
                input_ids=torch.from_numpy(ids), past_key_values=reference.new_cache(), use_cache=True
            ).logits.numpy()
        return found

    return logits


@pytest.fixture
def move_source() -> Callable[[Run, Path], None]:
    """`move_source(run, path)`: let the run's record say that its source model lies at `path`."""

    def move(run: Run, path: Path) -> None:
        record = json.loads(run.record_file.read_text())
        record["model"]["path"] = str(path)
        run.record_file.write_text(json.dumps(record))

    return move


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's chromium without a window, where it is."""
    driver = shutil.which("chromedriver")
    if not (driver and shutil.which("chromium")):
        pytest.skip("chromium and chromedriver are not here (Debian, Ubuntu: apt install chromium chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()
