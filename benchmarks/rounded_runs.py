"""The weights of a model that people know, rounded in several ways from one calibration, and what each way loses.

The protocol is that of `real_models.py`, but for windows of 512 tokens of the calibration text for all models. A model
is measured once; `fp8q scales` rounds its weights by each row's options. With `--runs FOLDER` all that takes minutes
stays in a folder of the model and of the last commit that changed what is measured: the run, the checkpoint and the
seconds of each row, and what the judge finds of each token. So a call that was killed goes on there, and another
benchmark takes the weights from there too.
"""

import argparse
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_checkpoints import checkpoint
from real_models import PROTOCOL, Judge, Tokens, evaluation_windows
from real_rows import Weights, stored_codes
from result import changes
from stale import UNREAD, git
from torch import nn

from fp8q.api import CalibrateOptions, ExportOptions, RescaleOptions, calibrate, scales
from fp8q.calibrate.model.source import load_model
from fp8q.core.run import Run
from fp8q.options import PRESETS, WeightRounding
from fp8q.stages.pipeline.stages import QUANTIZE
from fp8q.stages.shared.sources import source_of

#: Tokens of a calibration window.
CALIBRATION_CONTEXT = 512
#: Calibration windows of which the output side is known; a fifth of them judges.
OUTPUT_WINDOWS = 20
GPTQ, WEIGHED, EXACT = "gptq", "gptq, weighed first token", "exact"
#: The output side behind the row before it here, and behind `exact`.
OUTPUT_SIDE, EXACT_OUTPUT_SIDE = "output side", "output side, exact"
#: `exact` with more weights in BF16 than the 3 % of the preset, and the output side behind it.
BF16_SHARE = 0.1
MORE_BF16, MORE_BF16_OUTPUT_SIDE = "exact, 10% in BF16", "output side, exact, 10% in BF16"
#: What `fp8q scales` does for a row that says nothing else: GPTQ, for inputs in two codes, which lose next to nothing.
PLAIN: dict[str, Any] = {
    "weight_rounding": "gptq",
    "activation_terms": 2,
    "weigh_first_token": False,
    "weigh_outputs": 0,
    "bf16_weights": 0.0,
}
#: Row -> the options of `fp8q scales` that make it.
RESCALED: dict[str, dict[str, Any]] = {
    GPTQ: {},
    WEIGHED: {"weigh_first_token": True},
    OUTPUT_SIDE: {"weigh_first_token": True, "weigh_outputs": OUTPUT_WINDOWS},
    EXACT: {**PRESETS["exact"]},
    EXACT_OUTPUT_SIDE: {**PRESETS["exact"], "weigh_outputs": OUTPUT_WINDOWS},
    MORE_BF16: {**PRESETS["exact"], "bf16_weights": BF16_SHARE},
    MORE_BF16_OUTPUT_SIDE: {**PRESETS["exact"], "bf16_weights": BF16_SHARE, "weigh_outputs": OUTPUT_WINDOWS},
}


@dataclass(frozen=True)
class Rounded:
    """The weights of a row, and the seconds of the stages that made them."""

    weights: Weights
    seconds: float


