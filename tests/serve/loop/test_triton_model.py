"""The model as Triton loads it: imported from a repository by the name `1.model`, with
`stand_in/triton_python_backend_utils.py` for the stub's.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from fp8q import api
from fp8q.core.reporter import SILENT
from fp8q.options import TritonOptions
from fp8q.serve.triton.repository import write_repository
from tests.stand_in.driver import Driver
from tests.stand_in.runtime import machine

if TYPE_CHECKING:
    from fp8q.core.run import Run

STAND_IN = Path(__file__).parent / "stand_in"
SECONDS = 60


@dataclass
class Served:
    """A loaded model, and how a client sees it."""

    model: Any
    utilities: Any
    config: str

    def send(self, *inputs: dict[str, Any]) -> list[Any]:
        """Execute the requests together; their senders."""
        requests = [self.utilities.InferenceRequest(self.config, values) for values in inputs]
        assert self.model.execute(requests) is None, "a decoupled model returns nothing"
        return [request.sender for request in requests]

    def ask(self, **inputs: Any) -> list[dict[str, Any]]:
        """The responses to one request."""
        (sender,) = self.send(inputs)
        return answer(sender)


def answer(sender: Any) -> list[dict[str, Any]]:
    assert sender.done.wait(SECONDS)
    return [
        {"error": (each.error.message(), each.error.code())}
        if each.error
        else {t.name(): t.as_numpy().item() for t in each.tensors}
        for each in sender.responses
    ]


def model_config(text: str) -> str:
    """The JSON that Triton passes to `initialize`."""
    return str(
        json_format.MessageToJson(
            text_format.Parse(text, model_config_pb2.ModelConfig()), preserving_proto_field_name=True
        )
    )


@contextmanager
def loaded(home: Path, kind: str = "CPU", device: int = 0) -> Iterator[Served]:
    """Load the model in the folder `home` as an instance of that kind and device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STAND_IN))
        for path in (home / "1", home):  # in this order, at the end of the path: pb_stub.cc, Stub::StubSetup
            patch.setattr(sys, "path", [*sys.path, str(path)])
        before = set(sys.modules)
        try:
            model = importlib.import_module("1.model").TritonPythonModel()
            utilities = importlib.import_module("triton_python_backend_utils")
            utilities.install()
            config = (home / "config.pbtxt").read_text()
            model.initialize(
                {
                    "model_config": model_config(config),
                    "model_instance_kind": kind,
                    "model_instance_device_id": str(device),
                    "model_name": "demo",
                    "model_version": "1",
                    "model_repository": str(home),
                }
            )
            yield Served(model, utilities, config)
            model.finalize()
            assert not model._service.alive
        finally:
            for name in set(sys.modules) - before:
                if name.split(".")[0] in ("1", "triton_python_backend_utils"):
                    del sys.modules[name]


@pytest.fixture
def served(counting_run: Run, tmp_path: Path) -> Iterator[Served]:
    write_repository(counting_run, TritonOptions(name="demo", max_batch=2), SILENT)
    home = tmp_path / "models" / "demo"
    shutil.copytree(counting_run.triton / "demo", home)
    shutil.rmtree(counting_run.root)
    with loaded(home) as served:
        yield served


@pytest.mark.parametrize(("kind", "device", "gpu"), [("CPU", 0, 0), ("GPU", 0, 0), ("GPU", 1, 1)])
def test_the_model_opens_the_gpu_of_its_instance(engine_run: Run, kind: str, device: int, gpu: int) -> None:
    """One that is of a CPU for Triton looks for a GPU itself, and takes the first."""
    api.triton(engine_run.root, TritonOptions(name="demo"))
    with machine(Driver(9, 0, gpus=2), "tensorrt") as host:
        plan = engine_run.engines / "sm90.plan"
        host.knows(plan, engine_run.model / "model.fp32.onnx")
        with loaded(engine_run.triton / "demo", kind, device):
            assert host.driver.current == gpu


