"""Compare the numbers of an engine with those of a run: the codes of each module's weight, the factors `s_x ·
s_w[channel]` behind each GEMM, and the scale of each quantized input.

Types are not enough: an engine with other scales, of a fine-tune of the same model, or with two layers' weights
exchanged runs the same program. The program shows which constant belongs to which GEMM: the second operand of a
`fully_connected` are the codes; a kernel that reads its result takes the factors beside it; the kernel that made its
first operand takes the scale of the input, as a literal `1 / s_x` or, fused with the norm in front of it, as `w / s_x`
(or divides by `s_x / w`).
Columns of merged GEMMs lie in the order of the GEMM's name. Sizes may be padded.

Numbers that the plan does not show are reported too (`Difference.told` is false), and fail an engine if they are codes
or factors. Only the scale of an input may be hidden inside a kernel's code (attention that quantizes its own result).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .expected_gemms import Codes, ExpectedGemm, Numbers
from .plan import Plan
from .program import Pool, Program, ProgramTensor, Statement

#: The numbers of a module that are compared.
CODES = "codes"
FACTORS = "factors"
INPUT = "input scale"
#: Where the compiler multiplies or divides several numbers beforehand, in an order of its own.
RELATIVE = 1e-6
#: Kernels between a GEMM and the one that quantized its input, or scales its result: they only move numbers.
MOVES = 4
OPERANDS = 2
_FP32 = 4
#: The rank of a matrix in a GEMM of a batch.
_BATCHED = 3
#: Kernels are named after their steps: this one divides by its constant before it rounds to codes.
_DIVIDES = "DivCast"
_VALUES = ("fp32", "bf16", "fp16")
#: A node that a kernel's own program multiplies by a number, the profile, and the number.
Literal = tuple[str, str | None, np.float32]


@dataclass(frozen=True)
class Difference:
    """A number of a module that differs between the engine (`found`) and the run (`expected`).

    Where the engine does not show the number, `told` is false and `found` says why. The names of the fields are keys of
    `fp8q engine --json`.
    """

    module: str
    profile: str
    what: str
    found: str
    expected: str
    told: bool = True

    def __str__(self) -> str:
        """Format it in one line."""
        if not self.told:
            return f"{self.module}: its {self.what} cannot be told, {self.found}"
        return f"{self.module}: {self.found}, and the run has {self.expected}"


@dataclass(frozen=True)
class ProgramGemm:
    """One GEMM in the program of one profile, with the expected numbers of its modules in column order."""

    program: Program
    profile: str
    pool: Pool
    statement: Statement
    gemms: tuple[ExpectedGemm, ...]

    def constant(self, name: str) -> npt.NDArray[np.generic] | None:
        """Read a constant."""
        return self.pool.read(self.program.tensors.get(name))

    def numbers(self, names: Iterable[str]) -> list[Numbers]:
        """The FP32 constants among `names`, each flattened."""
        constants = (self.constant(name) for name in names)
        return [
            constant.astype(np.float32).ravel()
            for constant in constants
            if constant is not None and constant.dtype == np.float32
        ]

    def alpha(self, statement: Statement) -> np.float32 | None:
        """The scalar that a GEMM multiplies its sums by."""
        numbers = self.numbers(statement.inputs[OPERANDS : OPERANDS + 1])
        if numbers and numbers[0].size == 1:
            return np.float32(numbers[0][0])
        return None

    def columns(self, gemm: ExpectedGemm) -> slice:
        """The columns of a module in the GEMM."""
        start = sum(len(earlier.factors) for earlier in self.gemms[: self.gemms.index(gemm)])
        return slice(start, start + len(gemm.factors))

    def differs(self, gemm: ExpectedGemm, what: str, actual: str, expected: str) -> Difference:
        """Make the Difference for a number that is not the expected one."""
        return Difference(gemm.module, self.profile, what, actual, expected)

    def untold(self, gemm: ExpectedGemm, what: str, reason: str) -> Difference:
        """Make the Difference for a number that the plan does not show."""
        return Difference(gemm.module, self.profile, what, reason, "", told=False)


def compare_numbers(
    plan: Plan, pool: Pool | None, gemms: Iterable[ExpectedGemm], attention: Mapping[str, tuple[float, float]],
    profiles: Iterable[str],
) -> Iterator[Difference]:  # fmt: skip
    """Yield a Difference for every GEMM that computes with other numbers than `gemms`, or with unknown ones.

    `attention`: node -> the scales of both sides; `profiles`: their names, in order.
    """
    by_node = {gemm.node: gemm for gemm in gemms}
    named = dict(enumerate(profiles))
    literals = [
        (node, named.get(program.profile), number) for program in plan.programs for node, number in program.scalings
    ]
    same: set[tuple[str, int | None]] = set()  # codes that were compared already: profiles share their constants
    for program in plan.programs:
        profile = named.get(program.profile, str(program.profile))
        for statement in program.statements:
            if not (merged := tuple(by_node[node] for node in statement.nodes if node in by_node)):
                continue
            if pool is None or len(merged) < len(statement.nodes):
                reason = (
                    "its constants do not read" if pool is None else "it is merged with a GEMM that is not expected"
                )
                yield from (
                    Difference(gemm.module, profile, what, reason, "", told=False)
                    for gemm in merged
                    for what in (CODES, FACTORS, INPUT)
                )
                continue
            seen = ProgramGemm(program, profile, pool, statement, merged)
            for gemm in merged:
                yield from _codes(seen, gemm, by_node.values(), same)
                yield from _factors(seen, gemm)
                yield from _input(seen, gemm, attention, literals)


def _codes(
    seen: ProgramGemm, gemm: ExpectedGemm, others: Iterable[ExpectedGemm], same: set[tuple[str, int | None]]
) -> Iterator[Difference]:
    """Compare the codes that the GEMM multiplies."""
    name = next((name for name in seen.statement.inputs[:OPERANDS] if seen.constant(name) is not None), "")
    engine_codes = _codes_of_columns(seen.constant(name), gemm.codes.shape, seen.columns(gemm))
    if engine_codes is None:
        yield seen.untold(gemm, CODES, "its GEMM takes no constant of their size")
        return
    if (key := (gemm.module, seen.program.tensors[name].constant)) in same:
        return
    if np.array_equal(engine_codes, gemm.codes):
        same.add(key)
        return
    owner = next((other.module for other in others if _same(engine_codes, other.codes)), None)
    number = int((engine_codes != gemm.codes).sum())
    text = f"the codes of {owner}" if owner else f"{number} codes of {engine_codes.size} that are others"
    yield seen.differs(gemm, CODES, f"its GEMM multiplies {text}", "its own in model.onnx")


def _codes_of_columns(
    constant: npt.NDArray[np.generic] | None, shape: tuple[int, ...], columns: slice
) -> npt.NDArray[np.generic] | None:
    """Cut the codes [in, out] of a module from the constant of its GEMM; None if it has no codes of this shape.

    An engine for a batch of 1 has matrices [1, in, out].
    """
    if constant is None or constant.dtype != np.uint8:
        return None
    if constant.ndim == _BATCHED and len(constant) == 1:
        constant = constant[0]
    if constant.ndim != len(shape):
        return None
    codes = constant[: shape[0], columns]
    if codes.shape != shape:
        return None
    return codes


def _same(engine_codes: npt.NDArray[np.generic], codes: Codes) -> bool:
    """Compare two matrices, the first rows first."""
    return np.array_equal(engine_codes[:1], codes[:1]) and np.array_equal(engine_codes, codes)


def _factors(seen: ProgramGemm, gemm: ExpectedGemm) -> Iterator[Difference]:
    """Compare the factors of the GEMM's columns."""
    columns = seen.columns(gemm)
    covered = np.zeros(len(gemm.factors), bool)
    if (alpha := seen.alpha(seen.statement)) is None:
        yield seen.untold(gemm, FACTORS, "its GEMM states no alpha")
        return
    for kernel, start, candidates in _applied(seen):
        parts = [_overlap(start, numbers * alpha, columns) for numbers in candidates]
        if not candidates and columns.start <= start < columns.stop:
            yield seen.untold(gemm, FACTORS, f"{kernel} reads its GEMM and takes none of them")
            return
        if not (parts := [(inside, factors) for inside, factors in parts if factors.size]):
            continue
        equal = [inside for inside, factors in parts if np.array_equal(factors, gemm.factors[inside])]
        if not equal:
            inside, factors = parts[0]
            at = int(np.flatnonzero(factors != gemm.factors[inside])[0])
            scaled = f"its GEMM is scaled by {factors[at]:.9g} in channel {inside.start + at}"
            yield seen.differs(gemm, FACTORS, scaled, f"s_x · s_w = {gemm.factors[inside][at]:.9g}")
            return
        covered[equal[0]] = True
    if not covered.all():
        yield seen.untold(gemm, FACTORS, "no kernel takes them together with its GEMM")


