"""`--weight-rounding sequential` through its stage: what is written, killed runs, and what it refuses."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8q import api
from fp8q.calibrate.measure.stream import LayerSteps
from fp8q.calibrate.model.source import open_source
from fp8q.calibrate.ranks.world import World
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.options import CalibrateOptions, ExportOptions, RescaleOptions, ScaleOptions
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.weights.sequential import SequentialRounding
from fp8q.stages.corpus import save_tokens
from fp8q.stages.measure import check_batches, measure
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.preflight import check_calibrate
from fp8q.stages.quantize import quantize, rescaled
from fp8q.stages.shared.sources import gemms_of


@pytest.fixture(scope="module")
def measured(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of the demo with nothing quantized yet, on two batches."""
    run, source = Run(tmp_path_factory.mktemp("measured") / "run"), open_source(str(demo_checkpoint))
    with RunWriter(run).stage(
        "corpus", {}, {"data": "random tokens", "eval_data": "random tokens", "model": "demo"}
    ) as log:
        save_tokens(run.calibration, np.random.default_rng(0).integers(3, 500, (3, 24)))
        log.outputs.append(run.calibration)
    measure(run, source, CalibrateOptions(batch_size=2), Notes(SILENT))
    return run


def quantized(run: Run, checkpoint: Path, **options: Any) -> dict[str, bytes]:
    """What the stage `quantize` writes of `run`: the checkpoint's files, and the decisions."""
    source = open_source(str(checkpoint))
    chosen = ScaleOptions(only=("*.o_proj",), weight_rounding="sequential", **options)
    quantize(run, source, gemms_of(source), chosen, Notes(SILENT))
    assert not any(path.name.endswith(".work") for path in run.root.iterdir())
    return {path.name: path.read_bytes() for path in [run.scales, *sorted(run.model.iterdir())]}


