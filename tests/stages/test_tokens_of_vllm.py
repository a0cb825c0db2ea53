"""A run for vLLM is calibrated on the tokens that vLLM reads; where another is not, that is said first and last."""

from pathlib import Path
from typing import Any

import pytest

from fp8q import api
from fp8q.core.run import Run
from fp8q.stages.pipeline.stages import CORPUS
from fp8q.validate.accuracy.document import Verdict
from fp8q.validate.report.verdict import next_steps, report_verdict, standing
from tests.calibrate.conftest import Notebook
from tests.two_tokenizers import numbers, two_tokenizers

KINDS = [
    "numbers", "several spaces", "ends of lines", "é as two code points", "indented code",
    "the special token <|endoftext|>",
]  # fmt: skip


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """A model whose tokens vLLM reads by rules of its own."""
    source = two_tokenizers(tmp_path / "model", "Qwen2Config", "Qwen2Tokenizer")
    (tmp_path / "text.txt").write_text("\n".join(numbers()))
    return source.path


def calibrated(model: Path, notes: Notebook, **settings: Any) -> Run:
    out = model.parent / "run"
    return api.calibrate(model, model.parent / "text.txt", out, progress=notes, samples=4, seq_len=32, **settings)


def test_without_a_graph_the_tokens_are_those_that_vllm_reads(qwen: Path) -> None:
    notes = Notebook()
    run = calibrated(qwen, notes, graph=False)
    facts = run.facts(CORPUS)
    assert (facts.tokenizer, facts.other_tokens) == ("auto", None)
    assert not any("vLLM reads other tokens" in line for line in notes.lines)
    assert standing(run).other_tokens is None


def test_tokens_that_vllm_does_not_read_are_said_before_calibrating_and_beside_the_verdict(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notebook()
    run = calibrated(qwen, notes, graph=False, tokenizer="file")
    facts = run.facts(CORPUS)
    assert (facts.tokenizer, facts.other_tokens) == ("file", KINDS)
    first = next(number for number, line in enumerate(notes.lines) if "vLLM reads other tokens" in line)
    assert notes.lines[first].startswith(
        f"{qwen}: vLLM reads other tokens than are calibrated, of numbers, several spaces, ends of lines, é as two "
        "code points, indented code and the special token <|endoftext|>: '1969 twelve' is 1 9 6 9 Ġt w e l … by "
    )
    assert notes.lines[first].endswith("; --tokenizer auto calibrates those that vLLM reads")
    assert not any(line.startswith("model/") for line in notes.lines[:first])
    good = Verdict(kind="acceptable", sentence="Good", detail="Sure.", limit=0.01, runtime="reference")
    monkeypatch.setattr("fp8q.validate.report.verdict._stored_verdict", lambda run: good)
    remark = (
        f"It does not hold in vLLM, which reads other tokens than were calibrated and validated, of {', '.join(KINDS)}."
    )
    assert report_verdict(run).detail == f"{remark} Sure."
    (step,) = next_steps(good, standing(run))
    assert step.why == f"For vLLM: {remark}"
    assert step.command == (
        f"fp8q calibrate {qwen} --data {qwen.parent / 'text.txt'} --out {run.root} --samples 4 --seq-len 32 "
        "--tokenizer auto --no-graph"
    )
