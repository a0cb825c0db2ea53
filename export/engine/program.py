"""The programs in a TensorRT-RTX plan, read: statements, tensors, and the numbers behind their constants.

A plan holds the program of its compiler, Myelin, as text, one for each optimization profile and one for each fused
kernel that is finished at run time:

    header { version = 5 … inputs={ "input_ids.1" … } outputs={ … } … accelerators={sm89 } }
    descriptors {
      tensor={ … const_payload_size=32768 dims={ 256 128 } name="__mye5_dconst" offset=5 … strides={ 1 256 }
      type=fp8_e4m3 }
      sub_tensor={ base="__mye4" const_offset=512 dims={ "rows" 128 } name="__mye7^deref" … type=float }
    }
    main {
      fully_connected={ name="q.matmul+k.matmul" output={"__mye4" } input={"__mye2^deref" "__mye5_dconst" "…_alpha"
      "…_beta" } … } function={ name=__myl_MulCast … input_args={ "__mye7^deref" "__mye6_folded_matmul" … } …
      layers="[ONNX Layer: q.matmul]" }
    }

Sizes that are known at run time only are computed before the kernels, by `copy`, `mul`, `add`, `sub`, `div`, `max`,
`min`, `eq` and `select`;
a number is `__s^64i64`, or `__s^M1i64` for -1, and in a branch `shape_subg0___s^64i64`:

      mul={ name="…" output={"__mye6485_shape" } input={"__mye4877_shape_seq" "__s^4i64" } … }

The branches of an If lie between jumps (`cjmp`, `jmp`, `label`) in the same program, and what is in them reads as all
else does.

A constant's `offset` is its number in one pool that all programs share. The pool lies at the end of the plan's last
segment (the header has its place and size at byte 96), and a table near the beginning of the file has the place of
each number in it. So what a statement multiplies by is read from where the program takes it, and not looked for.

Found by reading plans of TensorRT-RTX 1.7.1 for sm89 and sm120; the format is undocumented. What does not read is None.
"""

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import ml_dtypes
import numpy as np
import numpy.typing as npt

Buffer = bytes | bytearray | memoryview
#: A size -> what makes it (`copy`, `mul`, `add`, `sub`, `div`, `max`, `min`, `eq`, `select`), and of which sizes and
#: numbers.
Sizes = Mapping[str, tuple[str, tuple[str, ...]]]
#: The name of an element type in the plan and the inspector's JSON -> the name used here.
TYPES = {"float": "fp32", "half": "fp16", "bfloat16": "bf16", "fp8_e4m3": "fp8", "float8": "fp8", "float16": "fp16"}
#: How the numbers of a constant are stored; FP8 ones stay codes.
_STORED: dict[str, npt.DTypeLike] = {
    "fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp8": np.uint8,
}  # fmt: skip

# A program: the run of text after its header's first line. Names may hold any UTF-8, so only control characters end it
# (0x1F separates ONNX layers).
_PROGRAM = re.compile(rb"header \{\n  version = \d[\t\n\x1f\x20-\x7e\x80-\xff]*")
_TENSOR = re.compile(rb"^  (?:sub_)?tensor=\{ ([^\n]*) type=(\w+) \}$", re.MULTILINE)
_FIELD = re.compile(rb'(\w+)=(?:"([^"\n]*)"|\{((?:[^}"\n]|"[^"\n]*")*)\}|(\S+))')
_GEMM = (
    rb'fully_connected=\{ name="(?P<label>[^"\n]*)" output=\{(?P<made>[^\n]*?)\} input=\{(?P<read>[^\n]*?)\} '
    rb"[a-z](?P<more>[^\n]*)"
)
_KERNEL = (
    rb"(?:function|runtime_fusion)=\{ name=(?P<kernel>\S+) [^\n]*?input_args=\{(?P<taken>[^\n]*?)\} "
    rb"[^\n]*?output_args=\{(?P<given>[^\n]*?)\} (?P<rest>[^\n]*)"
)
# A multiplication by one number, in the program of a kernel that is finished at run time: FP32 bits in hexadecimal.
_SCALING = re.compile(rb"^  mul=\{ [^\n]* alpha=([0-9A-F]{8})f32 ([^\n]*)", re.MULTILINE)
_STATEMENT = re.compile(rb"^  (?:" + _GEMM + rb"|" + _KERNEL + rb")", re.MULTILINE)
# What a program runs on; that of a single kernel may say `*`, any.
_TARGET = re.compile(rb"^  accelerators=\{([^\n}]*)\}$", re.MULTILINE)
_BOUND = re.compile(rb"^  (?:in|out)puts=\{([^\n]*)\}$", re.MULTILINE)
_LAYERS = re.compile(rb' layers="([^"\n]*)"')
LAYER = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_QUOTED = re.compile(rb'"([^"\n]*)"')
# What lies in the branch of an If is labelled with the If's own label before it, as a GEMM's name, or with the
# branch and the If behind it, as a layer.
_NODE = re.compile(
    r"(?:\$\$myelin\$\$.+\^)?(?P<node>.+?)(?: \[profile (?P<profile>\d+)\])?(?: \| .+ \((?:then|else)_branch\) \| .+)?"
)


