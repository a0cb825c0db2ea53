"""`RUN/triton`: a model repository that Triton serves as it is, and that can be copied away alone.

    triton/
      README.md                 how to start the server and how to call it
      <name>/config.pbtxt
      <name>/1/model.py         triton_model.py, copied
      <name>/1/generate.py …    the loop and its neighbours, copied (`LOOP`): the server needs no fp8q
      <name>/1/weights/         the graph, the safetensors it points into, tokenizer and configuration

Weights are copies of those in `RUN/model`, which take no room where the file system shares blocks (`files.share`). A
path to `../model` would take none anywhere, but a repository is what people copy, mount and upload, and one that breaks
then is none. With hard links ONNX's checker, and with it `onnx.load`, refuses the graphs on both sides.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from pydantic import BaseModel

from ..errors import BackendError, InputError
from ..files import read_document, replacing, share
from ..reporter import Reporter
from ..run import Run

LOOP = (
    "cache.py", "generate.py", "host_batch.py", "request.py", "sampling.py", "service.py", "sessions.py", "text.py",
)  # fmt: skip
#: What the model reads beside its graph; the last is not in every checkpoint.
COMPANIONS = ("config.json", "tokenizer.json", "generation_config.json")
WEIGHTS = "weights"
#: Name -> Triton's type and shape (without the batch), and whether a request may leave it out.
INPUTS = {
    "text_input": ("TYPE_STRING", 1, False),
    "stream": ("TYPE_BOOL", 1, True),
    "max_tokens": ("TYPE_INT32", 1, True),
    "stop_words": ("TYPE_STRING", -1, True),
    "temperature": ("TYPE_FP32", 1, True),
    "top_p": ("TYPE_FP32", 1, True),
    "frequency_penalty": ("TYPE_FP32", 1, True),
    "presence_penalty": ("TYPE_FP32", 1, True),
    "seed": ("TYPE_UINT64", 1, True),
    "return_num_input_tokens": ("TYPE_BOOL", 1, True),
    "return_num_output_tokens": ("TYPE_BOOL", 1, True),
    "return_finish_reason": ("TYPE_BOOL", 1, True),
}
OUTPUTS = {
    "text_output": ("TYPE_STRING", 1),
    "num_input_tokens": ("TYPE_UINT32", 1),
    "num_output_tokens": ("TYPE_UINT32", 1),
    "finish_reason": ("TYPE_STRING", 1),
}


@dataclass(frozen=True)
class TritonOptions:
    """Options of `fp8q triton`: the model's `name` in the repository (None: that of the source model), and how many
    requests are generated together.
    """

    name: str | None = None
    max_batch: int = 8

    def __post_init__(self) -> None:
        """Refuse names that are no single path segment of a URL, and batches of nothing."""
        if self.name is not None and self.name != model_name(self.name):
            raise InputError(
                f"--name {self.name}: is no name for a Triton model; use letters, digits, '.', '_' and '-', for "
                f"example {model_name(self.name)}"
            )
        if self.max_batch < 1:
            raise InputError(f"--max-batch {self.max_batch}: must be at least 1")


class Engine(BaseModel):
    """Of `engines/<target>.json`, what matters to a repository."""

    runtime: str


def model_name(text: str) -> str:
    """The last part of a path or hub name, as a name for a Triton model: other characters than letters, digits, '.',
    '_' and '-' become '-'.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(text).name).strip(".-") or "model"


def write_repository(run: Run, options: TritonOptions, report: Reporter) -> list[Path]:
    """Write `RUN/triton` in the place of the one that is there; returns its files.

    Raises InputError when the checkpoint or the FP32 graph is missing or changed, BackendError when Triton's protobuf
    schema is not installed.
    """
    name = options.name or model_name(run.record().model.get("name", run.root.resolve().name))
    config = config_text(name, options.max_batch)
    weights = weight_files(run)
    note_engines(run, report)
    with (
        report.track("Writing the Triton repository", len(weights), "files") as advance,
        replacing(run.triton) as partial,
    ):
        version = partial / name / "1"
        (version / WEIGHTS).mkdir(parents=True)
        for path in weights:
            share(path, version / WEIGHTS / path.name)
            advance(1)
        here = Path(__file__).parent
        shutil.copyfile(here / "triton_model.py", version / "model.py")
        for file in LOOP:
            shutil.copyfile(here / file, version / file)
        (partial / name / "config.pbtxt").write_text(config, encoding="utf-8")
        readme = Template((here / "templates" / "triton_readme.md").read_text(encoding="utf-8"))
        (partial / "README.md").write_text(readme.substitute(name=name, max_batch=options.max_batch), encoding="utf-8")
    return sorted(path for path in run.triton.rglob("*") if path.is_file())


