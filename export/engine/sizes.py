"""Sizes that are known at run time only, as a program computes them before its kernels: rows = 4 · seq.

copy={ name="…" output={"__mye6487_proxy.1" } input={"__mye6485_shape" } … }
mul={ name="…" output={"__mye6485_shape" } input={"__mye4877_shape_seq" "__s^4i64" } … }
add={ name="…" output={"__mye5741_shape" } input={"__mye4873_shape_batch" "__mye4873_shape_batch" } … }

So are `sub`, `max` and `min`; a number is `__s^64i64`, or `__s^M1i64` for -1, and in a branch `shape_subg0___s^64i64`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod

#: A size -> what makes it (`copy`, `mul`, `add`, `sub`, `max`, `min`), and of which sizes and numbers.
Sizes = Mapping[str, tuple[str, tuple[str, ...]]]
_MADE = re.compile(
    rb'^  (?P<how>copy|mul|add|sub|max|min)=\{ name="[^"\n]*" output=\{"(?P<made>[^"\n]*)" \} '
    rb'input=\{(?P<of>(?:"[^"\n]*" )*)\} ',
    re.MULTILINE,
)
_QUOTED = re.compile(r'"([^"]*)"')
_NUMBER = re.compile(r"(?:__s\^(\d+)i64|(\d+))")
_SIGNED = re.compile(r"(?:\w*__s\^)?(M?)(\d+)(?:i64)?")
_OPERATIONS: dict[str, Callable[[Sequence[int]], int]] = {
    "copy": lambda operands: operands[0],
    "mul": prod,
    "add": sum,
    "sub": lambda operands: operands[0] - sum(operands[1:]),
    "max": max,
    "min": min,
}
#: The depth of a computation of sizes that is followed.
_DEPTH = 32
#: From a size to what it is a multiple of: copies between host and device, and a product or two.
_STEPS = 8


def read_sizes(text: bytes) -> Sizes:
    """Parse the sizes in the text of a program."""
    return {
        match["made"].decode(errors="replace"): (
            match["how"].decode(),
            tuple(_QUOTED.findall(match["of"].decode(errors="replace"))),
        )
        for match in _MADE.finditer(text)
    }


def multiple(sizes: Sizes, name: str) -> tuple[int, str]:
    """Split a size into its factor and base, `(4, "seq")`; the base of a plain number is ""."""
    factor = 1
    for _ in range(_STEPS):
        operation, operands = sizes.get(name, ("", ()))
        numbers = [int(match[1] or match[2]) for match in map(_NUMBER.fullmatch, operands) if match]
        others = [size for size in operands if not _NUMBER.fullmatch(size)]
        if operation == "mul" and len(others) == 1:
            factor *= prod(numbers)
        elif operation == "add" and len(set(others)) == 1 and not numbers:
            factor *= len(others)
        elif operation != "copy" or len(others) != 1:
            break
        name = others[0]
    return (factor * int(name), "") if name.isdigit() else (factor, name)


def value_of(sizes: Sizes, name: str, known: Mapping[str, int], depth: int = _DEPTH) -> int | None:
    """Compute a size from the `known` ones; None where it depends on others, or in a way that is not read."""
    if name in known:
        return known[name]
    if number := _SIGNED.fullmatch(name):
        return int(number[2]) * (-1 if number[1] else 1)
    operation, operands = sizes.get(name, ("", ()))
    values = (
        [value_of(sizes, size, known, depth - 1) for size in operands] if depth and operation in _OPERATIONS else []
    )
    numbers = [value for value in values if value is not None]
    return _OPERATIONS[operation](numbers) if values and len(numbers) == len(values) else None
