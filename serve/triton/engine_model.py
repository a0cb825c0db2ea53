"""The plain `tensorrt_plan` model of a repository: the engine with all its tensors, for users with a loop of their own.

    <name>_engine/config.pbtxt
    <name>_engine/engine.json     the engine's inputs and outputs (`EngineModel`), for people and for `fp8q lint`
    <name>_engine/1/model.plan    the engine

Tensors are those of the graph that the engine is built of; nothing is guessed. Triton has no FP8 type (its TensorRT
backend maps those of `TRITON_TYPES`), so the engine of a run with an FP8 cache cannot be a model of its own: the cache
is what goes in and out.

Without `profile` Triton uses the first optimization profile alone; all are named, and the backend takes for each
request the one that fits. Warm-up runs one request in each, so that the first client does not wait for kernels to be
loaded: of one row, since the memory of a full batch's cache would be copied from the host for nothing, and over at
least one block of slots, for an empty tensor has no buffer to warm up with.

A cache in blocks has no axis of its own for the batch, so `max_batch_size` is 0 and all dimensions are declared: a
request is a step of as many rows as the client puts together.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx import ValueInfoProto

from ...core.errors import BackendError, InputError
from ...core.files import Strict
from ...export.engine.info import EngineInfo
from ...export.engine.profiles import BLOCK, Profile
from ...export.lint.check import sound_graph
from ...export.onnx_file.tensors import type_name

#: The suffix of the plain engine's name, after the name of the Python model.
SUFFIX = "_engine"
PLAN = "model.plan"
DESCRIPTION = "engine.json"
PLATFORM = "tensorrt_plan"
#: ONNX's element types that Triton's TensorRT backend takes -> their names in its schema.
TRITON_TYPES = {
    "FLOAT": "TYPE_FP32",
    "FLOAT16": "TYPE_FP16",
    "BFLOAT16": "TYPE_BF16",
    "INT8": "TYPE_INT8",
    "UINT8": "TYPE_UINT8",
    "INT32": "TYPE_INT32",
    "INT64": "TYPE_INT64",
    "BOOL": "TYPE_BOOL",
}


def import_schema() -> tuple[Any, Any]:
    """Import Triton's `model_config_pb2`, by which fp8q writes and `fp8q lint` reads `config.pbtxt`, and protobuf's
    `text_format`.

    Raises BackendError, naming the package, where they are not installed.
    """
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except (ImportError, RuntimeError) as error:  # tritonclient turns a missing grpcio into a RuntimeError
        raise BackendError(
            "",
            f"Triton's protobuf schema cannot be imported ({error})",
            "install it with `pip install 'tritonclient[grpc]'`",
        ) from error
    return model_config_pb2, text_format


class Binding(Strict):
    """An input or output of an engine: ONNX's name of its type, and its dimensions, the batch first."""

    type: str
    dims: list[int | str]


class EngineModel(Strict):
    """`engine.json`: an engine's inputs and outputs, its profiles, and its builder (None: no plan yet)."""

    inputs: dict[str, Binding]
    outputs: dict[str, Binding]
    profiles: list[Profile]
    tensorrt: str | None = None
    target: str | None = None
    bytes: int | None = None

    @property
    def tensors(self) -> dict[str, Binding]:
        """All inputs and outputs, inputs first."""
        return {**self.inputs, **self.outputs}

    @property
    def untyped(self) -> list[str]:
        """The tensors that Triton has no type for."""
        return [name for name, binding in self.tensors.items() if binding.type not in TRITON_TYPES]

    @property
    def batched(self) -> bool:
        """Tell whether every tensor has the batch as its first dimension, as Triton wants it of a batch of its own."""
        return all(binding.dims[0] == "batch" for binding in self.tensors.values())

    def dims(self, tensor: str) -> list[int | str]:
        """The dimensions of a tensor as `config.pbtxt` declares them: without the batch where that is Triton's."""
        return self.tensors[tensor].dims[1 if self.batched else 0 :]

    @property
    def max_batch(self) -> int:
        """The most rows that every profile takes."""
        return min(profile.batch[2] for profile in self.profiles)


