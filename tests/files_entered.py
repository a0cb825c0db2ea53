"""Count the files of the package that are entered on the way of one weight: from where the weights of a checkpoint are
opened until its shard has its name, by the writer of `fp8q calibrate` and by that of `fp8q convert`.

    python tests/files_entered.py    # of each writer: the number of files, and the files in the order of their entry

What is to be quantized is chosen before. A file counts once a function in it runs, in any thread; modules and class
bodies do not count, which run once, when they are imported. The count ends where the first shard gets its name.
`sys.monitoring` would take less time, and Python 3.11 lacks it.
"""

import inspect
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fp8q.calibrate.checkpoint.weights import find_weights, read_headers
from fp8q.calibrate.input.untrusted import read_json
from fp8q.calibrate.model.source import open_source
from fp8q.core.reporter import SILENT
from fp8q.quantize.checkpoint.hf_layout import hf_layout_of
from fp8q.quantize.checkpoint.writer import quantize_checkpoint
from fp8q.quantize.conversion.plan import plan_checkpoint
from fp8q.quantize.conversion.rules import load_rules
from fp8q.quantize.conversion.selection import select_tensors
from fp8q.quantize.conversion.shards import CheckpointWriter
from fp8q.quantize.scales.decisions import Scales
from fp8q.quantize.weights.channels import WeightScaling
from fp8q.quantize.weights.code_sources import Rounding

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "demo" / "checkpoint"
#: How the paths of other files begin: those beside the package, and those elsewhere.
OTHERS = ("tests/", ".venv/", "/", "<")
#: Writes a checkpoint into a folder that is not there.
Write = Callable[[Path], object]


class Entered:
    """The files of the package that were entered, in the order of their first entry, while it is `counting`."""

    def __init__(self, out: Path) -> None:
        self.out, self.files = out, dict[str, None]()
        self.counting = True

    def profile(self, frame: FrameType, event: str, function: object) -> None:
        """Note the file of a function that is called, until a shard is renamed (`sys.setprofile`)."""
        if not self.counting:
            return
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            name = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
            if not name.startswith(OTHERS):
                self.files[name] = None
        elif event == "c_return" and function is os.rename:
            self.counting = not any(self.out.glob("*.safetensors"))


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


#: The two writers, by the command.
WRITERS: Mapping[str, Callable[[], Write]] = {"calibrate": calibrated, "convert": converted}


def files_entered(command: str) -> list[str]:
    """The files that the writer of `command` enters, in the order of their first entry."""
    write = WRITERS[command]()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "first")  # imports what is imported in functions
        second = Path(folder) / "second"
        with entering(second) as entered:
            write(second)
    return [*entered.files]


if __name__ == "__main__":
    for name in WRITERS:
        files = files_entered(name)
        print(f"{name}: {len(files)} files", *files, sep="\n    ")
