"""Import a runtime, start it, and ask its inspector.

Beside `build` and the session that runs an engine (`serve.loop.engine_session`), nothing else uses TensorRT. A runtime
is built for one major version of CUDA, and a driver that is older starts none of its objects: pybind11 then says
`TypeError: pybind11::init(): factory function returned nullptr` (NVIDIA/TensorRT, issue 2913), from which nobody can
tell what to do. So the driver is asked what it knows, and the remedy named.
"""

import ctypes
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from ...core.errors import BackendError
from . import targets
from .failures import explain
from .targets import Runtime

#: Major version of CUDA -> the oldest driver of Linux that knows it (NVIDIA, "TensorRT: Prerequisites").
DRIVERS = {13: "r580", 12: "r535"}


def import_runtime(runtime: Runtime) -> Any:
    """Import a runtime; raises BackendError, saying why, where it is missing or broken."""
    try:
        return import_module(targets.MODULES[runtime])
    except (ImportError, OSError) as error:
        raise BackendError(
            "",
            f"{targets.TITLES[runtime]} cannot be imported ({error})",
            f"install it with `pip install 'fp8q[{runtime}]'`",
        ) from error


def collecting_logger(trt: Any) -> tuple[Any, list[str]]:
    """A logger that prints nothing, and the list of its errors."""
    errors: list[str] = []

    class Collecting(trt.ILogger):  # type: ignore[misc]  # the base class is known when the runtime is
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                errors.append(message)

    return Collecting(), errors


def start(runtime: Runtime, kind: Literal["Builder", "Runtime"], logger: Any) -> Any:
    """Make the runtime's `Builder` or `Runtime`; raises BackendError, naming the driver it needs, where it makes none.

    The logger must live as long.
    """
    trt = import_runtime(runtime)
    try:
        return getattr(trt, kind)(logger)
    except TypeError as error:
        raise BackendError("", f"{targets.TITLES[runtime]} {trt.__version__} {why_not_started(runtime)}") from error


def why_not_started(runtime: Runtime) -> str:
    """Say why a runtime does not start on this machine, and what to do."""
    here, built_for = driver_cuda(), cuda_of(runtime)
    needed = DRIVERS.get(built_for or 0)
    other = f", or install what is built for CUDA 12 (`pip install {runtime}-cu12`)" if built_for == 13 else ""
    if here is None:
        return f"does not start, since there is no NVIDIA driver here; install {needed or DRIVERS[13]} or newer"
    if built_for is None or here[0] < built_for:
        needs = f"built for CUDA {built_for} it needs {needed}" if needed else "CUDA 13 needs r580, CUDA 12 r535"
        return (
            f"does not start on this machine's driver, which knows CUDA {here[0]}.{here[1]}: {needs} or newer; update "
            f"the driver{other}"
        )
    return (
        f"does not start, though this machine's driver knows CUDA {here[0]}.{here[1]}; look with `nvidia-smi` whether "
        "it shows the GPU, and has memory left"
    )


def driver_cuda() -> tuple[int, int] | None:
    """The newest version of CUDA that this machine's driver knows, as (12, 4); None without a driver."""
    cuda_version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(cuda_version))
    except OSError:
        return None
    return None if failed else (cuda_version.value // 1000, cuda_version.value % 1000 // 10)


def cuda_of(runtime: Runtime) -> int | None:
    """The major version of CUDA that the installed packages of a runtime are built for; None where none says."""
    for major in DRIVERS:
        for ending in ("", "-libs"):
            try:
                version(f"{runtime}-cu{major}{ending}")
            except PackageNotFoundError:
                continue
            return major
    return None


def inspect_plan(plan: memoryview) -> str:
    """Return the JSON of TensorRT's engine inspector; needs the GPU it was built on.

    Written from the documentation, not run yet.
    """
    trt = import_runtime("tensorrt")
    logger, errors = collecting_logger(trt)
    engine = start("tensorrt", "Runtime", logger).deserialize_cuda_engine(plan)
    if engine is None:
        raise BackendError("", f"TensorRT cannot load the engine it built: {explain(errors)}")
    information: str = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    return information
