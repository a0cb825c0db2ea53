import errno
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from fp8q.core.errors import BackendError, InputError
from fp8q.core.reporter import Standing
from fp8q.core.run import Run
from fp8q.options import TritonOptions, model_name
from fp8q.serve.triton import repository
from fp8q.serve.triton.repository import config_text, external_data, write_repository

SOURCES = repository.LOOP_FOLDER


class Notes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)

    def track(self, description: str, total: int, unit: str = "steps", standing: Standing | None = None) -> Any:
        from fp8q.core.reporter import SILENT

        return SILENT.track(description, total, unit, standing)


def write(run: Run, options: TritonOptions = TritonOptions()) -> list[str]:
    return [str(path.relative_to(run.triton)) for path in write_repository(run, options, Notes())]


def parsed(text: str) -> Any:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_the_repository_holds_all_that_the_server_needs(counting_run: Run) -> None:
    assert write(counting_run) == [
        "Counting-Model/1/cache.py",
        "Counting-Model/1/cuda.py",
        "Counting-Model/1/device.py",
        "Counting-Model/1/device_batch.py",
        "Counting-Model/1/device_calls.py",
        "Counting-Model/1/device_kernels.py",
        "Counting-Model/1/device_logits.py",
        "Counting-Model/1/engine_session.py",
        "Counting-Model/1/generate.py",
        "Counting-Model/1/here.py",
        "Counting-Model/1/host_batch.py",
        "Counting-Model/1/kernels.ptx",
        "Counting-Model/1/model.py",
        "Counting-Model/1/request.py",
        "Counting-Model/1/sampling.py",
        "Counting-Model/1/service.py",
        "Counting-Model/1/sessions.py",
        "Counting-Model/1/step_logits.py",
        "Counting-Model/1/text.py",
        "Counting-Model/1/weights/config.json",
        "Counting-Model/1/weights/generation_config.json",
        "Counting-Model/1/weights/model-00001-of-00001.safetensors",
        "Counting-Model/1/weights/model.fp32.onnx",
        "Counting-Model/1/weights/tokenizer.json",
        "Counting-Model/config.pbtxt",
        "Dockerfile",
        "README.md",
        "repository.json",
    ]
    assert sorted(path.name for path in counting_run.root.iterdir()) == [
        ".lock",
        "model",
        "run.json",
        "scales.json",
        "triton",
    ]


def test_the_code_is_copied_as_it_is(counting_run: Run) -> None:
    write(counting_run)
    version = counting_run.triton / "Counting-Model" / "1"
    assert (version / "model.py").read_bytes() == (SOURCES / "triton_model.py").read_bytes()
    for name in ("cache.py", "generate.py", "sampling.py", "sessions.py", "text.py"):
        assert (version / name).read_bytes() == (SOURCES / name).read_bytes()


def test_weights_are_copies_of_their_own(counting_run: Run) -> None:
    write(counting_run)
    for path in (counting_run.triton / "Counting-Model" / "1" / "weights").iterdir():
        assert path.read_bytes() == (counting_run.model / path.name).read_bytes()
        # ONNX's checker refuses external data with several links
        assert path.stat().st_nlink == (counting_run.model / path.name).stat().st_nlink == 1


def test_a_full_disk_leaves_the_last_good_repository(counting_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = write(counting_run)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    told = f"{counting_run.triton}: no space left on the disk; free some or name another directory"
    with pytest.raises(InputError, match=f"^{re.escape(told)}$"):
        write(counting_run, TritonOptions(name="other"))
    monkeypatch.undo()
    assert (
        sorted(str(path.relative_to(counting_run.triton)) for path in counting_run.triton.rglob("*") if path.is_file())
        == before
    )
    assert sorted(path.name for path in counting_run.root.iterdir()) == [
        ".lock",
        "model",
        "run.json",
        "scales.json",
        "triton",
    ]


def test_another_name_takes_the_place_of_the_first(counting_run: Run) -> None:
    write(counting_run)
    write(counting_run, TritonOptions(name="chat-v2"))
    assert sorted(path.name for path in counting_run.triton.iterdir()) == [
        "Dockerfile",
        "README.md",
        "chat-v2",
        "repository.json",
    ]
    assert parsed((counting_run.triton / "chat-v2" / "config.pbtxt").read_text()).name == "chat-v2"


def test_the_config_is_what_tritons_schema_says() -> None:
    config = parsed(config_text("demo", 4))
    assert (config.name, config.backend, config.max_batch_size) == ("demo", "python", 1)
    assert config.model_transaction_policy.decoupled
    assert [(group.count, group.kind) for group in config.instance_group] == [
        (1, model_config_pb2.ModelInstanceGroup.KIND_CPU)
    ]
    assert {key: value.string_value for key, value in config.parameters.items()} == {
        "runtime": "onnxruntime",
        "weights": "weights",
        "max_batch": "4",
    }
    fields = {field.name for field, _ in config.ListFields()}
    assert fields == {
        "name",
        "backend",
        "max_batch_size",
        "input",
        "output",
        "model_transaction_policy",
        "instance_group",
        "parameters",
    }


def test_the_fields_are_those_of_the_openai_front_end() -> None:
    config = parsed(config_text("demo", 4))
    types = model_config_pb2.DataType.Name
    assert {tensor.name: (types(tensor.data_type), *tensor.dims) for tensor in config.input} == {
        "text_input": ("TYPE_STRING", 1),
        "stream": ("TYPE_BOOL", 1),
        "max_tokens": ("TYPE_INT32", 1),
        "stop_words": ("TYPE_STRING", -1),
        "temperature": ("TYPE_FP32", 1),
        "top_p": ("TYPE_FP32", 1),
        "frequency_penalty": ("TYPE_FP32", 1),
        "presence_penalty": ("TYPE_FP32", 1),
        "seed": ("TYPE_UINT64", 1),
        "return_num_input_tokens": ("TYPE_BOOL", 1),
        "return_num_output_tokens": ("TYPE_BOOL", 1),
        "return_finish_reason": ("TYPE_BOOL", 1),
    }
    assert [tensor.name for tensor in config.input if not tensor.optional] == ["text_input"]
    assert {tensor.name: (types(tensor.data_type), *tensor.dims) for tensor in config.output} == {
        "text_output": ("TYPE_STRING", 1),
        "num_input_tokens": ("TYPE_UINT32", 1),
        "num_output_tokens": ("TYPE_UINT32", 1),
        "finish_reason": ("TYPE_STRING", 1),
    }


def test_the_readme_names_the_model(counting_run: Run) -> None:
    write(counting_run, TritonOptions(name="chat-v2", max_batch=3))
    text = (counting_run.triton / "README.md").read_text()
    assert "curl -s localhost:8000/v2/models/chat-v2/generate -d" in text
    assert '-v "$PWD":/models' in text
    assert "up to 3 requests are generated together" in text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("/models/my model (v2)", "my-model-v2"),
        ("../..", "model"),
        ("модель", "model"),
        (".hidden", "hidden"),
        ("a/b/", "b"),
        ("x" * 199 + ".y", "x" * 199),
    ],
)
def test_a_model_is_named_after_the_last_part_of_its_source(text: str, name: str) -> None:
    assert model_name(text) == name


