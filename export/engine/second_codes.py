"""Tell whether an engine multiplies both terms of the inputs that are expected in two.

GEMMs, types, codes, factors and scales of an engine of one term are the same: the second term is twice the rows, and
some arithmetic in the kernels around the GEMM. So it is read from the program of each profile that

- one GEMM computes the module, and no second one a term of it;
- the tensor of its codes has other rows than the token ids, or than GEMMs of one term: it is not one term alone;
- the kernel that makes the codes, or one just before it, takes the scale, which the first codes are multiplied by to
  see what they leave, and a 16, which that is multiplied by;
- each kernel that reads the GEMM takes a 1/16 for each part that it reads, which the second half is multiplied by.

With a tail the codes have more positions than the call, which the program computes before its kernels (`sizes`): for
calls of a few lengths these are held to be those of the tail, and its beginning is among the sizes that the kernels
before and behind the GEMM take. A kernel that serves two GEMMs may take it for either, and whether the rows that
are added are the last or the first is not told, since both have the same sizes: lint holds the graph to that.

Scales are powers of two and may be 16 and 1/16 too; kernels get them as literals, under names of their own.

Of attention in FP8 queries and probabilities are such, one term below the other among the rows of each head. How many
rows that is for each token the program computes before its kernels (`sizes`), and the graph says how many it has to be.
The kernel that reads the scores also divides them by the head size's root, which makes 1/16 too for heads of 256: so
the number next to the GEMM, on either side of it, is held to be the share of its second half.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product as pairs
from math import prod

from ...options import Form
from ...quantize.codes.formats import TWO_TERMS
from .expected_gemms import ExpectedAttention, ExpectedGemm
from .numbers import MOVES, OPERANDS, Difference, moved_by, quantizer_of
from .plan import Plan
from .program import Pool, Program, ProgramTensor, Statement, multiple, value_of

#: The name of the check, in Difference.what.
TERMS = "two terms"
_LITERAL = "const-lit"
_TOKENS = "input_ids"
_RANK = 3
_MATRIX = 2
#: A batch that is no size of anything else, to compute sizes for.
_BATCH = 1009


def compare_terms(
    plan: Plan, pool: Pool, gemms: Sequence[ExpectedGemm], profiles: Sequence[str], forms: Mapping[str, Form]
) -> Iterator[Difference]:
    """Yield those of `gemms`, expected in two terms, that do not multiply both, or where this is unknown.

    `profiles`: their names, in order. `forms`: module -> the form of its input.
    """
    for program in plan.programs:
        profile = profiles[program.profile]
        by_module = {
            numbers.module: [statement for statement in program.statements if numbers.node in statement.nodes]
            for numbers in gemms
        }
        roots = {program.root(matching[0].outputs[0])[0] for matching in by_module.values() if matching}
        for gemm in gemms:
            statements = by_module[gemm.module]
            if len(statements) > 1:
                what = f"it is {len(statements)} GEMMs"
                yield Difference(gemm.module, profile, TERMS, what, "one of two terms")
            elif statements:
                read = _Read(program, pool)
                tail = forms[gemm.module].tail
                for what, expected, known in _faults(read, gemm, statements[0], roots, tail):
                    yield Difference(gemm.module, profile, TERMS, what, expected, known)


def compare_attention(
    plan: Plan, pool: Pool, gemms: Sequence[ExpectedAttention], profiles: Sequence[str]
) -> Iterator[Difference]:
    """Yield those of the attention `gemms`, expected in two terms, that do not multiply both, or where this is unknown.

    GEMMs inside a fused attention kernel are left out.
    """
    for program, gemm in pairs(plan.programs, gemms):
        profile = profiles[program.profile]
        statements = [statement for statement in program.statements if gemm.node in statement.nodes]
        if len(statements) > 1:
            yield Difference(gemm.node, profile, TERMS, f"it is {len(statements)} GEMMs", "one of two terms")
        for statement in statements[:1]:
            for what, expected, known in _faults_of_attention(_Read(program, pool), gemm, statement):
                yield Difference(gemm.node, profile, TERMS, what, expected, known)


class _Read:
    """Read the kernels and constants of one program."""

    def __init__(self, program: Program, pool: Pool):
        self.program = program
        self.pool = pool

    def singles(self, kernels: Iterable[Statement], literals: bool = False) -> list[float]:
        """The scalar constants of kernels, `literals` included."""
        taken = [name for kernel in kernels for name in kernel.inputs if literals or _LITERAL not in name]
        constants = [self.pool.read(self.program.tensors.get(name)) for name in taken]
        return [
            float(constant.ravel()[0])
            for constant in constants
            if constant is not None and constant.size == 1 and constant.dtype != "u1"
        ]

    def before(self, kernel: Statement) -> list[Statement]:
        """A kernel, and the producers of its inputs."""
        makers = (self.program.makers.get(self.program.root(name)[0]) for name in kernel.inputs)
        return [kernel, *(maker for maker in makers if maker is not None and not maker.nodes)]


#: The value in the engine, the expected one, and whether the engine shows it.
Fault = tuple[str, str, bool]


def _faults(
    read: _Read, gemm: ExpectedGemm, statement: Statement, roots: Collection[str], tail: int | None
) -> Iterator[Fault]:
    program = read.program
    divisor = TWO_TERMS.divisor
    codes = next(
        (name for name in statement.inputs[:OPERANDS] if read.pool.read(program.tensors.get(name)) is None), ""
    )
    codes_tensor = program.tensors.get(program.root(codes)[0])
    fault = (
        _fault_of_rows(program, codes_tensor, roots)
        if tail is None
        else _fault_of_positions(program, codes_tensor, tail)
    )
    if fault:
        yield fault
        if fault[-1]:
            return
    yield from _faults_of_codes(read, codes, gemm.quantizer, float(gemm.scale))
    readers = [reader for reader, _ in _readers(program, program.root(statement.outputs[0])[0])]
    for reader in readers:
        parts = sum(program.root(name)[0] in roots for name in reader.inputs)
        if (taken := read.singles([reader]).count(1 / divisor)) < parts:
            what = f"{reader.name} reads {parts} GEMMs of two terms and takes {taken} times 1/{divisor}"
            yield what, "the second half a sixteenth of each", True
    if tail is not None and fault is None:
        maker = quantizer_of(program, codes, gemm.quantizer)
        yield from _faults_of_beginning(program, [*readers, *([] if maker is None else read.before(maker)[:1])], tail)


def _fault_of_rows(program: Program, codes: ProgramTensor | None, roots: Collection[str]) -> Fault | None:
    """Tell whether codes have the rows of one term; None where they have others."""
    single = _rows_of_one_term(program, codes, roots)
    if codes is None or not single:
        return "the rows of its codes do not read", "", False
    if codes.symbols[0] in single:
        return ("its codes have the rows of one term", "both of them", True)
    return None


def _fault_of_positions(program: Program, codes: ProgramTensor | None, tail: int) -> Fault | None:
    """Tell whether codes [..., in] have other rows than a call's positions and those of its `tail` again; None where
    they have these.
    """
    unread = "the rows of its codes do not read", "", False
    if codes is None or (call := _call_sizes(program)) is None:
        return unread
    batch, seq = call
    batch_size = int(batch) if batch.isdigit() else _BATCH
    for positions in _lengths(seq, tail):
        known = _known_sizes(batch, seq, positions)
        sizes = [value_of(program.sizes, size, known) for size in codes.symbols[:-1]]
        rows = prod(size for size in sizes if size is not None)
        expected = positions + min(positions, tail)
        if None in sizes or not sizes:
            return unread
        if rows != batch_size * expected:
            what = f"its codes have {rows / batch_size:g} positions for a call of {positions}"
            return what, f"{expected}, with its tail", True
    return None


def _faults_of_beginning(program: Program, kernels: Iterable[Statement], tail: int) -> Iterator[Fault]:
    """Yield the kernels around a GEMM that do not take the position at which the tail of a long call begins."""
    batch, seq = _call_sizes(program) or ("", "")
    if not seq or seq.isdigit():  # a decode step: all of it is tail
        return
    positions = max(_lengths(seq, tail))
    for kernel in kernels:
        sizes = {value_of(program.sizes, name, _known_sizes(batch, seq, positions)) for name in kernel.inputs}
        if positions - tail not in sizes:
            yield f"{kernel.name} does not take where the tail begins", f"the last {tail} positions", True


def _call_sizes(program: Program) -> tuple[str, str] | None:
    """The sizes that are the batch and the number of positions of a call, digits where they are fixed; None where they
    do not read.
    """
    tokens = next((program.tensors.get(name) for name in program.bound if name.startswith(_TOKENS)), None)
    if tokens is None or len(tokens.symbols) < _MATRIX:
        return None
    (rows, batch), (factor, seq) = (multiple(program.sizes, size) for size in tokens.symbols)
    return batch or str(rows), seq or str(factor)


def _known_sizes(batch: str, seq: str, positions: int) -> dict[str, int]:
    """The sizes of a call by name; those that are fixed have none."""
    sizes = {seq: positions, batch: _BATCH}
    return {name: size for name, size in sizes.items() if not name.isdigit()}


def _lengths(seq: str, tail: int) -> tuple[int, ...]:
    """Lengths of calls that tell a tail from other forms: its own if it is fixed."""
    if seq.isdigit():
        return (int(seq),)
    return (1, tail, tail + 1, 3 * tail + 1)


def _faults_of_codes(read: _Read, codes: str, quantizer: str, scale: float) -> Iterator[Fault]:
    """Yield the operations of the second term that the kernels before its codes lack."""
    divisor = TWO_TERMS.divisor
    expected = f"{TWO_TERMS.divisor} times what the first term leaves"
    if (maker := quantizer_of(read.program, codes, quantizer)) is None:
        yield "no kernel with its QuantizeLinear makes its codes", "", False
    elif divisor not in read.singles(read.before(maker)):
        yield f"{maker.name} makes its codes without a {divisor}", expected, True
    elif scale not in (1, *read.singles(read.before(maker), literals=True)):
        yield f"{maker.name} makes its codes without the scale of the first", expected, True


def _faults_of_attention(read: _Read, gemm: ExpectedAttention, statement: Statement) -> Iterator[Fault]:
    program = read.program
    codes = statement.inputs[0]
    share = 1 / TWO_TERMS.divisor
    if gemm.rows is None or (rows := _rows_a_token(program, codes)) is None:
        yield "the rows of its codes do not read", "", False
    elif rows != gemm.rows:
        yield f"its codes have {rows} rows a token", f"{gemm.rows}, those of both terms", True
        return
    yield from _faults_of_codes(read, codes, gemm.quantizer, gemm.scale)
    root = program.root(statement.outputs[0])[0]
    if not (readers := _readers(program, root)):
        yield "no kernel reads its GEMM", "", False
    for reader, at in readers:
        neighbours = read.singles([replace(reader, inputs=(*reader.inputs[at + 1 : at + 2], *reader.inputs[:at][-1:]))])
        if share not in neighbours:
            number = f"{neighbours[0]:g}" if neighbours else "no number"
            yield f"{reader.name} takes {number} beside its GEMM", f"{share:g}, for the second half", True


def _rows_a_token(program: Program, codes: str) -> int | None:
    """The number of rows of codes [..., rows, width] for each token; None where it does not parse."""
    tokens = next((program.tensors.get(name) for name in program.bound if name.startswith(_TOKENS)), None)
    tensor = program.tensors.get(codes)
    if tensor is None or tokens is None or len(tensor.symbols) < _MATRIX or len(tokens.symbols) < _MATRIX:
        return None
    (rows, rows_base), (token_factor, token_base) = (
        multiple(program.sizes, size) for size in (tensor.symbols[-2], tokens.symbols[-1])
    )
    if rows_base == token_base and token_factor and rows % token_factor == 0:
        return rows // token_factor
    return None


def _rows_of_one_term(program: Program, codes: ProgramTensor | None, roots: Collection[str]) -> set[str]:
    """The names that the program gives to the number of rows of `codes` if they had one term.

    That is the batch, a number where it is fixed; for a matrix it is the rows of the GEMMs with one term (such as the
    output head's), whose results are not among `roots`.
    """
    if codes is None or not codes.symbols:
        return set()
    if len(codes.symbols) >= _RANK:
        tokens = [program.tensors.get(name) for name in program.bound if name.startswith(_TOKENS)]
        return {tensor.symbols[0] for tensor in tokens if tensor is not None and tensor.symbols}
    others = [
        statement
        for statement in program.statements
        if statement.nodes and program.root(statement.outputs[0])[0] not in roots
    ]
    references = [program.tensors.get(statement.inputs[0]) for statement in others]
    return {tensor.symbols[0] for tensor in references if tensor is not None and tensor.symbols and not tensor.dims[0]}


def _readers(program: Program, root: str) -> list[tuple[Statement, int]]:
    """The kernels that read a GEMM's result, each once, with the number of its first input that does; kernels that only
    move the result are looked through.
    """
    waiting = [(root, MOVES)]
    readers: dict[int, tuple[Statement, int]] = {}
    while waiting:
        made, moves = waiting.pop()
        for reader, index in program.readers.get(made, ()):
            onward = moved_by(program, reader, reader.inputs[index]) if moves else None
            if onward is None:
                readers.setdefault(id(reader), (reader, index))
            else:
                waiting.append((program.root(onward)[0], moves - 1))
    return [*readers.values()]
