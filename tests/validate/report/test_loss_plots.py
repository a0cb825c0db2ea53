"""The numbers behind the pictures of the loss: by layer, along the window, against cost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8q.core.files import write_document
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.quantize.learning.document import Distillation, Moment
from fp8q.quantize.sensitivity.document import KlAfter, Loss
from fp8q.validate.accuracy.document import load_accuracy, load_divergences, load_token_losses, save_accuracy
from fp8q.validate.report.drawings import (
    by_layer,
    divergence_plot,
    frontier_plot,
    learned_weights,
    learning_plot,
    loss_plot,
)
from fp8q.validate.tuning.document import Point, Step, Tuning, Windows


def loss(module: str, kind: Any, kl: float) -> Loss:
    return Loss(module=module, kind=kind, kl_nats=kl, sqnr_db=31.0, measured=False, kl_after=KlAfter())


LOSSES = [
    loss("model.layers.1.mlp.down_proj", "activation", 4e-4),
    loss("model.layers.0.self_attn.q_proj", "activation", 2e-4),
    loss("model.layers.1.self_attn.q_proj", "activation", 1e-4),
    loss("model.layers.1.self_attn.k", "kv_cache", 5e-5),
    loss("project_in", "weight", 1e-5),
]


def test_losses_are_added_up_by_layer_and_kind() -> None:
    found = by_layer(LOSSES)
    assert found == {"activation": {1: pytest.approx(5e-4), 0: 2e-4}, "kv_cache": {1: 5e-5}}
    plot = loss_plot(LOSSES)
    assert plot.caption.endswith("The worst is the input of model.layers.1.mlp.down_proj, 0.0004 nats.")
    assert {"activations", "cache"} <= set(re.findall(r">([^<>]+)</text>", plot.wide))
    assert "weights" not in plot.wide


def test_divergences_are_kept_beside_losses_and_are_no_runtimes(evaluated_run: Run) -> None:
    accuracy, nll = load_accuracy(evaluated_run), load_token_losses(evaluated_run)
    kl = {"reference": np.where(np.isnan(nll["reference"]), np.nan, 0.25).astype(np.float32)}
    with RunWriter(evaluated_run).stage("validate", {}, {}) as log:
        log.outputs += save_accuracy(evaluated_run, accuracy, nll, kl)
    assert load_token_losses(evaluated_run).keys() == nll.keys()
    found = load_divergences(evaluated_run)
    assert list(found) == ["reference"]
    np.testing.assert_array_equal(found["reference"], kl["reference"])
    plot = divergence_plot(found)
    assert "reference" in plot.wide
    assert "position in the window" in plot.narrow


def point(kl: float, weight_bytes: int, prefill: float) -> dict[str, Any]:
    return {
        "kl_nats": kl, "measured": True, "weight_bytes": weight_bytes, "cache_bytes": 64,
        "prefill_flops_ratio": prefill, "weight_rounding": "nearest", "kv_cache": "off", "two_terms": 0, "bf16": 0,
    }  # fmt: skip


def test_the_frontier_has_a_point_for_each_mix_and_marks_the_run() -> None:
    steps = [Step(**point(kl, size, ratio), changes=[]) for kl, size, ratio in ((3e-3, 100, 1.0), (4e-4, 100, 1.5))]
    tuning = Tuning(
        prefer="memory", changes=[], run=Point(**point(3.2e-3, 100, 1.0)), frontier=steps,
        windows=Windows(rounding=1, choosing=1, held_out=1), rise_over_kl=1.0,
    )  # fmt: skip
    plot = frontier_plot(tuning)
    texts = re.findall(r">([^<>]+)</text>", plot.wide)
    assert texts.count("the run") == 2
    assert "chosen" not in texts
    assert "operations of a prompt" in texts


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
    with RunWriter(run).stage("distill", {}, {}) as log:
        write_document(run.distillation, found)
        log.outputs.append(run.distillation)
    with RunWriter(run).stage("quantize", {run.distilled.name: "0"} if in_checkpoint else {}, {}):
        pass
    assert learned_weights(run) == (found if drawn else None)
