"""MXFP8 as the benchmark emulates it, on numbers that can be checked by hand."""

import pytest
import torch
from mxfp8 import block_weight, mx_exponents, mx_values

from fp8q.quantize.codes.blocks import group_values


@pytest.mark.parametrize(
    ("amax", "floor", "up"),
    [
        (448.0, 0, 0),
        (449.0, 0, 1),
        (256.0, 0, 0),
        (511.0, 0, 1),
        (512.0, 1, 1),
        (1.0, -8, -8),
        (0.875, -9, -9),
        (0.0, -127, -127),
    ],
)
def test_the_shared_exponent_is_of_the_largest_magnitude(amax: float, floor: int, up: int) -> None:
    found = torch.tensor([amax])
    assert (mx_exponents(found, False).item(), mx_exponents(found, True).item()) == (floor, up)


def test_floor_saturates_between_448_and_512_and_up_does_not() -> None:
    x = torch.zeros(2, 40)
    x[0, 0], x[0, 1], x[1, 39] = 500.0, 1.0, 3.0
    floor, up = mx_values(x, False), mx_values(x, True)
    assert (floor[0, 0].item(), up[0, 0].item()) == (448.0, 512.0)  # 500 / 2 = 250 lies between 240 and 256
    assert (floor[0, 1].item(), up[0, 1].item()) == (1.0, 1.0)
    assert floor[1, 39].item() == up[1, 39].item() == 3.0  # a block of 8 values
    assert floor.count_nonzero() == 3


def test_groups_and_blocks_of_128_have_scales_of_their_own() -> None:
    x = torch.zeros(1, 200)
    x[0, 0], x[0, 130] = 448.0, 0.01
    torch.testing.assert_close(group_values(x, powers=False), x)
    weight = torch.zeros(130, 200, dtype=torch.bfloat16)
    weight[0, 0], weight[129, 150] = 3.0, 0.001
    torch.testing.assert_close(block_weight(weight, "bf16"), weight.float(), rtol=0.005, atol=0)
    # 3.0 is a code of E4M3, and 0.001 is 1.024 of the power of two next to it
    expected = weight.float()
    expected[129, 150] = 2.0**-10
    assert torch.equal(block_weight(weight), expected)
    assert torch.equal(block_weight(weight, "bf16", again=True), expected)