class RoundedRuns:
    """A model's runs, and what is made of them, in one folder."""

    def __init__(self, name: str, asked: argparse.Namespace, folder: Path):
        """`name`: of the model; `asked`: options of `real_models.asked_of`."""
        self.name = name
        self.directory = checkpoint(name, asked.folder)
        self.asked = asked
        self.folder = folder
        self.context, count = PROTOCOL[name]
        self.windows = asked.windows or count
        #: The rounding that the run is measured for: by "nearest" it has no second moments.
        self.first: WeightRounding = "gptq"

    @cached_property
    def run(self) -> Run:
        """The run that rows are rescaled from."""
        run = Run(self.folder / ("run" if self.first == GPTQ else f"run, {self.first}"))
        if run.model.is_dir() and (self.folder / f"{_file_name(self.first)}.json").is_file():
            return run  # which may have been rescaled since
        return self.calibrated(run.root, weight_rounding=self.first)

    @cached_property
    def whole(self) -> Run:
        """The run with all its weights in FP8, whatever it was rescaled to since."""
        if self.run.options(QUANTIZE).bf16_weights:
            scales(self.run.root, RescaleOptions(**PLAIN | {"weight_rounding": "nearest"}))
        return self.run

    def calibrated(self, root: Path, **chosen: Any) -> Run:
        """Calibrate the model into `root`, in two codes and on the usual windows unless `chosen` otherwise."""
        usual = {"samples": self.asked.samples, "seq_len": CALIBRATION_CONTEXT, "activation_terms": 2}
        options = CalibrateOptions(**usual | chosen)
        texts = self.asked.data, root, self.asked.eval_data
        return calibrate(str(self.directory), *texts, options, ExportOptions(graph=False))

    def rescaled(self, row: str) -> Run:
        """Round the weights of the run by the options of `row`."""
        run = self.run
        return scales(run.root, RescaleOptions(**PLAIN | RESCALED[row]))

    def copied(self, name: str) -> Run:
        """The run once more, for stages that others would mistake for their own; files are links."""
        root = self.folder / name
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.run.root, root, copy_function=os.link, ignore=shutil.ignore_patterns(".*"))
        return Run(root)

    def rounded(self, row: str, make: Callable[[], tuple[Run, float]] | None = None) -> Rounded:
        """The weights of `row`, which `make` rounds in a run, in so many seconds, unless they are there; without it
        they are rounded by the options of `RESCALED`.
        """
        checkpoint = self.folder / _file_name(row)
        facts = checkpoint.with_suffix(".json")
        if not facts.is_file():
            run, seconds = make() if make else with_seconds(self.rescaled(row))
            shutil.rmtree(checkpoint, ignore_errors=True)
            shutil.copytree(run.model, checkpoint, copy_function=os.link)
            facts.write_text(json.dumps({"row": row, "seconds": round(seconds, 1)}), encoding="utf-8")
        return Rounded(stored_codes(checkpoint).weights, json.loads(facts.read_text(encoding="utf-8"))["seconds"])

    @cached_property
    def judge(self) -> Judge:
        """The judge of the evaluation windows."""
        folder = self._judged()
        windows = evaluation_windows(self.run, self.context, self.windows)
        return Judge(load_model(source_of(self.run), torch.float32, "cpu"), windows, folder)

    def tokens(self, row: str, model: Callable[[], nn.Module]) -> Tokens:
        """Each evaluated token of the `model` of `row`."""
        file = self._judged() / f"{_file_name(row)}.npz"
        if not file.is_file():
            partial = file.with_suffix(".partial.npz")
            np.savez(partial, **asdict(self.judge.compare(model())))
            partial.rename(file)
        with np.load(file) as stored:
            return Tokens(**stored)

    def _judged(self) -> Path:
        folder = self.folder / f"judged-{self.windows}"
        folder.mkdir(exist_ok=True)
        return folder


def with_seconds(run: Run) -> tuple[Run, float]:
    """The run, and the recorded seconds of its last rounding and of the stages whose outputs that read."""
    stages = run.record().stages
    read = stages["quantize"].inputs.keys()
    behind = {name for name, stage in stages.items() if stage.outputs.keys() & read}
    return run, sum(stages[name].seconds for name in behind | {"corpus", "quantize"})


def runs_argument(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the option `--runs`."""
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="leave runs there, and go on with those there")
    return parser


@contextmanager
def rounded_runs(name: str, asked: argparse.Namespace) -> Iterator[RoundedRuns]:
    """The runs of the model `name` in the block: in the folder that was `asked` for, or one that ends with it."""
    if asked.runs is None:
        with tempfile.TemporaryDirectory(dir=asked.folder) as scratch:
            yield RoundedRuns(name, asked, Path(scratch))
        return
    outside = [f":(exclude){pattern}" for pattern in UNREAD]
    measured = git("log", "-1", "--format=%h", "--", ".", *outside).stdout.strip()
    folder = asked.runs / f"{name}-{asked.samples}-{measured}{'+' if changes() else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    yield RoundedRuns(name, asked, folder)


def _file_name(row: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", row.lower())
