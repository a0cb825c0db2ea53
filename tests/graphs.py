"""What tests count in graphs themselves, to hold against what fp8q says of them."""

from pathlib import Path

import onnx


def products_of_the_demo(graph: Path) -> int:
    """Matrix products of the demo's graph: those of its 4 layers, the head, and the rotary angles where transformers
    makes a product of them (up to 5.14).
    """
    found: int = sum(node.op_type == "MatMul" for node in onnx.load(graph, load_external_data=False).graph.node)
    assert found in {4 * 7 + 1, 4 * 7 + 2}
    return found
