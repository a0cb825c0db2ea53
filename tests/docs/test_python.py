"""The Python of README and docs passes the type checker, and every function of the API takes its options by name."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp8q import api
from fp8q.core.errors import InputError

from ..conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Indented lines that begin with an import.
BLOCK = re.compile(r"^    (?:from|import) .*\n(?:(?:    .*)?\n)*", re.MULTILINE)
#: Names that pages take for granted: a model in training, and its data.
GIVEN = ("model", "batches", "optimizer")


def blocks(page: Path) -> list[str]:
    """The blocks of Python of a page, without their indentation and the commands of a shell behind them."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [inspect.cleandoc(f"\n{re.sub(r'(?m)^    fp8q .*$', '', block)}") for block in found]


@pytest.mark.slow
def test_the_python_of_every_page_passes_the_type_checker(tmp_path: Path) -> None:
    files = []
    for page in PAGES:
        for number, block in enumerate(blocks(page)):
            given = [f"{name}: Any\n" for name in GIVEN if not re.search(rf"\b{name}\b.* = ", block)]
            block = re.sub(
                r"(?m)^(.*model\.generate\(.*)$", r"\1  # type: ignore[operator]", block
            )  # a Tensor, to mypy
            files.append(tmp_path / f"{page.stem.replace('-', '_')}_{number}.py")
            files[-1].write_text(f"from typing import Any\n\n{''.join(given)}\n{block}\n", encoding="utf-8")
    assert len(files) >= 8
    words = [sys.executable, "-m", "mypy", *map(str, files)]
    checked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_every_function_with_options_takes_them_by_name() -> None:
    public = {name: getattr(api, name) for name in api.__all__}
    functions = {name: inspect.signature(value) for name, value in public.items() if inspect.isfunction(value)}
    with_options = {name: taken for name, taken in functions.items() if "options" in taken.parameters}
    assert len(with_options) >= 20
    for name, taken in with_options.items():
        assert taken.parameters["options"].default is not inspect.Parameter.empty, name
        assert inspect.Parameter.VAR_KEYWORD in {each.kind for each in taken.parameters.values()}, name


def test_a_name_that_is_no_option_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="^layouts=: is no option here; did you mean layout"):
        api.convert(tmp_path / "model", tmp_path / "out", layouts="block")
    with pytest.raises(InputError, match="^contexts=: is no option here; did you mean context"):
        api.compare_checkpoints("a", "b", contexts=8)
