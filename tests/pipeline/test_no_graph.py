"""`--no-graph`: the checkpoint and its numbers without the minute that tracing takes, for those who serve by vLLM; the
graph can be made later.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.run import Run

from ..command_result import Result
from ..conftest import KeepingGraphs, MadeOnce, Texts

pytestmark = pytest.mark.slow

Fp8q = Callable[..., Result]
#: The reason in the record, and in the messages of what needs the graph.
LEFT_OUT = "--no-graph left it out (`fp8q export` makes it)"
SMALL = ("--samples", "4", "--seq-len", "48")


@pytest.fixture(scope="module")
def texts(made_once: MadeOnce, demo_texts: Texts) -> tuple[Path, Path]:
    def make(folder: Path) -> None:
        for name, text in (("calibration.txt", demo_texts.calibration), ("evaluation.txt", demo_texts.evaluation)):
            (folder / name).write_text(text.read_text(encoding="utf-8")[:6_000], encoding="utf-8")

    folder = made_once("short-texts", make)
    return folder / "calibration.txt", folder / "evaluation.txt"


def test_a_run_without_graphs_is_whole_but_for_what_needs_them(
    fp8q: Fp8q, demo_checkpoint: Path, texts: tuple[Path, Path], tmp_path: Path, keeping_graphs: KeepingGraphs
) -> None:
    """It is validated by the reference, `scales` makes no graph either, and `export` makes them later."""
    run = Run(tmp_path / "run")
    common = ("--data", texts[0], "--eval-data", texts[1], "--out", run.root, *SMALL)
    told = fp8q("run", demo_checkpoint, *common, "--no-graph", "--json")
    assert told.code == 0, told.err
    exported = run.record().stages["export"]
    assert (exported.refused, exported.outputs, exported.options["graph"]) == (LEFT_OUT, {}, False)
    assert [*run.model.glob("*.onnx")] == []
    for stage in ("build-engine", "triton"):
        assert f"{stage}: left out, since {run.root} has no ONNX graph" in told.err.splitlines()
    assert {row["runtime"] for row in json.loads(told.out)["accuracy"]} == {"bf16", "reference"}
    assert run.report_html.is_file()
    assert fp8q("build-engine", run.root).complaint() == (
        f"{run.root}: has no ONNX graph, since {LEFT_OUT}; `fp8q generate {run.root} --runtime reference` runs its "
        f"checkpoint, and {run.root}/model/README.md says what else does"
    )
    gate = fp8q("validate", run.root, "--max-ppl-increase", "0.0001%")
    assert gate.code == 3
    assert gate.err.splitlines()[-1].endswith(
        f"more than --max-ppl-increase 0.0001%; `fp8q tune {run.root} --for vllm --max-ppl-increase 0.0001%` finds the "
        "cheapest mix that meets it"
    )
    assert "`model.onnx` (where it is not here, `fp8q export RUN` writes it)" in (run.model / "README.md").read_text()

    assert fp8q("scales", run.root, "--margin", "1").code == 0
    assert run.record().stages["export"].refused == LEFT_OUT
    with keeping_graphs():
        assert fp8q("export", run.root).code == 0
        assert run.record().stages["export"].refused is None
        assert sorted(path.name for path in run.model.glob("*.onnx")) == ["model.fp32.onnx", "model.onnx"]
        assert fp8q("calibrate", demo_checkpoint, *common, "--margin", "1", "--no-graph").code == 0
    assert [*run.model.glob("*.onnx")] == []


def test_a_runtime_of_the_graph_is_refused_before_anything_is_written(
    fp8q: Fp8q, demo_checkpoint: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    asked = ("--no-graph", "--runtimes", "bf16,onnxruntime")
    assert (
        fp8q("run", demo_checkpoint, "--data", texts[0], "--out", out, *SMALL, *asked)
        .complaint()
        .startswith(
            f"--runtimes onnxruntime: runs an ONNX graph, and {out} has none, since {LEFT_OUT}; choose from bf16, "
            "reference, fp32, original, one-term"
        )
    )
    assert not out.exists()


def test_a_form_without_graphs_is_the_reason_where_none_was_asked_for_too(
    demo_checkpoint: Path, demo_texts: Texts, tmp_path: Path
) -> None:
    graph = api.ExportOptions(graph=False)
    run = api.calibrate(
        demo_checkpoint, demo_texts.calibration, tmp_path / "run", export_options=graph, samples=2, seq_len=32,
        form=("dynamic",),
    )  # fmt: skip
    reason = run.without_graph()
    assert reason is not None
    assert "dynamic" in reason
    assert "fp8q export" not in reason


def test_exporting_without_a_graph_is_refused(demo_run: Run) -> None:
    with pytest.raises(InputError) as refused:
        api.export(demo_run.root, api.ExportOptions(graph=False))
    assert str(refused.value) == "--no-graph: the graphs are all that `fp8q export` makes; leave it out"
    assert demo_run.onnx.is_file()