def _overlap(start: int, numbers: Numbers, columns: slice) -> tuple[slice, Numbers]:
    """Cut `numbers`, which belong to the GEMM's columns from `start` on, to a module's `columns`; return their place
    among the module's columns, and the numbers.
    """
    first = max(start, columns.start)
    last = max(min(start + numbers.size, columns.stop), start)
    return slice(first - columns.start, last - columns.start), numbers[first - start : max(last - start, 0)]


def _applied(seen: ProgramGemm) -> Iterator[tuple[str, int, list[Numbers]]]:
    """Yield each kernel that reads the GEMM's result: its name, the first column that it reads, and the FP32 constants
    next to that input, the following one first.

    Kernels that only move the result are looked through. Multiplication commutes, so the factors of one part may come
    before it; with several parts in a row each must have its factors next to it, so that an exchange is noticed.
    """
    program = seen.program
    result = seen.statement.outputs[0]
    rows = _known_rows(program.tensors[result])
    waiting = [(result, 0, MOVES)]
    while waiting:
        made, begin, moves = waiting.pop()
        root, origin = program.root(made)
        row = _row_stride(program.tensors[made])
        for reader, index in program.readers.get(root, ()):
            name = reader.inputs[index]
            column = begin + (program.root(name)[1] - origin) // _FP32 % row
            neighbours = [reader.inputs[at] for at in (index + 1, index - 1) if 0 <= at < len(reader.inputs)]
            width = program.width(name) // rows
            if numbers := [constant for constant in seen.numbers(neighbours) if constant.size == width]:
                yield reader.name, column, numbers
            elif moves and (onward := moved_by(program, reader, name)) is not None:
                waiting.append((onward, column, moves - 1))
            else:
                yield reader.name, column, []


