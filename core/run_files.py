"""The paths of a run directory.

A stage is a type: "not calibrated yet" is a missing file. So every file of a run has one name, which is written here.
"""

from dataclasses import dataclass
from pathlib import Path

from .files import PARTIAL

#: The file that a process locks while it writes to a run.
LOCK = ".lock"
#: The ending of the folder with which a killed stage goes on.
WORK = ".work"
#: The folder of the model and the texts that a caller had in memory.
LOADED = "loaded"
#: The model card in a checkpoint. It is no output in a stage's record: nothing reads it but people, who may edit it.
CARD = "README.md"
#: The file names of the graph, and of the same graph computing in FP32.
GRAPH = "model.onnx"
GRAPH_FP32 = "model.fp32.onnx"


def graph_names(adapter: str | None) -> tuple[str, str]:
    """Return the file names of the two graphs of the model, with `adapter` on or (None) without one."""
    if adapter:
        return (f"model.{adapter}.onnx", f"model.{adapter}.fp32.onnx")
    return (GRAPH, GRAPH_FP32)


class _Path:
    """A path in the run directory, as an attribute of `RunFiles`."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, run: "RunFiles", kind: type | None = None) -> Path:
        return run.root / self.name


@dataclass(frozen=True)
class RunFiles:
    """The paths of the run directory at `root`; nothing is read or created."""

    root: Path

    record_file = _Path("run.json")
    loaded_model = _Path(f"{LOADED}/model")
    loaded_texts = _Path(f"{LOADED}/texts")
    loaded_eval_texts = _Path(f"{LOADED}/eval_texts")
    calibration = _Path("calibration.npz")
    evaluation = _Path("evaluation.npz")
    images = _Path("images.json")
    statistics = _Path("statistics.safetensors")
    statistics_json = _Path("statistics.json")
    moments = _Path("moments")
    first_tokens = _Path("first_tokens.json")
    output_moments = _Path("output_moments")
    queries = _Path("queries.safetensors")
    costliest = _Path("costliest.json")
    scales = _Path("scales.json")
    attention = _Path("attention.json")
    model = _Path("model")
    card = _Path(f"model/{CARD}")
    onnx = _Path(f"model/{GRAPH}")
    onnx_fp32 = _Path(f"model/{GRAPH_FP32}")
    baselines = _Path("baselines")
    engines = _Path("engines")
    accuracy = _Path("accuracy.json")
    tokens = _Path("tokens.npz")
    top_logits = _Path("top_logits.npz")
    comparison = _Path("compare.json")
    evaluated = _Path("evaluation.json")
    answers = _Path("answers")
    needles = _Path("needles.json")
    sensitivity = _Path("sensitivity.json")
    continuations = _Path("continuations.json")
    tuning = _Path("tune.json")
    form_choice = _Path("forms.json")
    distilled = _Path("distilled.safetensors")
    distillation = _Path("distill.json")
    training = _Path("training")
    adapter = _Path("adapter")
    adapter_learning = _Path("adapter.json")
    bench = _Path("bench.json")
    triton = _Path("triton")
    report_html = _Path("report.html")
    report_ipynb = _Path("report.ipynb")


def is_of_a_run(path: Path) -> bool:
    """Tell whether `path` is a file that a run may have before its record: a lock, what was loaded, or what a killed
    call left.
    """
    return path.name in (LOCK, LOADED) or (path.name.startswith(".") and path.name.endswith((PARTIAL, WORK)))
