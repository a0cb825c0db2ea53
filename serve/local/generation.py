"""Generate from a run directory in this process, as `fp8q generate` does, with the errors of the command line."""

from collections.abc import Callable
from pathlib import Path

from ...core.commands import engine_stage, stage_command
from ...core.errors import BackendError, Fp8qError, InputError
from ...core.run import Run
from ...core.run_files import graph_names
from ...export.engine.info import EngineInfo, engines_of, load_engines
from ...export.engine.runtime import import_runtime
from ...export.engine.targets import MODULES, Runtime, gpu_target
from ...export.lint.check import sound_graph
from ...options import Precision
from ...quantize.reading.run_checkpoint import checkpoint_of
from ..loop.engine_session import EngineSession
from ..loop.generate import GenerationError, Generator, completion
from ..loop.request import GeneratedAnswer, Request, RequestError
from ..loop.sessions import Session, SessionError, open_session
from ..loop.text import ModelFileError, Vocabulary


def open_run_session(
    run: Run, runtime: str = "onnxruntime", precision: Precision = "fp8", adapter: str | None = None
) -> Session:
    """The model in `run` of a precision on a runtime that needs no torch, with the adapter of that name on.

    Raises InputError when the run has no graph, BackendError when the runtime does not serve.
    """
    for engines in MODULES:
        if runtime == engines:
            return open_run_engine(run, engines, precision, adapter)
    directory = checkpoint_of(run, precision)
    graph = graph_names(adapter)[1]
    sound_graph(run.require(directory / graph, "export" if precision == "fp8" else f"export-{precision}"))
    try:
        return open_session(directory, runtime, graph)
    except SessionError as error:
        raise BackendError("", str(error)) from error


def open_run_engine(
    run: Run, runtime: Runtime, precision: Precision = "fp8", adapter: str | None = None
) -> EngineSession:
    """The engine of a precision, or with an adapter, that the run has for this machine's GPU.

    Raises what `engine_here` raises, and BackendError where it does not load.
    """
    plan, info = engine_here(run, runtime, precision, adapter)
    try:
        return EngineSession(plan, runtime)
    except SessionError as error:
        other = f" (version {info.version} built it)" if info.version != import_runtime(runtime).__version__ else ""
        raise BackendError("", f"{error}{other}") from error


def engine_here(
    run: Run, runtime: Runtime, precision: Precision = "fp8", adapter: str | None = None
) -> tuple[Path, EngineInfo]:
    """Find the engine of a precision, or with an adapter, for this machine's GPU, and its record; nothing is loaded.

    Raises BackendError when there is no GPU, or the engine is of another version of TensorRT than the installed one;
    InputError when the run has no engine for it, or the plan is not the file that was built.
    """
    gpu = gpu_target()
    if gpu is None:
        raise BackendError(runtime, "runs engines on an NVIDIA GPU, and there is none here", "use onnxruntime")
    stage = engine_stage(precision, adapter)
    folder = engines_of(run, precision, adapter)
    run.refuse_stale(stage)
    engines = [info for info in load_engines(run, precision, adapter) if info.runtime == runtime]
    info = next((info for info in engines if info.target == gpu), None)
    again = f"`{stage_command(stage, run.root)} --runtime {runtime} --target {gpu}`"
    if info is None:
        built = ", ".join(info.target for info in engines) or "none"
        raise InputError(
            folder, f"holds no engine of {runtime} for {gpu}, this GPU (there are: {built})", f"run {again}"
        )
    plan = run.require(folder / f"{gpu}.plan", stage)
    installed = import_runtime(runtime).__version__
    if runtime == "tensorrt" and info.version != installed:
        raise BackendError(
            plan,
            f"TensorRT {info.version} built it, and runs it",
            f"TensorRT {installed} is installed and does not: install that one (`pip install "
            f"tensorrt=={info.version}`), or run {again} here",
        )
    return plan, info


def open_generator(run: Run, session: Session, max_batch: int = 8) -> Generator:
    """The generation loop over a session of the model in `run`, up to `max_batch` requests at a time.

    Raises InputError when the model's files do not serve, BackendError when the runtime has no room for the cache.
    """
    try:
        return Generator(session, Vocabulary.read(run.model), max_batch)
    except ModelFileError as error:
        raise InputError(error.subject, error.fault, error.remedy) from error
    except SessionError as error:
        raise BackendError("", str(error)) from error


def answer_request(generator: Generator, request: Request, on_text: Callable[[str], None]) -> GeneratedAnswer:
    """Generate an answer to one request; `on_text` is called with each piece of its text.

    Raises InputError for a request that cannot be served, and for logits that are no numbers; BackendError where the
    runtime fails, as where the GPU's memory is used up.
    """
    pieces = []
    try:
        for piece in generator.run([request]):
            pieces.append(piece)
            on_text(piece.text)
        return completion(pieces)
    except (RequestError, GenerationError, SessionError) as error:
        raise _command_error(error) from error


def _command_error(error: Exception) -> Fp8qError:
    if isinstance(error, SessionError):
        return BackendError("", str(error))
    return InputError("", str(error))
