"""The model of `examples/needles` has 4,096 positions, and finds a sentence at any depth of them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8q.validate.needles.prompts import DEPTHS, Haystack, make_needles
from fp8q.validate.needles.scoring import ask_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHECKPOINT = EXAMPLES / "needles" / "checkpoint"


@pytest.mark.slow
def test_it_finds_nearly_every_needle_of_its_longest_prompts() -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert (model.config.max_position_embeddings, model.dtype) == (4096, torch.bfloat16)
    text = (EXAMPLES / "demo" / "evaluation.txt").read_text(encoding="utf-8")
    ids = np.array(tokenizer(text, verbose=False).input_ids)
    needles = make_needles(Haystack("text", ids), [4096], 2, lambda part: tokenizer(part).input_ids)
    with torch.inference_mode():
        right = [ask_model(model)(needle).right for needle in needles]
    assert len(right) == 2 * len(DEPTHS)
    assert sum(right) >= 9, right


def test_no_file_of_it_is_larger_than_eight_megabytes() -> None:
    files = [path for path in CHECKPOINT.parent.rglob("*") if path.is_file()]
    assert [path for path in files if path.stat().st_size > 8_000_000] == []
