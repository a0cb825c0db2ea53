"""`fp8q lint` of the graphs of a run, and of files that are damaged."""

import shutil
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.stages.lint import Linted

from ...graphs import products_of_the_demo
from .foreign_nodes import node
from .lint_output import Fp8q, findings


def test_the_graphs_of_a_run_are_held_against_its_promises(fp8q: Fp8q, demo_run: Run) -> None:
    for graph in (demo_run.onnx, demo_run.onnx_fp32):
        result = fp8q("lint", graph)
        assert result.code == 0
        assert result.out == (
            f"{graph}: opset 23, {products_of_the_demo(graph)} GEMMs, 28 on FP8 codes on both sides; held against "
            f"{demo_run.scales}\nno findings\n"
        )


def test_another_runs_graph_breaks_the_promise(fp8q: Fp8q, demo_run: Run, decoder: Callable[..., Any]) -> None:
    path = decoder().path
    assert fp8q("lint", path).code == 0
    result = fp8q("lint", path, "--run", demo_run.root, "--json")
    assert result.code == 3
    assert {"F203", "F206"} <= {rule for rule, _, _ in findings(result)}


def test_a_scale_that_was_changed_in_the_checkpoint_is_found(fp8q: Fp8q, demo_run: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    model = onnx.load_model(run.onnx, load_external_data=False)
    quantize = next(node for node in model.graph.node if node.op_type == "QuantizeLinear")
    scale = next(tensor for tensor in model.graph.initializer if tensor.name == quantize.input[1])
    scale.CopyFrom(numpy_helper.from_array(np.array(3, np.float32), scale.name))
    run.onnx.write_bytes(model.SerializeToString())
    linted = api.lint(run.onnx)
    assert {finding.rule for finding in linted.findings} == {"F206"}
    assert isinstance(linted, Linted)
    assert linted.compared_with == run.scales


def test_weights_cut_short_or_gone_are_wrong_input(fp8q: Fp8q, demo_run: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    (shard,) = run.model.glob("*.safetensors")
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    short = fp8q("lint", run.onnx, "--json")
    assert (short.code, "F403" in {rule for rule, _, _ in findings(short)}) == (2, True)
    assert short.err.startswith(f"fp8q: {run.onnx}: F403 external-bounds: ")
    assert short.err.endswith("; copy the graph's whole directory again\n")
    shard.unlink()
    gone = fp8q("lint", run.onnx)
    assert gone.code == 2
    assert f"its file {shard.name} is missing" in gone.err


def test_a_run_that_is_none(fp8q: Fp8q, demo_run: Run, tmp_path: Path) -> None:
    result = fp8q("lint", demo_run.onnx, "--run", tmp_path / "nowhere")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"fp8q: {tmp_path}/nowhere: there is no such directory; make a run with ")


def test_what_is_no_onnx_file_is_one_line_and_exit_code_2(
    fp8q: Fp8q, decoder: Callable[..., Any], tmp_path: Path
) -> None:
    good = decoder().path
    files = {
        tmp_path / "nowhere.onnx": "there is no such file",
        tmp_path: (
            "is a directory that holds neither run.json nor config.json nor models of Triton (folders with "
            "config.pbtxt); name an ONNX file, a Triton repository, a checkpoint or a run"
        ),
        tmp_path / "text.onnx": "is no ONNX model, or is cut short; export it again",
        tmp_path / "short.json": "is no ONNX model, or is cut short; export it again",
        tmp_path / "empty.onnx": "is no ONNX model, or holds no node; export it again",
    }
    (tmp_path / "text.onnx").write_text("a graph, one day")
    (tmp_path / "short.json").write_bytes(good.read_bytes()[:-500])
    (tmp_path / "empty.onnx").write_bytes(b"")
    for path, message in files.items():
        result = fp8q("lint", path, "--json")
        assert (result.code, result.out, result.err) == (2, "", f"fp8q: {path}: {message}\n")


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("graph.node.name", lambda model: setattr(model.graph.node[-1], "name", "MARK")),
        ("graph.node.op_type", lambda model: setattr(model.graph.node[-1], "op_type", "MARK")),
        ("graph.node.domain", lambda model: setattr(model.graph.node[-1], "domain", "MARK")),
        (
            "graph.node.attribute.g.node.output",
            lambda model: model.graph.node[-1].attribute.add(name="body", type=5).g.node.add().output.append("MARK"),
        ),
        (
            "graph.initializer.external_data.value",
            lambda model: setattr(model.graph.initializer[-1].external_data[0], "value", "MARK"),
        ),
        (
            "graph.input.type.tensor_type.shape.dim.dim_param",
            lambda model: setattr(model.graph.input[0].type.tensor_type.shape.dim[0], "dim_param", "MARK"),
        ),
    ],
)
def test_text_that_is_no_utf_8_is_damage_and_no_fault(
    fp8q: Fp8q, decoder: Callable[..., Any], field: str, spoil: Callable[[onnx.ModelProto], Any]
) -> None:
    path = decoder().path
    model = onnx.load_model(path, load_external_data=False)
    spoil(model)
    path.write_bytes(model.SerializeToString().replace(b"MARK", b"MAR\xff"))
    result = fp8q("lint", path)
    assert (result.code, result.out, result.err) == (
        2,
        "",
        f"fp8q: {path}: is damaged ({field} is no UTF-8); export it again\n",
    )


def test_cut_anywhere_a_graph_is_an_input_error_or_has_an_error_and_never_a_fault(
    decoder: Callable[..., Any], tmp_path: Path
) -> None:
    written = decoder()
    data = written.path.read_bytes()
    cut = written.path.with_name("cut.onnx")
    for size in range(0, len(data), 101):
        cut.write_bytes(data[:size])
        with pytest.raises(InputError, match="is no ONNX model, or "):
            api.lint(cut)


def test_a_graph_over_four_gigabytes_takes_no_memory(fp8q: Fp8q, tmp_path: Path) -> None:
    out, wide = 65_536, 65_536  # 4.3 GB of codes, in a file with a hole
    with open(tmp_path / "weights.bin", "wb") as handle:
        handle.truncate(4 + out * wide)
    weight = TensorProto(
        name="w", data_type=TensorProto.FLOAT8E4M3FN, dims=[out, wide], data_location=TensorProto.EXTERNAL
    )
    for key, value in (("location", "weights.bin"), ("offset", 4)):
        weight.external_data.add(key=key, value=str(value))
    scale = numpy_helper.from_array(np.array(0.5, np.float32), "s")
    nodes = [
        node("QuantizeLinear", "x s", "codes", name="q", output_dtype=17),
        node("DequantizeLinear", "codes s", "value", name="dq", output_dtype=1),
        node("DequantizeLinear", "w s", "wide", output_dtype=1),
        node("Gemm", "value wide", "y", transB=1),
    ]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", wide])] for name in "xy"]
    model = helper.make_model(
        helper.make_graph(nodes, "large", ends[0], ends[1], [scale, weight]),
        opset_imports=[helper.make_opsetid("", 23)],
        ir_version=11,
    )
    (tmp_path / "large.onnx").write_bytes(model.SerializeToString())
    tracemalloc.start()
    try:
        assert fp8q("lint", tmp_path / "large.onnx", "--json").out == '{"findings": []}\n'
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_the_lint_needs_nothing_but_the_base_install(
    base_install: Callable[..., subprocess.CompletedProcess[str]], demo_run: Run
) -> None:
    shown = base_install("lint", demo_run.onnx)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.endswith(f"held against {demo_run.scales}\nno findings\n")