def _row_stride(tensor: ProgramTensor) -> int:
    """The number of values from one row of a GEMM's result to the next; 1 where it is not known."""
    strides = tensor.strides
    if len(strides) == _BATCHED and tensor.dims[0] == 1:
        strides = strides[1:]
    if not strides:
        return 1
    return max(strides[0], 1)


def _known_rows(tensor: ProgramTensor) -> int:
    """The rows of a GEMM's result that are known when the engine is built: two terms of one token have two."""
    return math.prod(size for size in tensor.dims[:-1] if size)


def moved_by(program: Program, kernel: Statement, name: str) -> str | None:
    """The output of a kernel that only moves `name`; None for any other kernel."""
    types = [program.type(made) for made in kernel.outputs]
    if kernel.nodes or types != ["fp32"] or "Mul" in kernel.name:
        return None
    (made,) = kernel.outputs
    same = program.width(made) == program.width(name)
    if same and [program.type(taken) for taken in kernel.inputs].count("fp32") == 1:
        return made
    return None


def _input(
    seen: ProgramGemm,
    gemm: ExpectedGemm,
    attention: Mapping[str, tuple[float, float]],
    literals: Iterable[Literal],
) -> Iterator[Difference]:
    """Compare the scale that the GEMM's input was quantized with."""
    activation = next((name for name in seen.statement.inputs[:OPERANDS] if seen.constant(name) is None), "")
    maker = quantizer_of(seen.program, activation, gemm.quantizer)
    if maker is None:
        yield seen.untold(gemm, INPUT, "no kernel with its QuantizeLinear makes what it reads")
        return
    if maker.nodes:
        yield from _folded(seen, gemm, maker, attention)
        return
    constants = seen.numbers(maker.inputs)
    quantized_in = (gemm.quantizer, seen.profile)
    constants += [np.array([number]) for *where, number in literals if tuple(where) == quantized_in and not constants]
    if _DIVIDES in maker.name:
        constants = [np.reciprocal(numbers) for numbers in constants if np.all(numbers)] + constants
    scales = [scale for numbers in constants for scale in _scales(numbers, gemm)]
    if any(math.isclose(scale, gemm.scale, rel_tol=RELATIVE) for scale in scales):
        return
    if scales:
        yield seen.differs(gemm, INPUT, f"its input is quantized with the scale {scales[0]:.6g}", f"{gemm.scale:.6g}")
    else:
        yield seen.untold(gemm, INPUT, f"{maker.name} takes no constant that could be it")


