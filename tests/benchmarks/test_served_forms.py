"""Forms as a server computes them: weights that it joins, and rows of the whole way."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch


def test_weights_that_a_server_joins_are_coded_again_under_the_largest_scale() -> None:
    from served_forms import joined_again

    scales = {"0.q_proj": 1.0, "0.k_proj": 0.75, "0.o_proj": 0.75, "1.k_proj": 0.75}
    weights = {module: torch.tensor([[1.375 * scale, 1.0 * scale]]) for module, scale in scales.items()}
    served = {module: values.tolist() for module, values in joined_again(weights, scales).items()}
    assert served == {
        "0.q_proj": [[1.375, 1.0]],
        "0.k_proj": [[1.0, 0.75]],  # 1.03125 lies between 1 and 1.125
        "0.o_proj": [[1.03125, 0.75]],
        "1.k_proj": [[1.03125, 0.75]],
    }


@pytest.mark.slow
def test_a_scale_for_the_whole_weight_is_served_as_it_was_written(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rounded_runs
    import served_forms
    from real_rows import MODELOPT, stored_codes

    monkeypatch.setattr(rounded_runs, "checkpoint", lambda name, folder: demo_checkpoint)
    monkeypatch.setattr(rounded_runs, "PROTOCOL", {"demo": (64, 2)})
    monkeypatch.setattr(rounded_runs, "CALIBRATION_CONTEXT", 64)
    texts = {"data": str(demo_texts.calibration), "eval_data": str(demo_texts.evaluation)}
    rows = "^(ModelOpt|MXFP8|fp8q, .*nearest)"
    asked = Namespace(folder=tmp_path, samples=4, windows=None, rows=rows, llmcompressor=None, **texts)
    found = served_forms.measure(rounded_runs.RoundedRuns("demo", asked, tmp_path)).rows

    assert len(found) == 4 + sum(row.endswith("nearest") for row in served_forms.OWN)
    losses = {row: figures["kl_mean_micronats"] for row, figures in found.items()}
    static = losses["fp8q, one, --weight-scale tensor, nearest"]
    assert losses["fp8q, bf16, nearest"] < losses["fp8q, dynamic, nearest"] < static
    assert static < losses[served_forms.MODELOPT_WRITTEN] < losses[MODELOPT]  # whose weights are rounded twice
    stored = stored_codes(tmp_path / "one-scale-nearest")
    served = served_forms.joined_again(stored.weights, stored.scales)
    assert stored.scales.keys() == stored.weights.keys() == served.keys()
    assert all(torch.equal(served[module], values) for module, values in stored.weights.items())
    assert not (tmp_path / "run").exists()  # second moments were not measured
