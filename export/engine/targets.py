"""The runtimes and their target GPUs: TensorRT builds for the GPU of this machine, TensorRT-RTX ahead of time for any
that it knows.

A target is named after its compute capability, `sm89`. FP8 tensor cores begin with Ada (8.9). For older GPUs the
builder fails after all the work ("the model contains HW-specific datatypes"), so they are refused before. No runtime is
imported here.

An engine's runtime and version are in its first bytes. TensorRT's are read as trtexec reads the version of a plan
(NVIDIA/TensorRT, samples/common/sampleEngines.cpp): the tag, a serialization version of 0, and four numbers from byte
24 on. TensorRT-RTX's are recognized by their tag, which was seen in engines of 1.7.1.
"""

import ctypes
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ...core.errors import BackendError, InputError

Runtime = Literal["tensorrt", "tensorrt-rtx"]
#: Runtime -> the module it is imported as.
MODULES: dict[Runtime, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
#: How the runtimes write themselves.
TITLES: dict[Runtime, str] = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
#: The first bytes of an engine -> its runtime; and the bytes of TensorRT's header, up to its version.
TAGS: dict[bytes, Runtime] = {b"ftrt": "tensorrt", b"vtrt": "tensorrt-rtx"}
HEADER_BYTES = 28
#: The targets of TensorRT-RTX on a machine without a GPU: Ada and Blackwell RTX cards.
AHEAD_OF_TIME = ("sm89", "sm120")
#: GPUs with FP8 that TensorRT alone builds for, on the GPU itself, by their generation.
DATA_CENTRE = {"sm90": "Hopper", "sm100": "data-centre Blackwell", "sm103": "data-centre Blackwell"}
FP8_CAPABILITY = (8, 9)
#: CUDA driver API, `CUdevice_attribute`.
_MAJOR = 75
_MINOR = 76


def available_runtimes() -> tuple[Runtime, ...]:
    """The installed runtimes; none is imported."""
    return tuple(name for name, module in MODULES.items() if find_spec(module) is not None)


def capability(target: str) -> tuple[int, int] | None:
    """Parse `sm120` as (12, 0); None for any other name."""
    match = re.fullmatch(r"sm(\d+)(\d)", target)
    if match:
        return (int(match[1]), int(match[2]))
    return None


def can_do_fp8(target: str) -> bool:
    """Tell whether a target has FP8 tensor cores."""
    return (capability(target) or (0, 0)) >= FP8_CAPABILITY


def gpu_target() -> str | None:
    """The first GPU of the driver as a target; None without a driver or GPU.

    It asks the driver, so CUDA_VISIBLE_DEVICES counts.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = (ctypes.c_int() for _ in range(3))
    has_gpu = (
        cuda.cuInit(0) == 0
        and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
        and cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device) == 0
        and cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device) == 0
    )
    if has_gpu:
        return f"sm{major.value}{minor.value}"
    return None


def choose_runtime(
    asked: Runtime | Literal["auto"], targets: tuple[str, ...], installed: tuple[Runtime, ...], gpu: str | None
) -> Runtime:
    """The runtime to build with; for `auto` TensorRT where this machine's GPU is the target, else TensorRT-RTX.

    Raises BackendError, naming the extra to install, when it is not installed.
    """
    if asked != "auto":
        runtime = asked
    elif gpu is not None and set(targets) <= {gpu} and "tensorrt" in installed:
        runtime = "tensorrt"
    else:
        runtime = "tensorrt-rtx"
    if runtime in installed:
        return runtime
    raise BackendError(
        "",
        f"{TITLES[runtime]} is not installed and this command needs it",
        f"install it with `pip install 'fp8q[{runtime}]'`",
    )


def default_targets(runtime: Runtime, gpu: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """The default targets: this machine's GPU if the runtime builds FP8 for it, else `AHEAD_OF_TIME`.

    Raises BackendError when TensorRT, which builds on the GPU, finds none.
    """
    if runtime == "tensorrt" and gpu is None:
        raise BackendError(
            "",
            "TensorRT builds on the GPU that will run the engine, and there is none here",
            "--runtime tensorrt-rtx builds ahead of time",
        )
    if gpu is not None and (runtime == "tensorrt" or (gpu in known and can_do_fp8(gpu))):
        return (gpu,)
    return AHEAD_OF_TIME


def check_capability(target: str) -> None:
    """Raise InputError for a GPU that is too old for FP8; needs no runtime."""
    if capability(target) is not None and not can_do_fp8(target):
        raise InputError(
            f"--target {target}",
            f"cannot do FP8, whose tensor cores begin with sm{FP8_CAPABILITY[0]}{FP8_CAPABILITY[1]}",
            "choose a newer one",
        )


def check_target(target: str, runtime: Runtime, known: tuple[str, ...]) -> None:
    """Raise InputError for a target that cannot do FP8 or that the runtime does not know (`known`: those it does)."""
    check_capability(target)
    if target not in known:
        here = "; it builds for the GPU in this machine" if runtime == "tensorrt" else ""
        fit = ", ".join(filter(can_do_fp8, known)) or "none"
        if runtime == "tensorrt-rtx" and target in DATA_CENTRE:
            raise InputError(
                f"--target {target}",
                f"{DATA_CENTRE[target]} is none of TensorRT-RTX's GPUs ({fit})",
                "TensorRT builds for it, on that GPU: install it there with `pip install 'fp8q[tensorrt]'`, and run "
                "`fp8q build-engine RUN --runtime tensorrt`",
            )
        raise InputError(f"--target {target}", f"{TITLES[runtime]} does not know it{here}", f"choose from {fit}")


def read_engine_header(path: Path) -> tuple[Runtime | None, str | None]:
    """The runtime that an engine is for (None: it is no engine), and the version that built it (None: unknown). Raises
    OSError.
    """
    with open(path, "rb") as handle:
        head = handle.read(HEADER_BYTES)
    runtime = TAGS.get(head[:4])
    if runtime != "tensorrt" or len(head) < HEADER_BYTES or any(head[4:8]):
        return runtime, None
    return runtime, ".".join(map(str, head[24:28]))
