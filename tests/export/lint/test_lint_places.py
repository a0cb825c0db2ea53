"""External data that must not be opened, and ONNX files that are none: each is told from what the system knows of the
name, and nothing is waited for.
"""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from onnx import AttributeProto, ModelProto, TensorProto, helper

from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.export.engine.build import build_engines
from fp8q.export.lint.check import lint_file, sound_graph
from fp8q.options import EngineOptions
from fp8q.serve.triton.repository import external_data
from fp8q.validate.accuracy.session_logits import session

MISSING = "F402 external-missing: s: its file"
COPY = "(tensors in it: 1); copy the graph's whole directory again"
LINKED = "a link that leads outside the graph's directory; put a copy of the file in its place"
BESIDE = "outside the graph's directory; put the file beside the graph"


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """Nothing here takes seconds, and what waits for a pipe would wait for ever."""

    def late(*_: object) -> None:
        raise AssertionError("waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The graph's directory, with what may bear a file's name, and a secret beside it."""
    made = tmp_path / "model"
    made.mkdir()
    (tmp_path / "secret").write_bytes(b"\0\0\x80\xbf" * 16)
    os.mkfifo(made / "pipe")
    (made / "folder").mkdir()
    (made / "device").symlink_to("/dev/zero")
    (made / "nothing").symlink_to("gone")
    (made / "circle").symlink_to("circle")
    (made / "out").symlink_to("../secret")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(made / "socket"))
    return made


