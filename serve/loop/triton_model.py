"""The Python model of a Triton repository, copied there as `model.py`: text in, text out, by the loop of `generate.py`.

Requests are batched here, not by Triton: `execute` only passes them to a `Service`, whose thread steps one `Generator`
for all of them, so that a request joins the batch at the next token and leaves it with its last one. Decoupled
transactions make this possible: with `stream` there is a response for each piece of text, otherwise one in all.
`max_batch_size` is 1 for Triton's OpenAI front end, which sends every tensor as [1, …].

The fields are those that the front end sends and reads (`python/openai/openai_frontend/engine/utils/triton.py` in
Triton's server repository, there the format "tensorrtllm", which it uses for every Python model): token counts are
UINT32, and each response counts its own tokens, since the front end adds them up. `return_finish_reason` is vLLM's name
for the same thing.

Triton's utilities get their classes only after this module is imported, so they are looked up where they are used.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # exists in Triton's stub process only

from .generate import GenerationError, Generator
from .here import open_here
from .request import MOST_STOP_WORDS, BusyError, Piece, Request, RequestError
from .service import Failed, Service
from .sessions import SessionError
from .text import Vocabulary

LOG = logging.getLogger("fp8q")
AGAIN = "write the repository again with `fp8q triton RUN`"


@dataclass
class _Reply:
    """The receiver of a request's pieces, and the pieces that are not sent yet."""

    sender: Any
    stream: bool = False
    wanted: dict[str, bool] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    counted: int = 0

    def take(self, piece: Piece | Failed) -> None:
        """Send the available text: each nonempty piece with `stream`, otherwise all of it at the end."""
        if isinstance(piece, Failed):
            codes = {"refused": pb_utils.TritonError.INVALID_ARG, "cancelled": pb_utils.TritonError.CANCELLED}
            self.refuse(piece.reason, codes.get(piece.kind, pb_utils.TritonError.INTERNAL))
            return
        self.texts.append(piece.text)
        if piece.finish_reason or (self.stream and piece.text):
            self._send(piece)

    def _send(self, piece: Piece) -> None:
        outputs = [_tensor("text_output", np.array("".join(self.texts).encode(), object))]
        if self.wanted["return_num_input_tokens"]:
            outputs.append(_tensor("num_input_tokens", np.uint32(piece.input_tokens)))
        if self.wanted["return_num_output_tokens"]:
            outputs.append(_tensor("num_output_tokens", np.uint32(piece.output_tokens - self.counted)))
        if self.wanted["return_finish_reason"]:
            outputs.append(_tensor("finish_reason", np.array((piece.finish_reason or "").encode(), object)))
        self.texts.clear()
        self.counted = piece.output_tokens
        self._respond(pb_utils.InferenceResponse(outputs), final=piece.finish_reason is not None)

    def refuse(self, message: str, code: int) -> None:
        """Send an error as the only or the last response."""
        self._respond(pb_utils.InferenceResponse([], pb_utils.TritonError(message, code)), final=True)

    def _respond(self, response: Any, final: bool) -> None:
        self.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)


def _tensor(name: str, value: Any) -> Any:
    return pb_utils.Tensor(name, np.reshape(value, (1, 1)))


class TritonPythonModel:
    """The class that Triton's Python backend calls: initialize once, execute for every batch of requests, finalize
    once.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Open the engine or graph, and the tokenizer, that config.pbtxt names, on the GPU that Triton made this
        instance for, if it did; Triton shows what is raised as the reason why the model does not load.
        """
        config = json.loads(args["model_config"])
        version = Path(__file__).parent
        weights = _parameter(config, "weights")
        runtime = _parameter(config, "runtime")
        max_batch = _max_batch(config)
        vocabulary = Vocabulary.read(version / weights)
        gpu = int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None
        session = open_here(version, weights, runtime, gpu)
        self._service = Service(Generator(session, vocabulary, max_batch))

    def execute(self, requests: list[Any]) -> None:
        """Read the requests' tensors, which Triton takes back afterwards, and hand them in."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._hand_in(request, sender)
            except Exception:  # a client that is gone cannot be told; the others are to be served
                LOG.exception("a response could not be sent")

    def _hand_in(self, request: Any, sender: Any) -> None:
        try:
            reply = _Reply(sender, bool(_scalar(request, "stream", False)), _wanted(request))
            self._service.submit(_request(request), reply.take, sender.is_cancelled)
        except (BusyError, GenerationError) as error:
            _Reply(sender).refuse(str(error), pb_utils.TritonError.UNAVAILABLE)
        except RequestError as error:
            _Reply(sender).refuse(str(error), pb_utils.TritonError.INVALID_ARG)
        except Exception as error:  # noqa: BLE001  # of a tensor that does not read Triton may raise anything
            fault = f"the request cannot be read ({type(error).__name__}: {error}); send the types of config.pbtxt"
            _Reply(sender).refuse(fault, pb_utils.TritonError.INVALID_ARG)

    def is_ready(self) -> bool:
        """Tell Triton whether this instance takes requests in; servers older than 26.03 do not ask."""
        return self._service.alive

    def finalize(self) -> None:
        """Return once every request is answered."""
        self._service.close()


def _parameter(config: Mapping[str, Any], name: str) -> str:
    """Return a parameter of config.pbtxt.

    Raises SessionError where it is not there.
    """
    value = config.get("parameters", {}).get(name, {}).get("string_value")
    if not value:
        raise SessionError(f"config.pbtxt: has no parameter {name}; {AGAIN}")
    return str(value)


def _max_batch(config: Mapping[str, Any]) -> int:
    """Return how many requests the loop steps at once.

    Raises SessionError for anything but a positive whole number.
    """
    value = _parameter(config, "max_batch")
    if not (value.isascii() and value.isdigit() and int(value)):
        raise SessionError(f"config.pbtxt: max_batch is {value}, and not a number of requests from 1 on; {AGAIN}")
    return int(value)


def _wanted(request: Any) -> dict[str, bool]:
    names = ("return_num_input_tokens", "return_num_output_tokens", "return_finish_reason")
    return {name: bool(_scalar(request, name, False)) for name in names}


def _request(request: Any) -> Request:
    """Convert a Triton request to a Request of the loop.

    Raises RequestError for values out of range, text not in UTF-8, and tensors of other shapes than config.pbtxt has.
    """
    options = {
        name: _scalar(request, name, None)
        for name in ("max_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
    }
    prompts = _texts(request, "text_input")
    if len(prompts) != 1:
        raise RequestError(f"text_input holds {len(prompts)} prompts; send one a request")
    return Request(
        prompts[0],
        stop_words=tuple(_texts(request, "stop_words")),
        **{name: value for name, value in options.items() if value is not None},
    )


def _scalar(request: Any, name: str, default: Any) -> Any:
    """The value of an optional tensor [1, 1] as a Python number."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return default
    values = tensor.as_numpy()
    if values.size != 1:
        raise RequestError(f"{name} holds {values.size} values; send one")
    return values.item()


def _texts(request: Any, name: str) -> list[str]:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    values = [] if tensor is None else tensor.as_numpy().reshape(-1).tolist()
    if len(values) > MOST_STOP_WORDS:
        raise RequestError(f"{name} holds {len(values):,} texts; send at most {MOST_STOP_WORDS}")
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 ({error}); encode it so") from None
