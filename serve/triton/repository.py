"""`RUN/triton`: a model repository that Triton serves as it is, and that can be copied away alone.

    triton/
      README.md                 how to start the server, how to call it, what to tune
      Dockerfile                Triton's image with what it lacks for this (`images`)
      repository.json           what fp8q wrote here (`ownership`)
      <name>/config.pbtxt
      <name>/1/model.py         triton_model.py, copied
      <name>/1/generate.py …    the loop and its neighbours, copied (`LOOP`): the server needs no fp8q
      <name>/1/weights/         the graph, the safetensors it points into, tokenizer and configuration
      <name>/1/engines/         the run's engines, by runtime and target (`here`), and their records
      <name>_engine/…           the plain model of an engine, where there is one for TensorRT (`engine_model`)

Weights are copies of those in `RUN/model`, without room of their own where the file system shares blocks. A
path to `../model` would take none anywhere, but a repository is what people copy, mount and upload, and one that breaks
then is none. With hard links ONNX's checker, and with it `onnx.load`, refuses the graphs on both sides.
"""

import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from ...calibrate.checkpoint.companions import SPECIAL_TOKENS, TOKENIZER_CONFIG
from ...core.errors import InputError
from ...core.files import clone_file, replacing
from ...core.reporter import Reporter
from ...core.run import Run
from ...export.engine.profiles import round_up_to_blocks
from ...export.lint.check import sound_graph
from ...options import TritonOptions, model_name
from ..loop.engine_session import EngineRuntime
from ..loop.here import AUTO, ONNX_RUNTIME, plan_path
from .engine_model import DESCRIPTION, PLAN, SUFFIX, TRITON_TYPES, Binding, EngineModel, engine_config, import_schema
from .images import KERNELS_VOLUME, PINS, TEMPLATES, dockerfile, image_name, pinned, release_in
from .ownership import mark_written

#: The files of the loop, which lie side by side in a repository as they do there.
LOOP_FOLDER = Path(__file__).parent.parent / "loop"
LOOP = (
    "cache.py", "cuda.py", "device.py", "device_batch.py", "device_calls.py", "device_kernels.py",
    "device_logits.py", "engine_session.py", "generate.py", "here.py", "host_batch.py", "kernels.ptx", "request.py",
    "sampling.py", "service.py", "sessions.py", "step_logits.py", "text.py",
)  # fmt: skip
#: The files that the model reads besides its graph, and those that are not in every checkpoint.
COMPANIONS = ("config.json", "tokenizer.json")
OPTIONAL_COMPANIONS = ("generation_config.json", TOKENIZER_CONFIG, SPECIAL_TOKENS)
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
class Engine:
    """The plain engine of a repository: what it reads and answers, and its plan (None: to be put there)."""

    model: EngineModel
    plan: Path | None


@dataclass(frozen=True)
class PythonModelEngine:
    """An engine that the Python model runs itself, where it finds the GPU of its `target`; `version`: of `runtime`."""

    runtime: EngineRuntime
    version: str
    target: str
    plan: Path


def write_repository(
    run: Run,
    options: TritonOptions,
    report: Reporter,
    engine: Engine | None = None,
    python_model_engines: Sequence[PythonModelEngine] = (),
) -> list[Path]:
    """Write the model repository of a run over an existing one, with the plain `engine` and the engines of the Python
    model; return its files.

    Raises InputError when the checkpoint or the FP32 graph is missing or changed, BackendError when Triton's protobuf
    schema is not installed.
    """
    out = options.out or run.triton
    name = options.name or model_name(run.record().model.get("name", run.root.resolve().name))
    config = config_text(name, options.max_batch, AUTO if python_model_engines else ONNX_RUNTIME, options.gpus)
    engine_text = engine_config(name + SUFFIX, engine.model, options.gpus) if engine else ""
    weights = weight_files(run)
    plans = [engine.plan] if engine and engine.plan else []
    with (
        report.track(
            "Writing the Triton repository", len([*weights, *plans, *python_model_engines]), "files"
        ) as advance,
        replacing(out) as partial,
    ):
        _write_model(partial / name, config, weights, advance)
        for engine_info in python_model_engines:
            place = plan_path(partial / name / "1", engine_info.runtime, engine_info.target)
            place.parent.mkdir(parents=True, exist_ok=True)
            for kind in (".plan", ".json"):  # what is known of an engine lies beside it there, too
                clone_file(engine_info.plan.with_suffix(kind), place.with_suffix(kind))
            advance(1)
        if engine:
            folder = partial / (name + SUFFIX)
            (folder / "1").mkdir(parents=True)
            (folder / "config.pbtxt").write_text(engine_text, encoding="utf-8")
            (folder / DESCRIPTION).write_text(engine.model.model_dump_json(indent=1) + "\n", encoding="utf-8")
            for plan in plans:
                clone_file(plan, folder / "1" / PLAN)
                advance(1)
        built_by = engine.model.tensorrt if engine else None
        packages = PINS | {engine_info.runtime: engine_info.version for engine_info in python_model_engines}
        image = dockerfile(name, built_by, awaits_plan=engine is not None and not plans, packages=packages)
        (partial / "Dockerfile").write_text(image, encoding="utf-8")
        (partial / "README.md").write_text(readme(name, options, engine, image, python_model_engines), encoding="utf-8")
        mark_written(partial)
    return sorted(path for path in out.rglob("*") if path.is_file())


