"""Import a runtime, start it, ask its inspector, and explain its errors.

Only `build` and the session that runs an engine (`serve.loop.engine_session`) use TensorRT besides. A runtime is built
for one major version of CUDA, and an older driver starts none of its objects: pybind11 then says
`TypeError: pybind11::init(): factory function returned nullptr` (NVIDIA/TensorRT, issue 2913), from which nobody can
tell what to do. So the driver is asked which CUDA it knows, and the remedy named.

A builder's error comes in many lines, some about a missing driver, and names ONNX nodes or the runtime's own layers,
which are named after them. `explain` makes a fault, with its module, and a remedy of it. The failures in `KNOWN`
were provoked with TensorRT-RTX 1.7.1; others are passed on in TensorRT's words.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from ...core.errors import BackendError
from ..onnx_file import names
from . import targets
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
    here = driver_cuda()
    built_for = cuda_of(runtime)
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
    if failed:
        return None
    return (cuda_version.value // 1000, cuda_version.value % 1000 // 10)


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
        raise BackendError("TensorRT cannot load the engine it built", *explain(errors))
    information: str = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    return information


#: Lines that say nothing of what went wrong: no driver on a machine that builds ahead of time, and the parser's place
#: in the file.
_NOISE = re.compile(r"cudaError 35|While parsing node|--- (Begin|End) node")
#: The runtime's wrapping of a message, and the place in its source.
_WRAPPED = re.compile(r"Error Code \d+: [\w ]+ \((.+)\)", re.DOTALL)
_SOURCE = re.compile(r"\.? In \w+ at /\S+")
_LONGEST = 300


@dataclass(frozen=True)
class Failure:
    """A known failure, recognized by the pattern `sign` in the message, with its meaning and remedy; `{0}` is the
    pattern's group.
    """

    sign: str
    meaning: str
    remedy: str


class MaybeAttentionError(BackendError):
    """A runtime failed for want of an attention kernel, or at an Attention node, or for a reason that is not known and
    may be one of these.
    """


AGAIN = "run `fp8q export` again, and if it stays, report this line"
STANDARD = "export with standard operators (`fp8q export`), or install a newer runtime"
NO_ATTENTION_KERNEL = Failure(
    r"not supported by a dedicated kernel",
    "there is no fused attention kernel for its type, head size or number of heads",
    (
        "it takes BF16 or FP16, a head size that is a multiple of 8 from 16 to 256, and at least 4 heads to decode "
        "with; other models need plain GEMMs and a softmax"
    ),
)
KNOWN = (
    NO_ATTENTION_KERNEL,
    Failure(r"HW-specific datatypes: (\w+)", "the target has no {0}", "choose sm89 or newer with --target"),
    Failure(r"Plugin not found", "the runtime does not know this operator", STANDARD),
    Failure(r"^false$", "the runtime's parser refuses this operator and gives no reason", STANDARD),
    Failure(
        r"within workspace limit",
        "a kernel takes more memory for intermediate results than --workspace allows",
        "raise --workspace, or leave it out",
    ),
    Failure(
        r"offset/length out of range for file: (\S+)",
        "its external data {0} is cut short",
        "copy the whole of model/ again",
    ),
    Failure(r"Failed to open file: (\S+)", "its external data {0} is missing", "copy the whole of model/ again"),
    Failure(r"ParseFromCodedStream", "the file is no ONNX model, or is cut short", AGAIN),
    Failure(
        r"(?i)out ?of ?memory|bad_alloc|MEM_ALLOC", "there is not enough memory", "lower --max-batch or --max-seq-len"
    ),
)


def explain(
    messages: Sequence[str],
    node: str = "",
    operator: str = "",
    layers: Sequence[str] = (),
    near: Callable[[str], str | None] = lambda node: None,
) -> tuple[str, str]:
    """The fault, with module and node, and the remedy.

    `messages`: the runtime's messages, the most specific first; `node`, `operator`: the place that the parser names;
    `layers`: names to search for in the messages; `near`: the module nearest to a node without a module.
    """
    telling = _telling(messages)
    where = _where(node or _subject(telling, layers), operator, near)
    if known := _known(telling):
        failure, groups = known
        return f"{where}{failure.meaning.format(*groups)}", failure.remedy
    return f"{where}{_gist(telling[0]) if telling else 'it gave no reason'}", AGAIN


def may_be_attention(messages: Sequence[str]) -> bool:
    """Tell whether a build may have failed for want of an attention kernel, by the runtime's `messages`."""
    known = _known(_telling(messages))
    return known is None or known[0] is NO_ATTENTION_KERNEL


def _telling(messages: Sequence[str]) -> list[str]:
    return [message for message in messages if message and not _NOISE.search(message)]


def _known(messages: Sequence[str]) -> tuple[Failure, tuple[str, ...]] | None:
    """The first known failure that a message is of, with the groups of its pattern."""
    for failure in KNOWN:
        if match := next(filter(None, (re.search(failure.sign, message) for message in messages)), None):
            return failure, match.groups()
    return None


def _subject(messages: Sequence[str], layers: Sequence[str]) -> str:
    """The layer that the messages name; for attention without a kernel, which names none, the first attention."""
    if any("dedicated kernel" in message for message in messages):
        layers = [layer.removesuffix("_AttentionInput") for layer in layers if layer.endswith("_AttentionInput")]
        return layers[0] if layers else ""
    named = [layer for layer in layers if any(layer in message for message in messages)]
    return max(named, key=len, default="")


def _where(node: str, operator: str, near: Callable[[str], str | None]) -> str:
    kind = f", {operator}" if operator else ""
    if module := names.module_of(node):
        return f"{module} (node {node}{kind}): "
    if node and (module := near(node)):
        return f"near {module} (node {node}{kind}): "
    if node:
        return f"node {node}{kind.replace(',', ' of type', 1)}: "
    return ""


def _gist(message: str) -> str:
    wrapped = _WRAPPED.search(message)
    words = " ".join(_SOURCE.sub("", wrapped[1] if wrapped else message).split())
    if len(words) <= _LONGEST:
        return words
    return words[:_LONGEST] + "…"
