"""Copies beside a computing GPU, on a stand-in that notes what its streams are told, in order."""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8q.calibrate.measure.hidden_states import HiddenStates
from fp8q.calibrate.model.copies import Copies, DirectCopies, GpuCopies, copies_of
from fp8q.calibrate.model.decoder import LayerOutput
from fp8q.calibrate.model.materialize import Materializer
from fp8q.calibrate.model.skeleton import skeleton
from fp8q.calibrate.model.source import open_source

BATCHES = {batch: np.zeros((2, 3), np.int64) for batch in (0, 2, 3)}
OUTPUT = LayerOutput(0, 4, torch.bfloat16)


class Stream:
    """A stream that notes in `said`."""

    def __init__(self, name: str, said: list[str]):
        self.name, self.said = name, said

    def record_event(self) -> Any:
        self.said.append(f"{self.name} records")
        return self

    def wait_event(self, event: "Stream") -> None:
        self.said.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self.said.append(f"the thread waits for {self.name}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The notes of a stand-in for torch.cuda, whose tensors lie on the CPU."""
    found: list[str] = []
    computing, copying = Stream("computing", found), Stream("copying", found)

    @contextmanager
    def on(stream: Stream) -> Any:
        yield

    def keep(tensor: torch.Tensor, stream: Stream) -> None:
        found.append(f"memory is kept for {stream.name}")

    def pageable(*sizes: Any, pin_memory: bool = False, empty: Any = torch.empty, **options: Any) -> torch.Tensor:
        made: torch.Tensor = empty(*sizes, **options)
        return made

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copying)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.Tensor, "record_stream", keep)
    with torch.device("cpu"):  # whose first use in a process remembers the functions that make tensors: not `pageable`
        torch.zeros(())
    monkeypatch.setattr(torch, "empty", pageable)
    return found


def on_stand_in() -> Copies:
    return GpuCopies("cpu")


def test_a_cpu_copies_when_it_is_asked_to() -> None:
    assert isinstance(copies_of("cpu"), DirectCopies)
    tensor = torch.ones(3)
    coming = copies_of("cpu").to_device(lambda: tensor)
    tensor.add_(1)
    found = coming()
    tensor.add_(1)
    assert found.tolist() == [2, 2, 2]


def test_the_stream_that_computes_waits_for_the_copy_and_keeps_its_memory(said: list[str]) -> None:
    coming = on_stand_in().to_device(lambda: torch.arange(3))
    assert coming().tolist() == [0, 1, 2]
    assert said == ["copying records", "computing waits for copying", "memory is kept for computing"]


def test_a_result_is_copied_once_it_is_computed_and_written_once_it_is_copied(said: list[str]) -> None:
    def write(tensor: torch.Tensor) -> None:
        said.append(f"written: {tensor.tolist()}")

    on_stand_in().to_memory(torch.arange(3), write)()
    assert said == [
        "computing records", "copying waits for computing", "memory is kept for copying", "copying records",
        "the thread waits for copying", "written: [0, 1, 2]",
    ]  # fmt: skip


@pytest.mark.parametrize("make", [on_stand_in, lambda: DirectCopies("cpu")], ids=["beside", "directly"])
@pytest.mark.usefixtures("said")
def test_what_is_written_is_read_again(make: Callable[[], Copies], tmp_path: Path) -> None:
    states, copies = HiddenStates(tmp_path / "hidden", BATCHES, OUTPUT), make()
    given = {batch: torch.full((2, 3, 4), float(batch), dtype=torch.bfloat16) for batch in BATCHES}
    with states.writing(copies) as write:
        for batch, hidden in given.items():
            write(batch, hidden)
    found = dict(states.on_device(copies))
    assert list(found) == [0, 2, 3]
    assert all(torch.equal(found[batch], hidden) for batch, hidden in given.items())


@pytest.mark.usefixtures("said")
def test_the_next_batch_is_read_while_one_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    mapped = HiddenStates._mapped

    def noted(self: HiddenStates, batch: int) -> torch.Tensor:
        read.append(batch)
        return mapped(self, batch)

    monkeypatch.setattr(HiddenStates, "_mapped", noted)
    states = HiddenStates(tmp_path / "hidden", BATCHES, OUTPUT)
    for copies, expected in ((DirectCopies("cpu"), [[0], [0, 2], [0, 2, 3]]), (on_stand_in(), None)):
        read.clear()
        for step, (batch, _) in enumerate(states.on_device(copies)):
            assert batch in read
            if expected:
                assert read == expected[step]
    assert read == [0, 2, 3]


@pytest.mark.usefixtures("said")
def test_the_error_of_writing_a_batch_ends_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HiddenStates, "write", full)
    states = HiddenStates(tmp_path / "hidden", BATCHES, OUTPUT)
    with (
        pytest.raises(OSError, match="No space left on device"),
        states.writing(on_stand_in()) as write,
    ):
        write(0, torch.zeros(2, 3, 4, dtype=torch.bfloat16))


@pytest.mark.usefixtures("said")
def test_the_next_layer_s_weights_are_read_once_and_before_they_are_asked_for(demo_checkpoint: Path) -> None:
    source = open_source(str(demo_checkpoint))
    weights = Materializer(skeleton(source.config, torch.bfloat16), source, "cpu")
    layer = weights.model.get_submodule("model.layers.1")
    names = [f"model.layers.1.{name}" for name, _ in layer.named_modules() if name]
    with weights.filled(names):
        expected = {f"model.layers.1.{name}": tensor.clone() for name, tensor in layer.named_parameters()}
    assert len(expected) == 9
    weights.copies, read = on_stand_in(), list[str]()
    tensor = weights.weights.tensor

    def noted(name: str) -> torch.Tensor:
        read.append(name)
        return tensor(name)

    vars(weights.weights)["tensor"] = noted
    weights.prefetch(names)
    with weights.filled(names):
        assert all(torch.equal(weights.model.get_parameter(name), each) for name, each in expected.items())
    assert sorted(read) == sorted(expected)


def test_a_cpu_reads_no_weights_ahead(demo_checkpoint: Path) -> None:
    source = open_source(str(demo_checkpoint))
    weights = Materializer(skeleton(source.config, torch.bfloat16), source, "cpu")
    weights.prefetch([name for name, _ in weights.model.named_modules() if name.startswith("model.layers.1.")])
    assert weights._coming == {}