@dataclass(frozen=True)
class ProgramTensor:
    """A tensor of a program: element type, sizes and strides (0 where they are known at run time only).

    `constant`: its number in the pool; `base` and `offset`: the tensor that it is a part of, and its place there in
    bytes; `symbols`: the sizes as in the program, by name where they are known at run time only.
    """

    type: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    constant: int | None = None
    base: str | None = None
    offset: int = 0
    symbols: tuple[str, ...] = ()


@dataclass(frozen=True)
class Statement:
    """A GEMM (`nodes`: the ONNX nodes it computes) or another kernel (`nodes` is empty), with its inputs,
    outputs, and every ONNX node fused into it.
    """

    name: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """The program of one optimization profile, or of a single kernel: `bound` are its inputs and outputs.

    `scalings`: ONNX nodes that a single kernel's program multiplies by a number -> the number; `sizes`: how sizes that
    are known at run time only are computed.
    """

    profile: int
    tensors: Mapping[str, ProgramTensor]
    statements: tuple[Statement, ...]
    targets: frozenset[str] = frozenset()
    bound: tuple[str, ...] = ()
    scalings: tuple[tuple[str, np.float32], ...] = ()
    sizes: Sizes = field(default_factory=dict)

    def width(self, name: str) -> int:
        """The number of values in one row of a tensor; its rows are known at run time only."""
        sizes = self.tensors[name].dims if name in self.tensors else ()
        return math.prod(size for size in sizes if size)

    def type(self, name: str) -> str:
        """The element type of a tensor; `unknown` where the program does not say."""
        if name in self.tensors:
            return self.tensors[name].type
        return "unknown"

    def root(self, name: str) -> tuple[str, int]:
        """The tensor that `name` is a part of, and its offset there in bytes."""
        offset = 0
        passed: set[str] = set()
        while (tensor := self.tensors.get(name)) is not None and tensor.base is not None and name not in passed:
            passed.add(name)
            name = tensor.base
            offset = offset + tensor.offset
        return name, offset

    @cached_property
    def makers(self) -> Mapping[str, Statement]:
        """Tensor -> the statement that makes it, or a part of it."""
        return {self.root(name)[0]: statement for statement in self.statements for name in statement.outputs}

    @cached_property
    def readers(self) -> Mapping[str, list[tuple[Statement, int]]]:
        """Tensor -> the statements that read it, or a part of it, with the number of the input."""
        readers: dict[str, list[tuple[Statement, int]]] = {}
        for statement in self.statements:
            for index, name in enumerate(statement.inputs):
                readers.setdefault(self.root(name)[0], []).append((statement, index))
        return readers


