"""The stage `needles`: BF16 and FP8 are asked the same, and an answer counts where greedy decoding writes it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import ValidateOptions
from fp8q.stages.needles import ask_needles, needle_prompts
from fp8q.stages.pipeline.stage import Notes
from fp8q.validate.needles.document import NeedleScores, load_needles
from tests.noise import bf16_noise


@pytest.fixture
def copied(demo_run: Run, tmp_path: Path) -> Run:
    """A finished run of the demo, to change."""
    return Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))


def asked(run: Run, lengths: tuple[int, ...], **more: Any) -> NeedleScores:
    return ask_needles(run, Notes(SILENT), ValidateOptions(needles=lengths, **more))


def test_an_answer_is_right_where_greedy_decoding_writes_it(copied: Run, demo_checkpoint: Path) -> None:
    """By transformers' own generation and likelihoods in FP32, but where BF16 may take another token for the best."""
    found = asked(copied, (96,), needle_trials=2)
    assert found.runtimes == ["bf16", "reference", "reference-bf16-cache"]
    model: Any = AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_checkpoint)
    right = 0
    for prompt, needle in zip(
        needle_prompts(copied, ValidateOptions(needles=(96,), needle_trials=2))[1], found.needles, strict=True
    ):
        ids = torch.from_numpy(prompt.ids[None])
        written = model.generate(
            ids[:, : -prompt.answer], attention_mask=torch.ones_like(ids[:, : -prompt.answer]), do_sample=False,
            max_new_tokens=prompt.answer, min_new_tokens=prompt.answer,
        )  # fmt: skip
        assert tokenizer.decode(prompt.ids[-prompt.answer :]).strip() == needle.value
        right += needle.answers["bf16"].right
        with torch.inference_mode():
            likely = model(input_ids=ids).logits.log_softmax(-1)[0, -prompt.answer - 1 : -1]
        wanted, noise = ids[0, -prompt.answer :, None], bf16_noise(demo_checkpoint, ids)
        chosen = likely.gather(-1, wanted)
        closest = (chosen - likely.scatter(-1, wanted, -torch.inf).amax(-1, keepdim=True)).min()
        assert needle.answers["bf16"].right == bool((written == ids).all()) or closest.abs() < noise
        assert float(chosen.sum()) == pytest.approx(needle.answers["bf16"].log_probability, abs=prompt.answer * noise)
    assert 0 < right < len(found.needles), "the test sees both"


def test_needles_stand_beside_what_validate_wrote_and_are_not_asked_twice(
    copied: Run, fp8q: Callable[..., Any]
) -> None:
    before = copied.record().stages["validate"]
    shown = fp8q("validate", copied.root, "--needles", "64")
    assert shown.code == 0, shown.err
    assert "Needles by depth" in shown.out
    assert copied.record().stages["validate"] == before
    written = copied.record().stages["needles"]
    assert asked(copied, (64,)) == load_needles(copied)
    assert copied.record().stages["needles"] == written
    assert {needle["length"] for needle in json.loads(copied.needles.read_text())["needles"]} == {64}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--needles", "513"), "--needles 513: is more than the model's positions, 512; give at most 512"),
        (("--needles", "x"), "--needles x: is no list of whole numbers from 1 to 2,147,483,647; give one such as 1,8"),
        (("--needle-trials", "2"), ("--needle-trials 2: is of needles, and none are asked for; give --needles LENGTHS "
         "too")),
    ],
)  # fmt: skip
def test_needles_that_cannot_be_asked_for_are_refused_before_any_work(
    demo_run: Run, fp8q: Callable[..., Any], options: tuple[str, ...], told: str
) -> None:
    assert fp8q("validate", demo_run.root, *options).complaint() == told
    assert not demo_run.needles.exists()


def test_a_text_shorter_than_a_needles_prompt_is_refused(
    demo_run: Run, fp8q: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "short.txt"
    path.write_text("The secret number of {key} is {value}.\nimport os\n", encoding="utf-8")
    told = fp8q("validate", demo_run.root, "--needles", "128", "--needle-text", path).complaint()
    assert told == (
        f"--needles 128: hides a needle in 94 tokens of text, and {path} has 3; give more with --needle-text FILE, or "
        "fewer tokens"
    )
