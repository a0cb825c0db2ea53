"""Second terms in a call's last positions alone: the GEMMs of these rows are of two terms, all others of one."""

import numpy as np
import pytest
import torch
from gpu.waits import host_waits
from hypothesis import given
from hypothesis import strategies as st

from fp8q.calibrate.model.expert_modules import Expert, Experts, Routing
from fp8q.quantize.codes.encoding import CODE
from fp8q.quantize.reference.linear import CallPositions, FP8Linear, Tail, replace_linears

WIDTH, OUT = 32, 24


def layer(terms: int, tail: Tail | None = None, seed: int = 0) -> FP8Linear:
    """A layer of random codes; those of one seed differ in their terms alone."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randn(OUT, WIDTH, generator=random).mul(100).clamp(-448, 448).to(CODE)
    scales = torch.rand(OUT, generator=random) + 0.5
    made = FP8Linear(codes, scales, torch.tensor(2.0**-7), torch.randn(OUT, generator=random), "exact", terms)
    made.tail = tail
    return made


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().float()


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12), st.integers(1, 3))
def test_the_last_positions_and_decoded_ones_are_of_two_terms(
    positions: int, length: int, decoded: int, batch: int
) -> None:
    decoded = min(decoded, positions)
    x, tail = inputs(batch, positions), Tail(length, CallPositions(positions, decoded))
    one, two, found = layer(1)(x), layer(2)(x), layer(2, tail)(x)
    exact = min(length + decoded, positions)
    assert found.shape == (batch, positions, OUT)
    torch.testing.assert_close(found[:, positions - exact :], two[:, positions - exact :], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[:, : positions - exact], one[:, : positions - exact], rtol=1e-6, atol=1e-6)
    assert layer(2, tail)(x.flatten(0, 1)).equal(found.flatten(0, 1))  # as models do in front of their experts


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12), st.integers(1, 3))
def test_rows_are_those_whose_positions_are_in_the_tail(positions: int, length: int, decoded: int, batch: int) -> None:
    first = positions - min(decoded, positions) - length
    found = Tail(length, CallPositions(positions, min(decoded, positions))).rows(torch.empty(batch * positions, WIDTH))
    if first <= 0:
        assert found is None
    else:
        assert found is not None
        assert torch.equal(found, torch.where(torch.arange(batch * positions) % positions >= first)[0])


def test_the_rows_of_a_layer_are_found_without_a_wait() -> None:
    """Counted on the meta device, where a search by values is one wait."""
    tail, x = Tail(4, CallPositions(9)), torch.empty(2 * 9, WIDTH, device="meta")
    with host_waits() as counted:
        rows = tail.rows(x)
    assert rows is not None
    assert (counted.waits, counted.to_device, counted.to_memory, len(rows)) == (0, 0, 0, 8)
    with host_waits() as counted:
        torch.where(torch.arange(18, device="meta") % 9 >= 5)
    assert counted.waits == 1


def test_the_rows_of_all_experts_are_found_by_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [torch.tensor([7, 2, 4, 9]), torch.tensor([3, 8]), torch.tensor([0])]
    waits, tolist = 0, torch.Tensor.tolist

    def counting(tensor: torch.Tensor) -> object:
        nonlocal waits
        waits += 1
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counting)
    routing = Routing([(number, torch.zeros_like(token), token) for number, token in enumerate(tokens)])
    found = []
    for routing.current in range(3):
        found += [routing.rows_from(3, 5), routing.rows_from(3, 5)]  # of the gate and of up
    monkeypatch.undo()
    assert [rows.tolist() for rows in found] == [[2, 3], [2, 3], [0, 1], [0, 1], [], []]
    assert waits == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tail_is_exact_and_what_is_before_it_is_rounded(dtype: torch.dtype) -> None:
    x, tail = inputs(2, 9), Tail(4, CallPositions(9))
    made = layer(2, tail)
    assert made.bias is not None
    weight = made.codes.double() * made.weight_scale.double()[:, None]
    exact = x.double() @ weight.t() + made.bias.double()
    error = (made(x.to(dtype)).double() - exact).abs().amax((0, 2)).numpy()
    limit = 1e-3 if dtype == torch.float32 else 2.0**-8 * float(exact.abs().max())
    assert (error[5:] <= limit).all()
    assert (error[:5] > 0.5).all()


def test_rows_of_an_expert_are_exact_by_the_position_of_their_tokens() -> None:
    """Experts get the rows of their tokens alone, in another order."""
    call = CallPositions(5)

    def experts(terms: int, tail: bool) -> Experts:
        torch.manual_seed(0)
        made = Experts(Expert(WIDTH, OUT, torch.nn.functional.silu, torch.empty(())) for _ in range(3))
        layers: dict[str, torch.nn.Module] = {}
        for number, name in ((number, name) for number in range(3) for name in ("gate_proj", "up_proj")):
            rule = Tail(2, call, made) if tail else None
            layers[f"{number}.{name}"] = layer(terms, rule, number)
        for number in range(3):
            linear = torch.nn.Linear(OUT, WIDTH, bias=False)
            linear.weight.data = torch.randn(WIDTH, OUT, generator=torch.Generator().manual_seed(number))
            layers[f"{number}.down_proj"] = linear
        replace_linears(made, layers)
        for number, expert in enumerate(made.experts):
            assert expert.gate_proj is layers[f"{number}.gate_proj"]
        return made

    x = inputs(2, 5).flatten(0, 1)
    chosen = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0], [0, 2], [2, 1], [1, 2], [0, 1], [2, 0], [1, 0]])
    shares = torch.full((10, 2), 0.5)
    with torch.no_grad():
        one, two, found = (experts(*form)(x, chosen, shares) for form in ((1, False), (2, False), (2, True)))
    exact = np.isin(np.arange(10) % 5, (3, 4))
    torch.testing.assert_close(found[exact], two[exact], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[~exact], one[~exact], rtol=1e-5, atol=1e-5)
    assert (one - two).abs().amax(1).min() > 0.01
