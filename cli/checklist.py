"""Show the results of `fp8q doctor`: the runtimes, libraries and GPUs of this machine, or the checklist of a run."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__, api
from ..core.columns import Column, Table, magnitude, share
from ..core.run import Run
from ..options import DoctorOptions
from ..validate.advice.checkup import check_table, remedies
from ..validate.advice.remedy import remedy_of
from ..validate.report.rows import layer_of

if TYPE_CHECKING:
    from ..validate.advice.checkup import Checkup
    from .console import Terminal


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


#: The checks that the table by depth has, and how each is written.
BY_DEPTH = {
    "norm_inputs": ("norm input", magnitude),
    "attention_logits": ("logit", magnitude),
    "saturation": ("saturation", share),
    "underflow": ("underflow", share),
    "product_errors": ("worst GEMM's error", share),
    "hidden_states": ("hidden states' error", share),
}


def machine(speak: "Terminal", as_json: bool) -> None:
    """Show what is here."""
    findings = examine()
    if as_json:
        sys.stdout.write(
            json.dumps({"fp8q": __version__, "findings": [asdict(finding) for finding in findings]}) + "\n"
        )
    else:
        rows = [(finding.name, finding.version or "missing", finding.good_for, finding.remedy) for finding in findings]
        speak.table(f"fp8q {__version__} on this machine", ("what", "version", "good for", "to get it"), rows)


def show_checklist(speak: "Terminal", run: Path, options: DoctorOptions, as_json: bool) -> None:
    """Show the checklist of `run`: the worst last, where a terminal leaves the eye. Raises GateError where one is
    bad.
    """
    from ..validate.advice.checkup import refuse_bad
    from . import views

    outcome = api.doctor(run, options, speak)
    if as_json:
        views.emit(outcome.model_dump(by_alias=True, mode="json"))
    else:
        ran = f"{outcome.windows} windows, {outcome.tokens:,} tokens" if outcome.windows else "the model was not run"
        for table in (depth_table(outcome), check_table(outcome.checks, ran)):
            if table.rows:
                views.draw_table(speak, table)
        for line in remedies(outcome.checks):
            speak.say(line)
        if remedy := remedy_of(Run(run)):
            speak.say(f"by `fp8q sensitivity`: {remedy}.")
    refuse_bad(outcome)


def depth_table(checkup: "Checkup") -> Table[tuple[int, dict[str, float]]]:
    """Tabulate by depth: the largest value of each decoder layer's modules."""
    layers: dict[int, dict[str, float]] = {}
    for check in checkup.checks:
        for at in check.by_depth if check.check in BY_DEPTH else []:
            layer = layer_of(at.module)
            if layer is not None and at.value is not None:
                values = layers.setdefault(layer, {})
                values[check.check] = max(at.value, values.get(check.check, 0.0))

    def column(check: str, title: str, write: Callable[[float], str]) -> Column[Any]:
        return Column[Any](title, lambda row: row[1].get(check), write)

    columns = (
        Column[Any]("layer", lambda row: row[0]),
        *(column(check, title, write) for check, (title, write) in BY_DEPTH.items()),
    )
    return Table("By depth", sorted(layers.items()), columns, "The model has no numbered layers.")