@pytest.mark.parametrize(("before", "after", "fault"), [
    ('key: "weights"', 'key: "weight"', "has no parameter weights"),
    ('string_value: "2"', 'string_value: "two"', "max_batch is two, and not a number of requests from 1 on"),
    ('string_value: "2"', 'string_value: "0"', "max_batch is 0, and not a number of requests from 1 on"),
    ('string_value: "2"', 'string_value: ""', "has no parameter max_batch"),
])  # fmt: skip
def test_an_edited_configuration_is_refused_by_name(counting_run: Run, before: str, after: str, fault: str) -> None:
    write_repository(counting_run, TritonOptions(name="demo", max_batch=2), SILENT)
    path = counting_run.triton / "demo" / "config.pbtxt"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with (
        pytest.raises(Exception, match=rf"^config\.pbtxt: {fault}; write the repository again with `fp8q triton RUN`$"),
        loaded(counting_run.triton / "demo"),
    ):
        pass


def test_one_response_without_stream(served: Served) -> None:
    assert served.ask(text_input="t3 t1 t4", max_tokens=3) == [{"text_output": b" t1 t2 t6"}]


def test_a_response_for_every_piece_with_stream(served: Served) -> None:
    assert served.ask(text_input="t3 t1 t4", max_tokens=3, stream=True) == [
        {"text_output": b" t1"},
        {"text_output": b" t2"},
        {"text_output": b" t6"},
    ]


def test_what_is_asked_for_is_returned_and_token_counts_add_up(served: Served) -> None:
    wanted = {"return_num_input_tokens": True, "return_num_output_tokens": True, "return_finish_reason": True}
    (whole,) = served.ask(text_input="t3 t1 t4", max_tokens=3, **wanted)
    assert whole == {
        "text_output": b" t1 t2 t6",
        "num_input_tokens": 3,
        "num_output_tokens": 3,
        "finish_reason": b"length",
    }
    pieces = served.ask(text_input="t3 t1 t4", max_tokens=9, stream=True, stop_words=["t9", "t6"], **wanted)
    assert pieces == [
        {"text_output": b" t1", "num_input_tokens": 3, "num_output_tokens": 1, "finish_reason": b""},
        {"text_output": b" t2", "num_input_tokens": 3, "num_output_tokens": 1, "finish_reason": b""},
        {"text_output": b" ", "num_input_tokens": 3, "num_output_tokens": 1, "finish_reason": b"stop"},
    ]


def test_an_instance_whose_device_has_broken_says_so_to_all_and_is_not_ready(served: Served) -> None:
    service = served.model._service
    assert served.model.is_ready() is True
    step, broken = service._generator.step, threading.Event()

    def breaking() -> Any:
        assert broken.wait(SECONDS)
        error = sys.modules["1.device"].BrokenDeviceError
        raise error("cuStreamSynchronize failed with 719")

    service._generator.step = breaking
    senders = served.send({"text_input": "t0"}, {"text_input": "t1", "stream": True}, {"text_input": "t2 t7"})
    broken.set()
    said = (
        "the loop that generates has ended (BrokenDeviceError: cuStreamSynchronize failed with 719); start the server "
        "again"
    )
    internal, unavailable = served.utilities.TritonError.INTERNAL, served.utilities.TritonError.UNAVAILABLE
    assert [answer(sender) for sender in senders] == [[{"error": (said, internal)}]] * 3
    assert served.model.is_ready() is False
    assert served.ask(text_input="t3 t1 t4") == [{"error": (said, unavailable)}]
    service._generator.step = step
    assert served.ask(text_input="t3 t1 t4") == [{"error": (said, unavailable)}], "it does not come back by itself"


def test_an_answer_without_text_is_a_response_all_the_same(served: Served) -> None:
    assert served.ask(text_input="t5 t5", stream=True, return_finish_reason=True) == [
        {"text_output": b"", "finish_reason": b"stop"}
    ]


