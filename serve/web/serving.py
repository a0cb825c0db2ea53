"""The state of a server: its models, its chat template, its clients, and whether it is closing."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ...calibrate.text.chat import Message
from ...core.errors import InputError
from ..local.chat_template import ChatTemplate
from ..loop.generate import GenerationError, Generator
from ..loop.request import CHARACTERS_A_POSITION, BusyError, Request
from ..loop.service import Ongoing, Service
from .mailbox import Courier, Mailbox
from .metrics import Metrics, ModelMetrics
from .refusals import Refusal

#: Bytes of a request: a text of as many characters as are tokenized, each in two bytes, beside all else.
BODY = 1 << 20
BODY_A_POSITION = 2 * CHARACTERS_A_POSITION
#: Chats that may wait for the process that renders them.
MOST_RENDERING = 64
#: Pieces that a client may leave unread of its stream, and seconds, where another request waits for a row.
MOST_UNREAD = 4096
UNREAD_SECONDS = 2.0


class Model:
    """A model that is served under a name; `tailed`: its inputs have second codes only at the end of a prompt and in
    decoded tokens.
    """

    def __init__(self, name: str, precision: str, runtime: str, generator: Generator, *, tailed: bool = False):
        """`generator` is nobody else's from now on."""
        self.name = name
        self.precision = precision
        self.runtime = runtime
        self.tailed = tailed
        self.vocabulary = generator.vocabulary
        self.positions = generator.positions
        self.service = Service(generator)

    def load(self) -> tuple[int, int]:
        """Return the numbers of requests being answered and waiting."""
        return self.service.load


@dataclass
class Serving:
    """The state of one server, for its event loop alone.

    `template`: the model's, or the reason of its absence. `closing`: no new request is accepted. `cut`: the number of
    requests that were broken off at the end.
    """

    models: Sequence[Model]
    template: ChatTemplate | InputError
    key: str | None = None
    hosts: frozenset[str] | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    closing: bool = False
    cut: int = 0

    def __post_init__(self) -> None:
        """Begin to count."""
        self.metrics = Metrics()
        self._counts = {
            model.name: self.metrics.model_metrics(model.name, model.runtime, model.load) for model in self.models
        }
        self._rendering = ThreadPoolExecutor(1, "fp8q-template")
        self._rendered = 0
        self._boxes: dict[Mailbox, Handed] = {}

    @property
    def largest_body(self) -> int:
        """Bytes that a request may have."""
        return BODY + BODY_A_POSITION * max(model.positions for model in self.models)

    @property
    def alive(self) -> bool:
        """Tell whether every model's loop runs."""
        return all(model.service.alive for model in self.models)

    def open(self) -> None:
        """Take the running event loop for this server's."""
        self._courier = Courier()
        if isinstance(self.template, ChatTemplate):  # the process that renders takes seconds to start
            self._rendering.submit(self.template.render, [{"role": "user", "content": "?"}])

    def find(self, name: str | None) -> Model:
        """The model of that name, or the first; raises Refusal for any other name."""
        for model in self.models:
            if name in (None, model.name):
                return model
        there = ", ".join(model.name for model in self.models)
        raise Refusal(404, f"there is no model {name}; there is {there}", "model", "model_not_found")

    def counts(self, model: Model) -> ModelMetrics:
        """Return the metrics of a model."""
        return self._counts[model.name]

    async def render(self, messages: list[Message], said: int, positions: int) -> str:
        """Render the chat `messages`, of `said` characters in all, as a prompt.

        Raises Refusal for a chat that is too long, or that the template refuses.
        """
        if isinstance(self.template, InputError):
            raise Refusal(400, str(self.template), "messages")
        most = CHARACTERS_A_POSITION * positions
        if said > most:
            raise Refusal(
                400,
                f"the messages have {said:,} characters, more than {most:,}, and the model {positions} positions for "
                "prompt and answer; shorten them",
                "messages",
                "context_length_exceeded",
            )
        if self._rendered >= MOST_RENDERING:
            raise Refusal(429, f"{self._rendered} chats wait to be rendered already; try again later", code="busy")
        self._rendered += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._rendering, self.template.render, messages)
        except InputError as error:
            raise Refusal(400, str(error), "messages") from None
        finally:
            self._rendered -= 1

    def submit(self, model: Model, requests: Sequence[Request], eager: bool, client: str) -> "Handed":
        """Submit requests of `client`, all of them or none; raises Refusal where the queue is full."""
        if model.service.failure is not None:
            raise Refusal(503, model.service.failure, code="dead")
        if self.closing or not model.service.alive:
            raise Refusal(503, "the server is closing; ask another", code="closing")
        box = Mailbox(self._courier, eager)
        handed = Handed(self, model, box, [])
        try:
            for index, request in enumerate(requests):
                handed.ongoing.append(model.service.submit(request, box.receiver(index), client=client))
        except BusyError as error:
            handed.let_go()
            self.counts(model).ended("busy", len(requests))
            raise Refusal(429, str(error), code="busy") from None
        except GenerationError as error:
            handed.let_go()
            raise Refusal(503, str(error), code="dead") from None
        self._boxes[box] = handed
        return handed

    def drop(self, box: Mailbox) -> None:
        """Forget a client."""
        self._boxes.pop(box, None)

    async def watch(self) -> None:
        """Once a second, free the rows of streams that their clients do not read."""
        while True:
            await asyncio.sleep(1)
            for handed in list(self._boxes.values()):
                if handed.stalled():
                    handed.let_go()
                    handed.box.fail("the stream was not read; read it as it comes")

    def close(self) -> None:
        """Answer the requests in flight, then end all threads."""
        self._rendering.shutdown()
        for model in self.models:
            model.service.close()


@dataclass
class Handed:
    """The requests handed in for one client."""

    serving: Serving
    model: Model
    box: Mailbox
    ongoing: list[Ongoing]

    def stalled(self) -> bool:
        """Tell whether too much lies unread, or anything for too long while another request waits; once a second."""
        pieces, seconds = self.box.look()
        return pieces > MOST_UNREAD or (seconds > UNREAD_SECONDS and self.model.load()[1] > 0)

    def let_go(self) -> None:
        """Free the rows of the requests that have not ended."""
        for request in self.ongoing:
            request.cancel()
        self.serving.drop(self.box)
