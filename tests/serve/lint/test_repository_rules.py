"""What the rules of repositories say beyond the page's examples: other ways to break them, and what is none."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8q import api
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.serve.lint.check import lint_engines

from ..counting_model import PLAN, record_engine

Found = Callable[[], list[str]]
AGAIN = "run `fp8q triton` again"


def edit(file: Path, old: str, new: str) -> None:
    """Replace a text that is there."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def make_pipe(file: Path) -> None:
    """Put a pipe in a file's place."""
    file.unlink()
    os.mkfifo(file)


def test_a_good_repository_has_no_findings(found: Found) -> None:
    assert found() == []


def test_of_a_foreign_repository_only_what_holds_of_any_is_asked(tmp_path: Path) -> None:
    model = tmp_path / "theirs" / "1"
    model.mkdir(parents=True)
    (model.parent / "config.pbtxt").write_text('backend: "python"\ninput { name: "a" data_type: TYPE_FP32 dims: 3 }\n')
    (model / "model.py").write_text("from somewhere import TritonPythonModel\nimport numpy\n")
    assert api.lint(tmp_path).findings == []
    (model / "model.py").write_text("class Other:\n    pass\n")
    assert [str(finding) for finding in api.lint(tmp_path).findings] == [
        f"R106 python-code: theirs/1/model.py: has no class TritonPythonModel; {AGAIN}"
    ]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda file: file.unlink(), "there is no config.pbtxt"),
        (lambda file: file.write_bytes(b"\xff"), "is no text in UTF-8 ("),
        (make_pipe, "is a pipe"),
        (lambda file: file.write_text("colour: 1"), "does not read by Triton's schema (1:1 : "),
        (lambda file: file.write_text("input {" * 100_000), "does not read by Triton's schema ("),
        (lambda file: os.truncate(file, 17 << 20), "has more than 16,777,216 bytes"),
    ],
)
def test_a_configuration_that_does_not_read(good: Run, found: Found, damage: Callable[[Path], Any], told: str) -> None:
    damage(good.triton / "chat" / "config.pbtxt")
    line, *more = [line for line in found() if "R101" in line]
    assert more == []
    assert line.startswith(f"error   R101 config-reads: chat/config.pbtxt: {told}")
    assert line.endswith(f"; {AGAIN}, or move the folder out of the repository")


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(st.sampled_from('{}[]:",#\n 0-1abnameinputdimsbackendpythonversion_policyspecificversions'), max_size=80)
)
def test_whatever_a_configuration_holds_the_lint_ends_with_findings_or_none(good: Run, text: str) -> None:
    (good.triton / "chat" / "config.pbtxt").write_text(text)
    assert all(finding.message.isprintable() for finding in api.lint(good.triton).findings)


def test_a_folder_beside_the_models_is_a_model_to_triton(good: Run, found: Found) -> None:
    (good.triton / "notes").mkdir()
    (good.triton / ".hidden").mkdir()
    assert [line.split(": ")[1] for line in found()] == ["notes/config.pbtxt"]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('backend: "python"\n', "", 'names no backend; set backend: "python", or the platform of an engine'),
        (
            'backend: "python"\n',
            'backend: "python"\nplatform: "tensorrt_plan"\n',
            "the platform tensorrt_plan is not the backend python's; keep the right one of them",
        ),
    ],
)
def test_a_model_names_one_backend(good: Run, found: Found, old: str, new: str, told: str) -> None:
    edit(good.triton / "chat" / "config.pbtxt", old, new)
    assert f"error   R103 backend: chat/config.pbtxt: {told}" in found()


def test_a_platform_that_there_is_not(good: Run, found: Found) -> None:
    edit(good.triton / "chat_engine" / "config.pbtxt", "tensorrt_plan", "tensorrt_rtx_plan")
    (line,) = [line for line in found() if "R103" in line]
    assert line.startswith("error   R103 backend: chat_engine/config.pbtxt: the platform tensorrt_rtx_plan is none of ")