def test_requests_that_come_together_and_later_are_all_answered(served: Served) -> None:
    senders = served.send({"text_input": "t1"}, {"text_input": "t2 t7"}, {"text_input": "t3 t1 t4", "max_tokens": 3})
    senders += served.send({"text_input": "t0", "max_tokens": 2})
    answers = [answer(sender) for sender in senders]
    assert [len(each) for each in answers] == [1, 1, 1, 1]
    assert answers[2:] == [[{"text_output": b" t1 t2 t6"}], [{"text_output": b" t0 t0"}]]


def test_sampling_is_the_requests(served: Served) -> None:
    asked = {
        "text_input": "t3 t1 t4",
        "temperature": 30.0,
        "top_p": 0.99,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "seed": 2**64 - 1,
    }
    first, second = served.ask(**asked), served.ask(**asked)
    assert first == second
    assert first != served.ask(**asked | {"seed": 1})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": "t1", "top_p": 1.5}, "top_p is 1.5; it must be from 0 to 1"),
        ({"text_input": "t1", "max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"text_input": ""}, "the prompt has no tokens; write something to continue"),
        (
            {"text_input": " ".join(["t0"] * 41)},
            (
                "the prompt has 41 tokens and the model 40 positions for prompt and answer; shorten it to 39 tokens or "
                "fewer"
            ),
        ),
        (
            {"text_input": b"\xff"},
            (
                "text_input is not UTF-8 ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte); "
                "encode "
                "it so"
            ),
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_answered_with_the_reason(
    served: Served, inputs: dict[str, Any], message: str
) -> None:
    bad, good = served.send(inputs, {"text_input": "t3 t1 t4", "max_tokens": 1})
    assert answer(bad) == [{"error": (message, served.utilities.TritonError.INVALID_ARG)}]
    assert answer(good) == [{"text_output": b" t1"}]


def test_a_cancelled_request_is_let_go(served: Served) -> None:
    request = served.utilities.InferenceRequest(served.config, {"text_input": "t0", "max_tokens": 30})
    request.sender.cancelled = True
    served.model.execute([request])
    assert answer(request.sender) == [
        {"error": ("the client cancelled the request", served.utilities.TritonError.CANCELLED)}
    ]
    assert served.ask(text_input="t3 t1 t4", max_tokens=1) == [{"text_output": b" t1"}]


def test_a_client_that_is_gone_harms_nobody(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    gone, good = (
        served.utilities.InferenceRequest(served.config, {"text_input": "t3 t1 t4", "max_tokens": 2}) for _ in "ab"
    )
    gone.sender.broken = True
    served.model.execute([gone, good])
    assert answer(good.sender) == [{"text_output": b" t1 t2"}]
    assert served.ask(text_input="t0", max_tokens=1) == [{"text_output": b" t0"}]
    assert [record.getMessage() for record in caplog.records] == ["a response could not be sent"]


def test_logits_that_are_no_numbers_are_told_and_the_next_request_is_served(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = served.model._service._generator._batch
    prefill = batch.prefill

    def broken(*arguments: Any) -> Any:
        return np.full_like(prefill(*arguments), np.nan)

    message = (
        "generation failed: FloatingPointError: the model's logit of token 0 is nan; `fp8q inspect` shows its scales, "
        "`fp8q validate` where it goes wrong"
    )
    with monkeypatch.context() as patched:
        patched.setattr(batch, "prefill", broken)
        for sender in served.send({"text_input": "t1"}, {"text_input": "t2"}):
            assert answer(sender) == [{"error": (message, served.utilities.TritonError.INTERNAL)}]
    assert served.ask(text_input="t3 t1 t4", max_tokens=1) == [{"text_output": b" t1"}]
    assert {record.getMessage().split(":")[0] for record in caplog.records} == {"generation failed for one request"}


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("text_input", [b"t1", b"t2"], "text_input holds 2 prompts; send one a request"),
        ("text_input", [], "text_input holds 0 prompts; send one a request"),
        (
            "text_input",
            [7],
            (
                "the request cannot be read (AttributeError: 'int' object has no attribute 'decode'); send the types "
                "of config.pbtxt"
            ),
        ),
        ("max_tokens", [1, 2], "max_tokens holds 2 values; send one"),
        ("stream", [], "stream holds 0 values; send one"),
        ("stop_words", [b"a"] * 17, "stop_words holds 17 texts; send at most 16"),
        (
            "stop_words",
            [b"a" * 257],
            ("stop_words are 1, the longest of 257 characters; there may be at most 16, of at most 256 characters"),
        ),
    ],
)
def test_a_malformed_tensor_harms_its_own_request_alone(
    served: Served, name: str, tensor: list[Any], message: str
) -> None:
    bad, good = (served.utilities.InferenceRequest(served.config, {"text_input": "t3 t1 t4"}) for _ in "ab")
    array = np.array([tensor], object if tensor and not isinstance(tensor[0], int) else None)
    bad.inputs()[:] = [each for each in bad.inputs() if each.name() != name]
    bad.inputs().append(type(good.inputs()[0])(name, array))
    served.model.execute([bad, good])
    assert answer(bad.sender) == [{"error": (message, served.utilities.TritonError.INVALID_ARG)}]
    assert answer(good.sender)[0]["text_output"].startswith(b" t1 t2")


def test_more_than_may_wait_are_told_that_it_is_busy(served: Served) -> None:
    served.model._service._most = 0
    assert served.ask(text_input="t1") == [
        {"error": ("0 requests are here already; try again later", served.utilities.TritonError.UNAVAILABLE)}
    ]


def test_a_client_of_which_cannot_be_told_whether_it_is_gone_harms_nobody(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = (
        served.utilities.InferenceRequest(served.config, {"text_input": "t3 t1 t4", "max_tokens": 2}) for _ in "ab"
    )
    bad.sender.is_cancelled = lambda: 1 / 0
    served.model.execute([bad, good])
    assert answer(good.sender) == [{"text_output": b" t1 t2"}]
    assert answer(bad.sender) == [
        {
            "error": (
                "whether the client has gone cannot be told: division by zero",
                served.utilities.TritonError.INTERNAL,
            )
        }
    ]
    assert {record.getMessage() for record in caplog.records} == {"whether a client has gone cannot be told"}


SERVER = """
import importlib, json, sys
stand_in, home, config = sys.argv[1:]
sys.path += [stand_in, home + "/1", home]
model = importlib.import_module("1.model").TritonPythonModel()
utilities = importlib.import_module("triton_python_backend_utils")
utilities.install()
model.initialize({"model_config": config, "model_instance_kind": "CPU", "model_instance_device_id": "0"})
request = utilities.InferenceRequest(open(home + "/config.pbtxt").read(), {"text_input": "t3 t1 t4", "max_tokens": 3})
model.execute([request])
assert request.sender.done.wait(60)
model.finalize()
loaded = sorted({name.split(".")[0] for name in sys.modules} & {"fp8q", "torch", "transformers", "onnx", "pydantic"})
print(json.dumps([request.sender.responses[0].tensors[0].as_numpy().item().decode(), loaded]))
"""


def test_the_repository_runs_where_fp8q_and_torch_are_not_imported(counting_run: Run, tmp_path: Path) -> None:
    write_repository(counting_run, TritonOptions(name="demo"), SILENT)
    home = tmp_path / "elsewhere"
    shutil.move(counting_run.triton / "demo", home)
    shutil.rmtree(counting_run.root)
    arguments = [str(STAND_IN), str(home), model_config((home / "config.pbtxt").read_text())]
    done = subprocess.run(
        [sys.executable, "-c", SERVER, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == [" t1 t2 t6", []]
