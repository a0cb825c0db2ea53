"""The Python model of a Triton repository, copied there as `model.py`: text in, text out, with the loop of
`generate.py` between.

Requests are batched here, not by Triton: `execute` only hands them to a thread that steps one `Generator` for all of
them, so that a request joins the batch at the next token and leaves it with its last one. Decoupled transactions make
this possible: responses are sent when there is something to say, one for each piece of text with `stream`, else one in
all. `max_batch_size` is 1 for the sake of Triton's OpenAI front end, which sends every tensor as [1, …].

The fields are those that the front end sends and reads (`python/openai/openai_frontend/engine/utils/triton.py` in
Triton's server repository, there the format "tensorrtllm", which it takes for every Python model): token counts are
UINT32, and each response counts its own tokens, since the front end adds them up. `return_finish_reason` is vLLM's name
for the same thing.

Triton's utilities get their classes only after this module is imported, so they are looked up where they are used.
"""

import json
import logging
import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # exists in Triton's stub process only

from .generate import Generator, Piece, Request, RequestError
from .sessions import open_session
from .text import Vocabulary

LOG = logging.getLogger("fp8q")


@dataclass
class _Reply:
    """Whom a request's pieces go to, and what of them is not sent yet."""

    sender: Any
    stream: bool
    wanted: dict[str, bool]
    texts: list[str] = field(default_factory=list)
    counted: int = 0

    def take(self, piece: Piece) -> None:
        """Send what there is to send: each text that is not empty with `stream`, else all of them at the end."""
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
        """Hand a response to Triton; when it takes no more for this request, the others are not to suffer."""
        try:
            self.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
        except Exception:
            LOG.exception("a response could not be sent")


def _tensor(name: str, value: Any) -> Any:
    return pb_utils.Tensor(name, np.reshape(value, (1, 1)))


class TritonPythonModel:
    """What Triton's Python backend calls: initialize once, execute for every batch of requests, finalize once."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the graph and the tokenizer that config.pbtxt names; Triton shows what is raised as the reason why the
        model does not load.
        """
        parameters = {
            name: value["string_value"] for name, value in json.loads(args["model_config"])["parameters"].items()
        }
        directory = Path(__file__).parent / parameters["weights"]
        session = open_session(directory, parameters["runtime"])
        self._generator = Generator(session, Vocabulary.read(directory), int(parameters["max_batch"]))
        self._arrivals: queue.SimpleQueue[tuple[Request, _Reply] | None] = queue.SimpleQueue()
        self._replies: dict[int, _Reply] = {}
        self._worker = threading.Thread(target=self._serve, name="fp8q", daemon=True)
        self._worker.start()

    def execute(self, requests: list[Any]) -> None:
        """Read the requests' tensors, which Triton takes back afterwards, and hand them to the thread."""
        for request in requests:
            reply = _Reply(request.get_response_sender(), bool(_scalar(request, "stream", False)), _wanted(request))
            try:
                self._arrivals.put((_request(request), reply))
            except RequestError as error:
                reply.refuse(str(error), pb_utils.TritonError.INVALID_ARG)

    def finalize(self) -> None:
        """End the thread once every request it was given is answered."""
        self._arrivals.put(None)
        self._worker.join()

    def _serve(self) -> None:
        open_for_more = True
        while open_for_more or self._generator.busy:
            try:
                arrival = self._arrivals.get(block=not self._generator.busy)
            except queue.Empty:
                self._step()
                continue
            if arrival is None:
                open_for_more = False
            else:
                self._admit(*arrival)

    def _admit(self, request: Request, reply: _Reply) -> None:
        try:
            self._replies[self._generator.submit(request)] = reply
        except RequestError as error:
            reply.refuse(str(error), pb_utils.TritonError.INVALID_ARG)

    def _step(self) -> None:
        """Step the loop; a failure is told to all whom it concerns, and those who come after start afresh."""
        self._drop_cancelled()
        try:
            pieces = self._generator.step()
        except Exception as error:
            LOG.exception("generation failed")
            self._generator.reset()
            for reply in self._replies.values():
                reply.refuse(f"generation failed: {type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)
            self._replies.clear()
            return
        for piece in pieces:
            self._replies[piece.ticket].take(piece)
            if piece.finish_reason:
                del self._replies[piece.ticket]

    def _drop_cancelled(self) -> None:
        for ticket in [ticket for ticket, reply in self._replies.items() if reply.sender.is_cancelled()]:
            self._generator.cancel(ticket)
            self._replies.pop(ticket).refuse("the client cancelled the request", pb_utils.TritonError.CANCELLED)


def _wanted(request: Any) -> dict[str, bool]:
    names = ("return_num_input_tokens", "return_num_output_tokens", "return_finish_reason")
    return {name: bool(_scalar(request, name, False)) for name in names}


def _request(request: Any) -> Request:
    """A Triton request's tensors as ours; raises RequestError for values out of range and text not in UTF-8."""
    given = {
        name: _scalar(request, name, None)
        for name in ("max_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
    }
    (prompt,) = _texts(request, "text_input")
    return Request(
        prompt,
        stop_words=tuple(_texts(request, "stop_words")),
        **{name: value for name, value in given.items() if value is not None},
    )


def _scalar(request: Any, name: str, default: Any) -> Any:
    """The value of an optional tensor [1, 1] as a Python number."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().item()


def _texts(request: Any, name: str) -> list[str]:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    try:
        return [] if tensor is None else [value.decode() for value in tensor.as_numpy().reshape(-1)]
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 ({error}); encode it so") from None
