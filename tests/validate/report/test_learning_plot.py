"""The picture of learned weights: start and best marked, and none of codes that the checkpoint no longer has."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from fp8q.core.files import write_document
from fp8q.core.run import Run
from fp8q.quantize.learning.document import Distillation, Moment
from fp8q.validate.report.learning_plot import learned_weights, learning_plot

if TYPE_CHECKING:
    from pathlib import Path


def learned(*divergences: float) -> Distillation:
    moments = [Moment(step=4 * number, kl=kl) for number, kl in enumerate(divergences)]
    return Distillation(
        data="lib.txt", tokens=73728, held_out=8192, steps=8, seconds=1.0, moments=moments, changed=0.02
    )


def test_the_start_and_the_best_moment_are_marked() -> None:
    plot = learning_plot(learned(3.4e-4, 3.2e-4, 3.3e-4))
    for picture in (plot.wide, plot.narrow):
        texts = re.findall(r">([^<>]+)</text>", picture)
        assert (texts.count("start"), texts.count("best")) == (1, 1)
        assert {"step", "held-out KL, nats"} <= set(texts)
    assert plot.caption == (
        "The KL from BF16 on 8,192 held-out tokens while weights were learned from 73,728 of lib.txt: the held-out KL "
        "fell from 3.400e-04 to 3.200e-04 nats a token (-6%), by step 4 of 8; 2.0% of the codes changed."
    )


@pytest.mark.parametrize(
    ("divergences", "in_checkpoint", "drawn"),
    [((3e-4, 2e-4), True, True), ((3e-4, 2e-4), False, False), ((3e-4, 4e-4), False, True)],
    ids=["learned", "left out since", "nothing better"],
)
def test_codes_that_were_left_out_since_are_not_drawn(
    tmp_path: Path, divergences: tuple[float, ...], in_checkpoint: bool, drawn: bool
) -> None:
    run = Run(tmp_path / "run")
    assert learned_weights(run) is None
    found = learned(*divergences)
    with run.stage("distill", {}, {}) as log:
        write_document(run.distillation, found)
        log.outputs.append(run.distillation)
    with run.stage("quantize", {run.distilled.name: "0"} if in_checkpoint else {}, {}):
        pass
    assert learned_weights(run) == (found if drawn else None)
