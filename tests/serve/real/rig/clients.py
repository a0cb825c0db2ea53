"""How the tests reach a Triton server: its HTTP port as any program would, its gRPC port through NVIDIA's client."""

import json
import queue
from collections.abc import Generator
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np
from tritonclient import grpc
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from fp8q.serve.triton.repository import INPUTS

#: Seconds that anything may take; what needs as long hangs.
PATIENCE = 30.0


class Http:
    """A client of the HTTP port at `address`, to be used in `with`: the server waits for connections left open."""

    def __init__(self, address: str):
        """Connect where the first request needs it."""
        self._client = httpx.Client(
            base_url=address,
            timeout=PATIENCE,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,  # no proxy between
            verify=False,  # certificates, of which there are none here, take a while to read
        )

    def __enter__(self) -> Self:
        """This client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close its connections."""
        self._client.close()

    def load(self, model: str, loaded: bool = True) -> None:
        """Load a model of the repository, or unload it."""
        self._client.post(f"/v2/repository/models/{model}/{'load' if loaded else 'unload'}").raise_for_status()

    def state(self, model: str) -> str:
        """What the server says of a model: READY, UNLOADING, UNAVAILABLE …"""
        index = self._client.post("/v2/repository/index").json()
        return str(next(each.get("state", "") for each in index if each["name"] == model))

    def post(self, model: str, body: bytes, path: str = "generate") -> tuple[int, str]:
        """Send these bytes as a request; status and text of the answer."""
        answer = self._client.post(f"/v2/models/{model}/{path}", content=body)
        return answer.status_code, answer.text

    def generate(self, model: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """One answer; its status, and its fields without the model's name and version."""
        status, text = self.post(model, json.dumps(fields).encode())
        return status, _told(text)

    def text(self, model: str, **fields: Any) -> str:
        """The text of an answer that must be one."""
        status, told = self.generate(model, **fields)
        assert status == 200, told
        return str(told["text_output"])

    def stream(self, model: str, **fields: Any) -> Generator[dict[str, Any], None, None]:
        """The events of an answer as they come; whoever stops early closes the connection."""
        with self._client.stream("POST", f"/v2/models/{model}/generate_stream", json=fields) as answer:
            for line in answer.iter_lines():
                if line:
                    assert line.startswith("data: "), line
                    yield _told(line.removeprefix("data: "))


def _told(text: str) -> dict[str, Any]:
    told = json.loads(text)
    return {key: value for key, value in told.items() if key not in ("model_name", "model_version")}


class Grpc:
    """A stream to the gRPC port at `address`, to be used in `with`; its end cancels what is still in flight."""

    def __init__(self, address: str):
        """Open the stream."""
        self._answers: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
        self._client = grpc.InferenceServerClient(address)
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))

    def __enter__(self) -> Self:
        """This stream."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        """Hang up."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def send(self, model: str, request_id: str, **fields: Any) -> None:
        """Send a request, whose answers carry its id."""
        tensors = [tensor(name, value) for name, value in fields.items()]
        self._client.async_stream_infer(model, tensors, request_id=request_id, enable_empty_final_response=True)

    def next(self) -> tuple[str, dict[str, Any], bool]:
        """The next response: whose it is, its outputs, whether it is the last.

        Of an error the server does not say whose it is; the outputs then are `error` and `code`.
        """
        result, error = self._answers.get(timeout=PATIENCE)
        if error is not None:
            return "", {"error": error.message(), "code": str(error.status())}, True
        response = result.get_response()
        outputs = {output.name: result.as_numpy(output.name).item() for output in response.outputs}
        return response.id, outputs, response.parameters["triton_final_response"].bool_param

    def ask(self, model: str, **fields: Any) -> list[dict[str, Any]]:
        """All responses to one request, where no other is in flight."""
        self.send(model, "only", **fields)
        answers = []
        while True:
            _, outputs, last = self.next()
            answers.append(outputs)
            if last:
                return answers


def tensor(name: str, value: Any) -> grpc.InferInput:
    """One of the model's inputs [1, number of values], of the type that config.pbtxt has."""
    kind = {"TYPE_STRING": "BYTES"}.get(INPUTS[name][0], INPUTS[name][0].removeprefix("TYPE_"))
    values = value if isinstance(value, list) else [value]
    array = np.array(
        [[each.encode() if isinstance(each, str) else each for each in values]],
        np.object_ if kind == "BYTES" else triton_to_np_dtype(kind),
    )
    made = grpc.InferInput(name, array.shape, kind)
    made.set_data_from_numpy(array)
    return made
