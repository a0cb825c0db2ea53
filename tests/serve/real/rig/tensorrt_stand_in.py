"""Stands in for Triton's TensorRT backend where there is no GPU: put at `backends/tensorrt/model.py`, so that a
`config.pbtxt` with `platform: "tensorrt_plan"` loads unmodified and its model runs, on ONNX Runtime.

It takes the graph from the one `*.onnx` file beside the plan, and from the config what the plan's bindings are said to
be, which it holds against the graph: every binding must be declared, with its name, type and number of dimensions, as
the real backend wants it. Unlike the real one it knows no profiles and no kernels.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # exists in Triton's stub process only

#: What TensorRT's backend knows of Triton's types, by ONNX Runtime's names.
TYPES = {
    "tensor(float)": "TYPE_FP32", "tensor(float16)": "TYPE_FP16", "tensor(int8)": "TYPE_INT8",
    "tensor(uint8)": "TYPE_UINT8", "tensor(int32)": "TYPE_INT32", "tensor(int64)": "TYPE_INT64",
    "tensor(bool)": "TYPE_BOOL",
}  # fmt: skip


class TritonPythonModel:
    """What Triton's Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the graph and hold the config against it; what is raised is why the model does not load."""
        config = json.loads(args["model_config"])
        version = Path(args["model_repository"]) / args["model_version"]
        plan = version / (config.get("default_model_filename") or "model.plan")
        if not plan.is_file():
            raise ValueError(f"there is no {plan.name}")
        graphs = sorted(version.glob("*.onnx"))
        if len(graphs) != 1:
            raise ValueError(f"beside {plan.name} lie {len(graphs)} ONNX graphs; put the one there that it is made of")
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        self._session = onnxruntime.InferenceSession(str(graphs[0]), options, providers=["CPUExecutionProvider"])
        batched = int(config.get("max_batch_size", 0) > 0)
        hold(config["input"], self._session.get_inputs(), batched)
        hold(config["output"], self._session.get_outputs(), batched)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run each request by itself."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        wanted = list(request.requested_output_names())
        try:
            feeds = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            found = self._session.run(wanted, feeds)
        except Exception as error:  # noqa: BLE001  # ONNX Runtime's have no common class of their own
            return pb_utils.InferenceResponse([], pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, np.ascontiguousarray(value)) for name, value in zip(wanted, found, strict=True)]
        )


def hold(declared: list[dict[str, Any]], bindings: list[Any], batched: int) -> None:
    """Raise ValueError where the config's tensors are others than the graph's."""
    said = {each["name"]: (each["data_type"], len(each["dims"]) + batched) for each in declared}
    are = {each.name: (TYPES.get(each.type, each.type), len(each.shape)) for each in bindings}
    for name in sorted(said.keys() | are.keys()):
        if said.get(name) != are.get(name):
            raise ValueError(f"{name}: config.pbtxt says {said.get(name)}, the graph {are.get(name)}")
