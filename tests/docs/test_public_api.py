"""What type checkers and editors know of the public functions follows from the option classes, and is true."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from fp8q import api
from fp8q.options import keywords
from fp8q.options.settings import option_names

ROOT = Path(__file__).parents[2]


def test_the_files_are_what_the_option_classes_make_of_them() -> None:
    """Else: `python docs/public_api.py --write`."""
    command = [sys.executable, "docs/public_api.py"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stderr == ""


def test_every_option_of_calibrate_is_a_keyword() -> None:
    given = keywords.CalibrateSettings.__annotations__.keys()
    assert given == option_names(api.CalibrateOptions()) | option_names(api.ExportOptions()) | {"preset"}


@pytest.mark.slow
def test_the_types_of_results_can_be_imported() -> None:
    assert {"Accuracy", "Converted", "Sensitivity", "Tuning", "Checkup"} <= api.RETURNED.keys()
    for name, module in api.RETURNED.items():
        assert getattr(api, name) is getattr(import_module(module, "fp8q"), name)
    with pytest.raises(AttributeError, match=r"^module 'fp8q\.api' has no attribute 'accuracy'$"):
        getattr(api, "accuracy")  # noqa: B009


CALLS = """from fp8q.api import Accuracy, calibrate, run, validate

calibrate("m", "t", "o", samples=32, skip=["*.down_proj"], method="mse", preset="exact", graph=False)
run("m", "t", "o", weigh_first_token=False, max_ppl_increase="1%", server="vllm")
accuracy: Accuracy = validate("r", max_tokens=64)
calibrate("m", "t", "o", samples="32")
calibrate("m", "t", "o", sample=32)
run("m", "t", "o", kv_cache="fp4")
"""


@pytest.mark.slow
def test_a_wrong_name_or_type_is_an_error_of_the_type_checker(tmp_path: Path) -> None:
    file = tmp_path / "calls.py"
    file.write_text(CALLS, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--config-file", "pyproject.toml", str(file)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    lines = [line.partition("calls.py:")[2] for line in told.splitlines() if ": error:" in line]
    assert [line.partition(":")[0] for line in lines] == ["6", "7", "8"], told
    assert 'Argument "samples" to "calibrate" has incompatible type "str"; expected "int | None"' in lines[0]
    assert 'Unexpected keyword argument "sample" for "calibrate"' in lines[1]
    assert 'Argument "kv_cache" to "run" has incompatible type "Literal[\'fp4\']"' in lines[2]
