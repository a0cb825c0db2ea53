"""The plain engine of a repository: every tensor as the graph has it, all profiles, warm-up; and why it stays out."""

import json
import re
from typing import Any

import onnx
import pytest
from google.protobuf import text_format
from onnx import TensorProto
from tritonclient.grpc import model_config_pb2

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.reporter import Standing
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.export.engine.profiles import profiles
from fp8q.options import TritonOptions
from fp8q.serve.triton.engine_model import TRITON_TYPES, describe

from ..counting_model import PLAN, record_engine

ASKED = TritonOptions(engine_model=True)
Dtype = model_config_pb2.DataType


class Heard:
    """A reporter that keeps the notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)

    def track(self, description: str, total: int, unit: str = "steps", standing: Standing | None = None) -> Any:
        from fp8q.core.reporter import SILENT

        return SILENT.track(description, total, unit, standing)


def written(run: Run, options: TritonOptions = TritonOptions()) -> list[str]:
    """Write the repository of a run; what fp8q says of it."""
    heard = Heard()
    api.triton(run.root, options, heard)
    return heard.lines


def config_of(run: Run, name: str = "counting_engine") -> Any:
    return text_format.Parse((run.triton / name / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def test_every_tensor_of_the_engine_is_declared_with_the_graphs_type_and_dimensions(engine_run: Run) -> None:
    assert written(engine_run) == []
    config = config_of(engine_run)
    assert (config.name, config.platform, config.backend, config.max_batch_size) == (
        "counting_engine",
        "tensorrt_plan",
        "",
        4,
    )
    assert {tensor.name: (Dtype.Name(tensor.data_type), *tensor.dims) for tensor in config.input} == {
        "input_ids": ("TYPE_INT64", -1),
        "attention_mask": ("TYPE_INT64", -1),
        "position_ids": ("TYPE_INT64", -1),
        "logits_indices": ("TYPE_INT64", -1),
        "past_key_values.0.key": ("TYPE_FP32", 2, -1, 4),
        "past_key_values.0.value": ("TYPE_FP32", 2, -1, 4),
    }
    assert {tensor.name: (Dtype.Name(tensor.data_type), *tensor.dims) for tensor in config.output} == {
        "logits": ("TYPE_FP32", -1, 16),
        "new_key_values.0.key": ("TYPE_FP32", 2, -1, 4),
        "new_key_values.0.value": ("TYPE_FP32", 2, -1, 4),
    }


def test_all_profiles_are_used_and_warmed_up_and_the_newest_version_is_served(engine_run: Run) -> None:
    written(engine_run)
    config = config_of(engine_run)
    (group,) = config.instance_group
    assert (group.count, list(group.profile)) == (1, ["0", "1"])
    assert "kind" not in (engine_run.triton / "counting_engine" / "config.pbtxt").read_text()
    assert config.version_policy.latest.num_versions == 1
    warmed = {
        each.name: {name: (Dtype.Name(entry.data_type), *entry.dims) for name, entry in each.inputs.items()}
        for each in config.model_warmup
    }
    assert [each.batch_size for each in config.model_warmup] == [1, 1]
    past = "past_key_values.0.key"
    assert warmed["prefill"] == {
        "input_ids": ("TYPE_INT64", 32),
        "attention_mask": ("TYPE_INT64", 33),  # one slot: an empty tensor has no buffer
        "position_ids": ("TYPE_INT64", 32),
        "logits_indices": ("TYPE_INT64", 1),
        past: ("TYPE_FP32", 2, 1, 4),
        "past_key_values.0.value": ("TYPE_FP32", 2, 1, 4),
    }
    assert (warmed["decode"]["attention_mask"], warmed["decode"][past]) == (
        ("TYPE_INT64", 65),
        ("TYPE_FP32", 2, 64, 4),
    )


def test_the_plan_and_what_is_known_of_it_lie_in_their_places(engine_run: Run) -> None:
    written(engine_run)
    folder = engine_run.triton / "counting_engine"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "1/model.plan",
        "config.pbtxt",
        "engine.json",
    ]
    assert (folder / "1" / "model.plan").read_bytes() == PLAN
    described = json.loads((folder / "engine.json").read_text())
    assert (described["tensorrt"], described["target"], described["bytes"]) == ("10.16.1.11", "sm90", len(PLAN))
    assert described["inputs"]["attention_mask"] == {"type": "INT64", "dims": ["batch", "capacity + seq"]}


def test_the_python_model_finds_beside_its_engine_whether_that_has_branches(engine_run: Run) -> None:
    written(engine_run)
    folder = engine_run.triton / "counting" / "1" / "engines" / "tensorrt"
    assert sorted(path.name for path in folder.iterdir()) == ["sm90.json", "sm90.plan"]
    assert (folder / "sm90.json").read_bytes() == (engine_run.engines / "sm90.json").read_bytes()


def test_the_repository_is_written_anew_when_the_engine_is(engine_run: Run) -> None:
    written(engine_run)
    before = engine_run.record().stages["triton"]
    written(engine_run)
    assert engine_run.record().stages["triton"] == before
    record_engine(engine_run, "11.1.0.106")
    written(engine_run)
    assert "TRITON=26.07" in (engine_run.triton / "Dockerfile").read_text()


def test_without_a_plan_the_model_is_complete_but_for_it_and_the_readme_says_how_it_comes(wide_run: Run) -> None:
    assert written(wide_run, ASKED) == ["--max-seq-len: the default 2,048 is lowered to 40, the model's positions"]
    folder = wide_run.triton / "counting_engine"
    assert sorted(path.name for path in folder.iterdir()) == ["1", "config.pbtxt", "engine.json"]
    assert list((folder / "1").iterdir()) == []
    assert config_of(wide_run).max_batch_size == 8
    text = (wide_run.triton / "README.md").read_text()
    assert "    fp8q build-engine RUN --runtime tensorrt --max-batch 8 --max-seq-len 40\n" in text
    assert "    cp RUN/engines/smXX.plan counting_engine/1/model.plan\n" in text
    assert 'tritonserver --model-repository="$PWD" --model-control-mode=explicit --load-model=counting\n' in text
    assert "docker build -t counting-triton - < Dockerfile --build-arg TRITON=YY.MM\n" in text
    assert "\nARG TRITON\nFROM " in (wide_run.triton / "Dockerfile").read_text()


def test_the_readme_names_every_tensor_that_a_request_needs(engine_run: Run) -> None:
    """As config.pbtxt declares them: Triton refuses a request without one that is not optional."""
    written(engine_run)
    config, text = config_of(engine_run), (engine_run.triton / "README.md").read_text()
    section = " ".join(text.partition("## The plain engine")[2].split())
    for tensor in (*config.input, *config.output):
        name, kind = tensor.name.replace(".0.", ".N."), Dtype.Name(tensor.data_type).removeprefix("TYPE_")
        assert f"`{name}` {kind} [batch, " in section, tensor.name
    assert "`logits_indices` INT64 [batch, scored]" in section
    assert "`past_key_values.N.key` FP32 [batch, 2, capacity, 4]" in section


def test_of_a_tensorrt_rtx_engine_the_profiles_are_taken_and_nothing_else(wide_run: Run) -> None:
    record_engine(wide_run, "1.7.1.116", "tensorrt-rtx")
    assert written(wide_run, ASKED) == []
    assert config_of(wide_run).max_batch_size == 4
    assert not (wide_run.triton / "counting_engine" / "1" / "model.plan").exists()


def test_why_an_engine_stays_out_is_told(wide_run: Run) -> None:
    record_engine(wide_run, "1.7.1.116", "tensorrt-rtx")
    assert written(wide_run) == [
        (
            "engines sm90: the Python model runs them; no plain model of them, for Triton's tensorrt backend reads "
            "TensorRT plans and no TensorRT-RTX engines"
        )
    ]
    record_engine(wide_run)
    with RunWriter(wide_run).stage("export", {}, {"again": True}) as log:
        wide_run.onnx.write_bytes(onnx.load(wide_run.onnx, load_external_data=False).SerializeToString() + b"\x2a\0")
        log.outputs += [wide_run.onnx, wide_run.onnx_fp32]
    assert written(wide_run) == [
        (
            "engines sm90: stay out of the Triton repository, which would be of another model: they are of other files "
            "than the run has now; the model runs on ONNX Runtime"
        )
    ]
    assert sorted(path.name for path in wide_run.triton.iterdir() if path.is_dir()) == ["counting"]


def fp8_cache(run: Run) -> None:
    """Let the graph's cache be FP8, as far as its inputs and outputs say."""
    model = onnx.load(run.onnx, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        if "key_values" in value.name:
            value.type.tensor_type.elem_type = TensorProto.FLOAT8E4M3FN
    with RunWriter(run).stage("export", {}, {"cache": "fp8"}) as log:
        run.onnx.write_bytes(model.SerializeToString())
        log.outputs += [run.onnx, run.onnx_fp32]


def test_the_python_model_has_every_engine_and_the_image_its_runtime(wide_run: Run) -> None:
    record_engine(wide_run, "1.7.1.116", "tensorrt-rtx")
    written(wide_run)
    plan = wide_run.triton / "counting" / "1" / "engines" / "tensorrt-rtx" / "sm90.plan"
    assert plan.read_bytes() == (wide_run.engines / "sm90.plan").read_bytes()
    config = text_format.Parse((wide_run.triton / "counting/config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    assert config.parameters["runtime"].string_value == "auto"
    image, text = ((wide_run.triton / name).read_text() for name in ("Dockerfile", "README.md"))
    assert "pip install --no-cache-dir onnxruntime==1.32.0 tokenizers==0.23.3 tensorrt-rtx==1.7.1.116\n" in image
    assert (
        " ".join(text.split()).count("It runs the engine of the GPU that it finds, sm90 (tensorrt-rtx 1.7.1.116), ")
        == 1
    )
    assert "--gpus=all" in text


def test_an_engine_with_an_fp8_cache_stays_out_since_triton_has_no_type_for_it(wide_run: Run) -> None:
    fp8_cache(wide_run)
    record_engine(wide_run)
    assert written(wide_run) == [
        (
            "no plain model of the engine: Triton has no type for past_key_values.0.key, which is FLOAT8E4M3FN; the "
            "Python model runs it"
        )
    ]
    told = (
        "--engine-model: Triton has no type for past_key_values.0.key, which is FLOAT8E4M3FN; leave it out (the Python "
        "model keeps the cache to itself), or calibrate with --kv-cache off"
    )
    with pytest.raises(InputError, match=f"^{re.escape(told)}$"):
        written(wide_run, ASKED)


def test_a_tensor_that_does_not_begin_with_the_batch_is_named(wide_run: Run) -> None:
    model = onnx.load(wide_run.onnx, load_external_data=False)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    wide_run.onnx.write_bytes(model.SerializeToString())
    with pytest.raises(InputError) as raised:
        describe(wide_run.onnx, profiles(4, 32), None)
    assert str(raised.value) == (
        f"{wide_run.onnx}: input_ids does not begin with the batch (its dimensions are [4, 'seq']), as every tensor of "
        "a Triton model does; export the graph with `fp8q export`"
    )


def test_the_types_are_those_that_tritons_schema_has(wide_run: Run) -> None:
    assert set(TRITON_TYPES.values()) < set(Dtype.keys())
    assert set(TRITON_TYPES) < set(TensorProto.DataType.keys())


def test_a_plan_that_is_not_the_one_that_was_built_is_refused(engine_run: Run) -> None:
    (engine_run.engines / "sm90.plan").write_bytes(PLAN + b"more")
    with pytest.raises(InputError, match=r"sm90\.plan: is not the file that `fp8q build-engine "):
        written(engine_run)
