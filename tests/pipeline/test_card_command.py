"""The command that a model card names repeats the card's figures: cards are published."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8q import api
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, ExportOptions, ValidateOptions

pytestmark = pytest.mark.slow

BEGIN, END = "<!-- accuracy -->\n", "<!-- end -->"


def accuracy_part(run: Run) -> str:
    """The part of the card that `fp8q validate` writes."""
    return (run.model / "README.md").read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


@pytest.mark.parametrize(
    ("calibrating", "validating", "command"),
    [
        # one code, whole windows of which some are left out
        ({}, ValidateOptions(context=64, max_tokens=1500, max_kl=0.5),
         "fp8q validate RUN --runtimes bf16,reference --context 64 --max-tokens 1449 --max-kl 0.5"),
        # two codes, decoded behind prompts by default: once two whole windows in one code
        ({"activation_terms": "tail", "exact_tail": 8}, ValidateOptions(context=32, max_tokens=400),
         "fp8q validate RUN --runtimes bf16,reference,one-term --context 32 --as-served 16 --max-tokens 400"),
    ],
    ids=["one code", "a tail"],
)  # fmt: skip
def test_a_cards_command_repeats_its_figures(
    calibrating: dict[str, Any], validating: ValidateOptions, command: str, demo_checkpoint: Path, demo_texts: Any,
    tmp_path: Path, fp8q: Callable[..., Any],
) -> None:  # fmt: skip
    text, evaluation = tmp_path / "text.txt", tmp_path / "evaluation.txt"
    text.write_text(demo_texts.calibration.read_text(encoding="utf-8")[:8_000], encoding="utf-8")
    evaluation.write_text(demo_texts.evaluation.read_text(encoding="utf-8")[:12_000], encoding="utf-8")
    options = CalibrateOptions(samples=8, seq_len=64, **calibrating)
    run = api.calibrate(
        str(demo_checkpoint), str(text), tmp_path / "run", str(evaluation), options, ExportOptions(graph=False)
    )
    api.validate(run.root, None, validating)
    card = accuracy_part(run)
    (line,) = [line.strip() for line in card.splitlines() if line.startswith("    ")]
    assert line == command
    api.validate(run.root, None, ValidateOptions(context=48, as_served=40, max_tokens=100))
    assert accuracy_part(run) != card
    words = shlex.split(line.replace("RUN", str(run.root)))
    result = fp8q(*words[1:], "--json")
    assert result.code == 0
    assert accuracy_part(run) == card, "verdict, protocol, table and command"
    rows = {row["runtime"]: row for row in json.loads(result.out)["accuracy"]}
    figures = f"| perplexity | {rows['bf16']['perplexity']:.4f} in BF16, {rows['reference']['perplexity']:.4f}, "
    assert figures in card
