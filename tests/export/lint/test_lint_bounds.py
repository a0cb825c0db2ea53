"""Files that are made to keep a lint busy, fill the memory or the terminal: work grows with the file and no faster,
and what is said of it stays short.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper

from fp8q.core.errors import InputError
from fp8q.export.lint.check import lint_file
from fp8q.export.onnx_file import constants, loading

FP8 = TensorProto.FLOAT8E4M3FN
Change = Callable[[ModelProto], Any]


def node(operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(operator, inputs, [output], name=output, **attributes)


def graph(directory: Path, nodes: Sequence[NodeProto], change: Change = lambda model: None) -> Path:
    """x [batch, 32] as codes `q` and values `v`, and `nodes`."""
    pair = [node("QuantizeLinear", ["x", "s"], "q", output_dtype=FP8), node("DequantizeLinear", ["q", "s"], "v")]
    for made in pair[1:]:
        made.attribute.append(helper.make_attribute("output_dtype", TensorProto.FLOAT))
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 32])] for name in ("x", "v")]
    scale = helper.make_tensor("s", TensorProto.FLOAT, [], [0.5])
    made_graph = helper.make_graph([*pair, *nodes], "graph", ends[0], ends[1], [scale])
    model = helper.make_model(made_graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    change(model)
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    return directory / "model.onnx"


# Time: 4,000 of anything in a second of this processor, where what is quadratic takes a minute.


def row(operator: str, length: int, start: str = "v", **attributes: Any) -> list[NodeProto]:
    return [node(operator, [f"m{index - 1}" if index else start], f"m{index}", **attributes) for index in range(length)]


def hanging(moved: list[NodeProto]) -> list[NodeProto]:
    """A GEMM of each value and the first."""
    return [node("MatMul", [made.output[0], "v"], f"p{index}") for index, made in enumerate(moved)]


def circle(length: int) -> list[NodeProto]:
    moved = row("Transpose", length)
    moved[0].input[0] = moved[-1].output[0]
    return moved


ROWS: dict[str, Callable[[int], list[NodeProto]]] = {
    "moved": lambda length: (moved := row("Transpose", length)) + hanging(moved),
    "blocked": lambda length: (moved := row("Relu", length)) + hanging(moved),
    "last first": lambda length: (moved := row("Transpose", length))[::-1] + hanging(moved),
    "circle": lambda length: (moved := circle(length)) + hanging(moved),
    "scales": lambda length: [
        *(casts := row("Cast", length, "s", to=TensorProto.FLOAT)),
        *(node("QuantizeLinear", ["x", made.output[0]], f"c{i}", output_dtype=FP8) for i, made in enumerate(casts)),
    ],
    "one name": lambda length: [node("Relu", ["v"], "same") for _ in range(length)],
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_row_of_four_thousand_takes_no_minute(tmp_path: Path, kind: str) -> None:
    path = graph(tmp_path, ROWS[kind](4000))
    start = process_time()
    lint_file(path)
    assert process_time() - start < 5


def test_a_constant_is_read_through_as_many_casts_as_exporters_write(tmp_path: Path) -> None:
    def rules(casts: int) -> list[str]:
        quantize = node("QuantizeLinear", ["x", f"m{casts - 1}"], "c", output_dtype=FP8)
        return [finding.rule for finding in lint_file(graph(tmp_path, [*row("Identity", casts, "s"), quantize]))]

    assert rules(8) == ["F108", "F205"]  # 0.5 is read, and x is quantized with it already
    assert rules(9) == ["F104", "F205"]


# Memory.


def test_no_more_of_scales_is_read_than_scales_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: ModelProto) -> None:
        for name in ("a", "b"):
            tensor = model.graph.initializer.add(name=name, data_type=1, dims=[24], data_location=1)
            tensor.external_data.add(key="location", value="zeros")
        model.graph.node[2].input[1] = "a"
        model.graph.node[3].input[1] = "b"

    (tmp_path / "zeros").write_bytes(bytes(96))
    nodes = [node("QuantizeLinear", ["x", "s"], name, output_dtype=FP8) for name in ("c", "d")]
    path = graph(tmp_path, nodes, change)
    for limit, number, why in (
        ("LARGEST_CONSTANT", 16, "scale b has 24 numbers and is not read: no scale has more than 16"),
        ("LARGEST_SUM", 20, "scale b is not read: the scales have more than 20 numbers together"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(constants, limit, number)
            found = [str(finding) for finding in lint_file(path) if finding.rule == "F104"]
            assert found[0] == f"F104 scale-value: d: {why}; store scales that fit what they scale"
            assert len(found) == 2


def test_a_file_of_nothing_but_empty_messages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MOST_MESSAGES", 1000)
    path = graph(tmp_path, [NodeProto() for _ in range(1000)])
    with pytest.raises(
        InputError,
        match=r"has more than 1000 nodes, attributes and tensors, which no model has; export it again$",
    ):
        lint_file(path)


# What is said.


def test_of_one_rule_a_thousand_places_are_listed_and_the_others_counted(
    fp8q: Callable[..., Any], tmp_path: Path
) -> None:
    path = graph(tmp_path, [helper.make_node("Concat", ["q"] * 5000, ["joined"], name="join", axis=0)])
    found = [finding for finding in lint_file(path) if finding.rule == "F109"]
    assert len(found) == 1001
    assert str(found[-1]) == (
        "F109 operator-takes-fp8: 4,000 more places break this rule; mend those that are listed first"
    )
    assert (found[0].places, found[-1].places) == (1, 4000)
    shown = fp8q("lint", path)
    assert shown.code == 3
    assert "        F109: 4992 more (--json has the first 1000)\n" in shown.out
    assert shown.err.startswith(f"fp8q: {path}: 5001 errors, first F109 operator-takes-fp8: join: Concat reads FP8")
    listed = json.loads(fp8q("lint", path, "--json").out)["findings"]
    assert [entry["rule"] for entry in listed].count("F109") == 1001


HOSTILE = {
    "an escape": ("\x1b[2K\rgood", r"\x1b[2K\rgood"),
    "lines": ("a\nb\u2028c", r"a\nb\u2028c"),
    "direction": ("\u202eevil\u2066", r"\u202eevil\u2066"),
    "C1": ("\x9b31m", r"\x9b31m"),
    "escapes alone": ("\x1b" * 4096, r"\x1b" * 25 + " … (16,384 characters) … " + "1b" + r"\x1b" * 12),
    "length": ("n" * 4096, "n" * 100 + " … (4,096 characters) … " + "n" * 50),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_name_is_shown_in_printable_characters_and_short(fp8q: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    name, shown = HOSTILE[kind]
    made = helper.make_node("Relu", ["q"], ["r"], name=name)
    path = graph(tmp_path, [made, helper.make_node("Relu", ["q"], ["r2"], name=name)])
    first, *others = lint_file(path)
    assert str(first) == (
        f"F109 operator-takes-fp8: {shown}: Relu reads FP8 codes q (opset 23 allows no FP8 there); dequantize them "
        "first"
    )
    assert first.node == name
    assert all(str(finding).isprintable() and len(str(finding)) < 1300 for finding in others)
    result = fp8q("lint", path)
    assert name not in result.out + result.err
    assert json.loads(fp8q("lint", path, "--json").out)["findings"][0]["node"] == name


def test_a_message_is_short_whatever_it_tells_of(tmp_path: Path) -> None:
    def change(model: ModelProto) -> None:
        model.graph.initializer.add(name="t", data_type=1, dims=[10**18] * 64, raw_data=b"")

    (message,) = [finding.message for finding in lint_file(graph(tmp_path, [], change)) if finding.rule == "F407"]
    assert len(message) < 1000
    assert message.startswith("its data are 0 bytes, and FLOAT [1000000000000000000, ")
    assert message.endswith("export the graph again")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: setattr(model.graph.node[0], "name", "n" * 4097),
            "QuantizeLinear has a name of 4097 characters, of at most 4096",
        ),
        (
            lambda model: model.graph.node[1].output.__setitem__(0, "n" * 10_000_000),
            "DequantizeLinear has a name of 10000000 characters, of at most 4096",
        ),
        (
            lambda model: model.graph.initializer.add(name="t" * 5000, data_type=1),
            "has a name of 5000 characters, of at most 4096",
        ),
        (
            lambda model: setattr(model.graph.output[0], "name", "y" * 5000),
            "has a name of 5000 characters, of at most 4096",
        ),
        (
            lambda model: model.graph.initializer.add(name="t", data_type=1, dims=[2**62] * 100_000),
            "its shape has 100000 dimensions, of at most 64",
        ),
        (
            lambda model: model.graph.node[0].attribute.append(model.graph.node[0].attribute[0]),
            "QuantizeLinear has the attribute output_dtype twice",
        ),
        (
            lambda model: model.graph.node[0].attribute.append(helper.make_attribute("axis", 1.0)),
            "QuantizeLinear has the attribute axis as FLOAT and takes INT",
        ),
        (
            lambda model: model.graph.node.append(node("Cast", ["v"], "z", to=0)),
            "Cast names the element type 0, which there is not",
        ),
    ],
    ids=lambda case: case[:50] if isinstance(case, str) else "",
)
def test_what_is_longer_or_other_than_anything_written_is_of_no_form(
    tmp_path: Path, change: Change, message: str
) -> None:
    (finding,) = lint_file(graph(tmp_path, [], change))
    assert (finding.rule, finding.message) == ("F314", f"{message}; export the graph again")
    assert len(finding.node) < 4096


@pytest.mark.parametrize(
    ("scale", "rules"),
    [
        (np.array([], np.float32), ["F107", "F107"]),
        (np.array(1e300), ["F103", "F104"]),
        (np.array(0.5 + 1j, np.complex64), ["F103"]),
    ],
    ids=["empty", "beyond FP32", "complex"],
)
def test_scales_of_any_numbers_are_read_without_a_warning(tmp_path: Path, scale: Any, rules: list[str]) -> None:
    def change(model: ModelProto) -> None:
        kind = helper.np_dtype_to_tensor_dtype(scale.dtype)
        made = helper.make_tensor("s", kind, scale.shape, scale.tobytes(), raw=True)
        model.graph.initializer[0].CopyFrom(made)

    path = graph(tmp_path, [helper.make_node("MatMul", ["v", "v"], ["product"], name="up.matmul")], change)
    assert [finding.rule for finding in lint_file(path)] == rules
    assert {finding.rule for finding in lint_file(path, {"up": 2.5})} >= {"F203"}


def test_a_header_that_nests_too_deep_or_is_too_long_is_none(tmp_path: Path) -> None:
    def change(model: ModelProto) -> None:
        tensor = model.graph.initializer.add(name="t", data_type=1, data_location=1)
        tensor.external_data.add(key="location", value="t.safetensors")

    path = graph(tmp_path, [], change)
    for length, text in ((100_000, b"[" * 100_000), (1 << 40, b"{}")):
        with open(tmp_path / "t.safetensors", "wb") as file:
            file.write(length.to_bytes(8, "little") + text)
            file.truncate(1 << 41)
        (finding,) = [finding for finding in lint_file(path) if finding.rule == "F405"]
        assert finding.message == (
            "its file t.safetensors has no safetensors header; copy the graph's whole directory again"
        )
