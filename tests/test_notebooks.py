"""The notebooks run from top to bottom on a finished run, call public functions only, and are committed without
outputs.
"""

import ast
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fp8q import api
from fp8q.core.run import Run
from fp8q.validate.report.accuracy_rows import accuracy_rows
from fp8q.validate.report.report import execute
from fp8q.validate.report.rows import module_rows

if TYPE_CHECKING:
    from tests.conftest import Texts

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))


def cells(text: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    """The code of a cell without IPython's own lines."""
    return "".join(line for line in cell["source"] if not line.startswith("%"))


def shown(text: str) -> str:
    """All that an executed notebook shows as text."""
    outputs = [output for cell in cells(text) for output in cell["outputs"]]
    return "\n".join(
        "".join(output.get("text", [])) + "".join(output.get("data", {}).get("text/html", [])) for output in outputs
    )


def executed(name: str, directory: Path, **parameters: str) -> str:
    (notebook,) = [path for path in NOTEBOOKS if path.stem == name]
    return execute(notebook, directory, {"RUN": ".", **parameters})


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs_and_has_the_parameter_run(notebook: Path) -> None:
    code = cells(notebook.read_text(encoding="utf-8"))
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
    (parameters,) = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    assert source(parameters).startswith('RUN = "../runs/')


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_takes_from_fp8q_only_what_its_api_exports(notebook: Path) -> None:
    tree = ast.parse("\n".join(source(cell) for cell in cells(notebook.read_text(encoding="utf-8"))))
    imported = {
        (node.module, name.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    ours = {(module, name) for module, name in imported if module and module.startswith("fp8q")}
    assert {module for module, _ in ours} == {"fp8q.api"}
    assert {name for _, name in ours} <= set(api.__all__)
    assert not [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
        if name.name.startswith("fp8q")
    ]


def test_there_are_three_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["accuracy_report", "calibration_tour", "loaded_model"]


def test_the_accuracy_report_shows_the_runs_own_numbers(demo_run: Run) -> None:
    text = shown(executed("accuracy_report", demo_run.root))
    for accuracy in accuracy_rows(demo_run):
        assert f"{accuracy.perplexity:.4f}" in text
    for module in module_rows(demo_run):
        assert module.module in text


def test_the_calibration_tour_tells_of_the_runs_own_tensors(demo_run: Run) -> None:
    text = shown(executed("calibration_tour", demo_run.root))
    assert "0x3f81 = 16257  ->  1.00781" in text
    assert "127 magnitudes, the largest 448, the smallest above zero 0.001953125 = 2^-9" in text
    tensors = {row.tensor: row for row in module_rows(demo_run) if row.tensor is not None}
    (told,) = [tensors[line] for line in text.splitlines() if line in tensors]
    assert told.amax is not None
    assert f"   100 %  {told.amax:.4g}" in text


@pytest.mark.slow
def test_a_loaded_model_comes_to_a_verdict_and_answers(
    demo_checkpoint: Path, demo_texts: "Texts", tmp_path: Path
) -> None:
    texts = {"MODEL": str(demo_checkpoint), "TEXTS": str(demo_texts.calibration)}
    text = shown(executed("loaded_model", tmp_path, RUN="run", **texts))
    (accuracy,) = [row for row in accuracy_rows(Run(tmp_path / "run")) if row.runtime == "reference"]
    assert "<strong>Acceptable" in text
    assert accuracy.kl_mean_nats is not None
    assert f"KL {accuracy.kl_mean_nats:.3g} nats" in text
    assert "def main(" in text