def _write_model(folder: Path, config: str, weights: list[Path], advance: Callable[[int], None]) -> None:
    """Write the Python model: configuration, code, and copies of the weights."""
    version = folder / "1"
    (version / WEIGHTS).mkdir(parents=True)
    for path in weights:
        clone_file(path, version / WEIGHTS / path.name)
        advance(1)
    shutil.copyfile(LOOP_FOLDER / "triton_model.py", version / "model.py")
    for file in LOOP:
        shutil.copyfile(LOOP_FOLDER / file, version / file)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")


def readme(
    name: str,
    options: TritonOptions,
    engine: Engine | None,
    image: str,
    python_model_engines: Sequence[PythonModelEngine] = (),
) -> str:
    """The repository's own README.md; `image`: its Dockerfile."""
    awaits = engine is not None and engine.plan is None
    compiles = any(engine_info.runtime == "tensorrt-rtx" for engine_info in python_model_engines)
    alone = f" --model-control-mode=explicit --load-model={name}" if awaits else ""
    return _template("triton_readme.md").substitute(
        name=name,
        image=image_name(name),
        max_batch=options.max_batch,
        both=f" Beside it lies `{name}{SUFFIX}`, the plain engine." if engine else "",
        build="" if release_in(image) else " --build-arg TRITON=YY.MM",
        gpus=" --gpus=all" if engine or python_model_engines else "",
        volume=f" -v fp8q-kernels:{KERNELS_VOLUME}" if compiles else "",
        runs=_runs(python_model_engines),
        instances=_instances(options.gpus),
        serve=f" \\\n        tritonserver --model-repository=/models{alone}" if alone else "",
        serve_bare=alone,
        packages=pinned(PINS | {engine_info.runtime: engine_info.version for engine_info in python_model_engines}),
        engine=_engine_section(name, engine) if engine else "",
    )


def _runs(engines: Sequence[PythonModelEngine]) -> str:
    """Describe in a sentence what the Python model runs on."""
    if not engines:
        return "It runs on ONNX Runtime on the CPU"
    there = ", ".join(f"{engine_info.target} ({engine_info.runtime} {engine_info.version})" for engine_info in engines)
    return (
        f"It runs the engine of the GPU that it finds, {there}, with the cache on the GPU, and where there is none for "
        "it ONNX Runtime on the CPU"
    )


def _instances(gpus: Sequence[int] | None) -> str:
    """Describe in a sentence the instances of the model."""
    if gpus is None:
        return (
            "there is one instance, which takes the first GPU that the server sees, so CUDA_VISIBLE_DEVICES\n"
            "  chooses it. `fp8q triton RUN --gpus 0,1` writes one for each GPU, and Triton shares the requests out."
        )
    return (
        f"an instance on each of {', '.join(map(str, gpus))}, by CUDA's indices, and Triton shares the requests "
        "out.\n  A GPU that is not there, or has no engine here, keeps the model from loading."
    )