def _scales(numbers: Numbers, gemm: ExpectedGemm) -> Iterator[float]:
    """The scales that a kernel's constant may encode: `1 / s`, or a norm's weights divided by s."""
    if numbers[0] and np.all(numbers == numbers[0]):
        yield 1 / float(numbers[0])
    for norm in gemm.norms:
        at = int(np.argmax(np.abs(norm)))
        if norm.size == numbers.size and norm[at] and numbers[at]:
            scale = float(norm[at]) / float(numbers[at])
            if np.allclose(norm, numbers * scale, rtol=RELATIVE, atol=0):
                yield scale


def quantizer_of(program: Program, name: str, quantizer: str) -> Statement | None:
    """The statement that quantized a GEMM's input: the kernel with its QuantizeLinear, or a GEMM with an FP8
    result.

    Kernels that only move codes are looked through, and so are those that gather an expert's rows from codes that were
    made once for all experts: they have the QuantizeLinear in their names. A kernel that takes codes and values as wide
    as the input makes its codes: a decode step's adds the new token's value, which may be codes, before it quantizes.
    Codes of the cache, which are inputs of the program, are none of a GEMM's input.
    """
    held = False
    for _ in range(MOVES):
        maker = program.makers.get(program.root(name)[0])
        if maker is None or maker.nodes:
            return maker
        codes = [source for source in maker.inputs if program.type(source) == "fp8" and source not in program.bound]
        widths = {program.width(source) for source in maker.inputs if program.type(source) in _VALUES}
        if (held := held or quantizer in maker.layers) and (
            not codes or widths & {program.width(name), program.width(codes[0])}
        ):
            return maker
        if len(codes) != 1:
            return None
        (name,) = codes
    return None


def _folded(
    seen: ProgramGemm, gemm: ExpectedGemm, maker: Statement, attention: Mapping[str, tuple[float, float]]
) -> Iterator[Difference]:
    """Compare the factor of an attention GEMM with an FP8 result, which includes the scale of the next input."""
    sides = next((attention[node] for node in maker.nodes if node in attention), None)
    alpha = seen.alpha(maker)
    label = "+".join(maker.nodes)
    if sides is None or alpha is None or not alpha:
        yield seen.untold(gemm, INPUT, f"{label} makes what it reads")
        return
    scale = sides[0] * sides[1] / float(alpha)
    if not math.isclose(scale, gemm.scale, rel_tol=RELATIVE):
        yield seen.differs(gemm, INPUT, f"{label} quantizes its input with the scale {scale:.6g}", f"{gemm.scale:.6g}")