def test_the_versions_that_are_served_are_looked_at_and_no_others(good: Run, found: Found) -> None:
    folder = good.triton / "chat_engine"
    for name in ("01", "2", "10"):
        shutil.copytree(folder / "1", folder / name)
    (folder / "1" / "model.plan").unlink()
    (folder / "2" / "model.plan").unlink()
    assert found() == []  # 10 is the newest
    edit(
        folder / "config.pbtxt",
        "latest {\n    num_versions: 1\n  }",
        "specific {\n    versions: 2\n    versions: 7\n  }",
    )
    assert [line for line in found() if "R104" in line or "R105" in line] == [
        (
            "error   R104 version-folder: chat_engine/config.pbtxt: the version 7 is to be served and is not there; "
            "put it there, or another"
        ),
        (
            "error   R105 model-file: chat_engine/2/model.plan: there is no such file; put the engine there that `fp8q "
            "build-engine` builds with TensorRT"
        ),
    ]


@pytest.mark.parametrize(
    ("name", "source", "told"),
    [
        ("model.py", "def broken(:\n", "does not compile (invalid syntax, line 1)"),
        ("model.py", "\0", "does not compile ("),
        ("text.py", "x = (\n", "does not compile ('(' was never closed, line 1)"),
    ],
)
def test_code_that_does_not_compile(good: Run, found: Found, name: str, source: str, told: str) -> None:
    (good.triton / "chat" / "1" / name).write_text(source)
    (line,) = [line for line in found() if "R106" in line]
    assert line.startswith(f"error   R106 python-code: chat/1/{name}: {told}")


def test_an_environment_of_the_models_own_is_there(good: Run, found: Found) -> None:
    config = good.triton / "chat" / "config.pbtxt"
    wanted = "$$TRITON_MODEL_DIRECTORY/env.tar.gz"
    config.write_text(
        f'{config.read_text()}parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{wanted}" }} }}\n'
    )
    assert found() == [
        (
            f"error   R107 python-environment: chat/config.pbtxt: EXECUTION_ENV_PATH names {wanted}, which is not "
            "there; put it there, or leave it out"
        )
    ]
    (config.parent / "env.tar.gz").write_bytes(b"packed")
    assert found() == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('key: "max_batch"', 'key: "batch"', f"has no parameter max_batch; {AGAIN}"),
        (
            'string_value: "8"',
            'string_value: "-8"',
            "max_batch is '-8', and is a number of requests; set 8, for example",
        ),
        (
            'string_value: "weights"',
            'string_value: "../../weights"',
            f"there is no folder ../../weights in the version's; {AGAIN}",
        ),
    ],
)
def test_the_parameters_are_those_that_the_model_reads(good: Run, found: Found, old: str, new: str, told: str) -> None:
    edit(good.triton / "chat" / "config.pbtxt", old, new)
    assert found() == [f"error   R108 parameters: chat/config.pbtxt: {told}"]


def test_a_pipe_instead_of_a_tokenizer_is_not_waited_for(good: Run, found: Found) -> None:
    file = good.triton / "chat" / "1" / "weights" / "tokenizer.json"
    file.unlink()
    os.mkfifo(file)
    assert found() == [
        f"error   R109 model-files: chat/1/weights/tokenizer.json: is a pipe; {AGAIN}",
        "error   R117 links: chat/1/weights/tokenizer.json: is a pipe; take it out",
    ]


def test_a_tokenizer_that_is_none(good: Run, found: Found) -> None:
    (good.triton / "chat" / "1" / "weights" / "tokenizer.json").write_text("{}")
    (line,) = found()
    assert line.startswith("error   R109 model-files: chat/1/weights/tokenizer.json: ")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"model_type": "counting"}', "chat/1/weights/config.json: names no number of positions; "),
        ("{", "chat/1/weights/config.json: "),
        ('{"max_position_embeddings": "many"}', "chat/1/weights/config.json: names no number of positions; "),
        ('{"text_config": []}', "chat/1/weights/config.json: names no number of positions; "),
    ],
)
def test_a_configuration_that_does_not_say_what_generation_needs(good: Run, found: Found, text: str, told: str) -> None:
    (good.triton / "chat" / "1" / "weights" / "config.json").write_text(text)
    (line,) = found()
    assert line.startswith(f"error   R109 model-files: {told}")
    assert line.endswith(f"; {AGAIN}")


