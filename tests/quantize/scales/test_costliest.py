"""The weights that stay in BF16 since FP8 costs them most a byte."""

from fp8q.quantize.scales.costliest import Costliest, CostlyWeights, costliest_weights, stay_reasons

FAMILIES = [["l.q", "l.k"], ["l.o"], ["l.gate", "l.up"], ["l.experts.0.up"], ["l.zero"]]
NUMBERS = {"l.q": 20, "l.k": 10, "l.o": 10, "l.gate": 50, "l.up": 50, "l.experts.0.up": 50, "l.zero": 10}
#: Nats of each weight; a byte costs q and k 0.4, o 0.3, gate and up 0.02.
LOSSES = {"l.q": 4.0, "l.k": 8.0, "l.o": 3.0, "l.gate": 1.0, "l.up": 1.0, "l.experts.0.up": 1000.0, "l.zero": 0.0}


def chosen(share: float) -> list[list[str]]:
    weights = costliest_weights(FAMILIES, LOSSES, NUMBERS, share, ["l.experts"])
    return [one.modules for one in weights]


def test_weights_are_taken_in_falling_order_of_loss_a_byte_with_those_that_servers_join() -> None:
    assert chosen(0.2) == [["l.q", "l.k"], ["l.o"]]  # 30 and 10 of 200
    assert chosen(0.15) == [["l.q", "l.k"]]
    assert costliest_weights(FAMILIES, LOSSES, NUMBERS, 0.15, ["l.experts"]) == [
        CostlyWeights(modules=["l.q", "l.k"], kl_nats=12.0, bytes_share=0.15)
    ]


def test_what_does_not_fit_leaves_its_bytes_to_cheaper_ones() -> None:
    assert chosen(0.1) == [["l.o"]]  # q and k take 0.15
    assert chosen(0.04) == []


def test_neither_experts_nor_weights_that_lose_nothing_stay() -> None:
    assert chosen(1.0) == [["l.q", "l.k"], ["l.o"], ["l.gate", "l.up"]]
    assert ["l.experts.0.up"] in [one.modules for one in costliest_weights(FAMILIES, LOSSES, NUMBERS, 1.0)]


def test_the_reason_names_the_option() -> None:
    weights = [CostlyWeights(modules=["l.q", "l.k"], kl_nats=12.0, bytes_share=0.15)]
    reason = "its loss in FP8 is among the largest a byte (--bf16-weights 2.5%)"
    assert stay_reasons(Costliest(windows=8, kl_nats=20.0, weights=weights), 0.025) == {"l.q": reason, "l.k": reason}


def test_a_share_of_all_bytes_holds_all_weights() -> None:
    """Ten weights of a tenth each: ten times the share 0.1 is more than 1 where it is summed in binary."""
    families = [[f"l.{number}"] for number in range(10)]
    losses, numbers = {name: 1.0 for (name,) in families}, {name: 7 for (name,) in families}
    assert len(costliest_weights(families, losses, numbers, 1.0)) == 10
    assert len(costliest_weights(families, losses, numbers, 0.3)) == 3
