"""Rows of weights and inputs of models that people know: what is chosen, counted and left for another call."""

from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


def test_the_costliest_inputs_an_operation_are_exact_as_long_as_they_fit() -> None:
    from input_mixes import costliest_inputs

    sizes = {"q": 2, "k": 1, "down": 4, "up": 13}
    losses = [(["q", "k"], 0.9), (["down"], 1.6), (["up"], 1.3)]  # 0.3, 0.4 and 0.1 an operation
    assert costliest_inputs(losses, sizes, 0.0) == set()
    assert costliest_inputs(losses, sizes, 0.15) == {"q", "k"}  # the four of `down` do not fit into three
    assert costliest_inputs(losses, sizes, 0.35) == {"down", "q", "k"}
    assert costliest_inputs(losses, sizes, 1.0) == set(sizes)


def test_an_operation_in_bf16_counts_for_two() -> None:
    from input_mixes import kinds, operations

    sizes = {"a.up": 3, "a.down": 1}
    assert [operations(sizes, exact) for exact in ((), ("a.up",), sizes)] == [0.5, 7 / 8, 1.0]
    assert kinds(["0.up", "1.up", "1.down"]) == {"down": 1, "up": 2}


def test_codes_that_differ_are_counted_by_kind_of_gemm() -> None:
    from weight_levers import changed

    start = {"0.q": torch.zeros(2, 2), "1.q": torch.ones(2, 2), "0.up": torch.ones(1, 2)}
    revised = start | {"1.q": torch.tensor([[1.0, 2.0], [1.0, 1.0]])}
    assert changed(revised, start) == {"q": 0.125, "up": 0.0}


def test_a_row_stands_beside_bf16_and_the_row_that_others_are_divided_by(monkeypatch: pytest.MonkeyPatch) -> None:
    import row_figures
    from real_models import Tokens

    zeros = np.zeros((3, 4))
    losses = {"BF16": 1.0, "first": 4.0, "other, stored": 2.0}
    runs: Any = SimpleNamespace(
        run=None, name="demo", context=64, windows=3,
        tokens=lambda row, model: Tokens(zeros + losses[row], zeros, zeros, zeros),
    )  # fmt: skip
    monkeypatch.setattr(row_figures, "source_of", lambda run: None)
    rows = row_figures.RowFigures(runs, "first", "gptq")
    first, other = rows.judge("first", torch.nn.Identity), rows.judge("other", torch.nn.Identity, "other, stored")
    assert (first["kl_over_bf16"], first["kl_over_gptq"]) == (4.0, 1.0)
    assert (other["kl_over_bf16"], other["kl_over_gptq"], other["ratio_interval"]) == (2.0, 0.5, [0.5, 0.5])
    other["seconds"] = 1.5
    document = rows.document()
    assert document["evaluation_tokens"] == 3 * 64
    assert (list(document["rows"]), document["rows"]["other"]["seconds"]) == (["BF16", "first", "other"], 1.5)


def test_the_seconds_of_a_row_are_of_the_stages_whose_outputs_it_reads() -> None:
    from rounded_runs import with_seconds

    def stage(seconds: float, inputs: tuple[str, ...] = (), outputs: tuple[str, ...] = ()) -> SimpleNamespace:
        return SimpleNamespace(seconds=seconds, inputs=dict.fromkeys(inputs), outputs=dict.fromkeys(outputs))

    stages = {
        "corpus": stage(1, outputs=("calibration.npz",)),
        "measure": stage(10, outputs=("moments/a", "statistics.json")),
        "outputs": stage(100, outputs=("output_moments/a",)),
        "first-tokens": stage(1000, outputs=("first_tokens.json",)),
        "quantize": stage(10000, inputs=("moments/a", "first_tokens.json")),
    }
    run: Any = SimpleNamespace(record=lambda: SimpleNamespace(stages=stages))
    assert with_seconds(run) == (run, 11011)


@pytest.mark.slow
def test_rows_that_are_in_the_folder_are_not_made_again(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rounded_runs
    from real_rows import quantized
    from rounded_runs import GPTQ, WEIGHED, RoundedRuns

    from fp8q.stages.shared.sources import source_of

    monkeypatch.setattr(rounded_runs, "checkpoint", lambda name, folder: demo_checkpoint)
    monkeypatch.setattr(rounded_runs, "PROTOCOL", {"demo": (64, 2)})
    monkeypatch.setattr(rounded_runs, "CALIBRATION_CONTEXT", 64)
    texts = {"data": str(demo_texts.calibration), "eval_data": str(demo_texts.evaluation)}
    asked = Namespace(folder=tmp_path, samples=4, windows=None, **texts)
    runs = RoundedRuns("demo", asked, tmp_path)
    rows = {row: runs.rounded(row) for row in (WEIGHED, GPTQ)}
    source = source_of(runs.run)
    tokens = {row: runs.tokens(row, partial(quantized, source, made.weights, {})) for row, made in rows.items()}
    assert (tokens[WEIGHED].kl != tokens[GPTQ].kl).any()
    assert rows[WEIGHED].seconds > 0

    for name in ("calibrate", "scales"):
        monkeypatch.setattr(rounded_runs, name, lambda *_: pytest.fail("it is made again"))
    again = RoundedRuns("demo", asked, tmp_path)
    for row, made in rows.items():
        assert again.rounded(row).seconds == made.seconds
        assert all(torch.equal(weight, made.weights[name]) for name, weight in again.rounded(row).weights.items())
        np.testing.assert_array_equal(again.tokens(row, lambda: pytest.fail("it is judged again")).kl, tokens[row].kl)
