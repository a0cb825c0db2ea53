"""How many bits a product of codes keeps, by asking it for sums that have just one more.

A row's first product is 2^16, another one, `distance` places behind it, 2^(16 - p), and all others are zero. Exact is
2^16 + 2^(16 - p); an adder that keeps f bits behind the leading one gives it up to p = f and 2^16 beyond. The distance
tells where it happens: 1 is within one instruction, 32 is a chain of two, and from 128 on a sum that is begun anew
every 128 products has all of FP32's 23 bits. Three quarters of the last bit then tell cutting from rounding.
"""

from collections.abc import Callable

import torch

from fp8q.quantize.codes.encoding import CODE

#: Products of codes x [rows, in] and weight [out, in], float32 [rows, out].
Sums = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LEADING = 16
#: Bits that are probed: 2^(16 - 8) is a code that a weight of 1 leaves as it is; FP32 has no more than 23.
PROBED = range(8, 24)
#: Rows and outputs of the product: so many that cuBLAS does not split the row among processors.
SIZE = 512


def kept_bits(sums: Sums, distance: int, length: int = 4096, size: int = SIZE, device: str = "cpu") -> int:
    """Bits behind the leading one that `sums` keeps of what comes `distance` places later; 7 stands for fewer than 8,
    and 23 is FP32's.
    """
    found = _probe(sums, [2.0 ** (LEADING - p) for p in PROBED], distance, length, size, device)
    exact = [2.0**LEADING + 2.0 ** (LEADING - p) for p in PROBED]
    kept = PROBED.start - 1
    for p, ours, right in zip(PROBED, found, exact, strict=True):
        if ours != right:
            break
        kept = p
    return kept


def cuts(sums: Sums, distance: int, length: int = 4096, size: int = SIZE, device: str = "cpu") -> bool:
    """Whether three quarters of the last kept bit are lost (cut, toward zero), where rounding would make them one."""
    kept = kept_bits(sums, distance, length, size, device)
    last = 2.0 ** (LEADING - kept)
    return _probe(sums, [0.75 * last], distance, length, size, device)[0] == 2.0**LEADING


def _probe(sums: Sums, small: list[float], distance: int, length: int, size: int, device: str) -> list[float]:
    """The sums of 2^16 and each of `small`."""
    rows = -(-len(small) // size) * size
    x, weight = torch.zeros(rows, length), torch.ones(size, length)
    x[:, 0] = weight[:, 0] = 2.0 ** (LEADING // 2)
    x[: len(small), distance] = torch.tensor(small)
    assert x.to(CODE).float().equal(x), "every probe is a code"
    found = sums(x.to(CODE).to(device), weight.to(CODE).to(device))
    return [float(value) for value in found[: len(small), 0].cpu()]
