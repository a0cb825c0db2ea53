"""The progress of passes over layers: what is left after a call that was stopped, and what its steps gave."""

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fp8q.calibrate.measure.stream import LayerSteps
from fp8q.core.errors import InputError
from fp8q.quantize.learning.blocks import LearnedBlocks
from fp8q.quantize.learning.document import BlockLoss
from fp8q.quantize.sensitivity.output_gradients import GradientSquares, LayerSquares
from tests.calibrate.conftest import Notebook


@pytest.mark.parametrize(
    ("ended", "left", "going_on_at"),
    [(0, [0, 1, 2], None), (1, [0, 1, 2], None), (2, [1, 2], 2), (3, [2], 3), (4, [], None)],
)
def test_the_layers_left_are_those_without_an_ended_step(
    ended: int, left: list[int], going_on_at: int | None, tmp_path: Path
) -> None:
    """Of three layers; the first step comes before them."""
    LayerSteps(tmp_path / "steps.json").end(ended)
    report = Notebook()
    assert list(LayerSteps.of(tmp_path / "steps.json").layers_left(3, report)) == left
    at = f"going on at decoder layer {going_on_at} of 3, where an earlier call stopped"
    assert report.lines == ([at] if going_on_at else [])


def test_sums_are_read_as_they_were_written(tmp_path: Path) -> None:
    squares = LayerSquares.of(tmp_path / "squares.json")
    assert (squares.steps, squares.squares) == (0, {})
    squares.squares |= {"q": GradientSquares(first=math.inf, others=0.1, first_tokens=2, other_tokens=14)}
    squares.end(3)
    assert LayerSquares.of(tmp_path / "squares.json") == squares


def test_a_layer_has_learned_once_its_loss_is_written(tmp_path: Path) -> None:
    file = tmp_path / "learned.json"
    blocks = LearnedBlocks.of(file)
    blocks.end(1)
    loss = BlockLoss(layer=0, before=0.25, after=math.inf, step=0, codes=4, changed=0, stopped=3)
    codes = {"q": (torch.zeros(2, 2).to(torch.float8_e4m3fn), torch.ones(2))}
    blocks.add(loss, codes)
    again = LearnedBlocks.of(file)
    assert (again.steps, again.losses) == (2, [loss])
    again.save_codes(tmp_path / "all.safetensors", {})
    with safe_open(tmp_path / "all.safetensors", "pt") as stored:
        assert sorted(stored.keys()) == ["q.codes", "q.scale"]


def test_damaged_progress_is_named(tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text("3", encoding="utf-8")
    with pytest.raises(InputError) as refused:
        LayerSteps.of(tmp_path / "steps.json")
    told = str(refused.value)
    assert told.startswith(f"{tmp_path / 'steps.json'}: does not read as what a killed call left (")
    assert told.endswith("); remove it")
