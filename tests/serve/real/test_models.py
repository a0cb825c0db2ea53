"""Models as a server holds them: the demo's own text, loaded anew while it serves, and a TensorRT model's config."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from clients import PATIENCE, Http
from httpx import HTTPStatusError
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import np_to_triton_dtype

from fp8q import api
from fp8q.core.reporter import SILENT
from fp8q.options import TritonOptions
from fp8q.serve.triton.repository import write_repository

from ..counting_model import make_wide_run, record_engine
from .conftest import deploy

if TYPE_CHECKING:
    from tritonserver import Server

    from fp8q.core.run import Run

COUNTING = "counting"
#: Once more with another server where Triton has ended by itself, or hangs: the connection closes, or nothing answers.
AGAIN = pytest.mark.flaky(reruns=1, only_rerun=["RemoteProtocolError", "ConnectError", "ReadError", "ReadTimeout"])


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("def read_file(path):\n    ", {"max_tokens": 40}),
        ("été, 你好: ", {"max_tokens": 20}),
        ("import os\n", {"max_tokens": 20, "temperature": 0.8, "top_p": 0.9, "seed": 7}),
    ],
)
def test_the_demo_says_what_generate_says(
    http: Http, demo_model: str, demo_run: Run, fp8q: Callable[..., Any], prompt: str, options: dict[str, Any]
) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    said = json.loads(fp8q("generate", demo_run.root, "--prompt", prompt, "--json", *words).out)["text"]
    assert said
    assert http.text(demo_model, text_input=prompt, **options) == said
    streamed = http.stream(demo_model, text_input=prompt, stream=True, **options)
    assert "".join(piece["text_output"] for piece in streamed) == said


@pytest.fixture
def reloaded(own_triton: Server, counting_run_at: Callable[[Path, int], Run], tmp_path: Path) -> Iterator[Http]:
    """A server of its own that has loaded the counting model with 200 positions."""
    deploy(own_triton, counting_run_at(tmp_path / "run", 200), COUNTING, 8)
    with Http(own_triton.http) as client:
        yield client


@AGAIN
def test_a_model_is_loaded_anew_while_it_answers(own_triton: Server, reloaded: Http) -> None:
    """The answer that is under way comes to its end from the old one, other models go on."""
    under_way = reloaded.stream(COUNTING, text_input="t0", max_tokens=190, stream=True)
    texts = [next(under_way)["text_output"]]
    config = own_triton.repository / COUNTING / "config.pbtxt"
    config.write_text(config.read_text() + "\n")
    reloaded.load(COUNTING)
    texts += [piece["text_output"] for piece in under_way]
    assert texts == [" t0"] * 190
    assert reloaded.text(COUNTING, text_input="t3 t1 t4", max_tokens=3) == " t1 t2 t6"


@AGAIN
def test_an_unloaded_model_finishes_what_it_began_and_comes_back(reloaded: Http) -> None:
    under_way = reloaded.stream(COUNTING, text_input="t0", max_tokens=190, stream=True)
    texts = [next(under_way)["text_output"]]
    reloaded.load(COUNTING, loaded=False)
    assert reloaded.generate(COUNTING, text_input="t0") == (
        404,
        {"error": "Request for unknown model: 'counting' has no available versions"},
    )
    texts += [piece["text_output"] for piece in under_way]
    assert texts == [" t0"] * 190
    reloaded.load(COUNTING)
    assert reloaded.text(COUNTING, text_input="t3 t1 t4", max_tokens=3) == " t1 t2 t6"


#: Makes a model's session fail as a GPU does, in the step that would read a prompt of t13.
FAULT = """

def _step(self: Generator, step=Generator.step) -> list[Piece]:
    from .device import BrokenDeviceError

    if any(row.prompt == (13,) for row in self._waiting):
        raise BrokenDeviceError("cuStreamSynchronize failed with 700")
    return step(self)


