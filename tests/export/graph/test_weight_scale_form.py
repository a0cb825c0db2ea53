"""The two forms of a graph: what the pass makes, what it leaves alone, and that the way back gives the same bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from fp8q.export.graph.weight_scale_form import UNIT, in_form, link_data, other, recorded_form, write_form
from fp8q.export.onnx_file.loading import load_graph
from fp8q.export.onnx_file.weight_scales import weight_scales

Decoders = Callable[..., Any]
LAYER = "model.layers.0"
GATE, UP, DOWN = (f"{LAYER}.mlp.{name}_proj" for name in ("gate", "up", "down"))
GRAPHS: list[dict[str, Any]] = [
    {},
    {"layers": 2, "bias": True},
    {"transposed": False, "bias": True},
    {"compute": TensorProto.FLOAT},
    {"compute": TensorProto.FLOAT16, "plain_attention": True, "key_value_heads": 4},
    {"wide": (DOWN,)},
]


def loaded(path: Path) -> ModelProto:
    return onnx.load_model(path, load_external_data=False)


def rescaled(model: ModelProto) -> set[str]:
    """The modules whose GEMM is in the form `mul`."""
    ends = ".matmul.rescale"
    return {node.name.removesuffix(ends) for node in model.graph.node if node.name.endswith(ends)}


@pytest.mark.parametrize("options", GRAPHS, ids=str)
def test_the_way_to_mul_and_back_gives_the_same_bytes(decoder: Decoders, options: dict[str, Any]) -> None:
    written = decoder(**options)
    before = written.path.read_bytes()
    write_form(written.path, written.path, "dq")
    assert written.path.read_bytes() == before
    write_form(written.path, written.path, "mul")
    there = written.path.read_bytes()
    assert rescaled(loaded(written.path)) == set(written.modules)
    write_form(written.path, written.path, "mul")
    assert written.path.read_bytes() == there
    write_form(written.path, written.path, "dq")
    assert written.path.read_bytes() == before


@pytest.mark.parametrize("options", GRAPHS, ids=str)
def test_both_forms_multiply_by_the_checkpoints_scales(decoder: Decoders, options: dict[str, Any]) -> None:
    written = decoder(**options)
    for form in ("dq", "mul"):
        write_form(written.path, written.path, form)
        graph = load_graph(written.path)
        assert recorded_form(graph) == form
        found = {product.node.name.removesuffix(".matmul"): weight_scales(graph, product) for product in graph.gemms}
        for module in written.modules:
            np.testing.assert_array_equal(found[module], written.weight_scales[module])
    assert (other("dq"), other("mul")) == ("mul", "dq")


def test_the_product_is_fp32_then_scaled_then_cast_then_the_bias_is_added(decoder: Decoders) -> None:
    path = decoder(bias=True, weight_scale="mul").path
    nodes = {node.name: node for node in loaded(path).graph.node}
    first = f"{DOWN}.matmul"
    chain = [(first, "MatMul"), (f"{first}.rescale", "Mul"), (f"{first}.rescale_cast", "Cast")]
    assert [(name, nodes[name].op_type) for name, _ in chain] == chain
    product, rescale, cast = (nodes[name] for name, _ in chain)
    assert list(rescale.input) == [product.output[0], f"{DOWN}.weight_scale"]
    assert (list(cast.input), [entry.i for entry in cast.attribute]) == ([*rescale.output], [TensorProto.BFLOAT16])
    assert list(nodes[f"{DOWN}.bias_add"].input) == [cast.output[0], f"{DOWN}.bias"]
    for name, scale in ((f"{DOWN}.weight.dequantize", UNIT), (f"{DOWN}.input.dequantize", f"{DOWN}.input_scale")):
        assert nodes[name].input[1] == scale
        assert {entry.name: entry.i for entry in nodes[name].attribute}["output_dtype"] == TensorProto.FLOAT


def test_a_graph_in_fp32_needs_no_cast(decoder: Decoders) -> None:
    model = loaded(decoder(compute=TensorProto.FLOAT, weight_scale="mul").path)
    assert len(rescaled(model)) == 7
    assert not [node.name for node in model.graph.node if node.op_type == "Cast"]


def test_a_dequantize_that_states_no_type_gets_the_form_s(decoder: Decoders) -> None:
    written = decoder(compute=TensorProto.FLOAT)
    model = loaded(written.path)
    dequantize = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    for node in dequantize:  # its type is that of its scale then
        stated = [entry for entry in node.attribute if entry.name != "output_dtype"]
        del node.attribute[:]
        node.attribute.extend(stated)
    in_form(model, written.path.parent, "mul")
    types = {entry.i for node in dequantize for entry in node.attribute if entry.name == "output_dtype"}
    assert (len(rescaled(model)), types) == (7, {TensorProto.FLOAT})


def read_elsewhere(model: ModelProto) -> None:
    """Something else takes the input of gate and up, as codes give it."""
    model.graph.node.append(
        helper.make_node("Identity", [f"{GATE}.input.dequantize_output"], ["elsewhere"], name="elsewhere")
    )


def gemm(model: ModelProto) -> None:
    next(node for node in model.graph.node if node.name == f"{DOWN}.matmul").op_type = "Gemm"


@pytest.mark.parametrize(
    ("options", "change", "left"),
    [
        ({"per_channel": False}, None, None),
        ({"wide_inputs": (DOWN,)}, None, {DOWN}),
        ({}, read_elsewhere, {GATE, UP}),
        ({}, gemm, {DOWN}),
    ],
)
def test_what_is_left_as_it_is(
    decoder: Decoders, options: dict[str, Any], change: Callable[[ModelProto], None] | None, left: set[str] | None
) -> None:
    written = decoder(**options)
    model = loaded(written.path)
    if change:
        change(model)
    before = model.SerializeToString()
    in_form(model, written.path.parent, "mul")
    assert rescaled(model) == (set(written.modules) - left if left is not None else set())
    assert left or model.SerializeToString() == before
    in_form(model, written.path.parent, "dq")
    assert model.SerializeToString() == before


def test_in_another_directory_links_lead_to_the_data(decoder: Decoders, tmp_path: Path) -> None:
    path = decoder().path
    (engines := tmp_path / "engines").mkdir()
    write_form(path, engines / "sm90.onnx", "mul")
    (link,) = link_data(path, engines)
    assert (link, link.readlink()) == (engines / "model.safetensors", Path("../model/model.safetensors"))
    assert link_data(path, engines) == []
    assert loaded(engines / "sm90.onnx").graph.initializer[-1].name == UNIT
