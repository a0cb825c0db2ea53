"""`fp8q run` on the lowest versions that pyproject.toml allows, from calibration to ONNX Runtime; torch is the
environment's own, since a lower one has no wheel for CPUs in every index.
"""

import json
import os
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import fp8q
from fp8q.core.run import Run
from fp8q.validate.accuracy.document import load_accuracy

from ..conftest import Texts

ROOT = Path(fp8q.__file__).parent
LISTED = Path(__file__).with_name("lowest.txt")
LIFE_S = 600


def listed() -> dict[str, Version]:
    lines = [line for line in LISTED.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {name: Version(number) for name, _, number in (line.partition("==") for line in lines)}


def lower_bounds() -> dict[str, Version]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [Requirement(each) for each in (*project["dependencies"], *project["optional-dependencies"]["calibrate"])]
    return {each.name: Version(bound.version) for each in needed for bound in each.specifier if bound.operator == ">="}


def test_the_list_has_the_lower_end_of_every_range_but_torchs() -> None:
    """The first release of a series: 12.535.77 for 12.535, which was never released."""
    bounds = lower_bounds()
    del bounds["torch"]
    found = listed()
    assert bounds.keys() <= found.keys()
    for name, bound in bounds.items():
        assert found[name].release[: len(bound.release)] == bound.release, name


def test_the_demo_goes_the_whole_way(home_of: Callable[[str], Path], demo_texts: Texts, tmp_path: Path) -> None:
    python = home_of("lowest") / "bin" / "python"
    names = [name for name in listed() if name in lower_bounds()]
    ask = f"import json; from importlib.metadata import version; print(json.dumps([version(n) for n in {names}]))"
    told = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    assert [Version(each) for each in json.loads(told.stdout)] == [listed()[name] for name in names]
    words: list[str | Path] = ["run", ROOT / "examples" / "demo" / "checkpoint", "--data", demo_texts.calibration]
    words += ["--eval-data", demo_texts.evaluation, "--out", tmp_path / "run", "--max-tokens", "2048"]
    done = subprocess.run(
        [python, "-m", "fp8q", *words, "--samples", "16", "--seq-len", "64"], cwd=tmp_path,
        capture_output=True, text=True, timeout=LIFE_S, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    runtimes = load_accuracy(Run(tmp_path / "run")).runtimes
    assert runtimes["onnxruntime"].perplexity == pytest.approx(runtimes["reference"].perplexity, rel=0.01)