def test_weights_of_another_type_do_not_belong_to_the_graph(good: Run, found: Found) -> None:
    (file,) = (good.triton / "chat" / "1" / "weights").glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"F32"', b'"I32"'))
    (line,) = found()
    assert line.startswith("error   R110 weights: chat/1/weights/model.fp32.onnx: F405 external-tensor: vocabulary: ")


def test_a_graph_that_the_loop_cannot_run(good: Run, found: Found) -> None:
    path = good.triton / "chat" / "1" / "weights" / "model.fp32.onnx"
    model = onnx.load(path, load_external_data=False)
    model.graph.output[0].name = "scores"
    model.graph.node[-1].output[0] = "scores"
    path.write_bytes(model.SerializeToString())
    lines = found()
    assert lines[0] == (
        "error   R110 weights: chat/1/weights/model.fp32.onnx: F306 interface: there is no output logits; run `fp8q "
        "export` again"
    )
    path.write_bytes(b"no graph")
    assert found() == [
        f"error   R110 weights: chat/1/weights/model.fp32.onnx: is no ONNX model, or is cut short; {AGAIN}"
    ]


@pytest.mark.parametrize(
    ("model", "old", "new", "told"),
    [
        ("chat", "TYPE_UINT64", "TYPE_INT64", "the input seed is TYPE_INT64 [1], and should be TYPE_UINT64 [1]"),
        ("chat", '"finish_reason"', '"reason"', "the output finish_reason is not declared"),
        (
            "chat_engine",
            "dims: 16",
            "dims: 17",
            "the output logits is TYPE_FP32 [-1, 17], and should be TYPE_FP32 [-1, 16]",
        ),
        ("chat_engine", '"logits"', '"scores"', "the output scores is none of the model's"),
    ],
)
def test_tensors_are_those_of_the_model(good: Run, found: Found, model: str, old: str, new: str, told: str) -> None:
    edit(good.triton / model / "config.pbtxt", old, new)
    assert f"error   R112 tensors: {model}/config.pbtxt: {told}; {AGAIN}" in found()


def test_an_engine_with_an_fp8_tensor_has_no_type_in_triton(good: Run, found: Found) -> None:
    edit(good.triton / "chat_engine" / "engine.json", '"FLOAT"', '"FLOAT8E4M3FN"')
    assert found() == [
        (
            "error   R112 tensors: chat_engine/config.pbtxt: past_key_values.0.key is FLOAT8E4M3FN, for which Triton "
            "has no type; calibrate with --kv-cache off"
        )
    ]
    (good.triton / "chat_engine" / "engine.json").write_text("{")
    (line,) = found()
    assert line.startswith("error   R112 tensors: chat_engine/engine.json: does not read as fp8q's engine.json: ")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('  profile: "0"\n  profile: "1"\n', "", ["the profile 1 (decode) is not used; name it in instance_group"]),
        ("max_batch_size: 4", "max_batch_size: 5", ["max_batch_size is 5, and the engine takes 1 to 4 rows; set 4"]),
    ],
)
def test_profiles_and_batches_are_the_engines(good: Run, found: Found, old: str, new: str, told: list[str]) -> None:
    edit(good.triton / "chat_engine" / "config.pbtxt", old, new)
    assert found() == [f"error   R113 profiles: chat_engine/config.pbtxt: {line}" for line in told]


NO_KIND = (
    "instance_group names no kind or no GPUs, so each GPU of a host gets an instance; set kind: KIND_CPU for one on "
    "the first GPU, or KIND_GPU and gpus"
)


