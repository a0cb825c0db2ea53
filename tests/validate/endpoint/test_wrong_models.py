"""No model but the validated one passes, and what passes says what it could not have noticed: some sixty wrong servers
and a dozen right ones, of the demo or another Llama.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest

from fp8q.validate.endpoint.judgement import Judged

from .wrong_models import NEAR, RIGHT, World, compared, wrong_models

#: Another checkpoint, such as SmolLM2's (docs/decisions/0060-each-measure-suffices.md).
OTHER = os.environ.get("FP8Q_WRONG_MODELS_OF")
#: With inputs in one code, those that are about inputs, or that pass.
OF_ONE_CODE = NEAR[1] | {
    "final norm's sign", "head rolled by 1,000", "random, small", "clipped at 99 %", "input scales / 4", "BF16",
    "a tenth of the weights zero", "temperature 0.7",
}  # fmt: skip
DEMO = Path(__file__).resolve().parents[3] / "examples" / "demo"


@pytest.fixture(scope="module")
def worlds() -> dict[int, World]:
    text = (DEMO / "evaluation.txt").read_text(encoding="utf-8")
    return {terms: World(Path(OTHER or DEMO / "checkpoint"), text, terms, windows=4, length=96) for terms in (2, 1)}


@pytest.fixture(scope="module")
def judged(worlds: dict[int, World]) -> Callable[[int, str], Judged]:
    """The verdict on a wrong or right server of a model in so many codes."""

    @cache
    def verdict(terms: int, name: str) -> Judged:
        return worlds[terms].judged((wrong_models(worlds[terms]) | RIGHT)[name])

    return verdict


def passing(found: Mapping[str, Judged]) -> set[str]:
    """The names of those that pass; they say which differences would not have, and are nearer than these."""
    passed = {name: each for name, each in found.items() if compared(each).passes}
    for each in passed.values():
        assert each.noticed is not None
        assert each.noticed.kl_nats is not None
        assert each.sentence.endswith(f"; further than {each.noticed} would not pass")
        assert min(row.kl_nats.mean for row in each.runtimes if row.validated and row.kl_nats) < each.noticed.kl_nats
    return {*passed}


@pytest.mark.slow
def test_no_other_model_passes_where_two_codes_were_validated(
    worlds: dict[int, World], judged: Callable[[int, str], Judged]
) -> None:
    assert passing({name: judged(2, name) for name in wrong_models(worlds[2])}) <= NEAR[2]


@pytest.mark.slow
def test_nor_where_one_code_was_but_for_those_that_are_nearer_than_its_rounding(
    worlds: dict[int, World], judged: Callable[[int, str], Judged]
) -> None:
    names = wrong_models(worlds[1]) if OTHER else OF_ONE_CODE
    assert passing({name: judged(1, name) for name in names}) <= NEAR[1]


@pytest.mark.parametrize("terms", [2, 1])
def test_every_implementation_of_what_was_validated_passes(terms: int, judged: Callable[[int, str], Judged]) -> None:
    found = {name: judged(terms, name) for name in RIGHT}
    assert passing(found) == {*RIGHT}, [each.sentence for each in found.values()]


FAR = (
    "final norm's sign", "head rolled by 1,000", "random, small", "random, large", "first layers swapped",
    "a layer dropped", "a tenth of the weights zero", "RoPE base × 50", "heads of q reversed", "no causal mask",
    "another tokenizer", "temperature 0.7", "top-k before log-probabilities", "scale × 8 of one down_proj",
)  # fmt: skip


def test_what_is_far_is_called_another_model(judged: Callable[[int, str], Judged]) -> None:
    assert {name: judged(2, name).verdict for name in FAR} == dict.fromkeys(FAR, "other-model")
