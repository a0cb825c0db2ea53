"""What Triton's stub process gives a Python model, as far as fp8q's model uses it, and as strict as Triton is or
stricter.

As in Triton, the classes are put into this module by the stub after it has imported the model (`install`), tensors
carry the dtype that their data type has, and a sender that was sent the final flag takes nothing more. Unlike Triton,
which lets any shape pass, a response's tensors are held against config.pbtxt.
"""

import threading
from typing import Any

import numpy as np
from google.protobuf import text_format
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
DTYPES: dict[str, Any] = {
    "TYPE_STRING": np.object_,
    "TYPE_BOOL": np.bool_,
    "TYPE_INT32": np.int32,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_FP32": np.float32,
}


def get_input_tensor_by_name(request: "_InferenceRequest", name: str) -> "_Tensor | None":
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


class _Tensor:
    def __init__(self, name: str, array: NDArray[Any]):
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> NDArray[Any]:
        return self._array


class _TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL):
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class _InferenceResponse:
    def __init__(self, output_tensors: list[_Tensor], error: _TritonError | None = None):
        self.tensors, self.error = output_tensors, error


class _Sender:
    """Keeps what is sent; `done` is set by the final flag."""

    def __init__(self, config: Any):
        self.config = config
        self.responses: list[_InferenceResponse] = []
        self.done = threading.Event()
        self.cancelled = False
        self.broken = False

    def is_cancelled(self) -> bool:
        return self.cancelled

    def send(self, response: _InferenceResponse | None = None, flags: int = 0) -> None:
        if self.done.is_set():
            raise RuntimeError("Unable to send response. Response sender has been closed.")
        if self.broken:
            raise RuntimeError("An error occurred while sending a response.")
        if response is None and not flags:
            raise RuntimeError("Inference Response object must be provided when the response flags is set to zero.")
        if response is not None:
            for tensor in response.tensors:
                self._check(tensor)
            self.responses.append(response)
        if flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.done.set()

    def _check(self, tensor: _Tensor) -> None:
        (declared,) = [output for output in self.config.output if output.name == tensor.name()]
        assert tensor.as_numpy().dtype == DTYPES[model_config_pb2.DataType.Name(declared.data_type)], tensor.name()
        assert tensor.as_numpy().shape == (1, *declared.dims), tensor.name()


class _InferenceRequest:
    """A request as the server hands it on: inputs of the declared types and shapes, the required ones there."""

    def __init__(self, config_text: str, inputs: dict[str, Any]):
        config = text_format.Parse(config_text, model_config_pb2.ModelConfig())
        declared = {tensor.name: tensor for tensor in config.input}
        assert inputs.keys() <= declared.keys()
        assert all(name in inputs or tensor.optional for name, tensor in declared.items())
        self._inputs = [_Tensor(name, _array(value, declared[name])) for name, value in inputs.items()]
        self.sender = _Sender(config)

    def inputs(self) -> list[_Tensor]:
        return self._inputs

    def get_response_sender(self) -> _Sender:
        return self.sender


def _array(value: Any, declared: Any) -> NDArray[Any]:
    values = value if isinstance(value, list) else [value]
    assert list(declared.dims) in ([-1], [len(values)])
    encoded = [each.encode() if isinstance(each, str) else each for each in values]
    return np.array([encoded], DTYPES[model_config_pb2.DataType.Name(declared.data_type)])


def install() -> None:
    """Do what the stub does once the model's module is imported."""
    globals().update(
        Tensor=_Tensor,
        TritonError=_TritonError,
        InferenceResponse=_InferenceResponse,
        InferenceRequest=_InferenceRequest,
    )