@dataclass(frozen=True)
class Pool:
    """The constants of a plan, by their offsets in the file."""

    data: Buffer = field(repr=False)
    places: tuple[int, ...] = field(repr=False)

    def read(self, tensor: ProgramTensor | None) -> npt.NDArray[np.generic] | None:
        """Read a constant in its sizes (FP8 as codes, uint8); None where there is none or it does not parse."""
        if tensor is None or tensor.constant is None or tensor.constant >= len(self.places):
            return None
        stored = np.dtype(_STORED.get(tensor.type, np.void))
        start = self.places[tensor.constant]
        steps = [stride * stored.itemsize for stride in tensor.strides]
        extent = sum((size - 1) * step for size, step in zip(tensor.dims, steps, strict=False)) + stored.itemsize
        if not stored.itemsize or 0 in (*tensor.dims, *tensor.strides) or len(steps) != len(tensor.dims):
            return None
        if start + extent > len(self.data):
            return None
        numbers = np.frombuffer(self.data, stored, extent // stored.itemsize, start)
        return np.lib.stride_tricks.as_strided(numbers, tensor.dims, steps, writeable=False)


def read_programs(plan: Buffer) -> Iterator[Program]:
    """Yield each program of a plan. The plan is searched in place (3 GB/s), and programs are copied one at a time."""
    for match in _PROGRAM.finditer(memoryview(plan).cast("B")):
        text = match.group()
        statements = [_statement(statement) for statement in _STATEMENT.finditer(text)]
        scalings = [(node_of(node)[0], bits) for bits, rest in _SCALING.findall(text) for node in _layers(rest)]
        profile = max((profile for profile, _ in statements), default=0)
        yield Program(
            profile,
            {name: tensor for fields, kind in _TENSOR.findall(text) for name, tensor in _tensor(fields, kind)},
            tuple(statement for _, statement in statements),
            frozenset(name for listed in _TARGET.findall(text) for name in listed.decode().split()),
            tuple(name for listed in _BOUND.findall(text) for name in _quoted(listed)),
            tuple((node, np.uint32(int(bits, 16)).view(np.float32)) for node, bits in scalings),
            read_sizes(text),
        )


def read_pool(plan: Buffer) -> Pool | None:
    """Find the constants of a plan; None where its header does not describe them.

    The table has pairs of a constant's number (0, 1, …) and its place in the pool, 8 bytes each, then the number of
    pairs (4 bytes) and the size of the pool (8 bytes), which ends where the last segment ends.
    """
    data = memoryview(plan).cast("B")
    first = _PROGRAM.search(data)
    if len(data) < _SEGMENT + 16 or first is None:
        return None
    end = sum(struct.unpack_from("<QQ", data, _SEGMENT))
    tables = [
        places for match in _TABLE.finditer(data[: first.start()]) if (places := _places(data, match.start(), end))
    ]
    if len(tables) == 1:
        return Pool(plan, tables[0])
    return None


_SEGMENT = 96
_TABLE = re.compile(re.escape(struct.pack("<QQQ", 0, 0, 1)))


def _places(data: memoryview, start: int, end: int) -> tuple[int, ...] | None:
    """The places in a table at `start`, for a pool that ends at `end`; None where it is no table."""
    offsets: list[int] = []
    while start + 28 <= len(data) and (entry := struct.unpack_from("<QQ", data, start))[0] == len(offsets):
        offsets.append(entry[1])
        start += 16
    if start + 12 > len(data):
        return None
    count, size = struct.unpack_from("<IQ", data, start)
    if count != len(offsets) or offsets != sorted(offsets) or not offsets[-1] < size <= end <= len(data):
        return None
    return tuple(end - size + offset for offset in offsets)


def _statement(match: re.Match[bytes]) -> tuple[int, Statement]:
    """Parse a statement, and the profile in its label."""
    rest = match["more"] if match["label"] is not None else match["rest"]
    layers = tuple(node for node, _ in map(node_of, _layers(rest)))
    if match["label"] is None:
        name = match["kernel"].decode(errors="replace")
        return 0, Statement(name, (), _quoted(match["taken"]), _quoted(match["given"]), layers)
    label = match["label"].decode(errors="replace")
    nodes = [node_of(part) for part in label.split("+")]
    profile = max((profile for _, profile in nodes), default=0)
    return profile, Statement(
        label, tuple(node for node, _ in nodes), _quoted(match["read"]), _quoted(match["made"]), layers
    )


def node_of(label: str) -> tuple[str, int]:
    """The ONNX node of an engine's label, and its profile."""
    match = _NODE.fullmatch(label.strip())
    if match:
        return (match["node"], int(match["profile"] or 0))
    return (label, 0)


def _layers(rest: bytes) -> list[str]:
    listed = _LAYERS.search(rest)
    if listed:
        return LAYER.findall(listed[1].decode(errors="replace"))
    return []


def _quoted(names: bytes) -> tuple[str, ...]:
    return tuple(name.decode(errors="replace") for name in _QUOTED.findall(names))


def _tensor(fields: bytes, kind: bytes) -> Iterator[tuple[str, ProgramTensor]]:
    """Parse the line of a tensor; return its name and the tensor."""
    values = {key: (text or listed or word) for key, text, listed, word in _FIELD.findall(fields)}
    if (name := values.get(b"name")) is None or b"offset" not in values:
        return
    base = values.get(b"base")
    yield (
        name.decode(errors="replace"),
        ProgramTensor(
            program_type_name(kind.decode()),
            _numbers(values.get(b"dims", b"")),
            _numbers(values.get(b"strides", b"")),
            _number(values[b"offset"])
            if b"const_payload_size" in values and _POOLED.match(values.get(b"region", b""))
            else None,
            base.decode(errors="replace") if base is not None else None,
            _number(values.get(b"const_offset", b"0")),
            tuple(size.decode(errors="replace").strip('"') for size in _SIZE.findall(values.get(b"dims", b""))),
        ),
    )


# Constants of the pool; those of kernels finished at run time (runtime-fusion-consts) lie elsewhere.
_POOLED = re.compile(rb"__mye\d+-consts")
_SIZE = re.compile(rb'"[^"]*"|\d+')


def _numbers(listed: bytes) -> tuple[int, ...]:
    return tuple(_number(size) for size in _SIZE.findall(listed))


def _number(digits: bytes) -> int:
    if digits.isdigit() and len(digits) < 19:
        return int(digits)
    return 0


def program_type_name(name: str) -> str:
    """Translate an element type to fp8q's name for it."""
    return TYPES.get(name.lower(), name.lower())


_SIZE_OPERATION = re.compile(
    rb'^  (?P<how>copy|mul|add|sub|div|max|min|eq|select)=\{ name="[^"\n]*" output=\{"(?P<made>[^"\n]*)" \} '
    rb'input=\{(?P<of>(?:"[^"\n]*" )*)\} ',
    re.MULTILINE,
)
_SIZE_NAME = re.compile(r'"([^"]*)"')
_NUMBER = re.compile(r"(?:__s\^(\d+)i64|(\d+))")
_SIGNED = re.compile(r"(?:\w*__s\^)?(M?)(\d+)(?:i64)?")
_OPERATIONS: dict[str, Callable[[Sequence[int]], int]] = {
    "copy": lambda operands: operands[0],
    "mul": math.prod,
    "add": sum,
    "sub": lambda operands: operands[0] - sum(operands[1:]),
    "div": lambda operands: operands[0] // operands[1] if operands[1] else 0,
    "eq": lambda operands: int(operands[0] == operands[1]),
    "select": lambda operands: operands[1] if operands[0] else operands[2],
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
            tuple(_SIZE_NAME.findall(match["of"].decode(errors="replace"))),
        )
        for match in _SIZE_OPERATION.finditer(text)
    }


def multiple(sizes: Sizes, name: str) -> tuple[int, str]:
    """Split a size into its factor and base, `(4, "seq")`; the base of a plain number is ""."""
    factor = 1
    for _ in range(_STEPS):
        operation, operands = sizes.get(name, ("", ()))
        numbers = [int(match[1] or match[2]) for match in map(_NUMBER.fullmatch, operands) if match]
        others = [size for size in operands if not _NUMBER.fullmatch(size)]
        if operation == "mul" and len(others) == 1:
            factor *= math.prod(numbers)
        elif operation == "add" and len(set(others)) == 1 and not numbers:
            factor *= len(others)
        elif operation != "copy" or len(others) != 1:
            break
        name = others[0]
    if name.isdigit():
        return (factor * int(name), "")
    return (factor, name)


def root_of(sizes: Sizes, name: str) -> str:
    """The size that `name` is a copy of."""
    for _ in range(_DEPTH):
        operation, operands = sizes.get(name, ("", ()))
        if operation != "copy" or len(operands) != 1:
            break
        name = operands[0]
    return name


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
    if values and len(numbers) == len(values):
        return _OPERATIONS[operation](numbers)
    return None
