"""Find the codes and scales of each module in an FP8 checkpoint from the headers; read values of scales on demand.

In every form a value is code × scale, also where the scale is called `weight_scale_inv`: transformers' `Fp8Dequantize`
multiplies by it, as DeepSeek's own kernel does.

    compressed-tensors   weight_scale [1], [out, 1] or [out/r, in/c]       input_scale [1]
    modelopt             weight_scale [], [out] or [out/r, 1, in/c, 1]    input_scale []
    fp8                  weight_scale_inv [out/r, in/c] or []             activation_scale []

The scales of a cache are `self_attn.k_scale` and `v_scale` [1] in compressed-tensors, `k_proj.k_scale` and
`v_proj.v_scale` [] in ModelOpt's form; AutoFP8 writes `k_proj.output_scale` and `v_proj.output_scale` [], or one
`self_attn.kv_scale` of both, in the form fp8. Numbers of blocks are rounded up. Where fp8 has one scale for a
tensor, vLLM reads `weight_scale` and `input_scale` too. A tensor is read within the bytes that its header gives it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...calibrate.checkpoint.weights import INDEX, SINGLE, read_index
from ...calibrate.input.untrusted import exists, read_json
from ...core.errors import InputError
from ...core.headers import StoredTensor, read_header, value_bits
from ...options import DYNAMIC, ONE
from ..scales.scheme import Granularity, Scheme
from .codecs import declared_form
from .quantization_config import CONFIG, DeclaredQuantization

Float32s = npt.NDArray[np.float32]
CODES = "F8_E4M3"
#: The scales of a cache, by their last name.
CACHE_SCALES = ("k_scale", "v_scale")
#: The types that scales are stored in: safetensors' name -> NumPy's type.
TYPES: Mapping[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu, CODES: ml_dtypes.float8_e4m3fn,
}  # fmt: skip


@dataclass(frozen=True)
class Codes:
    """The names of the tensors of a module whose weight is codes; None for a tensor that is missing.

    `granularity`: by the shape of the scale, None where it fits no granularity. `block`: the rows and columns of the
    weight that share a scale, for every granularity: value [r, c] = code [r, c] × scales [r // rows, c // columns].
    """

    module: str
    weight: str
    shape: tuple[int, ...]
    scale: str | None
    input_scale: str | None
    scheme: Scheme
    granularity: Granularity | None = None
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """An FP8 checkpoint: its declared quantization, and its tensors by name.

    `problems`: the faults of its files (file, fault); tensors of a faulty file may be missing.
    """

    root: Path
    config: Mapping[str, Any]
    declared: DeclaredQuantization
    tensors: Mapping[str, StoredTensor]
    problems: tuple[tuple[str, str], ...]

    @cached_property
    def codes(self) -> Mapping[str, Codes]:
        """Module -> its codes, for every weight in E4M3, in the order of names.

        A tensor that stacks all experts counts as a module of the tensor's name.
        """
        named = {name: name.removesuffix(".weight") for name in sorted(self.tensors)}
        return {module: self._codes(module, name) for name, module in named.items() if self._is_weight(name)}

    def _is_weight(self, name: str) -> bool:
        tensor = self.tensors[name]
        return tensor.dtype == CODES and len(tensor.shape) >= 2 and not name.rpartition(".")[2].endswith("scale")

    def _codes(self, module: str, weight: str) -> Codes:
        shape = self.tensors[weight].shape
        dot = "." if weight != module else "_"

        def first(names: tuple[str, ...]) -> str | None:
            endings = [name if dot == "." else name.removeprefix("weight_") for name in names]
            return next((scale for end in endings if (scale := f"{module}{dot}{end}") in self.tensors), None)

        scale = first(self.declared.codec.weight_scales)
        scheme = self.declared.scheme(module)
        one_scale = scale is not None and prod(self.tensors[scale].shape) == 1 and not scale.endswith("_inv")
        if one_scale and scheme.weights and self.declared.block_assumed:
            # as AutoFP8 writes it, and vLLM reads it
            scheme = Scheme("tensor", ONE if scheme.input.static else DYNAMIC)
        codes = Codes(module, weight, shape, scale, first(self.declared.codec.input_scales), scheme)
        if scale is None:
            return codes
        granularity, block = granularity_of(self.tensors[scale].shape, shape, scheme)
        return replace(codes, granularity=granularity, block=block)

    @cached_property
    def cache_scales(self) -> Mapping[str, str]:
        """The scales of a cache, by the names of the forms: tensor -> its attention module."""
        attentions = {}
        for name in sorted(self.tensors):
            if parts := cache_parts(name):
                attentions[name] = name.rpartition(".")[0].removesuffix(f".{parts[0]}_proj")
        return attentions

    @property
    def twofold_cache_scales(self) -> Iterator[tuple[str, str]]:
        """Pairs of scales of one part of a cache, under two names, that differ."""
        first: dict[tuple[str, str], str] = {}
        for name, module in self.cache_scales.items():
            for part in cache_parts(name):
                other = first.setdefault((module, part), name)
                if other != name and not np.array_equal(self.values(other).ravel(), self.values(name).ravel()):
                    yield other, name

    def values(self, name: str) -> Float32s:
        """Read a scale as float32, in its shape.

        Raises InputError for a type that no scale has, and for a file that was cut short since.
        """
        tensor = self.tensors[name]
        if tensor.dtype not in TYPES:
            raise InputError(tensor.file, f"{name} is {tensor.dtype}, which no scale is", "store it as F32")
        values: Float32s = self._read(tensor, TYPES[tensor.dtype]).astype(np.float32)
        return values.reshape(tensor.shape)

    def scales(self, codes: Codes) -> Float32s:
        """Read the scales of a weight, float32 [rows, columns] of blocks (`Codes.block`); [1, 1] for a single scale.

        Those of a stack of experts are [experts, rows, columns]. Raises InputError where there is no scale, and where
        its shape does not tile the weight.
        """
        if codes.scale is None:
            raise InputError(
                codes.weight,
                f"has no scale ({' or '.join(self.declared.codec.weight_scales)}), and codes without one say nothing",
                "export the checkpoint again",
            )
        if codes.block is None:
            raise InputError(
                f"{codes.scale}",
                f"has the shape {list(self.tensors[codes.scale].shape)}, which does not tile {codes.weight} "
                f"{list(codes.shape)}",
                "export the checkpoint again",
            )
        rows, columns = (-(-side // of) for side, of in zip(codes.shape[-2:], codes.block, strict=True))
        return self.values(codes.scale).reshape(*codes.shape[:-2], rows, columns)

    def read_codes(self, codes: Codes) -> npt.NDArray[np.uint8]:
        """The codes of a weight as bytes, in its shape, mapped from the file."""
        tensor = self.tensors[codes.weight]
        return self._read(tensor, np.uint8).reshape(tensor.shape)

    @cached_property
    def _mapped(self) -> dict[Path, npt.NDArray[np.uint8]]:
        return {}

    def same_bytes(self, one: str, other: str) -> bool:
        """Tell whether two tensors are of one type and shape, and have the same bytes."""
        first = self.tensors[one]
        second = self.tensors[other]
        alike = (first.dtype, first.shape) == (second.dtype, second.shape)
        return alike and np.array_equal(self._read(first, np.uint8), self._read(second, np.uint8))

    def _read(self, tensor: StoredTensor, dtype: Any) -> npt.NDArray[Any]:
        if tensor.start == tensor.end:
            return np.zeros(0, dtype)
        try:
            if tensor.file not in self._mapped:
                self._mapped[tensor.file] = np.memmap(tensor.file, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise InputError(tensor.file, f"cannot be read ({error})", "copy or download it again") from None
        return self._mapped[tensor.file][tensor.start : tensor.end].view(dtype)


def cache_parts(name: str) -> str:
    """The parts of a cache that the scale `name` is of: `k`, `v`, `kv` for AutoFP8's one scale of both; empty for
    another tensor.

    AutoFP8 calls those of each `k_proj.output_scale` and `v_proj.output_scale`. vLLM takes all of these names.
    """
    module, _, last = name.rpartition(".")
    if last in CACHE_SCALES:
        return last[0]
    if last == "output_scale" and module.endswith((".k_proj", ".v_proj")):
        return module[-6]
    return "kv" if last == "kv_scale" else ""


def granularity_of(
    scale: tuple[int, ...], weight: tuple[int, ...], scheme: Scheme
) -> tuple[Granularity | None, tuple[int, int] | None]:
    """Find the granularity of a scale of shape `scale`, and the rows and columns of the weight that share a value.

    Where several fit, that of `scheme` counts; (None, None) where none fits.
    """
    *stack, rows, columns = weight
    sides = scheme.block
    grid = [-(-rows // sides[0]), -(-columns // sides[1])]
    shapes: dict[Granularity, tuple[list[list[int]], tuple[int, int]]] = {
        "tensor": ([[], [1], [1, 1]] if not stack else [stack, [*stack, 1], [*stack, 1, 1]], (rows, columns)),
        "channel": ([[*stack, rows], [*stack, rows, 1]], (1, columns)),
        "block": ([[*stack, *grid], [*stack, grid[0], 1, grid[1], 1]], sides),
    }
    for granularity in sorted(shapes, key=lambda name: name != scheme.weights):
        fitting, block = shapes[granularity]
        if list(scale) in fitting:
            return granularity, block
    return None, None


def open_checkpoint(directory: Path) -> Checkpoint | None:
    """The FP8 checkpoint in `directory`; None for one that is not quantized.

    Raises InputError for a configuration or an index that does not parse, an unknown form, and a folder without
    safetensors. Files that are missing or damaged become its `problems`.
    """
    declared = declared_form(directory)
    if declared is None:
        return None
    tensors, problems = located_tensors(directory)
    return Checkpoint(directory, read_json(directory / CONFIG), declared, tensors, problems)


def located_tensors(directory: Path) -> tuple[Mapping[str, StoredTensor], tuple[tuple[str, str], ...]]:
    """Read the headers of the safetensors in `directory`: name -> tensor, and the faults of files (file, fault).

    Raises InputError for an index that does not parse, and for a folder without safetensors.
    """
    weight_map = _weight_map(directory)
    tensors: dict[str, StoredTensor] = {}
    problems: list[tuple[str, str]] = []
    for file in sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]:
        for name, tensor in sound_tensors(directory / file, problems):
            if name in tensors:
                problems.append((file, f"holds {name}, and so does {tensors[name].file.name}"))
            else:
                tensors[name] = tensor
    damaged = {file for file, _ in problems}
    for name, file in (weight_map or {}).items():
        if file not in damaged and (name not in tensors or tensors[name].file.name != file):
            problems.append((INDEX, f"promises {name} in {file}, which does not hold it"))
    return tensors, tuple(problems)


def _weight_map(directory: Path) -> dict[str, str] | None:
    """Read `weight_map` of the index; None where one file holds all tensors, which transformers looks for first."""
    if exists(directory / SINGLE):
        return None
    path = directory / INDEX
    if not exists(path):
        raise InputError(directory, f"has no safetensors weights: neither {SINGLE} nor {INDEX}", "copy the whole of it")
    return read_index(path, linted=True)


def sound_tensors(file: Path, problems: list[tuple[str, str]]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a file up to the first that does not lie within it, which is added to `problems`."""
    try:
        header = read_header(file)
        size = file.stat().st_size
    except InputError as error:
        problems.append((file.name, error.fault))
        return
    for name, tensor in header.items():
        fits = prod(tensor.shape) * value_bits(tensor.dtype) == 8 * tensor.nbytes
        if min(tensor.shape, default=0) < 0 or not fits or not 0 < tensor.start <= tensor.end <= size:
            problems.append((file.name, f"does not hold the whole of {name}"))
            return
        yield name, tensor
