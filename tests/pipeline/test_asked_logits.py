"""The graph gives the logits of the positions that are asked for, and `--logits all` those of all, the same numbers."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.export.lint.check import lint_file
from fp8q.export.modules.graph_model import at_positions
from fp8q.serve.loop.generate import Generator, complete
from fp8q.serve.loop.request import Request
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.serve.loop.text import Vocabulary
from fp8q.stages.corpus import load_tokens
from fp8q.stages.export import traced_form
from fp8q.stages.pipeline.stages import EXPORT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def all_run(demo_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo with graphs that give the logits of all positions."""
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path_factory.mktemp("all") / "run")))
    return api.export(run.root, api.ExportOptions(logits="all"))


@pytest.fixture(scope="module")
def ids(demo_run: Run) -> np.ndarray:
    return load_tokens(demo_run, demo_run.evaluation)[:48].reshape(2, 24)


def logits_of(run: Run, ids: np.ndarray, scored: int | None = None) -> np.ndarray:
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(ids.shape[1]), ids.shape))
    session = OnnxRuntimeSession(run.onnx_fp32, 1)
    found: np.ndarray = session.forward(ids, np.ones_like(ids), positions, scored=scored)[0]
    return found


def dimensions(run: Run) -> dict[str, list[object]]:
    graph = onnx.load(run.onnx, load_external_data=False).graph
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }


def test_the_last_positions_are_those_of_all(demo_run: Run, all_run: Run, ids: np.ndarray) -> None:
    whole = logits_of(demo_run, ids)
    assert whole.shape == (2, 24, 2048)
    # the head multiplies other numbers of rows, whose kernels may add in another order
    np.testing.assert_allclose(logits_of(all_run, ids), whole, rtol=0, atol=1e-4)
    for run in (demo_run, all_run):
        np.testing.assert_allclose(logits_of(run, ids, 5), whole[:, -5:], rtol=0, atol=1e-4)
        np.testing.assert_allclose(logits_of(run, ids, 1), whole[:, -1:], rtol=0, atol=1e-4)


def test_each_row_may_ask_for_positions_of_its_own_in_any_order(demo_run: Run, ids: np.ndarray) -> None:
    asked = np.array([[23, 0, 7], [4, 4, 11]])
    past: dict[str, tuple[type[np.generic], int]] = {
        "tensor(float)": (np.float32, onnx.TensorProto.FLOAT),
        "tensor(float8e4m3fn)": (np.uint8, onnx.TensorProto.FLOAT8E4M3FN),
    }
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(demo_run.onnx_fp32, options, providers=["CPUExecutionProvider"])
    feeds = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.tile(np.arange(24), (2, 1)),
        "logits_indices": asked,
    }
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for value in session.get_inputs():
        if value.name not in feeds:
            kind, number = past[value.type]
            empty = np.zeros((0, 64, 64), kind)
            values[value.name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(empty, number)
    found = session.run_with_ort_values(["logits"], values)[0].numpy()
    wanted = np.take_along_axis(logits_of(demo_run, ids), asked[..., None], 1)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def test_both_kinds_are_told_by_their_interface_and_recorded(demo_run: Run, all_run: Run) -> None:
    asks, gives = dimensions(demo_run), dimensions(all_run)
    assert asks.pop("logits_indices") == ["batch", "scored"]
    assert (asks.pop("logits"), gives.pop("logits")) == (["batch", "scored", 2048], ["batch", "seq", 2048])
    assert asks == gives
    assert (demo_run.options(EXPORT).logits, all_run.options(EXPORT).logits) == ("asked", "all")


def test_both_kinds_are_served_alike(demo_run: Run, all_run: Run) -> None:
    requests = [Request("The first thing that", 8), Request("One", 8)]
    answers = [
        complete(Generator(OnnxRuntimeSession(run.onnx_fp32, 1), Vocabulary.read(run.model)), requests)
        for run in (demo_run, all_run)
    ]
    assert answers[0] == answers[1]
    assert all(len(answer.tokens) == 8 for answer in answers[0])


def test_a_record_of_before_says_that_all_are_given(all_run: Run, tmp_path: Path) -> None:
    run = without_fact(all_run, "logits", tmp_path)
    assert run.options(EXPORT).logits == "all"


def test_a_graph_that_concatenates_the_cache_is_no_start_of_another_export(all_run: Run, tmp_path: Path) -> None:
    """Graphs from before decision 73 are traced again, and not rewritten for other options."""
    assert traced_form(all_run, all_run.options(EXPORT)) == "dq"
    run = without_fact(all_run, "past", Path(shutil.copytree(all_run.root, tmp_path / "run")))
    assert EXPORT.read(run.record().stages["export"].options, run.record_file)[1].past == "concatenated"
    assert traced_form(run, run.options(EXPORT)) is None


def without_fact(run: Run, name: str, folder: Path) -> Run:
    """A run in `folder` with the record of `run`, but without what it says of `name` of the export."""
    record = json.loads(run.record_file.read_text(encoding="utf-8"))
    del record["stages"]["export"]["options"][name]
    (folder / run.record_file.name).write_text(json.dumps(record), encoding="utf-8")
    return Run(folder)


def test_logits_of_other_positions_than_are_asked_for_break_the_lint(demo_run: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo_run.model, tmp_path / "model"))
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    (logits,) = [value for value in graph.graph.output if value.name == "logits"]
    logits.type.tensor_type.shape.dim[1].dim_param = "seq"
    (asked,) = [value for value in graph.graph.input if value.name == "logits_indices"]
    asked.type.tensor_type.elem_type = onnx.TensorProto.INT32
    onnx.save(graph, folder / "model.onnx")
    found = [str(each) for each in lint_file(folder / "model.onnx", {}) if each.rule in ("F306", "F307")]
    assert found == [
        "F306 interface: the input logits_indices is INT32; make it INT64",
        "F307 dynamic-axes: logits is [batch, seq, 2048]; give it the contract's [batch, scored, size]",
    ]


def test_a_model_that_calls_no_head_is_refused() -> None:
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model, asked = LlamaForCausalLM(config), torch.zeros(1, 1, dtype=torch.int64)
    with at_positions(model, asked):
        assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 1, 16)
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 16)
    told = r"^its output head is no module that it calls, which `--logits all` needs not$"
    with pytest.raises(RuntimeError, match=told), at_positions(model, asked):
        model.model(input_ids=torch.tensor([[1, 2, 3]]))


def test_baselines_take_no_choice_of_logits() -> None:
    with pytest.raises(InputError) as refused:
        api.ExportOptions(precision="int8", logits="all")
    assert str(refused.value) == "--logits all: is for the FP8 graph, not for --precision int8; leave one of them out"
