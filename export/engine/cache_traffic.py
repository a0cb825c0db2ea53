"""Read from a plan how many bytes of the KV cache a decode step reads, and whether it writes a copy of it.

A step of a few bytes of weights a row is bound by the cache that it reads. A kernel that concatenates the past and the
new keys reads all of it and writes it again in the compute type, which attention then reads: 5 bytes for an FP8 value
where 1 is enough. The program of a profile shows this: the statements that read an input of the cache, what each of
them gives, and who reads that. A statement that is no GEMM and gives half as many values as it reads of the
cache, or more, makes a copy.

Sizes are those of the profile's likely shape: sizes that the program computes are computed here (`program.value_of`)
from the sizes of its inputs.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..onnx_file.indexed import Indexed
from .info import first_few
from .plan import Plan
from .profiles import Profile
from .program import Program, Statement, root_of, value_of

#: Bytes of a value, by the type's name.
BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4, "int8": 1}
_BOUND = re.compile(r"(?P<name>.+?)(?: \[profile \d+\])?(?:\.\d+)?")
_PAST = "past_key_values."
#: A kernel that is a GEMM, with what is computed in front of it and behind.
_GEMM = re.compile(r"__myl_\w*Fc")


@dataclass(frozen=True)
class CacheTraffic:
    """The bytes of one decode step of `rows` rows over `slots` slots: `held` in the cache itself, of `values` values;
    `read` by kernels, copies of it included; `written` as copies. `intermediate`: the bytes that are written of all
    other results that grow with the number of slots. `copying`: the kernels that make the copies.
    """

    rows: int
    slots: int
    values: int
    held: int
    read: int
    written: int
    intermediate: int
    copying: tuple[str, ...]

    @property
    def read_per_value(self) -> float:
        """The bytes that are read for each value of the cache."""
        return self.read / self.values

    def __str__(self) -> str:
        """Format it as a sentence without its subject."""
        if self.copying:
            named = first_few(self.copying)
            copies = f"writes {self.written:,} of copies, {self.written / self.values:.2f} a value ({named})"
        else:
            copies = "copies nothing"
        return (
            f"reads {self.read:,} bytes of a cache of {self.values:,} values, {self.read_per_value:.2f} a value, and "
            f"{copies}; other results that grow with it are {self.intermediate:,} bytes"
        )


def cache_traffic(plan: Plan, graph: Indexed, profiles: Sequence[Profile]) -> CacheTraffic | None:
    """Count the bytes of a step in the profile of the fewest tokens; None where the plan does not show them."""
    if not plan.programs or not profiles:
        return None
    index = min(range(len(profiles)), key=lambda at: profiles[at].seq[2])
    programs = [program for program in plan.programs if program.profile == index]
    if not programs:
        return None
    program = max(programs, key=lambda listed: len(listed.statements))  # the others are of single kernels
    profile = profiles[index]
    slots = profile.capacity[1]
    likely, doubled = (_counted(program, graph, _at(profile, count)) for count in (slots, 2 * slots))
    if likely is None or doubled is None or not likely.values:
        return None
    grown = sum(size for name, size in likely.others.items() if doubled.others[name] > size)
    return CacheTraffic(
        profile.batch[1], profile.capacity[1], likely.values, likely.held, likely.read, likely.written, grown,
        tuple(dict.fromkeys(likely.copying)),
    )  # fmt: skip


def _at(profile: Profile, slots: int) -> Profile:
    """The profile with that many slots as the likely number."""
    return profile.model_copy(update={"capacity": (0, slots, slots)})


@dataclass(frozen=True)
class _Count:
    """As `CacheTraffic`; `others`: tensor -> its bytes, of results that are no copies."""

    values: int
    held: int
    read: int
    written: int
    copying: tuple[str, ...]
    others: Mapping[str, int]


def _counted(program: Program, graph: Indexed, profile: Profile) -> _Count | None:
    bound = {match["name"]: name for name in program.bound if (match := _BOUND.fullmatch(name))}
    pasts = {name for plain, name in bound.items() if plain.startswith(_PAST)}
    known = dict(_known(program, graph, profile, bound))

    def size(name: str) -> int | None:
        tensor = program.tensors.get(name)
        values = [value_of(program.sizes, symbol, known) for symbol in tensor.symbols] if tensor else [None]
        if None in values:
            return None
        return math.prod(value for value in values if value is not None)

    def in_bytes(name: str) -> int:
        return (size(name) or 0) * BYTES.get(program.type(name), 1)

    if not pasts or any(size(name) is None or program.type(name) not in BYTES for name in pasts):
        return None
    values = sum(size(name) or 0 for name in pasts)
    held = sum(map(in_bytes, pasts))
    read = 0
    written = 0
    copying: list[str] = []
    copies = set(pasts)
    others: dict[str, int] = {}
    outputs = {program.root(name)[0] for name in program.bound}
    for statement in program.statements:
        taken = [name for name in statement.inputs if program.root(name)[0] in copies]
        read += sum(map(in_bytes, taken))
        of_cache = sum(size(name) or 0 for name in taken)
        for name in statement.outputs:
            root = program.root(name)[0]
            count = size(name)
            if count is None:
                if taken:
                    return None
                continue  # a size that depends on values, as of a mask that is broadcast: none of the cache's
            if taken and root not in outputs and not _multiplies(statement) and 2 * count >= of_cache / len(taken):
                copies.add(root)
                written += in_bytes(name)
                copying.append(statement.name)
            elif root not in outputs:
                others[name] = in_bytes(name)
    return _Count(values, held, read, written, tuple(copying), others)


def _multiplies(statement: Statement) -> bool:
    return bool(statement.nodes) or _GEMM.fullmatch(statement.name) is not None


def _known(program: Program, graph: Indexed, profile: Profile, bound: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the sizes of the program's inputs at the likely shape of a profile."""
    for plain, name in bound.items():
        value = graph.inputs.get(plain)
        tensor = program.tensors.get(name)
        if value is None or tensor is None:
            continue
        dims = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for symbol, size in zip(tensor.symbols, profile.shapes(plain, dims)[1], strict=False):
            if not symbol.isdigit():
                yield root_of(program.sizes, symbol), size
