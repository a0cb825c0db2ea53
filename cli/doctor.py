"""List the runtimes, libraries and GPUs of this machine, and their use."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

#: Distribution -> what it is good for here, and the extra that brings it.
PURPOSES = {
    "torch": ("calibrate, export, validate: runs the model and the FP8 reference", "calibrate"),
    "transformers": ("calibrate, export, validate: the model's architecture", "calibrate"),
    "compressed-tensors": ("calibrate: the schema of the FP8 checkpoint", "calibrate"),
    "datasets": ("calibrate: reads the text", "calibrate"),
    "onnxscript": ("export: writes the ONNX graph", "calibrate"),
    "onnx": ("lint, build-engine: reads the graph", ""),
    "onnxruntime": ("validate, triton: runs the FP32 graph on the CPU", ""),
    "tensorrt-rtx": ("build-engine: engines for RTX cards (Ada sm89, Blackwell sm120), on any machine", "tensorrt-rtx"),
    "tensorrt": ("build-engine: engines for the GPU in this machine (Ada, Hopper, Blackwell)", "tensorrt"),
    "tritonclient": ("triton: the schema of config.pbtxt", ""),
    "matplotlib": ("report: plots", "report"),
    "papermill": ("report: runs the notebook", "report"),
}
#: FP8 tensor cores begin with this compute capability (Ada).
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Requirement:
    """A library or device that fp8q can use; `version` is None where it is missing."""

    name: str
    version: str | None
    good_for: str
    remedy: str = ""


def examine() -> list[Requirement]:
    """Look for Python, the libraries and the GPUs. Nothing is imported, so a broken library cannot break this."""
    python = ".".join(map(str, sys.version_info[:3]))
    return [Requirement("python", python, "everything"), *(_distribution(name) for name in PURPOSES), *_gpus()]


def _distribution(name: str) -> Requirement:
    purpose, extra = PURPOSES[name]
    try:
        return Requirement(name, metadata.version(name), purpose)
    except metadata.PackageNotFoundError:
        return Requirement(name, None, purpose, f"pip install 'fp8q[{extra}]'" if extra else f"pip install {name}")


def _gpus() -> list[Requirement]:
    smi = shutil.which("nvidia-smi")
    query = [smi or "", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader"]
    try:
        lines = (
            subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip().splitlines()
            if smi
            else []
        )
    except (OSError, subprocess.SubprocessError):
        lines = []
    if not lines:
        return [
            Requirement(
                "GPU",
                None,
                "runs TensorRT engines; calibrates faster",
                "none needed to calibrate, export, or build with TensorRT-RTX",
            )
        ]
    return [_gpu(line) for line in lines]


def _gpu(line: str) -> Requirement:
    name, capability, memory = (part.strip() for part in line.split(","))
    major, minor = map(int, capability.split("."))
    fp8 = (major, minor) >= FP8_CAPABILITY
    return Requirement(
        f"GPU {name}",
        f"sm{major}{minor}, {memory}",
        "runs FP8 engines" if fp8 else "calibrates; it has no FP8 units, so it runs no FP8 engine",
    )
