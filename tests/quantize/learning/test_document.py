"""Layers that learned one by one and the whole model after them are one outcome."""

from fp8q.quantize.learning.document import BlockLoss, Distillation, Moment


def outcome(*moments: tuple[int, float], steps: int = 9, blocks: list[BlockLoss] | None = None) -> Distillation:
    return Distillation(
        data="text", tokens=100, held_out=10, steps=steps, seconds=1.0, changed=0.5, blocks=blocks,
        moments=[Moment(step=step, kl=kl) for step, kl in moments],
    )  # fmt: skip


def moments(found: Distillation) -> list[tuple[int, float]]:
    return [(moment.step, moment.kl) for moment in found.moments]


def test_the_whole_model_goes_on_from_its_layers() -> None:
    losses = [BlockLoss(layer=0, before=0.2, after=0.1, step=3, codes=10, changed=2)]
    found = outcome((0, 1.0), (40, 0.8), steps=40, blocks=losses).followed_by(outcome((0, 0.8), (5, 0.7), (9, 0.72)))
    assert moments(found) == [(0, 1.0), (40, 0.8), (45, 0.7), (49, 0.72)]
    assert (found.best.step, found.steps, found.seconds, found.blocks) == (45, 49, 2.0, losses)


def test_the_codes_of_the_layers_stay_where_the_whole_model_gets_no_better() -> None:
    found = outcome((0, 1.0), (40, 0.8), steps=40).followed_by(outcome((0, 0.8), (5, 0.81), (9, 0.9)))
    assert moments(found) == [(0, 1.0), (40, 0.8), (45, 0.81), (49, 0.9)]
    assert found.best.step == 40


def test_the_whole_model_alone_may_get_better() -> None:
    found = outcome((0, 1.0), (40, 1.1), steps=40).followed_by(outcome((0, 1.0), (5, 0.7), (9, 0.72)))
    assert moments(found) == [(0, 1.0), (45, 0.7), (49, 0.72)]
    assert found.best.step == 45


def test_two_sums_of_one_divergence_are_no_gain() -> None:
    """The whole model's is summed in another order than that of its layers."""
    layers, whole = outcome((0, 1.0000001), (40, 1.1), steps=40), outcome((0, 1.0), (5, 1.0), (9, 1.2))
    assert layers.followed_by(whole).best.step == 0
    assert layers.followed_by(whole).conclusion.startswith("nothing better was found in 49 steps: ")


def test_both_reasons_are_told() -> None:
    layers, whole = outcome((0, 1.0), (40, 0.8)), outcome((0, 0.8))
    nan = whole.model_copy(update={"stopped": "the loss is nan at step 3 of 9"})
    assert layers.followed_by(whole).stopped is None
    assert layers.followed_by(nan).stopped == "the loss is nan at step 3 of 9"
    broken = layers.model_copy(update={"stopped": "the loss of layer 1 is not finite at step 2 of 9"})
    assert broken.followed_by(nan).stopped == (
        "the loss of layer 1 is not finite at step 2 of 9; the loss is nan at step 3 of 9"
    )