def describe(onnx_file: Path, profiles: Sequence[Profile], built: EngineInfo | None) -> EngineModel:
    """Describe the engine of a graph in `profiles`; `built`: the record of the plan (None: there is none yet).

    Raises InputError for a graph with a tensor whose first dimension is not of the batch.
    """
    graph = sound_graph(onnx_file)
    described = EngineModel(
        inputs=_bindings(onnx_file, graph.inputs),
        outputs=_bindings(onnx_file, graph.outputs),
        profiles=list(profiles),
        tensorrt=built.version if built else None,
        target=built.target if built else None,
        bytes=built.bytes if built else None,
    )
    return described


def _bindings(onnx_file: Path, values: Mapping[str, ValueInfoProto]) -> dict[str, Binding]:
    bindings = {}
    for name, value in values.items():
        tensor = value.type.tensor_type
        dims = [dim.dim_param if dim.HasField("dim_param") else int(dim.dim_value) for dim in tensor.shape.dim]
        if not dims or "batch" not in str(dims[0]).split("*"):
            raise InputError(
                onnx_file,
                f"{name} does not begin with the batch (its dimensions are {dims}), as every tensor of a Triton model "
                "does",
                "export the graph with `fp8q export`",
            )
        bindings[name] = Binding(type=type_name(tensor.elem_type), dims=dims)
    return bindings


def declared(model: EngineModel) -> Iterator[tuple[str, str, str, list[int]]]:
    """Yield the tensors that `config.pbtxt` declares: whether `input` or `output`, the name, Triton's type, the
    dimensions (-1 for any size), without the batch where that is Triton's.
    """
    for field, bindings in (("input", model.inputs), ("output", model.outputs)):
        for name, binding in bindings.items():
            dims = [-1 if isinstance(size, str) else size for size in model.dims(name)]
            yield field, name, TRITON_TYPES[binding.type], dims


def engine_config(name: str, model: EngineModel, gpus: Sequence[int] | None = None) -> str:
    """`config.pbtxt` of an engine whose tensors all have a type of Triton's, through Triton's own schema; `gpus`: their
    indices, for an instance on each.

    Without them there is no `kind` in the instance group, which is Triton's default: an instance on each GPU, which the
    backend opens on its own GPU. A stand-in for the backend may have none.
    """
    config_pb2, text_format = import_schema()
    config = config_pb2.ModelConfig(name=name, platform=PLATFORM)
    config.max_batch_size = model.max_batch if model.batched else 0
    for field, tensor, kind, dims in declared(model):
        getattr(config, field).add(name=tensor, data_type=config_pb2.DataType.Value(kind), dims=dims)
    config.version_policy.latest.num_versions = 1
    profiles = [str(index) for index in range(len(model.profiles))]
    if gpus is None:
        config.instance_group.add(count=1, profile=profiles)
    for gpu in gpus or ():
        kind = config_pb2.ModelInstanceGroup.KIND_GPU
        config.instance_group.add(count=1, kind=kind, gpus=[gpu], profile=profiles)
    for profile in model.profiles:
        warmed = config.model_warmup.add(name=profile.name, batch_size=1)
        for tensor, (kind, dims) in warm_inputs(model, profile).items():
            entry = warmed.inputs[tensor]
            entry.data_type = config_pb2.DataType.Value(kind)
            entry.zero_data = True
            entry.dims.extend(dims)
    return str(text_format.MessageToString(config))


def warm_inputs(model: EngineModel, profile: Profile) -> dict[str, tuple[str, list[int]]]:
    """Input -> Triton's type and the dimensions of a warm-up request in a profile, as `EngineModel.dims` has them."""
    least, likely, most = profile.capacity
    slots = 1 if model.batched else BLOCK
    filled = profile.model_copy(
        update={"capacity": (least, max(slots, likely), most), "batch": (1, 1, profile.batch[2])}
    )
    return {
        name: (TRITON_TYPES[binding.type], list(filled.shapes(name, model.dims(name))[1]))
        for name, binding in model.inputs.items()
    }
