"""Choose the session of a Triton repository's model on its host: the engine for this GPU, if there is one, else ONNX
Runtime.

Engines lie in the version's folder as `engines/<runtime>/<target>.plan`. An engine for this GPU that does not load is
an error: a model that silently runs on the CPU of a GPU host helps nobody.

Copied unchanged into Triton repositories: imports only its neighbours in this folder.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

from .cuda import CudaDevice, CudaError
from .engine_session import RUNTIMES, EngineRuntime, EngineSession
from .sessions import Session, SessionError, open_session

LOG = logging.getLogger("fp8q")
ENGINES = "engines"
ONNX_RUNTIME = "onnxruntime"
AUTO = "auto"


def plan_path(version: Path, runtime: EngineRuntime, target: str) -> Path:
    """Return the path of a runtime's engine for a target (`sm90`) in a version's folder."""
    return version / ENGINES / runtime / f"{target}.plan"


def open_here(version: Path, weights: str, runtime: str = AUTO, gpu: int | None = None) -> Session:
    """Open the model in the folder `version`, whose graph is in `weights`, on a `runtime`; `auto`: the engine for the
    GPU with the index `gpu` (None: for the first, where there is one), or else ONNX Runtime.

    Raises SessionError where the requested runtime, or the engine for this GPU, does not open, and where there is no
    engine for a GPU that was asked for by its index.
    """
    if runtime in RUNTIMES or runtime == AUTO:
        asked = [engine_runtime for engine_runtime in RUNTIMES if runtime in (engine_runtime, AUTO)]
        built = any((version / ENGINES / engine_runtime).is_dir() for engine_runtime in asked)
        target = cuda_target(gpu) if built else None
        for engine_runtime in asked:
            if target and (plan := plan_path(version, engine_runtime, target)).is_file():
                return EngineSession(plan, engine_runtime, gpu or 0)
        if runtime != AUTO:
            raise SessionError(f"{runtime}: {_missing(version, target, gpu, asked)}")
        if target and gpu is not None:
            raise SessionError(
                f"{_missing(version, target, gpu, asked)}; build it on that GPU with `fp8q build-engine`, or write the "
                "repository again without it in --gpus"
            )
        if target:
            LOG.warning("%s; the model runs on ONNX Runtime, on the CPU", _missing(version, target, gpu, asked))
    return open_session(version / weights, ONNX_RUNTIME if runtime == AUTO else runtime)


def _missing(version: Path, target: str | None, gpu: int | None, runtimes: list[EngineRuntime]) -> str:
    there = ", ".join(_targets(version, runtimes)) or "none"
    what = (target or "a GPU, which is not here") + ("" if gpu is None else f", GPU {gpu},")
    return f"there is no engine for {what} in {version / ENGINES} (there are: {there})"


def _targets(version: Path, runtimes: list[EngineRuntime]) -> Iterator[str]:
    for runtime in runtimes:
        yield from (f"{runtime}/{plan.stem}" for plan in sorted((version / ENGINES / runtime).glob("*.plan")))


def cuda_target(gpu: int | None = None) -> str | None:
    """The GPU with an index as a target; None: the first that CUDA shows, and no target where there is none.

    Raises CudaError where there is no GPU of that index.
    """
    try:
        return CudaDevice(gpu or 0).target
    except CudaError:
        if gpu is not None:
            raise
        return None
