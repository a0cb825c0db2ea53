"""A server whose FP8 cache is written by 1.0, or that leaves inputs in BF16, is told so: nothing in its log says it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from fp8q import api
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.serve.loop.text import Vocabulary
from fp8q.stages import compare as stage
from fp8q.validate.accuracy.top_logits import TopTokens, load_top_logits
from fp8q.validate.endpoint.answers import LikelyTokens
from fp8q.validate.endpoint.document import VALIDATED, ModelComparison
from fp8q.validate.endpoint.judgement import ARITHMETICS, UNIT_CACHE, WEIGHTS_ALONE, Judged, judge
from fp8q.validate.endpoint.server_arithmetics import with_arithmetic

from .stand_in import StandIn, Table, kept_tokens, serving, table
from .test_asking import asked_of

BF16 = table(1)
REFERENCE = table(2, 0.03, BF16)
RUNTIMES = {"bf16": BF16, "reference": REFERENCE, "onnxruntime": table(4, 0.01, REFERENCE)}
WITHOUT_SCALES = table(8, 1.5, REFERENCE)
KEPT = kept_tokens(RUNTIMES)
INPUTS_AS_THEY_ARE = table(13, 0.015, BF16)
TRIED = {
    UNIT_CACHE: kept_tokens(RUNTIMES | {UNIT_CACHE: WITHOUT_SCALES}),
    WEIGHTS_ALONE: kept_tokens(RUNTIMES | {WEIGHTS_ALONE: INPUTS_AS_THEY_ARE}),
}
#: Words of the demo.
SIZE = 2048
WINDOW_OF = np.nonzero(KEPT.positions)[0]


def answers_of(model: Table, folder: Path) -> LikelyTokens:
    with serving(StandIn(model)) as server:
        return asked_of(server, folder, KEPT).answers


def told(answers: LikelyTokens) -> Judged:
    """What `fp8q compare` says, once it has tried a cache without scales, and inputs in BF16."""
    before = judge(KEPT, answers, WINDOW_OF)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "fp8q.validate.endpoint.server_arithmetics.with_arithmetic", lambda _, kept, name, *__: TRIED[name]
        )
        patch.setattr(
            stage, "SERVER_ARITHMETICS",
            {name: (words, lambda run: True) for name, (words, _) in stage.SERVER_ARITHMETICS.items()},
        )  # fmt: skip
        return stage._by_server_arithmetics(SimpleNamespace(), KEPT, answers, before, SILENT)  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_server_without_cache_scales_is_told_so(noise: float, tmp_path: Path) -> None:
    """By the run's own runtimes alone it is another model."""
    answers = answers_of(table(9, noise, WITHOUT_SCALES), tmp_path)
    assert judge(KEPT, answers, WINDOW_OF).verdict == "other-model"
    found = told(answers)
    assert (found.verdict, found.arithmetics) == ("other-arithmetic", [ARITHMETICS[UNIT_CACHE]])
    assert "cache scales look unused" in found.sentence
    assert (found.runtimes[0].runtime, found.runtimes[0].validated) == (UNIT_CACHE, False)


@pytest.mark.parametrize("model", [table(10, 1.5, REFERENCE), table(11)], ids=["as far", "another"])
def test_another_error_of_the_same_size_is_not_called_so(model: Table, tmp_path: Path) -> None:
    answers = answers_of(model, tmp_path)
    before = judge(KEPT, answers, WINDOW_OF)
    assert before.verdict == "other-model"
    found = told(answers)
    assert (found.verdict, found.sentence) == (before.verdict, before.sentence)


def test_a_server_that_leaves_inputs_in_bf16_is_told_so(tmp_path: Path) -> None:
    """As vLLM does on a CPU with AMX; by the run's own runtimes alone its arithmetic has no name."""
    answers = answers_of(table(14, 0.002, INPUTS_AS_THEY_ARE), tmp_path)
    before = judge(KEPT, answers, WINDOW_OF)
    assert before.verdict in stage.UNEXPLAINED
    found = told(answers)
    assert (found.verdict, found.arithmetics) == ("other-arithmetic", [ARITHMETICS[WEIGHTS_ALONE]])
    assert found.sentence.startswith("the model, but in FP8 weights and inputs in BF16, as vLLM computes on a CPU with")


def test_a_right_server_is_as_validated_beside_it(tmp_path: Path) -> None:
    found = judge(TRIED[UNIT_CACHE], answers_of(table(12, 0.01, REFERENCE), tmp_path), WINDOW_OF)
    assert (found.verdict, found.arithmetics) == ("validated", [VALIDATED])


