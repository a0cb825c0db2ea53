"""Sort the nodes of a graph topologically.

ONNX asks for this order in the file (F313), and most files have it; a file that does not is checked all the same.
"""

from collections.abc import Mapping, Sequence

from onnx import NodeProto


def in_order(nodes: Sequence[NodeProto], makers: Mapping[str, NodeProto]) -> list[NodeProto]:
    """Sort the nodes so that each comes behind the producers of its inputs, and otherwise keep the file's order.

    Nodes in a cycle, and nodes that depend on one, come last. `makers`: value -> the node that makes it.
    """
    made: set[str] = set()
    readers: dict[str, list[int]] = {}
    missing: list[int] = []
    ordered: list[NodeProto] = []
    for index, node in enumerate(nodes):
        lacking = {name for name in node.input if name in makers and name not in made}
        for name in lacking:
            readers.setdefault(name, []).append(index)
        missing.append(len(lacking))
        free = [] if lacking else [index]
        while free:
            ready = nodes[free.pop()]
            ordered.append(ready)
            for name in ready.output:
                made.add(name)
                for waiting in readers.pop(name, ()):
                    missing[waiting] -= 1
                    free += [] if missing[waiting] else [waiting]
    return ordered + [node for node, lacking in zip(nodes, missing, strict=True) if lacking]
