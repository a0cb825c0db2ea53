"""One damaged module: `sensitivity` puts it first, and `tune` repairs the run by touching just that."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from culprits import rescale_outliers, saturating_k, scale_too_small
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.api import CalibrateOptions, SensitivityOptions, TuneOptions, ValidateOptions
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.scheme import in_two_codes
from fp8q.stages.other_text import evaluation
from fp8q.stages.shared.sources import source_of

Logits = Callable[[Run, np.ndarray], np.ndarray]
ATTENTION = "model.layers.2.self_attn"
DAMAGED, GROUP = f"{ATTENTION}.q_proj", {f"{ATTENTION}.{part}_proj" for part in "qkv"}
WINDOWS = 4


def kl_of(run: Run, exact_logits: Logits, windows: int | None = None) -> float:
    """KL from transformers' model in FP32 to the run's checkpoint, a token of its evaluation text, or of its first
    `windows`, that is scored.
    """
    text = evaluation(run, None, ValidateOptions(), SILENT)
    source = AutoModelForCausalLM.from_pretrained(source_of(run).path, dtype=torch.float32)
    total = 0.0
    for ids, scored in zip(text.ids[:windows], text.scored[:windows], strict=True):
        with torch.inference_mode():
            log_p = source(input_ids=torch.from_numpy(ids[None])).logits[0].log_softmax(-1)
        log_q = torch.from_numpy(exact_logits(run, ids[None]))[0].log_softmax(-1)
        kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
        total += float(kl[:-1][scored[1:]].sum())
    return total / int(text.scored[:windows, 1:].sum())


@pytest.fixture
def copied(demo_run: Run, tmp_path: Path) -> Run:
    """The demo's run, to damage."""
    return Run(
        Path(shutil.copytree(demo_run.root, tmp_path / "run", ignore=shutil.ignore_patterns("engines", "triton")))
    )


@pytest.fixture
def healed(demo_run: Run, exact_logits: Logits, without_graphs: Any) -> Callable[[Run, str, str, str], Run]:
    """`healed(run, module, kind, choice)`: the damaged run, found and repaired within twice what the healthy one loses,
    by what is to become of the module alone.
    """

    def heal(run: Run, module: str, kind: str, choice: str) -> Run:
        budget = 2 * kl_of(demo_run, exact_logits, WINDOWS)
        assert kl_of(run, exact_logits, WINDOWS) > 10 * budget
        worst, second = api.sensitivity(run.root, SensitivityOptions(windows=WINDOWS)).modules[:2]
        assert (worst.module, worst.kind) == (module, kind)
        assert worst.kl_nats > 10 * second.kl_nats
        before = load_scales(run)
        with without_graphs():  # test_tune.py has one made
            found = api.tune(run.root, TuneOptions(windows=WINDOWS, max_kl=budget), apply=True)
        assert [(change.module, change.choice) for change in found.changes] == [(module, choice)]
        assert found.met
        assert found.run.kl_nats > 10 * budget
        assert found.measured_kl_nats is not None
        repaired = kl_of(run, exact_logits)
        assert repaired <= budget
        assert repaired == pytest.approx(found.measured_kl_nats, rel=0.05)
        after = load_scales(run)
        assert {name for name in before.activations if before.activations[name] != after.activations[name]} == (
            GROUP if kind == "activation" else set()
        )
        assert {name for name in before.kv_cache if before.kv_cache[name] != after.kv_cache[name]} == (
            {module} if kind == "kv_cache" else set()
        )
        return run

    return heal


def test_a_scale_ten_times_too_small_is_chosen_again(healed: Any, copied: Run, demo_run: Run) -> None:
    scale_too_small(copied, DAMAGED)
    assert load_scales(healed(copied, DAMAGED, "activation", "rescaled")) == load_scales(demo_run)


def test_a_saturating_cache_is_scaled_again(healed: Any, copied: Run, demo_run: Run) -> None:
    name = saturating_k(copied, ATTENTION)
    assert load_scales(healed(copied, name, "kv_cache", "rescaled")) == load_scales(demo_run)


def test_outlier_channels_take_two_terms(
    healed: Any, demo_checkpoint: Path, demo_texts: Any, demo_run: Run, without_graphs: Any, tmp_path: Path
) -> None:
    rescale_outliers(demo_checkpoint, tmp_path / "damaged", DAMAGED)
    texts = str(demo_texts.calibration), str(demo_run.root.parent / "evaluation.txt")
    options = CalibrateOptions(kv_cache="fp8", samples=24, seq_len=256)
    with without_graphs():
        run = api.calibrate(str(tmp_path / "damaged"), texts[0], tmp_path / "run", texts[1], options)
    scales = load_scales(healed(run, DAMAGED, "activation", "two_terms"))
    assert set(in_two_codes(scales.forms)) == GROUP