def _engine_section(name: str, engine: Engine) -> str:
    """Write the README's section on the plain engine, and how its plan comes to its place where it is not there."""
    model = engine.model
    shown = "; ".join(
        f"`{profile.name}` of {profile.batch[0]} to {profile.batch[2]} rows, {profile.seq[0]} to {profile.seq[2]} "
        f"tokens, {profile.capacity[0]} to {profile.capacity[2]} slots"
        for profile in model.profiles
    )
    if engine.plan is not None:
        plan = f"The plan is of TensorRT {model.tensorrt} for {model.target}, and runs on that version and GPU alone."
    else:
        plan = _template("triton_awaits.md").substitute(
            name=name,
            place=f"{name}{SUFFIX}/1/{PLAN}",
            max_batch=model.max_batch,
            max_seq_len=_longest(model),
        )
    return _template("triton_engine.md").substitute(
        name=name + SUFFIX,
        max_batch=model.max_batch,
        profiles=shown,
        plan=plan.rstrip("\n"),
        inputs=_tensors(model.inputs),
        outputs=_tensors(model.outputs),
    )


def _longest(model: EngineModel) -> int:
    """The length of sequences that an engine's profiles are for: their slots are rounded up to whole blocks."""
    prompt, slots = (max(getattr(profile, of)[2] for profile in model.profiles) for of in ("seq", "capacity"))
    return int(prompt if round_up_to_blocks(prompt) == slots else slots)


def _tensors(bindings: Mapping[str, Binding]) -> str:
    """List tensors with types and dimensions as the graph has them; those of a layer once, by the first."""
    shown = {
        name.replace(".0.", ".N."): f"{TRITON_TYPES[binding.type].removeprefix('TYPE_')} {list(binding.dims)}"
        for name, binding in bindings.items()
        if not re.search(r"\.[1-9]\d*\.", name)
    }
    text = "; ".join(f"`{name}` {text}" for name, text in shown.items()).replace("'", "")
    return textwrap.fill(text, 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _template(name: str) -> Template:
    return Template((TEMPLATES / name).read_text(encoding="utf-8"))


def weight_files(run: Run) -> list[Path]:
    """The files of `RUN/model` that the model reads: the FP32 graph, its external data, `COMPANIONS`, and those of
    `OPTIONAL_COMPANIONS` that are there.
    """
    graph = run.require(run.onnx_fp32, "export")
    exported = run.record().stages["export"].outputs  # the scales of attention in FP8 are; the weights are older
    stored = [
        run.require(run.model / name, "export" if f"{run.model.name}/{name}" in exported else "quantize")
        for name in external_data(graph)
    ]
    optional = [name for name in OPTIONAL_COMPANIONS if (run.model / name).exists()]
    companions = [run.require(run.model / name, "quantize") for name in (*COMPANIONS, *optional)]
    return [graph, *stored, *companions]


def external_data(graph: Path) -> list[str]:
    """Names of the external data files of the ONNX model at `graph`; no weight is read.

    Raises InputError for a file that is not beside the graph (it would be missing in a repository), is no regular file,
    or is cut short.
    """
    names = sorted({where.location for _, _, where, _ in sound_graph(graph).storage.external})
    for name in names:
        if Path(name).name != name:
            raise InputError(
                graph, f"keeps weights in {name}, which is not beside it", "export it again with `fp8q export`"
            )
    return names


def config_text(name: str, max_batch: int, runtime: str = ONNX_RUNTIME, gpus: Sequence[int] | None = None) -> str:
    """`config.pbtxt`, through Triton's own schema; `gpus`: their indices, for an instance on each.

    Without them there is one instance, which looks for a GPU itself: KIND_CPU is one on every host, where no kind is an
    instance on each GPU that the host has.
    """
    config_pb2, text_format = import_schema()
    config = config_pb2.ModelConfig(name=name, backend="python", max_batch_size=1)
    for key, (dtype, length, optional) in INPUTS.items():
        config.input.add(name=key, data_type=config_pb2.DataType.Value(dtype), dims=[length], optional=optional)
    for key, (dtype, length) in OUTPUTS.items():
        config.output.add(name=key, data_type=config_pb2.DataType.Value(dtype), dims=[length])
    config.model_transaction_policy.decoupled = True
    if gpus is None:
        config.instance_group.add(count=1, kind=config_pb2.ModelInstanceGroup.KIND_CPU)
    for gpu in gpus or ():
        config.instance_group.add(count=1, kind=config_pb2.ModelInstanceGroup.KIND_GPU, gpus=[gpu])
    for key, value in {"runtime": runtime, "weights": WEIGHTS, "max_batch": str(max_batch)}.items():
        config.parameters[key].string_value = value
    return str(text_format.MessageToString(config))
