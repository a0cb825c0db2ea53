"""Loops in greedy text: what counts as one, and when FP8 has more than chance gives it."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from fp8q.validate.advice.checkup import Remedies
from fp8q.validate.advice.loops import Loops, greedy, loop_length
from fp8q.validate.advice.model_checks import loops

#: 24 tokens at least, four turns at least.
TEXT = list(range(100, 140))


@pytest.mark.parametrize(
    ("tokens", "period"),
    [
        ([*TEXT, *[7] * 24], 1),
        ([*TEXT, *[7] * 23], 0),
        ([*TEXT, *[1, 2, 3] * 8], 3),
        ([*TEXT, *[1, 2, 3] * 8, 1], 3),
        ([*TEXT, *list(range(10)) * 3], 0),
        ([*TEXT, *list(range(10)) * 4], 10),
        ([*TEXT, *[7] * 24, 8], 0),
        (TEXT, 0),
        ([], 0),
    ],
)
def test_a_loop_is_a_period_that_ends_the_text(tokens: list[int], period: int) -> None:
    assert loop_length(tokens) == period


def test_loops_are_counted_by_prompt() -> None:
    loop, text = [7] * 30, TEXT
    found = Loops.from_answers([loop, loop, text, text], [loop, text, loop, text])
    assert found == Loops(fp8=1, bf16=1, both=1, prompts=4)


@pytest.mark.parametrize(
    ("fp8", "bf16", "both", "chance", "verdict"),
    [
        (0, 0, 0, 1.0, "good"),
        (0, 3, 0, 1.0, "good"),
        (0, 0, 9, 1.0, "watch"),
        (4, 0, 0, 1 / 16, "watch"),
        (5, 0, 0, 1 / 32, "bad"),
        (5, 1, 0, 7 / 64, "watch"),
        (7, 1, 3, 9 / 256, "bad"),
    ],
)
def test_fp8_loops_too_often_where_chance_would_not(
    fp8: int, bf16: int, both: int, chance: float, verdict: str
) -> None:
    found = Loops(fp8, bf16, both, 16)
    assert found.chance == pytest.approx(chance)
    assert found.verdict == verdict


def test_greedy_text_is_that_of_transformers() -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
        max_position_embeddings=64, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompts = torch.randint(61, (3, 5))
    expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=9)
    assert greedy(model, DynamicCache, prompts, 9) == expected[:, 5:].tolist()


def test_what_helps_against_loops_is_to_find_the_tensors_that_lose_most() -> None:
    remedies = Remedies("RUN", "MODEL", "TEXT", 8)
    assert loops(Loops(5, 0, 0, 16), remedies).remedy == "`fp8q sensitivity RUN`"
    assert loops(Loops(0, 3, 0, 16), remedies).remedy is None
