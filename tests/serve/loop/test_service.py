"""The service on the counting model: events, never clocks, say who has come how far."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from fp8q.serve.loop.device import BrokenDeviceError
from fp8q.serve.loop.generate import GenerationError
from fp8q.serve.loop.request import BusyError, Piece, Request, RequestError
from fp8q.serve.loop.service import Failed, Service

if TYPE_CHECKING:
    from tests.serve.counting_model import CountingModel

SECONDS = 60
pytestmark = pytest.mark.parametrize("counting", ["fp8"], indirect=True)


class Client:
    """Keeps what it is told, and holds the thread that tells it up until it `goes_on`."""

    def __init__(self, raises: bool = False):
        self.told: list[Piece | Failed] = []
        self.first, self.done, self.goes_on = threading.Event(), threading.Event(), threading.Event()
        self.goes_on.set()
        self.raises = raises

    def __call__(self, told: Piece | Failed) -> None:
        self.told.append(told)
        self.first.set()
        self.goes_on.wait(SECONDS)
        if isinstance(told, Failed) or told.finish_reason:
            self.done.set()
        if self.raises:
            raise ConnectionError("gone")

    @property
    def text(self) -> str:
        assert self.done.wait(SECONDS)
        return "".join(each.text for each in self.told if isinstance(each, Piece))


@pytest.fixture
def service(counting: CountingModel) -> Iterator[Service]:
    service = Service(counting.generator(2), max_waiting=3)
    yield service
    service.close()
    assert service.load == (0, 0)


def test_a_queue_that_one_client_fills_has_places_for_others(counting: CountingModel) -> None:
    service = Service(counting.generator(1), max_waiting=1)
    held = Client()
    held.goes_on.clear()
    for _ in range(2):
        service.submit(Request("t0", max_tokens=2), held, client="many")
    for client in ("many", "few"):
        if client == "few":
            service.submit(Request("t3 t1 t4", max_tokens=3), first := Client(), client=client)
        with pytest.raises(BusyError):
            service.submit(Request("t0"), Client(), client=client)
    held.goes_on.set()
    assert first.text == " t1 t2 t6"
    service.close()
    assert service.load == (0, 0)


def test_an_answer_comes_in_pieces(service: Service) -> None:
    assert [piece.text for piece in service.stream(Request("t3 t1 t4", max_tokens=3))] == [" t1", " t2", " t6"]
    assert service.alive


def test_more_than_fit_are_all_answered(service: Service, counting: CountingModel) -> None:
    clients = [Client() for _ in range(5)]
    prompts = ["t1", "t3 t1 t4 t1 t5 t9", "t2 t7", "t14 t13 t12", "t0"]
    for client, prompt in zip(clients, prompts, strict=True):
        service.submit(Request(prompt, max_tokens=9), client)
    assert [client.text for client in clients] == [counting.text(counting.answer(prompt, 9)) for prompt in prompts]


def test_a_full_house_is_busy_and_a_closed_one_too(service: Service) -> None:
    tokenizing = threading.Event()
    prepare = service._generator.prepare
    service._generator.prepare = lambda request: tokenizing.wait(SECONDS) and prepare(request)  # type: ignore[method-assign, assignment, return-value]
    clients = [Client() for _ in range(5)]
    for client in clients:
        service.submit(Request("t3 t1 t4", max_tokens=3), client)
    assert service.load == (0, 5)
    with pytest.raises(BusyError) as raised:
        service.submit(Request("t1"), Client())
    assert str(raised.value) == "5 requests are here already; try again later"
    tokenizing.set()
    assert {client.text for client in clients} == {" t1 t2 t6"}
    service.close()
    assert not service.alive
    with pytest.raises(BusyError) as raised:
        service.submit(Request("t1"), Client())
    assert str(raised.value) == "the service is closing; ask another"


def test_tokenizing_a_long_prompt_holds_nobody(service: Service) -> None:
    others_done = threading.Event()
    prepare = service._generator.prepare

    def slow(request: Request) -> Any:
        assert request.prompt == "t3 t1 t4" or others_done.wait(SECONDS)
        return prepare(request)

    service._generator.prepare = slow  # type: ignore[method-assign]
    long = Client()
    service.submit(Request("t5 t5"), long)
    for _ in range(3):
        assert len(list(service.stream(Request("t3 t1 t4", max_tokens=3)))) == 3
    assert not long.told
    others_done.set()
    assert long.text == ""


def test_who_raises_or_cannot_say_whether_it_is_gone_harms_itself_alone(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    raising, good, unsure = Client(raises=True), Client(), Client()
    service.submit(Request("t0", max_tokens=100), raising)
    service.submit(Request("t0", max_tokens=100), unsure, lambda: bool(1 / 0))
    service.submit(Request("t3 t1 t4", max_tokens=3), good)
    assert good.text == " t1 t2 t6"
    assert len(raising.told) == 1
    assert unsure.text == ""
    assert unsure.told == [Failed("whether the client has gone cannot be told: division by zero", "failed")]
    assert sorted(record.getMessage() for record in caplog.records) == [
        "a response could not be sent",
        "whether a client has gone cannot be told",
    ]


def test_a_request_can_be_cancelled_at_any_time(service: Service) -> None:
    client, gone = Client(), Client()
    client.goes_on.clear()
    ongoing = service.submit(Request("t0", max_tokens=150), client)
    assert client.first.wait(SECONDS)
    ongoing.cancel()
    ongoing.cancel()
    client.goes_on.set()
    service.submit(Request("t0", max_tokens=150), gone, gone.first.is_set)
    assert gone.done.wait(SECONDS)
    assert gone.told[-1] == Failed("the client cancelled the request", "cancelled")
    assert not client.done.is_set()
    pieces = service.stream(Request("t0", max_tokens=150))
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert [piece.text for piece in service.stream(Request("t3 t1 t4", max_tokens=1))] == [" t1"]


def test_what_is_wrong_is_told(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RequestError, match="^the prompt has no tokens; write something to continue$"):
        list(service.stream(Request(" ")))
    step = service._generator.step

    def broken() -> Any:
        service._generator.step = step  # type: ignore[method-assign]
        step()
        raise OSError("the device is gone")

    service._generator.step = broken  # type: ignore[method-assign]
    with pytest.raises(GenerationError, match="^generation failed: OSError: the device is gone$"):
        list(service.stream(Request("t1")))
    assert [record.getMessage() for record in caplog.records] == ["generation failed"]
    assert [piece.text for piece in service.stream(Request("t3 t1 t4", max_tokens=1))] == [" t1"]


DOWN = (
    "the loop that generates has ended (BrokenDeviceError: cuStreamSynchronize failed with 700); start the server again"
)


def raising(error: BaseException) -> Any:
    def call(*arguments: Any) -> Any:
        raise error

    return call


def test_after_a_fault_of_the_device_all_are_told_at_once_and_nobody_is_taken_in(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """Two are in flight, two wait for a row, and the prompt of one is being tokenized when the device breaks."""
    prepare, tokenizing = service._generator.prepare, threading.Event()

    def slow(request: Request) -> Any:
        assert request.prompt == "t0" or tokenizing.wait(SECONDS)
        return prepare(request)

    service._generator.prepare = slow  # type: ignore[method-assign]
    clients = [Client() for _ in range(5)]
    clients[0].goes_on.clear()  # holds the stepping thread up
    for client in clients[:4]:
        service.submit(Request("t0", max_tokens=100), client)
    service.submit(Request("t5"), clients[4])
    assert clients[0].first.wait(SECONDS)
    service._generator.step = raising(BrokenDeviceError("cuStreamSynchronize failed with 700"))  # type: ignore[method-assign]
    clients[0].goes_on.set()
    for client in clients:
        assert client.done.wait(SECONDS)
        assert client.told[-1] == Failed(DOWN, "failed")
    assert not tokenizing.is_set(), "the last one was told while its prompt was still being tokenized"
    assert (service.alive, service.failure) == (False, DOWN)
    with pytest.raises(GenerationError) as refused:
        service.submit(Request("t1"), Client())
    assert str(refused.value) == DOWN
    with pytest.raises(GenerationError) as refused:
        list(service.stream(Request("t1")))
    assert str(refused.value) == DOWN
    tokenizing.set()
    assert [record.getMessage() for record in caplog.records] == ["the loop that generates has ended"]
    assert service._thread.is_alive(), "for those whose prompts are still to come"


@pytest.mark.parametrize("error", [OSError("gone"), SystemExit(), MemoryError(), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["drop", "submit", "cancel"])
def test_whatever_else_is_raised_in_the_stepping_thread_is_told_too(
    service: Service, where: str, error: BaseException
) -> None:
    """Where the session cannot be dropped after a failure, and where a request cannot be queued or cancelled."""
    held, other = Client(), Client()
    held.goes_on.clear()
    ongoing = service.submit(Request("t0", max_tokens=100), held)
    assert held.first.wait(SECONDS)
    setattr(service._generator, where, raising(error))
    if where == "drop":
        service._generator.step = raising(RuntimeError("enqueue failed"))  # type: ignore[method-assign]
    if where == "cancel":
        ongoing.cancel()
    service.submit(Request("t0", max_tokens=100), other)
    held.goes_on.set()
    assert other.done.wait(SECONDS)
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    failed = Failed(f"the loop that generates has ended ({words}); start the server again", "failed")
    assert other.told == [failed]
    assert held.told[-1] == failed or where == "cancel", "who cancels is told nothing more"
    assert not service.alive


def test_a_request_that_is_cancelled_after_a_fault_does_no_harm(service: Service) -> None:
    held = Client()
    ongoing = service.submit(Request("t0", max_tokens=100), held)
    assert held.first.wait(SECONDS)
    service._generator.step = raising(BrokenDeviceError("cuStreamSynchronize failed with 700"))  # type: ignore[method-assign]
    service._generator.cancel = raising(AssertionError("nothing of the device is touched any more"))  # type: ignore[method-assign]
    assert held.done.wait(SECONDS)
    ongoing.cancel()
    service.close()
    assert service.failure == DOWN
