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
ENGINES, ONNX_RUNTIME, AUTO = "engines", "onnxruntime", "auto"


def plan_path(version: Path, runtime: EngineRuntime, target: str) -> Path:
    """Return the path of a runtime's engine for a target (`sm90`) in a version's folder."""
    return version / ENGINES / runtime / f"{target}.plan"


def open_here(version: Path, weights: str, runtime: str = AUTO) -> Session:
    """Open the model in the folder `version`, whose graph is in `weights`, on a `runtime`; `auto`: the engine for this
    machine's GPU, or else ONNX Runtime.

    Raises SessionError where the requested runtime, or the engine for this GPU, does not open.
    """
    if runtime in RUNTIMES or runtime == AUTO:
        asked = [each for each in RUNTIMES if runtime in (each, AUTO)]
        gpu = cuda_target() if any((version / ENGINES / each).is_dir() for each in asked) else None
        for each in asked:
            if gpu and (plan := plan_path(version, each, gpu)).is_file():
                return EngineSession(plan, each)
        if runtime != AUTO:
            raise SessionError(f"{runtime}: {_missing(version, gpu, asked)}")
        if gpu:
            LOG.warning("%s; the model runs on ONNX Runtime, on the CPU", _missing(version, gpu, asked))
    return open_session(version / weights, ONNX_RUNTIME if runtime == AUTO else runtime)


def _missing(version: Path, gpu: str | None, runtimes: list[EngineRuntime]) -> str:
    there = ", ".join(_targets(version, runtimes)) or "none"
    return f"there is no engine for {gpu or 'a GPU, which is not here'} in {version / ENGINES} (there are: {there})"


def _targets(version: Path, runtimes: list[EngineRuntime]) -> Iterator[str]:
    for runtime in runtimes:
        yield from (f"{runtime}/{plan.stem}" for plan in sorted((version / ENGINES / runtime).glob("*.plan")))


def cuda_target() -> str | None:
    """The first GPU that CUDA shows, as a target; None where there is none."""
    try:
        return CudaDevice().target
    except CudaError:
        return None
