"""Rules C101 to C103: files and types, which a loader reads before any scale; C123 to C125: weights.

C123 reads every code once, at 3 to 8 GB a second of processor time: no header and no scale tells of a NaN.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from ...core.findings import Broken
from ..codes.formats import E4M3
from ..reading.fp8_tensors import CODES, Checkpoint
from .rules import AGAIN, checkpoint_rule

#: Codes that are looked through at a time.
CHUNK = 1 << 24
#: Without its sign a NaN is this byte: eight of each in a word, and the bit that only a NaN reaches when one is added.
_MAGNITUDES, _ONES, _SIGNS = (np.uint64(int.from_bytes(bytes([byte]) * 8)) for byte in (0x7F, 0x01, 0x80))
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
#: A module with its name up to the last number, which is its layer or expert.
LAYER = re.compile(r"(.*\.\d+\.).*", re.DOTALL)


def count_nan(codes: npt.NDArray[np.uint8]) -> int:
    """Count the E4M3 codes of NaN in `codes` uint8 [values]."""
    count = 0
    for start in range(0, codes.size, CHUNK):
        part = codes[start : start + CHUNK]
        words = part[: part.size // 8 * 8].view(np.uint64)
        if np.bitwise_or.reduce(((words & _MAGNITUDES) + _ONES) & _SIGNS, initial=np.uint64(0)) or part.size % 8:
            count += int(np.count_nonzero(np.isnan(E4M3.values[part])))
    return count


@checkpoint_rule("C123", "nan-code")
def nan_code(checkpoint: Checkpoint) -> Broken:
    """No code of a weight is NaN (7F and FF): it makes its output NaN for every token, and no loader looks."""
    for codes in checkpoint.codes.values():
        every = checkpoint.read_codes(codes).reshape(-1)
        if count := count_nan(every):
            yield codes.weight, f"holds {count:,} codes of NaN of {every.size:,}; leave the module in BF16, or {AGAIN}"


@checkpoint_rule("C124", "scale-alone")
def scale_alone(checkpoint: Checkpoint) -> Broken:
    """A scale of a weight has its weight beside it: where that is gone, loaders go on with random numbers, and warn of
    a missing key at most.
    """
    if checkpoint.problems:  # a file that is damaged may hold it, and C101 tells of that
        return
    for name in checkpoint.tensors:
        module, _, last = name.rpartition(".")
        if last in checkpoint.declared.codec.weight_scales and f"{module}.weight" not in checkpoint.tensors:
            yield name, f"is there, and {module}.weight is not; copy or download the checkpoint again"


@checkpoint_rule("C125", "weight-shape")
def weight_shape(checkpoint: Checkpoint) -> Broken:
    """A weight in codes has the shape of most of its like in other layers, or others of its layer differ from theirs
    too, as in models whose layers have several widths: one that differs alone was cut, and no GEMM takes it.
    """
    usual = _usual_shapes(checkpoint)
    apart = defaultdict(list)
    for module, shape in _shapes(checkpoint):
        if (role := NUMBER.sub("*", module)) in usual and shape != usual[role][0]:
            apart[_layer(module)].append(module)
    for module, codes in checkpoint.codes.items():
        if apart[_layer(module)] == [module]:
            most, count = usual[NUMBER.sub("*", module)]
            yield codes.weight, f"is {list(codes.shape)}, and {count} others of its kind {list(most)}; {AGAIN}"


def _shapes(checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, tensor in checkpoint.tensors.items():
        if name.endswith(".weight"):
            yield name.removesuffix(".weight"), tensor.shape


def _usual_shapes(checkpoint: Checkpoint) -> Mapping[str, tuple[tuple[int, ...], int]]:
    """Name with `*` for numbers -> the shape that more than half of these weights have, and how many have it."""
    shapes: dict[str, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for module, shape in _shapes(checkpoint):
        shapes[NUMBER.sub("*", module)][shape] += 1
    usual = {role: counted.most_common(1)[0] for role, counted in shapes.items()}
    return {role: (shape, count) for role, (shape, count) in usual.items() if 2 * count > shapes[role].total()}


def _layer(module: str) -> str:
    match = LAYER.fullmatch(module)
    return match[1] if match else ""


#: Types of eight bits that are no E4M3.
OTHER_CODES = ("F8_E5M2", "I8", "U8")


@checkpoint_rule("C101", "checkpoint-files")
def checkpoint_files(checkpoint: Checkpoint) -> Broken:
    """Every file that the index names is there, whole, and holds the tensors that it promises, each once. A loader that
    does not find a scale goes on with the number it began with.
    """
    for file, what in checkpoint.problems:
        yield file, f"{what}; copy or download it again"


@checkpoint_rule("C102", "code-type")
def code_type(checkpoint: Checkpoint) -> Broken:
    """The codes of a weight are E4M3. Loaders make a parameter of that type and copy what the file has into it: E5M2
    and bytes are then converted as numbers, not taken as codes.
    """
    for name, tensor in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        if tensor.dtype in OTHER_CODES and name != module and checkpoint.declared.scheme(module).weights:
            yield name, f"holds {tensor.dtype}; store its codes as {CODES}"


@checkpoint_rule("C103", "nothing-quantized")
def checkpoint_nothing_quantized(checkpoint: Checkpoint) -> Broken:
    """At least one weight is codes: a checkpoint without any is no FP8 model, whatever its configuration says."""
    if not checkpoint.codes and not checkpoint.problems:
        yield checkpoint.declared.source.name, f"says FP8, and no weight is {CODES}; {AGAIN}"