def external(location: str, name: str = "s") -> TensorProto:
    """A scale that lies elsewhere."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


def scaled(*tensors: TensorProto, change: Callable[[ModelProto], Any] = lambda model: None) -> bytes:
    """A graph that quantizes x [batch, 32] with the scale `s`."""
    node = helper.make_node("QuantizeLinear", ["x", "s"], ["y"], name="quantize", output_dtype=17)
    x, y = (helper.make_tensor_value_info(name, kind, ["batch", 32]) for name, kind in (("x", 1), ("y", 17)))
    graph = helper.make_graph([node], "scaled", [x], [y], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    change(model)
    data: bytes = model.SerializeToString()
    return data


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("../secret", f"F401 external-location: s: its data lie in ../secret, {BESIDE}"),
        ("folder/../../secret", f"F401 external-location: s: its data lie in folder/../../secret, {BESIDE}"),
        ("out", f"F401 external-location: s: its data lie in out, {LINKED}"),
        ("device", f"F401 external-location: s: its data lie in device, {LINKED}"),
        ("/dev/zero", f"F401 external-location: s: its data lie in /dev/zero, {BESIDE}"),
        ("", f"F401 external-location: s: its data lie in no file, {BESIDE}"),
        ("pipe", f"{MISSING} pipe is a pipe {COPY}"),
        ("folder", f"{MISSING} folder is a directory {COPY}"),
        (".", f"{MISSING} . is a directory {COPY}"),
        ("socket", f"{MISSING} socket is a socket {COPY}"),
        ("gone", f"{MISSING} gone is missing {COPY}"),
        (
            "nothing",
            f"{MISSING} nothing is a link to a file that is not there {COPY}",
        ),
        (
            "circle",
            f"{MISSING} circle cannot be read (Too many levels of symbolic links) {COPY}",
        ),
    ],
)
def test_a_scale_is_read_from_no_place_but_a_file_beside_the_graph(
    directory: Path, location: str, expected: str
) -> None:
    path = directory / "model.onnx"
    path.write_bytes(scaled(external(location)))
    found = [str(finding) for finding in lint_file(path)]
    assert found[1:] == [expected]  # and the first that nothing is on FP8 codes; no value of the secret's, which is -1
    with pytest.raises(InputError) as refused:
        sound_graph(path)
    assert str(refused.value) == f"{path}: {expected}"


def body(model: ModelProto) -> None:
    held = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["v"], name="copy")], "body", [], [], [external("../secret", "w")]
    )
    model.graph.node.append(helper.make_node("If", ["x"], ["z"], name="if", then_branch=held, else_branch=held))


def in_attribute(model: ModelProto) -> None:
    model.graph.node.append(
        helper.make_node("ConstantOfShape", ["shape"], ["z"], name="fill", value=external("../secret", "w"))
    )


def in_function(model: ModelProto) -> None:
    constant = helper.make_node("Constant", [], ["v"], name="constant", value=external("../secret", "w"))
    model.functions.append(helper.make_function("theirs", "f", [], ["v"], [constant], []))


def sparse(model: ModelProto) -> None:
    model.graph.sparse_initializer.add().values.CopyFrom(external("../secret", "w"))
    model.graph.sparse_initializer[0].indices.data_type = TensorProto.INT64


def shadowed(model: ModelProto) -> None:
    model.graph.initializer.insert(0, external("../secret", "w"))
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, [], [1.0]))


@pytest.mark.parametrize("change", [body, in_attribute, in_function, sparse, shadowed])
def test_every_tensor_of_the_file_has_its_place_looked_at(directory: Path, change: Callable[[ModelProto], Any]) -> None:
    path = directory / "model.onnx"
    path.write_bytes(scaled(helper.make_tensor("s", TensorProto.FLOAT, [], [0.5]), change=change))
    line = f"F401 external-location: w: its data lie in ../secret, {BESIDE}"
    assert line in [str(finding) for finding in lint_file(path)]


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("location", "other", "has two values for location"),
        ("offset", "1e3", "has the offset '1e3', which is no number"),
        ("offset", "NaN", "has the offset 'NaN', which is no number"),
        ("offset", " 5", "has the offset ' 5', which is no number"),
        ("length", "1_000", "has the length '1_000', which is no number"),
        ("length", "9" * 4001, f"has the length '{'9' * 4001}', which is no number"),
    ],
)
def test_a_place_that_readers_take_differently_is_none(directory: Path, key: str, value: str, why: str) -> None:
    scale = external("model.bin")
    scale.external_data.add(key=key, value=value)
    (directory / "model.bin").write_bytes(bytes(4))
    (directory / "model.onnx").write_bytes(scaled(scale))
    found = [finding.message for finding in lint_file(directory / "model.onnx") if finding.rule == "F401"]
    (line,) = found
    text = f"its place {why}; export the graph again"
    assert line == text or (len(text) > 1000 and f"({len(text):,} characters)" in line)


@pytest.mark.parametrize("offset", [str(2**63), str(2**70), "-1"])
def test_an_offset_beyond_any_file_is_out_of_bounds(directory: Path, offset: str) -> None:
    scale = external("model.bin")
    scale.external_data.add(key="offset", value=offset)
    (directory / "model.bin").write_bytes(bytes(4))
    (directory / "model.onnx").write_bytes(scaled(scale))
    assert [finding.rule for finding in lint_file(directory / "model.onnx")] == ["F205", "F403"]


def test_whoever_opens_a_graph_looks_at_its_places_first(directory: Path) -> None:
    run = Run(directory.parent)
    refused = (
        "F402 external-missing: s: its file pipe is a pipe (tensors in it: 1); copy the graph's whole directory again"
    )
    for path in (run.model / "model.onnx", run.onnx_fp32, run.baselines / "bf16" / "model.onnx"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name("pipe").unlink(missing_ok=True)
        os.mkfifo(path.with_name("pipe"))
        path.write_bytes(scaled(external("pipe")))
    options = EngineOptions(runtime="tensorrt-rtx", targets=("sm89",), precision="bf16")
    for path, opened in (
        (run.onnx_fp32, lambda: session(run, "onnxruntime")),
        (run.onnx_fp32, lambda: external_data(run.onnx_fp32)),
        (run.baselines / "bf16" / "model.onnx", lambda: build_engines(run, {}, options, SILENT)),
    ):
        with pytest.raises(InputError) as told:
            opened()
        assert str(told.value) == f"{path}: {refused}"


# The ONNX file itself.


def test_what_is_no_onnx_file_is_refused_before_it_is_read(fp8q: Callable[..., Any], directory: Path) -> None:
    with open(directory / "huge.onnx", "wb") as file:
        file.truncate(1 << 40)
    (directory / "empty.onnx").touch()
    (directory / "garbage.onnx").write_bytes(bytes(range(256)))
    (directory / "cut.onnx").write_bytes(scaled(external("gone"))[:-9])
    for name, why in {
        "pipe": "is a pipe; name a file",
        "socket": "is a socket; name a file",
        "device": "is a device; name a file",
        "folder": (
            "is a directory that holds neither run.json nor config.json nor models of Triton (folders with "
            "config.pbtxt); name an ONNX file, a Triton repository, a checkpoint or a run"
        ),
        "nothing": "is a link to a file that is not there",
        "circle": "cannot be read (Too many levels of symbolic links)",
        "absent.onnx": "there is no such file",
        "n" * 256: "cannot be read (File name too long)",
        "huge.onnx": (
            "is no ONNX model: it has 1099511627776 bytes, and protobuf takes at most 2147483647; export it with its "
            "weights as external data"
        ),
        "empty.onnx": "is no ONNX model, or holds no node; export it again",
        "garbage.onnx": "is no ONNX model, or is cut short; export it again",
        "cut.onnx": "is no ONNX model, or is cut short; export it again",
    }.items():
        result = fp8q("lint", directory / name)
        assert (result.code, result.out) == (2, "")
        assert result.err == f"fp8q: {directory / name}: {why}\n"


def nested(depth: int) -> bytes:
    """An ONNX file of If in If, written byte by byte: protobuf makes none so deep."""

    def field(tag: int, data: bytes) -> bytes:
        length, size = b"", len(data)
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([tag]) + length + bytes([size]) + data

    graph = b""
    for _ in range(depth):
        attribute = field(0x32, graph) + bytes([0xA0, 0x01, AttributeProto.GRAPH])
        graph = field(0x0A, field(0x22, b"Loop") + field(0x2A, attribute))
    return bytes([0x08, 11]) + field(0x3A, graph)


def test_bodies_in_bodies_are_looked_at_or_refused_and_never_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    for depth in (1, 10, 32):
        path.write_bytes(nested(depth))
        assert "F314" in {finding.rule for finding in lint_file(path)}
    for depth in (34, 100, 2000):
        path.write_bytes(nested(depth))
        with pytest.raises(InputError, match="is no ONNX model, or is cut short; export it again$"):
            lint_file(path)