def weight_files(run: Run) -> list[Path]:
    """The files of `RUN/model` that the model reads: the FP32 graph, its external data, and `COMPANIONS`."""
    graph = run.require(run.onnx_fp32, "export")
    exported = run.record().stages["export"].outputs  # the scales of attention in FP8 are; the weights are older
    stored = [
        run.require(run.model / name, "export" if f"{run.model.name}/{name}" in exported else "quantize")
        for name in external_data(graph)
    ]
    optional = run.model / COMPANIONS[-1]
    companions = [run.require(run.model / name, "quantize") for name in COMPANIONS[:-1]] + (
        [run.require(optional, "quantize")] if optional.exists() else []
    )
    return [graph, *stored, *companions]


def external_data(graph: Path) -> list[str]:
    """Names of the files that the tensors of the ONNX model at `graph` lie in; no weight is read.

    Raises InputError for one that is not beside the graph (it would not be there in a repository), is no file, or is
    cut short.
    """
    from ..export.lint.check import sound_graph

    names = sorted({where.location for _, _, where, _ in sound_graph(graph).storage.external})
    for name in names:
        if Path(name).name != name:
            raise InputError(
                f"{graph}: keeps weights in {name}, which is not beside it; export it again with `fp8q export`"
            )
    return names


def config_text(name: str, max_batch: int) -> str:
    """`config.pbtxt`, through Triton's own schema.

    No `kind` in the instance group: one file for hosts with a GPU and without.
    """
    config_pb2, text_format = import_schema()
    config = config_pb2.ModelConfig(name=name, backend="python", max_batch_size=1)
    for key, (dtype, length, optional) in INPUTS.items():
        config.input.add(name=key, data_type=config_pb2.DataType.Value(dtype), dims=[length], optional=optional)
    for key, (dtype, length) in OUTPUTS.items():
        config.output.add(name=key, data_type=config_pb2.DataType.Value(dtype), dims=[length])
    config.model_transaction_policy.decoupled = True
    config.instance_group.add(count=1)
    for key, value in {"runtime": "onnxruntime", "weights": WEIGHTS, "max_batch": str(max_batch)}.items():
        config.parameters[key].string_value = value
    return str(text_format.MessageToString(config))


def import_schema() -> tuple[Any, Any]:
    """Triton's `model_config_pb2` and protobuf's `text_format`; raises BackendError, naming the extra, where they are
    not installed.
    """
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except (ImportError, RuntimeError) as error:  # tritonclient turns a missing grpcio into a RuntimeError
        raise BackendError(
            f"Triton's protobuf schema cannot be imported ({error}); install it with `pip install 'tritonclient[grpc]'`"
        ) from error
    return model_config_pb2, text_format


def note_engines(run: Run, report: Reporter) -> None:
    """Say what becomes of the engines in the run."""
    runtimes = {path.stem: read_document(path, Engine).runtime for path in sorted(run.engines.glob("*.json"))}
    foreign = [name for name, runtime in runtimes.items() if runtime == "tensorrt-rtx"]
    if foreign:
        report.note(
            f"engines {', '.join(foreign)}: stay out of the Triton repository, whose tensorrt backend reads TensorRT "
            "plans and no TensorRT-RTX engines; the model runs on ONNX Runtime"
        )
    plans = [name for name, runtime in runtimes.items() if runtime == "tensorrt"]
    if plans:
        report.note(
            f"engines {', '.join(plans)}: stay out of the Triton repository in this version; the model runs on ONNX "
            "Runtime"
        )
