"""What is installed: the wheel holds the package and nothing else, and the base install needs none of the extras."""

import ast
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from tomllib import loads

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fp8q

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"calibrate", "core", "options", "cli", "quantize", "export", "validate", "serve", "stages"}
HEAVY = {
    "torch",
    "transformers",
    "modelopt",
    "datasets",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "tensorrt",
    "tensorrt_rtx",
    "matplotlib",
    "scipy",
    "pandas",
}
#: top-level module -> the distributions that bring it
OWNERS = metadata.packages_distributions()
PROJECT = loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy, so that neither an old `build/` gets into it nor a new one into the tree."""
    made = tmp_path_factory.mktemp("wheel")
    unneeded = shutil.ignore_patterns(
        ".venv", ".git", "runs", "build", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, made / "source", ignore=unneeded)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(made),
        str(made / "source"),
    ]
    built = subprocess.run(pip, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (file,) = made.glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def wheel_metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read(f"fp8q-{fp8q.__version__}.dist-info/METADATA").decode())


def test_the_wheel_holds_the_root_modules_and_the_folders_whole_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    at_root = {path.name for path in ROOT.glob("*.py")} | {"py.typed"}
    in_folders = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    at_root.add("notebooks/accuracy_report.ipynb")  # `fp8q report` executes it
    packed = {name.removeprefix("fp8q/") for name in wheel.namelist() if name.startswith("fp8q/")}
    assert packed == at_root | in_folders
    assert {name.split("/")[0] for name in wheel.namelist()} == {"fp8q", f"fp8q-{fp8q.__version__}.dist-info"}


def test_the_wheel_installs_the_command_and_carries_the_licence(
    wheel: zipfile.ZipFile, wheel_metadata: Message
) -> None:
    info = f"fp8q-{fp8q.__version__}.dist-info"
    assert wheel.read(f"{info}/entry_points.txt").decode().split("\n")[:2] == [
        "[console_scripts]",
        "fp8q = fp8q.cli.main:main",
    ]
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()
    assert wheel_metadata["License-Expression"] == "Apache-2.0"
    assert wheel_metadata["Version"] == fp8q.__version__


def test_the_extra_all_brings_every_other_but_tensorrt_evaluate_docs_and_dev(wheel_metadata: Message) -> None:
    requirements = [Requirement(line) for line in wheel_metadata.get_all("Requires-Dist", [])]
    of_all = next(r.extras for r in requirements if r.name == "fp8q")
    assert of_all == set(wheel_metadata.get_all("Provides-Extra", [])) - {"all", "dev", "docs", "evaluate", "tensorrt"}


def test_every_requirement_but_tensorrt_is_pinned_inside_its_range() -> None:
    """lm-eval in the list of its own environment, where the tests run it."""
    listed, own = ROOT / "constraints.txt", ROOT / "tests" / "elsewhere" / "lm-eval.txt"
    lines = [line for line in listed.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    (harness,) = [Requirement(line) for line in own.read_text(encoding="utf-8").splitlines() if "lm_eval" in line]
    pinned = [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate()]
    pins = {r.name: next(iter(r.specifier)).version for r in pinned}
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    every = [Requirement(line) for line in [*PROJECT["dependencies"], *(x for lines in extras.values() for x in lines)]]
    ranges = [r for r in every if r.marker is None or r.marker.evaluate()]
    outside = {
        str(r): pins.get(r.name)
        for r in ranges
        if r.name not in {"fp8q", "lm-eval", "tensorrt"} and not (r.name in pins and r.specifier.contains(pins[r.name]))
    }
    (wanted,) = [r for r in ranges if r.name == "lm-eval"]
    assert wanted.specifier.contains(next(iter(harness.specifier)).version)
    assert outside == {}
    assert set(map(canonicalize_name, pins)) <= {
        canonicalize_name(distribution.name) for distribution in metadata.distributions()
    }


def imported_distributions(source: Path) -> set[str]:
    """The distributions whose modules a file imports absolutely; those that own a namespace together count all."""
    found = set[str]()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
        found |= {owner for name in names for owner in OWNERS.get(name.partition(".")[0], [])}
    return {canonicalize_name(name) for name in found}


def test_every_library_the_package_imports_is_declared() -> None:
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    shipped = [line for name, lines in extras.items() if name not in {"dev", "docs"} for line in lines]
    declared = {canonicalize_name(Requirement(line).name) for line in [*PROJECT["dependencies"], *shipped]}
    declared.add(canonicalize_name("triton"))  # PyTorch's builds for CUDA bring it, and its kernels run on no other
    sources = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    undeclared = {
        path.relative_to(ROOT).as_posix(): missing
        for path in sources
        if (missing := imported_distributions(path) - declared)
    }
    assert undeclared == {}


def test_help_lists_the_commands_with_nothing_but_the_base_install(
    base_install: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    shown = base_install("--help")
    assert shown.returncode == 0, shown.stderr
    for command in (
        "run",
        "calibrate",
        "export",
        "lint",
        "build-engine",
        "engine",
        "validate",
        "generate",
        "serve",
        "bench",
        "triton",
        "report",
        "inspect",
        "doctor",
    ):
        assert f" {command} " in shown.stdout


def test_doctor_says_what_a_base_install_lacks_and_which_extra_brings_it(
    base_install: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    shown = base_install("doctor", "--json")
    assert shown.returncode == 0, shown.stderr
    (line,) = shown.stdout.splitlines()
    found = {row["name"]: (row["version"], row["remedy"]) for row in json.loads(line)["findings"]}
    assert found["torch"] == (None, "pip install 'fp8q[calibrate]'")
    assert found["onnxruntime"] == (metadata.version("onnxruntime"), "")


def test_calibrate_says_which_extra_it_needs(
    base_install: Callable[..., subprocess.CompletedProcess[str]], demo_checkpoint: Path, tmp_path: Path
) -> None:
    refused = base_install(
        "calibrate", demo_checkpoint, "--data", demo_checkpoint.parent / "calibration.txt", "--out", tmp_path / "run"
    )
    assert refused.returncode == 4
    assert (
        refused.stderr
        == "fp8q: torch is not installed and this command needs it; install it with `pip install 'fp8q[calibrate]'`\n"
    )
    assert not (tmp_path / "run").exists()


def test_help_loads_no_heavy_library_and_little_else() -> None:
    """Its time is that of importing modules: a third of a second to two thirds, by the processor."""
    code = (
        "import atexit, runpy, sys; sys.argv = ['fp8q', '--help']; atexit.register(lambda: print(*sys.modules, "
        "file=sys.stderr)); runpy.run_module('fp8q', run_name='__main__')"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded = shown.stderr.split()
    assert HEAVY.isdisjoint(loaded)
    assert "fp8q.cli.commands" in loaded
    assert len(loaded) < 600, len(loaded)


def test_no_address_of_a_package_index_stands_in_the_repository() -> None:
    """Whoever installs has an index of their own; PyTorch's installation page has those of its builds."""
    hosts = ("pypi" + ".org", "download.pytorch" + ".org", "pypi.nvidia" + ".com")
    folders = {*FOLDERS, "benchmarks", "docs", "examples", "integrations", "notebooks", "tests", ".ci"}
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    kinds = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".ipynb", ".j2", ""}
    texts = [path for path in files if path.suffix in kinds and path.stat().st_size < 2_000_000]
    assert len(texts) > 800
    named = [
        f"{path.relative_to(ROOT)}: {host}"
        for path in texts
        for host in hosts
        if host in path.read_text(encoding="utf-8", errors="ignore")
    ]
    assert named == []