class OfRun(StandIn):
    """A server of what a runtime answers behind each beginning of a run's windows, with the run's tokens."""

    def tell(self, run: Run, tops: TopTokens, runtime: str) -> None:
        self.tokens, row = Vocabulary.read(run.model), 0
        self.rows = dict[tuple[int, ...], Table]()
        top, nll = tops.runtimes[runtime], tops.nll[runtime]
        for window, ids in enumerate(tops.ids):
            for position in np.flatnonzero(tops.positions[window]):
                known = np.full(SIZE, -30.0)
                known[top.tokens[row]] = top.logprobs[row]
                known[ids[position]] = -nll[row]
                self.rows[*map(int, ids[:position])] = known
                row += 1

    def _read(self, prompt: list[int] | str) -> list[int]:
        return self.tokens.encode(prompt) if isinstance(prompt, str) else prompt

    def _after(self, ids: list[int]) -> Table:
        return self.rows.get((*ids,), np.full(SIZE, -np.log(SIZE)))


def with_small_values(checkpoint: Path, folder: Path) -> Path:
    """A copy that computes the same, whose values are a thousandth: an FP8 cache without a scale has none of them."""
    copy = Path(shutil.copytree(checkpoint, folder))
    file = copy / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("v_proj.weight"):
            tensors[name] = tensors[name] / 1024
        elif name.endswith("o_proj.weight"):
            tensors[name] = tensors[name] * 1024
    save_file(tensors, file, {"format": "pt"})
    return copy


@pytest.mark.slow
def test_fp8q_compare_names_the_cache_of_a_wrong_server(demo_checkpoint: Path, demo_texts: Any, tmp_path: Path) -> None:
    """The public case (SGLang 22671): the server answers what the model does with a cache written by 1.0."""
    run, text = Run(tmp_path / "run"), tmp_path / "evaluation.txt"
    text.write_text(demo_texts.evaluation.read_text(encoding="utf-8")[:3_000], encoding="utf-8")
    checkpoint = with_small_values(demo_checkpoint, tmp_path / "checkpoint")
    options = api.CalibrateOptions(kv_cache="fp8", samples=8, seq_len=64)
    api.calibrate(
        str(checkpoint), str(demo_texts.calibration), run.root, str(text), options, api.ExportOptions(graph=False)
    )
    api.validate(run.root, options=api.ValidateOptions(runtimes=("fp32", "bf16", "reference")))
    tops = with_arithmetic(run, load_top_logits(run), UNIT_CACHE, "cpu", SILENT)
    found = compared(run, tops, UNIT_CACHE)
    assert (found.verdict, found.arithmetics, found.passes) == ("other-arithmetic", [ARITHMETICS[UNIT_CACHE]], False)
    assert found.sentence.startswith(
        "the model, but in an FP8 cache written by 1.0, so that its cache scales look unused"
    )
    by = {each.runtime: each for each in found.runtimes}
    assert by[UNIT_CACHE].perplexity > 1.3 * by["reference"].perplexity  # type: ignore[operator]
    assert {each.runtime for each in compared(run, tops, "bf16").runtimes} == {"fp32", "bf16", "reference"}


@pytest.mark.slow
def test_fp8q_compare_names_inputs_in_bf16_of_a_server(demo_checkpoint: Path, demo_texts: Any, tmp_path: Path) -> None:
    """As vLLM 0.33 answers on a CPU with AMX, for a run in one code."""
    run, text = Run(tmp_path / "run"), tmp_path / "evaluation.txt"
    text.write_text(demo_texts.evaluation.read_text(encoding="utf-8")[:6_000], encoding="utf-8")
    options = api.CalibrateOptions(samples=8, seq_len=64)
    api.calibrate(
        str(demo_checkpoint), str(demo_texts.calibration), run.root, str(text), options, api.ExportOptions(graph=False)
    )
    api.validate(run.root, options=api.ValidateOptions(runtimes=("fp32", "bf16", "reference")))
    tops = with_arithmetic(run, load_top_logits(run), WEIGHTS_ALONE, "cpu", SILENT)
    found = compared(run, tops, WEIGHTS_ALONE)
    assert (found.verdict, found.arithmetics) == ("other-arithmetic", [ARITHMETICS[WEIGHTS_ALONE]])
    assert compared(run, tops, "bf16").arithmetics == ["BF16"]


def compared(run: Run, tops: TopTokens, served: str) -> ModelComparison:
    """What `fp8q compare` finds of a server of that runtime."""
    server = OfRun(table(0))
    server.tell(run, tops, served)
    with serving(server):
        return api.compare(run.root, api.CompareOptions(url=server.url))