@pytest.mark.parametrize(
    ("group", "told"),
    [
        ("instance_group { count: 1 kind: KIND_CPU }", []),
        ("instance_group { count: 1 kind: KIND_GPU gpus: 1 } instance_group { kind: KIND_GPU gpus: 0 }", []),
        ("instance_group { count: 1 kind: KIND_GPU }", [NO_KIND]),
        ("instance_group { count: 1 }", [NO_KIND]),
        ("", [NO_KIND]),
        (
            "instance_group { count: 3 kind: KIND_CPU }",
            ["instance_group has count 3, and each instance loads the weights again; set 1"],
        ),
    ],
)
def test_a_text_model_has_one_instance_or_those_of_its_gpus(
    good: Run, found: Found, group: str, told: list[str]
) -> None:
    edit(good.triton / "chat" / "config.pbtxt", "instance_group {\n  count: 1\n  kind: KIND_CPU\n}\n", group)
    assert found() == [f"warning R121 instances: chat/config.pbtxt: {line}" for line in told]


def test_a_warm_up_whose_dimensions_do_not_belong_together(good: Run, found: Found) -> None:
    edit(good.triton / "chat_engine" / "config.pbtxt", "dims: 33", "dims: 34")
    assert found() == [
        f"error   R114 warm-up: chat_engine/config.pbtxt: the warm-up {name} has dimensions that no profile takes; "
        f"{AGAIN}"
        for name in ["prefill"]
    ]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"PK\x03\x04" + bytes(124), "is not of TensorRT's form; put an engine there that "),
        (PLAN + b"1", f"is of {len(PLAN) + 1} bytes, and engine.json of {len(PLAN)} bytes; "),
        (PLAN.replace(b"\x0a\x10\x01\x0b", b"\x0b\x00\x00\x72"), "is of TensorRT 11.0.0.114, and engine.json of "),
    ],
)
def test_a_plan_that_is_not_the_one_that_was_described(good: Run, found: Found, data: bytes, told: str) -> None:
    (good.triton / "chat_engine" / "1" / "model.plan").write_bytes(data)
    (line,) = [line for line in found() if "R115" in line]
    assert line.startswith(f"error   R115 plan: chat_engine/1/model.plan: {told}")


@pytest.mark.parametrize("text", ["FROM ubuntu\n", "FROM nvcr.io/nvidia/tritonserver:24.01-py3\n", None])
def test_an_image_that_fp8q_does_not_know_is_not_judged(good: Run, found: Found, text: str | None) -> None:
    (good.triton / "Dockerfile").unlink()
    if text is not None:
        (good.triton / "Dockerfile").write_text(text)
    assert found() == []


def test_links_within_a_repository_are_good_and_dangling_ones_are_not(good: Run, found: Found) -> None:
    weights = good.triton / "chat" / "1" / "weights"
    (weights / "tokenizer.json").rename(weights / "kept.json")
    (weights / "tokenizer.json").symlink_to("kept.json")
    assert found() == []
    (weights / "more.json").symlink_to("nowhere.json")
    assert found() == [
        "error   R117 links: chat/1/weights/more.json: is a link to what is not there; put the file itself there"
    ]


def test_engines_of_other_graphs_are_found_in_a_run(good: Run) -> None:
    assert lint_engines(good) == []
    with RunWriter(good).stage("export", {}, {"again": True}) as log:
        good.onnx.write_bytes(good.onnx.read_bytes() + b"\x2a\0")
        log.outputs += [good.onnx, good.onnx_fp32]
    assert [str(finding) for finding in lint_engines(good)] == [
        f"R119 run-engine: engines: is of other graphs than there are now; run `fp8q build-engine {good.root}` again",
        f"R120 run-repository: triton: is of other files than there are now; run `fp8q triton {good.root}` again",
    ]
    record_engine(good)
    assert [finding.rule for finding in lint_engines(good)] == ["R120"]