Generator.step = _step
"""


@AGAIN
def test_after_a_fault_of_the_gpu_nobody_waits(
    own_triton: Server, counting_run_at: Callable[[Path, int], Run], tmp_path: Path
) -> None:
    run = counting_run_at(tmp_path / "run", 1_000_000)
    write_repository(run, TritonOptions(name=COUNTING, max_batch=8), SILENT)
    shutil.copytree(run.triton / COUNTING, own_triton.repository / COUNTING)
    with open(own_triton.repository / COUNTING / "1" / "generate.py", "a", encoding="utf-8") as code:
        code.write(FAULT)
    said = (
        "the loop that generates has ended (BrokenDeviceError: cuStreamSynchronize failed with 700); start the server "
        "again"
    )
    with Http(own_triton.http) as http:
        http.load(COUNTING)
        under_way = http.stream(COUNTING, text_input="t0", max_tokens=900_000, stream=True)
        assert next(under_way)["text_output"] == " t0"
        assert http.generate(COUNTING, text_input="t13")[1] == {"error": said}
        assert [piece for piece in under_way if "error" in piece] == [{"error": said}]
        for _ in range(3):
            assert http.generate(COUNTING, text_input="t3 t1 t4")[1] == {"error": said}


def test_the_client_in_the_repositorys_readme_streams(triton: Server, wide_run: Run, counting_model: str) -> None:
    api.triton(wide_run.root, api.TritonOptions(name=counting_model))
    _, _, code = (wide_run.triton / "README.md").read_text().partition("```python\n")
    code = code.partition("```")[0].replace("localhost:8001", triton.grpc).replace("Once upon a time", "t3 t1 t4")
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (made.returncode, made.stdout[:9]) == (0, " t1 t2 t6"), made.stderr


@pytest.fixture(scope="module")
def engine_model(triton: Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The plain engine of the counting model without FP8, as `fp8q triton` writes it; beside the plan lies the graph,
    for the stand-in.
    """
    run = make_wide_run(tmp_path_factory.mktemp("engine") / "run")
    record_engine(run)
    api.triton(run.root)
    name = "counting_engine"
    shutil.copytree(run.triton / name, triton.repository / name)
    for path in (run.onnx_fp32, *run.model.glob("*.safetensors")):
        shutil.copy(path, triton.repository / name / "1")
    with Http(triton.http) as client:
        client.load(name)
    return name


def test_a_tensorrt_models_config_loads_and_runs_without_tensorrt(triton: Server, engine_model: str) -> None:
    """After t3 t1 t4 the counting model says t1: 3·1 + 1·2 + 4·3 = 17, and 17 mod 16 is 1."""
    feeds = {
        "input_ids": np.array([[3, 1, 4]]), "attention_mask": np.ones((1, 3), np.int64),
        "position_ids": np.array([[0, 1, 2]]), "logits_indices": np.array([[0, 1, 2]]),
        "past_key_values.0.key": np.zeros((1, 2, 0, 4), np.float32),
        "past_key_values.0.value": np.zeros((1, 2, 0, 4), np.float32),
    }  # fmt: skip
    inputs = []
    for name, value in feeds.items():
        inputs.append(InferInput(name, value.shape, np_to_triton_dtype(value.dtype)))
        inputs[-1].set_data_from_numpy(value)
    with closing(InferenceServerClient(triton.grpc)) as client:
        found = client.infer(engine_model, inputs, client_timeout=PATIENCE)
        assert found.as_numpy("logits").argmax(-1).tolist() == [[3, 5, 1]]
        assert found.as_numpy("new_key_values.0.key")[0, 1, :, 2].tolist() == [3.0, 1.0, 4.0]


def test_a_config_that_differs_from_the_graph_does_not_load(triton: Server, http: Http, engine_model: str) -> None:
    config = triton.repository / engine_model / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "logits"', 'name: "logit"'))
    with pytest.raises(HTTPStatusError) as raised:
        http.load(engine_model)
    assert "logit: config.pbtxt says ('TYPE_FP32', 3), the graph None" in raised.value.response.text


def test_a_gpu_that_the_host_has_not_is_refused_in_one_line(triton: Server, http: Http, tmp_path: Path) -> None:
    """By Triton itself, before the model is asked; without --gpus the same repository loads."""
    run = make_wide_run(tmp_path / "run")
    record_engine(run)
    api.triton(run.root, api.TritonOptions(name="elsewhere", gpus=(4095,)))
    shutil.copytree(run.triton / "elsewhere", triton.repository / "elsewhere")
    with pytest.raises(HTTPStatusError) as raised:
        http.load("elsewhere")
    (line,) = raised.value.response.json()["error"].splitlines()
    assert "instance group elsewhere_0 of model elsewhere has kind KIND_GPU but " in line or (
        "instance group elsewhere_0 of model elsewhere specifies invalid or unsupported gpu id 4095" in line
    )
    api.triton(run.root, api.TritonOptions(name="elsewhere"))
    config = run.triton / "elsewhere" / "config.pbtxt"
    shutil.copyfile(config, triton.repository / "elsewhere" / "config.pbtxt")
    http.load("elsewhere")
    assert http.text("elsewhere", text_input="t3 t1 t4", max_tokens=3) == " t1 t2 t6"
