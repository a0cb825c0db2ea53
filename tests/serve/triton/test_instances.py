"""The instances that Triton makes of a configuration, by Triton's own rules, on hosts with no, one and eight GPUs.

The rules are those of Triton's core, as of June 2026: `NormalizeInstanceGroup` and `ValidateInstanceGroup` in
src/model_config_utils.cc, and the settings of instances in src/backend_model.cc.
"""

import json
import re
from collections.abc import Collection
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.options import TritonOptions
from fp8q.serve.triton.repository import config_text

Kind = model_config_pb2.ModelInstanceGroup
HOSTS = [(), (0,), tuple(range(8))]


def instances(config: Any, host: Collection[int]) -> list[tuple[str, int]]:
    """The kind and device of each instance on a host with these GPUs; raises ValueError where Triton refuses."""
    made: list[tuple[str, int]] = []
    for number, group in enumerate(config.instance_group):
        kind, gpus = group.kind, list(group.gpus)
        if kind == Kind.KIND_AUTO:
            kind = Kind.KIND_GPU if host and set(gpus) <= set(host) else Kind.KIND_CPU
        if kind == Kind.KIND_GPU and not gpus:
            gpus = sorted(host)
        refused = f"instance group {config.name}_{number} of model {config.name}"
        if kind == Kind.KIND_CPU and gpus:
            raise ValueError(f"{refused} has kind KIND_CPU but specifies one or more GPUs")
        if kind == Kind.KIND_GPU and not gpus:
            raise ValueError(f"{refused} has kind KIND_GPU but no GPUs are available")
        if absent := [gpu for gpu in gpus if gpu not in host]:
            raise ValueError(f"{refused} specifies invalid or unsupported gpu id {absent[0]}")
        for _ in range(group.count):
            made += [("GPU", gpu) for gpu in gpus] if kind == Kind.KIND_GPU else [("CPU", 0)]
    return made


def parsed(text: str) -> Any:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("runtime", ["auto", "onnxruntime"])
def test_without_gpus_there_is_one_instance_on_every_host(runtime: str, host: Collection[int]) -> None:
    assert instances(parsed(config_text("demo", 8, runtime)), host) == [("CPU", 0)]


def test_each_gpu_that_is_named_has_one_instance() -> None:
    config = parsed(config_text("demo", 8, "auto", (0, 5)))
    assert instances(config, range(8)) == [("GPU", 0), ("GPU", 5)]


@pytest.mark.parametrize("host", [(), (0,), (0, 1, 2, 3, 4)])
def test_a_gpu_that_the_host_has_not_is_refused_by_triton(host: Collection[int]) -> None:
    config = parsed(config_text("demo", 8, "auto", (0, 5)))
    with pytest.raises(ValueError, match=r"^instance group demo_[01] of model demo specifies invalid .* gpu id [05]$"):
        instances(config, host)


def test_both_models_of_a_repository_are_on_the_gpus_that_are_named(engine_run: Run) -> None:
    """Without a name the plain engine has one on each: its backend opens an engine on the GPU of the instance."""
    for gpus, of_text, of_engine in (
        (None, [("CPU", 0)], [("GPU", gpu) for gpu in range(8)]),
        ((1, 3), [("GPU", 1), ("GPU", 3)], [("GPU", 1), ("GPU", 3)]),
    ):
        api.triton(engine_run.root, TritonOptions(gpus=gpus))
        configs = [
            parsed((engine_run.triton / name / "config.pbtxt").read_text()) for name in ("counting", "counting_engine")
        ]
        assert [instances(config, range(8)) for config in configs] == [of_text, of_engine]
        assert all(list(group.profile) == ["0", "1"] for group in configs[1].instance_group)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0,1,0", "--gpus 0,1,0: has GPU 0 twice, and one has one instance; name it once"),
        ("0,-1", "--gpus 0,-1: is no list of GPUs by their indices, from 0; give one such as 0,1"),
        ("cuda:1", "--gpus cuda:1: is no list of GPUs by their indices, from 0; give one such as 0,1"),
        ("", "--gpus (none): is no list of GPUs by their indices, from 0; give one such as 0,1"),
        ("0,", "--gpus 0,: is no list of GPUs by their indices, from 0; give one such as 0,1"),
    ],
)
def test_what_is_no_list_of_gpus_is_refused(fp8q: Any, engine_run: Run, text: str, said: str) -> None:
    refused = fp8q("triton", engine_run.root, f"--gpus={text}")
    assert (refused.code, refused.err) == (2, f"fp8q: {said}\n")


def test_gpus_that_there_is_no_engine_for_are_refused(fp8q: Any, wide_run: Run) -> None:
    refused = fp8q("triton", wide_run.root, "--gpus=0,1")
    assert refused.code == 2
    assert refused.err == (
        f"fp8q: --gpus 0,1: {wide_run.root} has no engine of its graph to run there; build one with `fp8q "
        f"build-engine {wide_run.root}`, or leave --gpus out\n"
    )
    with pytest.raises(InputError, match=rf"^--gpus 2: {re.escape(str(wide_run.root))} has no engine "):
        api.triton(wide_run.root, TritonOptions(gpus=(2,)))


def test_the_list_is_read_from_the_command_line(fp8q: Any, engine_run: Run) -> None:
    json.loads(fp8q("triton", engine_run.root, "--gpus", "1,0", "--json").out)
    config = parsed((engine_run.triton / "counting" / "config.pbtxt").read_text())
    assert instances(config, (0, 1)) == [("GPU", 0), ("GPU", 1)]