@pytest.fixture(scope="module")
def uninterrupted(measured: Run, demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = shutil.copytree(measured.root, tmp_path_factory.mktemp("whole") / "run")
    return quantized(Run(root), demo_checkpoint)


def test_the_checkpoint_has_it_and_scales_cannot_choose_again(
    measured: Run, demo_checkpoint: Path, tmp_path: Path
) -> None:
    run, options = Run(shutil.copytree(measured.root, tmp_path / "run")), CalibrateOptions(weight_rounding="sequential")
    check_calibrate(open_source(str(demo_checkpoint)), options, ExportOptions())
    quantized(run, demo_checkpoint)
    scales = load_scales(run)
    assert list(scales.weights) == [f"model.layers.{layer}.self_attn.o_proj" for layer in range(4)]
    assert {weight.rounding for weight in scales.weights.values()} == {"sequential"}
    assert not run.moments.exists()
    before = run.record().stages["quantize"]
    assert "calibration.npz" in before.inputs
    quantized(run, demo_checkpoint)
    assert run.record().stages["quantize"] == before
    with pytest.raises(InputError) as refused:
        rescaled(run, RescaleOptions(kv_cache="fp8"))
    assert str(refused.value) == (
        "--weight-rounding sequential: runs the model, and scales are chosen again without it; use `fp8q calibrate` "
        "with the options of the run and those that are to change"
    )
    assert rescaled(run, RescaleOptions(weight_rounding="nearest")).weight_rounding == "nearest"


class Killed(BaseException):
    """Stands for SIGKILL where the test must go on: like it, nothing of ours catches it."""


@pytest.fixture
def layers_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that are rounded, as they begin."""
    begun: list[int] = []
    layer = SequentialRounding._round_layer

    def counted(self: SequentialRounding, index: int, calls: Any) -> None:
        begun.append(index)
        layer(self, index, calls)

    monkeypatch.setattr(SequentialRounding, "_round_layer", counted)
    return begun


@pytest.mark.parametrize("at", [0, 3, 6])
def test_stopped_anywhere_it_goes_on_at_the_layer_it_was_in(
    at: int, measured: Run, uninterrupted: dict[str, bytes], demo_checkpoint: Path, layers_run: list[int],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Step 1 is the embedding, 2 to 5 are the demo's layers: 3 stops when all of the second is written but not yet said
    to be. 0 stops at the first layer's first GEMM, 6 while the checkpoint is written.
    """
    run, end = Run(shutil.copytree(measured.root, tmp_path / "run")), LayerSteps.end

    def stopped(*arguments: Any, **named: Any) -> None:
        raise Killed

    def stopping(self: LayerSteps, step: int) -> None:
        if step == at:
            raise Killed
        end(self, step)

    with monkeypatch.context() as once:
        if at in (0, 6):
            once.setattr(
                "fp8q.stages.quantize.quantize_checkpoint" if at else "fp8q.quantize.weights.sequential.ridge_targets",
                stopped,
            )
        once.setattr(LayerSteps, "end", stopping)
        with pytest.raises(Killed):
            quantized(run, demo_checkpoint)
    assert (run.root / ".quantize.work").is_dir()
    assert not run.scales.exists()
    layers_run.clear()
    assert quantized(run, demo_checkpoint) == uninterrupted
    assert layers_run == list(range(max(at - 2, 0), 4))
    assert run.record().stages["quantize"].notes == (
        [f"going on at decoder layer {at - 1} of 4, where an earlier call stopped"] if at == 3 else []
    )


def test_what_was_left_by_other_options_is_rounded_anew(
    measured: Run, uninterrupted: dict[str, bytes], demo_checkpoint: Path, layers_run: list[int], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def stopped(*arguments: Any) -> None:
        raise Killed

    run = Run(shutil.copytree(measured.root, tmp_path / "run"))
    with monkeypatch.context() as once:
        once.setattr("fp8q.stages.quantize.quantize_checkpoint", stopped)
        with pytest.raises(Killed):
            quantized(run, demo_checkpoint, weight_method="amax")
    layers_run.clear()
    assert quantized(run, demo_checkpoint) == uninterrupted
    assert layers_run == [0, 1, 2, 3]


CHILD = """
import os, signal, sys
from pathlib import Path
from fp8q.calibrate.model.source import open_source
from fp8q.options import ScaleOptions
from fp8q.quantize.weights.rounding_progress import Rounded
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.stages.preflight import check_calibrate
from fp8q.stages.quantize import quantize
from fp8q.stages.shared.sources import gemms_of
from fp8q.stages.pipeline.stage import Notes
import torch
torch.set_num_threads(int(sys.argv[3]))
add = Rounded.add
def adding(self, module, made):
    add(self, module, made)
    if module == "model.layers.1.self_attn.o_proj":
        os.kill(os.getpid(), signal.SIGKILL)
Rounded.add = adding
source = open_source(sys.argv[2])
options = ScaleOptions(only=("*.o_proj",), weight_rounding="sequential")
quantize(Run(Path(sys.argv[1])), source, gemms_of(source), options, Notes(SILENT))
"""


@pytest.mark.slow
def test_killed_in_the_second_layer_the_next_call_gives_the_same_bytes(
    measured: Run, uninterrupted: dict[str, bytes], demo_checkpoint: Path, layers_run: list[int], tmp_path: Path
) -> None:
    run = Run(shutil.copytree(measured.root, tmp_path / "run"))
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(run.root), str(demo_checkpoint)]
    killed = subprocess.run([*command, str(torch.get_num_threads())], check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert quantized(run, demo_checkpoint) == uninterrupted
    assert layers_run == [1, 2, 3]


def test_it_is_refused_in_parts() -> None:
    with pytest.raises(InputError) as refused:
        check_batches(CalibrateOptions(weight_rounding="sequential", batches=(0, 2)), 99, World())
    assert str(refused.value) == (
        "--weight-rounding sequential: runs all batches through one layer after the other, and --batches measures some "
        "of them; use `fp8q calibrate` without --batches, or leave it out"
    )


def test_merging_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        api.merge([tmp_path / "one"], tmp_path / "out", options=ScaleOptions(weight_rounding="sequential"))
    assert str(refused.value) == (
        "--weight-rounding sequential: runs the model; use `fp8q calibrate` on all of the text in one run, or leave it "
        "out"
    )
