"""Nodes as ModelOpt's exporter names them."""

from typing import Any

from onnx import NodeProto, helper

LAYER = "/model/layers.0/mlp/down_proj"


def node(operator: str, inputs: str, output: str, name: str | None = None, **attributes: Any) -> NodeProto:
    """A node, named as ModelOpt names it."""
    scope = (
        f"{'input' if inputs.startswith('x') else 'weight'}_quantizer/"
        if operator.endswith("quantizeLinear") or operator == "QuantizeLinear"
        else ""
    )
    return helper.make_node(
        operator, inputs.split(), [output], name=f"{LAYER}/{scope}{operator}" if name is None else name, **attributes
    )