@pytest.mark.parametrize("name", ["a/b", "..", "my model", "", "-o", "a\n", "x" * 201])
def test_a_name_that_is_no_path_segment_is_refused(name: str) -> None:
    with pytest.raises(InputError) as raised:
        TritonOptions(name=name)
    assert str(raised.value) == (
        f"--name {name}: is no name for a Triton model; use letters, digits, '.', '_' and '-', for example "
        f"{model_name(name)}"
    )


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(InputError) as raised:
        TritonOptions(max_batch=0)
    assert str(raised.value) == "--max-batch 0: must be at least 1"


def test_a_graph_that_was_changed_is_refused(counting_run: Run) -> None:
    with open(counting_run.onnx_fp32, "ab") as handle:
        handle.write(b"\0")
    with pytest.raises(InputError) as raised:
        write(counting_run)
    assert str(raised.value) == (
        f"{counting_run.onnx_fp32}: is not the file that `fp8q export {counting_run.root}` wrote (its SHA-256 differs "
        f"from run.json); restore it, or delete it and run `fp8q export {counting_run.root}` again"
    )
    assert not counting_run.triton.exists()


def test_a_tokenizer_that_is_missing_is_named(counting_run: Run) -> None:
    (counting_run.model / "tokenizer.json").unlink()
    with pytest.raises(InputError) as raised:
        write(counting_run)
    assert (
        str(raised.value)
        == f"{counting_run.model / 'tokenizer.json'}: is missing; `fp8q calibrate` writes it, run that first"
    )


def test_a_checkpoint_without_a_generation_config_has_none_in_the_repository(counting_run: Run) -> None:
    (counting_run.model / "generation_config.json").unlink()
    assert not [name for name in write(counting_run) if "generation_config" in name]


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (
            "../weights.safetensors",
            (
                "F401 external-location: {name}: its data lie in ../weights.safetensors, outside the graph's "
                "directory; put the file beside the graph"
            ),
        ),
        (
            "below/weights.safetensors",
            "keeps weights in below/weights.safetensors, which is not beside it; export it again with `fp8q export`",
        ),
    ],
)
def test_weights_that_lie_elsewhere_are_refused(counting_run: Run, tmp_path: Path, place: str, why: str) -> None:
    (weights,) = external_data(counting_run.onnx_fp32)
    assert weights == "model-00001-of-00001.safetensors"
    (tmp_path / "below").mkdir()
    for copy in (tmp_path / weights, tmp_path / "below" / "weights.safetensors"):
        copy.write_bytes((counting_run.model / weights).read_bytes())
    model = onnx.load(counting_run.onnx_fp32, load_external_data=False)
    moved = model.graph.initializer[0]
    moved.external_data[0].value = place
    path = tmp_path / "elsewhere.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InputError) as raised:
        external_data(path)
    assert str(raised.value) == f"{path}: {why.format(name=moved.name)}"


@pytest.mark.parametrize("module", ["tritonclient.grpc", "google.protobuf"])
def test_a_missing_schema_is_said_with_the_extra_that_brings_it(
    counting_run: Run, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendError) as raised:
        write(counting_run)
    assert str(raised.value).endswith("); install it with `pip install 'tritonclient[grpc]'`")
    assert str(raised.value).startswith("Triton's protobuf schema cannot be imported (import of ")
    assert not counting_run.triton.exists()
