"""How long `lint_file` takes on graphs of up to 10,000 products, beside what onnx itself takes for them: at most 10 s.

    python benchmarks/lint_time.py [--products 1000 3000 10000]

Two graphs of each size, written node by node: `layers` are linear layers one behind the other, as `fp8q export` writes
them (Q/DQ, the weight's DequantizeLinear and Transpose, a MatMul; weights and scales in a safetensors file), held
against a promise of every scale; `chain` is one row of as many Identity and Transpose behind a DequantizeLinear, with a
product hanging from each of them, which every walk from a product back to its codes must climb. What no lint can do
without is onnx's `load`, and its checker does least of what a lint does: both are the ceiling. Seconds of this
process's processor time, the least of two runs. Prints one JSON line; exit status 1 when the limit is not met.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper
from result import arguments, described, publish

from fp8q.export.lint.check import lint_file

Array = npt.NDArray[np.generic]
#: The file of a graph, and what is promised of it.
Made = tuple[Path, dict[str, float | None] | None, dict[str, Array] | None]
LIMIT_SECONDS = 10.0
RUNS = 2
WIDTH = 64
FP8, BF16 = TensorProto.FLOAT8E4M3FN, TensorProto.BFLOAT16
SCALE = 0.5


def node(operator: str, inputs: str, output: str, name: str, **attributes: Any) -> NodeProto:
    """A node of one output."""
    return helper.make_node(operator, inputs.split(), [output], name=name, **attributes)


def linear(module: str, value: str, output: str) -> list[NodeProto]:
    """A linear layer as `fp8q export` writes it."""
    to: dict[str, Any] = {"output_dtype": BF16}
    return [
        node("QuantizeLinear", f"{value} {module}.s", f"{module}.c", f"{module}.input.quantize", output_dtype=FP8),
        node("DequantizeLinear", f"{module}.c {module}.s", f"{module}.v", f"{module}.input.dequantize", **to),
        node(
            "DequantizeLinear",
            f"{module}.weight {module}.weight_scale",
            f"{module}.w",
            f"{module}.weight.dequantize",
            axis=0,
            **to,
        ),
        node("Transpose", f"{module}.w", f"{module}.t", f"{module}.turn", perm=[1, 0]),
        node("MatMul", f"{module}.v {module}.t", output, f"{module}.matmul"),
    ]


def layers(directory: Path, products: int) -> Made:
    """The graph of as many linear layers, its file of weights beside it, and what is promised of it."""
    modules = [f"model.layers.{index // 7}.part{index % 7}" for index in range(products)]
    nodes = [
        made
        for index, module in enumerate(modules)
        for made in linear(module, f"x{index}", f"x{index + 1}" if index + 1 < products else "y")
    ]
    weights, scales = np.zeros((WIDTH, WIDTH), np.uint8), np.ones(WIDTH, np.float32)
    kinds: dict[str, tuple[int, str, Array]] = {
        "weight": (FP8, "F8_E4M3", weights),
        "weight_scale": (TensorProto.FLOAT, "F32", scales),
        "s": (TensorProto.FLOAT, "F32", np.array(SCALE, np.float32)),
    }
    stored: list[tuple[str, int, Array, int]] = []
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for module in modules:
        for part, (kind, code, values) in kinds.items():
            header[f"{module}.{part}"] = {
                "dtype": code,
                "shape": list(values.shape),
                "data_offsets": [end, end + values.nbytes],
            }
            stored.append((f"{module}.{part}", kind, values, end))
            end += values.nbytes
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, values, _ in stored:
            file.write(values.tobytes())
    tensors = [external(name, kind, values, 8 + len(text) + start) for name, kind, values, start in stored]
    path = write(directory, nodes, tensors)
    return path, dict.fromkeys(modules, SCALE), dict.fromkeys(modules, scales)


def external(name: str, kind: int, values: Array, offset: int) -> TensorProto:
    """A tensor in the safetensors file."""
    tensor = TensorProto(name=name, data_type=kind, dims=values.shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "model.safetensors"), ("offset", offset), ("length", values.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def chain(directory: Path, products: int) -> Made:
    """A row of Identity and Transpose, a product hanging from each; nothing is promised of it."""
    weight = helper.make_tensor("w", FP8, [WIDTH, WIDTH], bytes(WIDTH * WIDTH), raw=True)
    scale = helper.make_tensor("s", TensorProto.FLOAT, [], [SCALE])
    nodes = [
        node("QuantizeLinear", "x0 s", "c", "quantize", output_dtype=FP8),
        node("DequantizeLinear", "c s", "m0", "dequantize", output_dtype=BF16),
        node("DequantizeLinear", "w s", "wide", "weight", output_dtype=BF16),
    ]
    for index in range(products):
        operator = "Transpose" if index % 2 else "Identity"
        nodes.append(node(operator, f"m{index}", f"m{index + 1}", f"move{index}"))
        output = f"p{index}" if index + 1 < products else "y"
        nodes.append(node("MatMul", f"m{index + 1} wide", output, f"product{index}"))
    return write(directory, nodes, [weight, scale]), None, None


def write(directory: Path, nodes: list[NodeProto], tensors: list[TensorProto]) -> Path:
    """The file of a graph from x0 to y."""
    ends = [[helper.make_tensor_value_info(name, BF16, ["batch", WIDTH])] for name in ("x0", "y")]
    graph = helper.make_graph(nodes, "graph", ends[0], ends[1], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    return directory / "model.onnx"


GRAPHS: dict[str, Callable[[Path, int], Made]] = {"layers": layers, "chain": chain}


def seconds(work: Callable[[], object]) -> float:
    """Processor time of `work`, the least of `RUNS`."""
    found = []
    for _ in range(RUNS):
        start = process_time()
        work()
        found.append(process_time() - start)
    return round(min(found), 3)


def checked(path: Path) -> ModelProto:
    """What onnx itself does with a file."""
    model = onnx.load(path, load_external_data=False)
    onnx.checker.check_model(str(path))
    return model


def measured(kind: str, products: int) -> dict[str, object]:
    """One graph: seconds of the lint and of onnx, and how many findings."""
    with tempfile.TemporaryDirectory() as folder:
        path, promised, scales = GRAPHS[kind](Path(folder), products)
        return {
            "graph": kind,
            "products": products,
            "file_bytes": path.stat().st_size,
            "findings": len(lint_file(path, promised, scales)),
            "lint_seconds": seconds(lambda: lint_file(path, promised, scales)),
            "onnx_load_seconds": seconds(lambda: onnx.load(path, load_external_data=False)),
            "onnx_load_and_checker_seconds": seconds(lambda: checked(path)),
        }


def main() -> int:
    """Measure, print, and say by the exit status whether the limit was met."""
    parser = arguments(__doc__)
    parser.add_argument("--products", type=int, nargs="+", default=[1000, 3000, 10_000])
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    options = parser.parse_args()
    head = described("lint_time")
    found = [measured(kind, products) for kind in options.graphs for products in options.products]
    slowest = max(float(str(each["lint_seconds"])) for each in found)
    limits = {"limit_seconds": LIMIT_SECONDS, "seconds": slowest, "passed": slowest <= LIMIT_SECONDS}
    return publish(head, {"graphs": found, **limits}, options.save)


if __name__ == "__main__":
    sys.exit(main())
