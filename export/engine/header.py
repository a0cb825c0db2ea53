"""Read the first bytes of an engine: its runtime and version; no runtime is needed.

TensorRT's are read as `trtexec --getPlanVersionOnly` reads them (NVIDIA/TensorRT, samples/common/sampleEngines.cpp):
the tag, a serialization version of 0, and four numbers from byte 24 on. TensorRT-RTX's are recognized by their tag,
which was seen in engines of 1.7.1.
"""

from pathlib import Path

from .targets import Runtime

TAGS: dict[bytes, Runtime] = {b"ftrt": "tensorrt", b"vtrt": "tensorrt-rtx"}
SIZE = 28


def read_engine_header(path: Path) -> tuple[Runtime | None, str | None]:
    """The runtime that an engine is for (None: it is no engine), and the version that built it (None: unknown). Raises
    OSError.
    """
    with open(path, "rb") as handle:
        head = handle.read(SIZE)
    runtime = TAGS.get(head[:4])
    if runtime != "tensorrt" or len(head) < SIZE or any(head[4:8]):
        return runtime, None
    return runtime, ".".join(map(str, head[24:28]))
