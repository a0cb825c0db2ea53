"""The likeliest tokens that `validate` keeps, by hand, and what becomes of them in the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from fp8q.calibrate.text.evaluation import cut
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.validate.accuracy.compare import Turns, compare_in_turn
from fp8q.validate.accuracy.document import load_token_losses
from fp8q.validate.accuracy.top_logits import (
    MOST_OF_WINDOW,
    MOST_TOKENS,
    TOP,
    load_top_logits,
    positions_to_keep,
    top_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SHARES = torch.tensor([1 / 2, 1 / 8, 1 / 4, 1 / 8])


def test_the_likeliest_come_first_and_the_rest_has_the_mass_of_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8q.validate.accuracy.top_logits.TOP", 2)
    found = top_of(SHARES.log()[None] + 5)
    assert found.tokens.tolist() == [[0, 2]]
    np.testing.assert_allclose(np.exp(found.logprobs), [[1 / 2, 1 / 4]], rtol=1e-6)
    np.testing.assert_allclose(np.exp(found.rest), [1 / 4], rtol=1e-6)


def test_of_a_vocabulary_that_is_kept_whole_nothing_is_left() -> None:
    found = top_of(SHARES.log()[None])
    assert found.tokens.shape == (1, 4)
    assert found.rest.tolist() == [-np.inf]


def test_windows_are_spaced_evenly_and_whole_ones_keep_their_last_tokens() -> None:
    evaluation = cut(np.arange(300 * 40), "text", 300, 300)
    kept = positions_to_keep(evaluation)
    windows = np.flatnonzero(kept.any(axis=1))
    assert len(windows) == MOST_TOKENS // MOST_OF_WINDOW == 16
    assert (windows[0], windows[-1]) == (0, 39)
    assert set(np.diff(windows).tolist()) <= {2, 3}
    assert np.flatnonzero(kept[0]).tolist() == list(range(300 - MOST_OF_WINDOW, 300))
    assert (kept <= evaluation.scored).all()


def test_windows_behind_a_prompt_keep_the_first_tokens_behind_it() -> None:
    kept = positions_to_keep(cut(np.arange(600 * 3), "text", 600, 600, prompt=300))
    assert np.flatnonzero(kept[1]).tolist() == list(range(300, 300 + MOST_OF_WINDOW))


def test_each_runtime_keeps_those_of_its_own_logits_at_the_same_tokens(tmp_path: Path) -> None:
    """Logits that are the id before, turned round: the likeliest is that id, and the next one the second."""
    ids = np.random.default_rng(1).integers(0, 50, 200)
    evaluation = cut(ids, "text", 20, 20)

    def forward(shift: int) -> Callable[[np.ndarray], torch.Tensor]:
        return lambda ids: -((torch.arange(50) - torch.from_numpy(ids)[..., None] - shift) % 50).float()

    openers = {"bf16": lambda: forward(0), "reference": lambda: forward(1)}
    found = compare_in_turn(Turns(evaluation, openers, 50, tmp_path / "work"), SILENT)
    before = evaluation.ids[:, :-1].ravel()
    assert found.top["bf16"].tokens[:, 0].tolist() == before.tolist()
    assert found.top["reference"].tokens[:, 1].tolist() == ((before + 2) % 50).tolist()
    again = compare_in_turn(Turns(evaluation, openers, 50, tmp_path / "work"), SILENT)
    np.testing.assert_array_equal(again.top["bf16"].logprobs, found.top["bf16"].logprobs)


def test_a_run_has_those_of_each_runtime_with_the_losses_of_the_same_tokens(demo_run: Run) -> None:
    kept = load_top_logits(demo_run)
    assert {*kept.runtimes} == {"bf16", "reference", "onnxruntime"}
    losses = load_token_losses(demo_run)
    for name, top in kept.runtimes.items():
        assert top.tokens.shape == (int(kept.positions.sum()), TOP)
        np.testing.assert_allclose(np.exp(top.logprobs).sum(axis=1) + np.exp(top.rest), 1, atol=1e-5)
        np.testing.assert_array_equal(kept.nll[name], losses[name][kept.windows][kept.positions])
        own = top.tokens == kept.ids[kept.positions][:, None]
        known = own.any(axis=1)
        assert known.mean() > 0.7
        np.testing.assert_allclose(-top.logprobs[own], kept.nll[name][known], atol=1e-5)
    assert demo_run.top_logits.stat().st_size < 8e6


@pytest.fixture
def copy(demo_run: Run, tmp_path: Path) -> Run:
    return Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))


def test_a_run_of_an_older_version_is_told_what_to_do(copy: Run) -> None:
    record = json.loads(copy.record_file.read_text(encoding="utf-8"))
    del record["stages"]["validate"]["outputs"]["top_logits.npz"]
    copy.record_file.write_text(json.dumps(record), encoding="utf-8")
    copy.top_logits.unlink()
    with pytest.raises(InputError) as refused:
        load_top_logits(copy)
    expected = f"{copy.top_logits}: is missing; `fp8q validate {copy.root}` writes it, run that first"
    assert str(refused.value) == expected
