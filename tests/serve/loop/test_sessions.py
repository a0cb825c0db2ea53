from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime
import pytest

from fp8q.serve.loop.host_batch import attention_mask
from fp8q.serve.loop.sessions import Batch, OnnxRuntimeSession, Session, SessionError, open_session

if TYPE_CHECKING:
    from tests.serve.counting_model import CountingModel


def test_the_cache_is_what_the_graph_says(counting: CountingModel) -> None:
    layout = counting.session().layout
    assert layout.names == ("0.key", "0.value")
    assert layout.shapes == ((2, 4), (2, 4))
    assert [dtype.name for dtype in layout.dtypes] == {
        "off": ["float32", "float32"],
        "v": ["float32", "uint8"],
        "fp8": ["uint8", "uint8"],
    }[counting.cache]


def test_keys_leave_as_numbers_or_as_fp8_codes(counting: CountingModel) -> None:
    session = counting.session()
    ids = np.array([[1, 5, 14]])
    _, (key, _) = session.forward(ids, np.ones_like(ids), np.arange(3)[None])
    assert key.shape == (1, 2, 3, 4)
    # E4M3 with bias 7: 1 = 2^0, 5 = 1.25 · 2^2, 14 = 1.75 · 2^3
    expected = [0b0_0111_000, 0b0_1001_010, 0b0_1010_110] if counting.cache == "fp8" else [1.0, 5.0, 14.0]
    np.testing.assert_array_equal(key, np.broadcast_to(np.array(expected)[:, None], (1, 2, 3, 4)))


def test_a_step_with_a_past_gives_what_the_whole_sequence_gives(counting: CountingModel) -> None:
    session = counting.session()
    ids = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])  # the second has three tokens
    lengths = np.array([5, 3])
    positions = np.tile(np.arange(5), (2, 1))
    whole, new = session.forward(ids, attention_mask(np.zeros(2, np.int64), 0, positions < lengths[:, None]), positions)
    cache = session.new_cache(2, 8)
    cache.write(0, positions, new)
    logits, _ = session.forward(
        np.array([[7], [7]]), attention_mask(lengths, 8, np.ones((2, 1), bool)), lengths[:, None], cache.past(0, 2)
    )
    # 3·1 + 1·2 + 4·3 + 1·1 + 5·2 = 28 -> 12, + 7·3 = 49 -> 1; 9·1 + 2·2 + 6·3 = 31 -> 15, + 7·1 = 38 -> 6
    assert whole[0, 4].argmax() == 12
    assert whole[1, 2].argmax() == 15
    assert logits[:, 0].argmax(-1).tolist() == [1, 6]
    alone, _ = session.forward(np.array([[3, 1, 4, 1, 5, 7]]), np.ones((1, 6), np.int64), np.arange(6)[None])
    np.testing.assert_array_equal(logits[0, 0], alone[0, 5])


def test_a_strided_past_is_read_as_numpy_reads_it(counting: CountingModel) -> None:
    """ONNX Runtime takes the address of an array and ignores its strides."""
    session = counting.session()
    cache = session.new_cache(2, 8)
    cache.write(0, np.array([[0], [0]]), [np.full((2, 2, 1, 4), 1, dtype) for dtype in session.layout.dtypes])
    strided = [np.concatenate([buffer, buffer + 1], axis=2)[:, :, :8] for buffer in cache.past(0, 2)]
    arguments = np.array([[7], [7]]), attention_mask(np.array([1, 1]), 8, np.ones((2, 1), bool)), np.array([[1], [1]])
    np.testing.assert_array_equal(
        session.forward(*arguments, strided)[0], session.forward(*arguments, cache.past(0, 2))[0]
    )


def test_a_file_that_is_no_graph_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.fp32.onnx"
    path.write_bytes(b"no graph")
    with pytest.raises(SessionError) as raised:
        open_session(tmp_path)
    assert str(raised.value).startswith(f"{path}: ONNX Runtime {onnxruntime.__version__} cannot load it (")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["position_ids", "past_key_values.0.key", "logits", "new_key_values.0.value"])
def test_a_graph_with_another_interface_is_refused(counting: CountingModel, tmp_path: Path, name: str) -> None:
    model = onnx.load(counting.directory / "model.fp32.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.name = "other" if value.name == name else value.name
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["other" if each == name else each for each in names]
    onnx.save(model, tmp_path / "model.fp32.onnx")
    with pytest.raises(SessionError) as raised:
        open_session(tmp_path)
    assert str(raised.value) == (
        f"{tmp_path / 'model.fp32.onnx'}: has no tensor named {name}, so it is no graph that `fp8q export` wrote; "
        "export it again"
    )


def test_a_cache_in_another_type_is_refused(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (int64[b, s] input_ids, int64[b, t] attention_mask, int64[b, s] position_ids, double[b, 1, c, 2] past_key)
    => (float[b, s] logits, double[b, 1, c, 2] new_key)
    { logits = Cast<to = 1> (input_ids)
      new_key = Identity (past_key) }"""
    model = onnx.parser.parse_model(text)
    model.graph.input[3].name = model.graph.node[1].input[0] = "past_key_values.0.key"
    model.graph.output[1].name = model.graph.node[1].output[0] = "new_key_values.0.key"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(SessionError) as raised:
        OnnxRuntimeSession(tmp_path / "model.onnx")
    assert str(raised.value) == (
        f"{tmp_path / 'model.onnx'}: its cache is of tensor(double); ONNX Runtime serves tensor(float) or "
        "tensor(float8e4m3fn): use model.fp32.onnx"
    )


def test_onnx_runtime_reports_to_nobody_and_leaves_nothing(tmp_path: Path) -> None:
    told = {key: value for key, value in os.environ.items() if key not in ("CI", "ORT_DISABLE_TELEMETRY")}
    told |= dict.fromkeys(("HOME", "TMPDIR", "XDG_DATA_HOME", "XDG_CACHE_HOME"), str(tmp_path))
    code = "from fp8q.serve.loop.sessions import import_onnxruntime; import_onnxruntime()"
    subprocess.run([sys.executable, "-c", code], env=told, check=True)
    assert list(tmp_path.rglob("*")) == []


def test_missing_onnx_runtime_is_said(counting: CountingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(SessionError) as raised:
        open_session(counting.directory)
    assert str(raised.value) == (
        "ONNX Runtime is not installed (import of onnxruntime halted; None in sys.modules); install it with `pip "
        "install onnxruntime`"
    )


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ("tensorrt", "tensorrt: runs engines, and this is a graph; use the runtime onnxruntime"),
        ("tensorrt-rtx", "tensorrt-rtx: runs engines, and this is a graph; use the runtime onnxruntime"),
        ("vllm", "vllm: there is no such runtime; use onnxruntime"),
    ],
)
def test_runtimes_that_cannot_be_had_are_refused(tmp_path: Path, runtime: str, message: str) -> None:
    with pytest.raises(SessionError) as raised:
        open_session(tmp_path, runtime)
    assert str(raised.value) == message


def test_sessions_and_batches_meet_their_protocols(counting: CountingModel) -> None:
    session: Session = counting.session()
    batch: Batch = session.open_batch(1, 3)
    batch.clear()
    assert (session.vocabulary, session.most_rows, session.most_positions) == (16, None, None)
