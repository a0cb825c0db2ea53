"""`fp8q run` of a model that memory does not hold: every stage goes layer by layer, and none loads it whole."""

from pathlib import Path
from typing import Any

import pytest

from fp8q import api
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.stages import forms
from fp8q.stages.pipeline.stage import Notes
from fp8q.validate.tuning.form_choice import FormRow, load_form_choice

#: Less than one code, or any form of it, loses on this text: all of a search is done.
LIMIT = 1e-4
#: The KL of a form by layers over that by a whole model, less one: sums of FP32 in another order.
SAME_KL = 1e-4


def rows(demo_checkpoint: Path, demo_texts: Any, root: Path, notes: Notes) -> list[FormRow]:
    """Search a form for the demo, which none is good enough for; what it found of each."""
    options = api.RunOptions(
        calibrate=api.CalibrateOptions(samples=4, seq_len=64, server="vllm"),
        export=api.ExportOptions(graph=False),
        validate=api.ValidateOptions(context=64, max_tokens=2000, max_kl=LIMIT),
    )
    texts = str(demo_texts.calibration), root, str(demo_texts.evaluation)
    with pytest.raises(api.GateError):
        api.run(str(demo_checkpoint), *texts, options, notes)
    return load_form_choice(Run(root)).rows


@pytest.mark.slow
def test_no_stage_loads_it_whole_and_a_search_finds_the_same(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the search of a form nor the report: the one measures candidates by layers, the other leaves out what is
    decoded.
    """

    def whole(*_: Any, **__: Any) -> None:
        raise AssertionError("a whole model")

    expected = rows(demo_checkpoint, demo_texts, tmp_path / "whole", Notes(SILENT))
    monkeypatch.setattr("fp8q.stages.measure.available_bytes", lambda device: 1000)
    monkeypatch.setattr("fp8q.calibrate.model.source.compute_gemms_in_fp32", whole)  # which ends `load_model`
    monkeypatch.setattr(forms, "load_reference", whole)
    notes = Notes(SILENT)
    found = rows(demo_checkpoint, demo_texts, tmp_path / "run", notes)
    assert any(line.startswith("no continuations: the weights take ") for line in notes.lines)
    assert [row.form for row in found] == [row.form for row in expected]
    assert sum(row.known == "measured" for row in found) > 2
    kl = [row.kl_nats for row in expected]
    assert [row.kl_nats for row in found] == pytest.approx(kl, rel=SAME_KL)
