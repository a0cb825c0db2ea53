"""Which moment wins, by hand: one that is better by chance does not."""

import numpy as np
import pytest

from fp8q.quantize.learning.document import BlockLoss, Distillation, Moment, best_of, standard_error


def moment(step: int, kl: float, error: float = 0.0) -> Moment:
    return Moment(step=step, kl=kl, error=error)


def outcome(*moments: Moment, steps: int = 9, blocks: list[BlockLoss] | None = None) -> Distillation:
    return Distillation(
        data="text",
        tokens=100,
        held_out=10,
        steps=steps,
        seconds=1.0,
        moments=list(moments),
        changed=0.5,
        blocks=blocks,
    )


def test_a_moment_wins_that_is_better_by_more_than_its_errors() -> None:
    start = moment(0, 1.0)
    assert best_of([start, moment(1, 0.9, 0.03), moment(2, 0.95, 0.01)]).step == 1
    assert best_of([start, moment(1, 0.9, 0.05), moment(2, 0.95, 0.01)]).step == 0
    assert best_of([start, moment(1, 1.1, 0.01)]).step == 0
    assert best_of([start, moment(1, 0.9), moment(2, 0.9)]).step == 1  # the earlier of equal ones


def test_the_standard_error_is_that_of_the_mean() -> None:
    assert standard_error(np.array([1.0, 2.0, 3.0])) == pytest.approx(1 / 3**0.5)
    assert standard_error(np.array([5.0])) == 0.0


def test_a_moment_better_by_chance_is_said_to_be_so() -> None:
    assert outcome(moment(0, 1.0), moment(3, 0.9, 0.06), moment(9, 1.2, 0.06)).conclusion == (
        "nothing better was found in 9 steps: the held-out KL is 1.000e+00 nats a token as it was, of which the least, "
        "9.000e-01, differs by chance, and the model is unchanged"
    )
    assert outcome(moment(0, 1.0), moment(9, 1.2, 0.06)).conclusion == (
        "nothing better was found in 9 steps: the held-out KL is 1.000e+00 nats a token as it was, and the model is "
        "unchanged"
    )


def test_layers_and_the_whole_model_are_one_outcome() -> None:
    losses = [BlockLoss(layer=0, before=0.2, after=0.1, step=3, codes=10, changed=2)]
    layers = outcome(moment(0, 1.0), moment(40, 0.8, 0.01), steps=40, blocks=losses)
    whole = outcome(moment(0, 0.8), moment(5, 0.7, 0.01), moment(9, 0.72, 0.01))
    found = layers.followed_by(whole)
    assert found.moments == [*layers.moments, moment(45, 0.7, 0.01), moment(49, 0.72, 0.01)]
    assert (found.best.step, found.steps, found.seconds, found.blocks) == (45, 49, 2.0, losses)


def test_the_codes_that_layers_learned_stay_where_the_whole_model_gets_no_better() -> None:
    layers = outcome(moment(0, 1.0), moment(40, 0.8, 0.01), steps=40)
    whole = outcome(moment(0, 0.8), moment(5, 0.79, 0.01), moment(9, 0.9, 0.01))
    assert whole.best.step == 0
    assert layers.followed_by(whole).best == layers.moments[1]


def test_the_whole_model_alone_may_get_better() -> None:
    layers = outcome(moment(0, 1.0), moment(40, 1.1, 0.01), steps=40)
    whole = outcome(moment(0, 1.0), moment(5, 0.7, 0.01), moment(9, 0.72, 0.01))
    found = layers.followed_by(whole)
    assert found.moments == [layers.start, moment(45, 0.7, 0.01), moment(49, 0.72, 0.01)]
    assert found.best.step == 45
