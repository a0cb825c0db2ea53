"""Count the files of the package that are entered on three ways through it.

    python tests/files_entered.py    # of each way: the number of files, and the files in the order of their entry

A weight: from where the weights of a checkpoint are opened until its shard has its name, by the writer of `fp8q
calibrate` and by that of `fp8q convert`; what is to be quantized is chosen before. An activation: from a tensor that is
observed until scales.json has its name. A request: from what `fp8q serve` reads of it until a client has the text of
the first token; the model, a graph on ONNX Runtime, is open.

A file counts once a function in it runs, in any thread; modules and class bodies do not count, which run once, when
they are imported. `sys.monitoring` would take less time, and Python 3.11 lacks it.
"""

import inspect
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch

from fp8q.api import calibrate
from fp8q.calibrate.checkpoint.weights import find_weights, read_headers
from fp8q.calibrate.input.untrusted import read_json
from fp8q.calibrate.measure.observe import Observer
from fp8q.calibrate.measure.statistics import load_statistics
from fp8q.calibrate.model.source import open_source
from fp8q.core.files import write_document
from fp8q.core.reporter import SILENT
from fp8q.options import ScaleOptions
from fp8q.quantize.checkpoint.hf_layout import hf_layout_of
from fp8q.quantize.checkpoint.writer import quantize_checkpoint
from fp8q.quantize.conversion.plan import plan_checkpoint
from fp8q.quantize.conversion.rules import load_rules
from fp8q.quantize.conversion.selection import select_tensors
from fp8q.quantize.conversion.shards import CheckpointWriter
from fp8q.quantize.scales.choose_scales import choose_scales
from fp8q.quantize.scales.decisions import Scales
from fp8q.quantize.weights.channels import WeightScaling
from fp8q.quantize.weights.code_sources import Rounding
from fp8q.stages.shared.sources import gemms_of
from tests.serve.counting_model import make_counting_run
from tests.serve.web.started_server import in_thread

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "demo" / "checkpoint"
#: How the paths of other files begin: those beside the package, and those elsewhere.
OTHERS = ("tests/", ".venv/", "/", "<")
#: Writes into a folder that is not there.
Write = Callable[[Path], object]
#: What a way ends with, where it ends with a file.
ENDS = ("*.safetensors", "scales.json")


class Entered:
    """The files of the package that were entered, in the order of their first entry, while it is `counting`."""

    def __init__(self, out: Path) -> None:
        self.out, self.files = out, dict[str, None]()
        self.counting = True

    def profile(self, frame: FrameType, event: str, function: object) -> None:
        """Note the file of a function that is called, until a file of `ENDS` is there (`sys.setprofile`)."""
        if not self.counting:
            return
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            name = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
            if not name.startswith(OTHERS):
                self.files[name] = None
        elif event == "c_return" and function is os.rename:
            self.counting = not any(file for pattern in ENDS for file in self.out.glob(pattern))


@contextmanager
def entering(out: Path) -> Iterator[Entered]:
    """Count while the block runs, which writes a checkpoint into `out`."""
    entered = Entered(out)
    before = sys.getprofile()
    threading.setprofile(entered.profile)
    sys.setprofile(entered.profile)
    try:
        yield entered
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def calibrated() -> Write:
    """Choose one weight of the demo; return what quantizes it as `fp8q calibrate` does."""
    source = open_source(str(DEMO), fingerprinted=False)
    scales = Scales(weights={}, activations={}, skipped={}, bf16_inputs=["model.layers.0.mlp.down_proj"])

    layout = hf_layout_of(source, scales)

    def write(out: Path) -> None:
        find_weights(DEMO, "demo")
        quantize_checkpoint(source, out, scales, Rounding(WeightScaling("amax")), layout, SILENT)

    return write


def converted() -> Write:
    """Choose the weights of the demo by rule; return what quantizes them as `fp8q convert` does."""
    selection = select_tensors(
        load_rules(None), read_json(DEMO / "config.json"), read_headers(find_weights(DEMO, "demo"))
    )

    def write(out: Path) -> None:
        out.mkdir()
        files = find_weights(DEMO, "demo")
        plan = plan_checkpoint(files, read_headers(files), selection, ("dynamic", "compressed-tensors"))
        CheckpointWriter(plan, out, 1, lambda _: None).write()

    return write


def observed() -> Write:
    """Measure a little of the demo; return what observes one of its tensors again and chooses scales."""
    source = open_source(str(DEMO), fingerprinted=False)
    texts = DEMO.parent
    with tempfile.TemporaryDirectory() as folder:
        run = calibrate(
            DEMO, texts / "calibration.txt", Path(folder) / "run", texts / "evaluation.txt", samples=2, graph=False
        )
        statistics = load_statistics(run)
    gemms = gemms_of(source)
    name = "model.layers.0.mlp.down_proj.input"
    activation = torch.randn(1, 16, gemms.widths[name.removesuffix(".input")], dtype=torch.bfloat16)

    def write(out: Path) -> None:
        out.mkdir()
        observer = Observer(1)
        observer.update(activation, 0)
        measured = observer.statistics()
        assert measured is not None
        tensors = {**statistics.tensors, name: measured}
        scales = choose_scales(source, replace(statistics, tensors=tensors), gemms, ScaleOptions())
        write_document(out / "scales.json", scales)

    return write


#: The ways that end with a file.
WRITERS: Mapping[str, Callable[[], Write]] = {
    "weight, calibrate": calibrated,
    "weight, convert": converted,
    "activation": observed,
}


def files_answering() -> list[str]:
    """The files that `fp8q serve` enters from a request on until its first token is with the client."""
    with tempfile.TemporaryDirectory() as folder:
        run = make_counting_run(Path(folder) / "run", 40)
        with entering(run.root / "nothing") as entered, in_thread(run.root, name="counting") as server:
            for _ in range(2):  # the first one imports what is imported in functions
                entered.files.clear()
                entered.counting = True
                asked = {"prompt": "t3 t1 t4", "max_tokens": 9, "temperature": 0, "stream": True}
                with server.client.stream("POST", "/v1/completions", json=asked) as response:
                    lines = response.iter_lines()
                    assert "t1" in next(lines)
                    entered.counting = False
                    assert list(lines)
            return [*entered.files]


def files_entered(way: str) -> list[str]:
    """The files that are entered on one of the ways that end with a file, in the order of their first entry."""
    write = WRITERS[way]()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "first")  # imports what is imported in functions
        second = Path(folder) / "second"
        with entering(second) as entered:
            write(second)
    return [*entered.files]


if __name__ == "__main__":
    for name in (*WRITERS, "request"):
        files = files_answering() if name == "request" else files_entered(name)
        print(f"{name}: {len(files)} files", *files, sep="\n    ")
