"""Dequantize FP8 source checkpoints, and keep those of their codes that fp8q can write.

The reference that FP8 is compared with is the model as given: value = code × scale, in FP32. A code has 4 significant
bits and a scale up to 24, so the product is rounded once at most, to FP32 (not at all for a scale on the BF16 grid).
Running the model in BF16 rounds once more, as transformers' `Fp8Dequantize` does (docs/decisions/0021). `calibrate`
sees only these values, through the `Coding` that `recognize` gives it.

Codes with one scale for the tensor or for each channel are kept byte for byte. One scale for each output channel is the
only form that fp8q writes, so the scale of a tensor is repeated for its channels. Weights with a scale for each block
are dequantized and quantized again. Checkpoints that `fp8_tensors` does not read, or finds damaged, are refused here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...calibrate.checkpoint.recognizer import CODES, MODELOPT_FILE
from ...calibrate.model.source import Source
from ...core.errors import InputError
from ...core.headers import StoredTensor
from ..scales.clip import SMALLEST_SCALE
from ..weights.channels import QuantizedWeight, inherited_summary
from ..weights.code_sources import FloatWeight
from .codecs import declared_form, other_declaration
from .compressed_tensors import COMPRESSED_TENSORS
from .fp8_tensors import CACHE_SCALES, Checkpoint, Codes, cache_parts, sound_tensors
from .quantization_config import CONFIG, ORIGINAL, READ
from .run_checkpoint import CACHE_FILE, EXPERT_FILE


@dataclass(frozen=True)
class FP8Source:
    """An FP8 checkpoint whose configuration and headers were checked: a `Coding`.

    `other_files`: the files read for it beside config.json and the weights.
    """

    checkpoint: Checkpoint
    other_files: tuple[Path, ...] = ()

    @cached_property
    def weights(self) -> Mapping[str, Codes]:
        """The weights that are stored as codes, by tensor name."""
        return {codes.weight: codes for codes in self.checkpoint.codes.values()}

    @cached_property
    def _scales(self) -> set[str | None]:
        scales = {name for codes in self.weights.values() for name in (codes.scale, codes.input_scale)}
        queries = {name for name in self.checkpoint.tensors if name.endswith(".q_scale")}
        return scales | set(self.checkpoint.cache_scales) | queries

    def headers(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The headers of the dequantized tensors: scales are left out, and weights in codes are F32."""
        return {
            name: replace(header, dtype="F32") if name in self.weights else header
            for name, header in stored.items()
            if name not in self._scales
        }

    def decoded(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor | None:
        """Dequantize the weight `name`: code × scale, float32 in its shape; None for a tensor that is not codes."""
        if name not in self.weights:
            return None
        codes = self.weights[name]
        scales = torch.from_numpy(self.checkpoint.scales(self.weights[name]))
        values, (rows, columns) = read(name).float(), codes.block or codes.shape
        if columns >= values.shape[1]:  # the scales have one column
            return values.mul_(scales if len(scales) == 1 else scales.repeat_interleave(rows, 0)[: len(values)])
        for band, row in enumerate(scales):
            values[band * rows : (band + 1) * rows] *= row.repeat_interleave(columns)[: values.shape[1]]
        return values

    def input_scale(self, weight: str) -> float | None:
        """The static input scale of the module whose weight is `weight`; None where the checkpoint has none."""
        codes = self.weights.get(weight)
        if codes is None or codes.input_scale is None:
            return None
        return self._one(codes.input_scale)

    @cached_property
    def cache_scales(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """The scales of an FP8 cache: `<attention>.k` or `.v` -> scale, float32 [1] or [heads, 1, 1].

        Raises InputError for two of one part that differ.
        """
        for one, other in self.checkpoint.twofold_cache_scales:
            raise InputError(
                one, f"is another scale of the same keys or values than {other}", "take one of them out of the files"
            )
        return {
            f"{module}.{part}": self._of_cache(name)
            for name, module in self.checkpoint.cache_scales.items()
            for part in cache_parts(name)
        }

    def _of_cache(self, name: str) -> npt.NDArray[np.float32]:
        """Read the scale of a cache tensor, or those of its heads. Raises InputError for a value that is no scale."""
        values = self.checkpoint.values(name)
        if values.ndim < 3:
            return np.array([self._one(name)], np.float32)
        if not ((values >= SMALLEST_SCALE) & (values < np.inf)).all():
            raise InputError(
                name,
                f"holds {values.min():g} to {values.max():g}, and the scales of heads are positive and finite",
                "leave out --inherit",
            )
        return values.reshape(-1, 1, 1)

    def _one(self, name: str) -> float:
        """Read the one scale of an activation. Raises InputError for several, and for a value that is no scale."""
        values = self.checkpoint.values(name).reshape(-1)
        if len(values) != 1 or not SMALLEST_SCALE <= values[0] < np.inf:
            what = f"{len(values)} scales" if len(values) != 1 else f"the scale {values[0]:g}"
            raise InputError(
                name, f"holds {what}, and a tensor of activations has one, positive and finite", "leave out --inherit"
            )
        return float(values[0])


@dataclass(frozen=True)
class InheritedCodes:
    """The FP8 weights of `source`, as a source of codes; modules of `anew` have none."""

    source: Source
    fp8: FP8Source
    anew: frozenset[str] = frozenset()

    def quantized(self, weight: FloatWeight) -> QuantizedWeight | None:
        """The stored codes and scales of `weight`.

        None where it is not FP8, has a scale for each block, or is to be quantized anew; and of a Conv1D, since FP8
        checkpoints of others have codes of linear layers only.
        """
        codes = self.fp8.weights.get(self.source.stored(f"{weight.module}.weight"))
        if codes is None or codes.granularity == "block" or weight.axis != 0 or weight.module in self.anew:
            return None
        scale = torch.from_numpy(self.fp8.checkpoint.scales(codes).reshape(-1)).expand(codes.shape[0]).clone()
        return QuantizedWeight(self.source.weights().stored(codes.weight), scale, inherited_summary(scale))


def fp8_source(source: Source) -> FP8Source | None:
    """The FP8 checkpoint in `source`; None where it is none."""
    if isinstance(source.coding, FP8Source):
        return source.coding
    return None


def recognize(
    path: Path, name: str, config: Mapping[str, Any], headers: Mapping[str, StoredTensor]
) -> FP8Source | None:
    """The FP8 checkpoint in `path`, which the user calls `name`; None for one that is not quantized (a `Recognizer`).

    Raises InputError for a form that is not read, for codes without scales or with scales that do not tile them or are
    no scales, and for tensors of other types of codes.
    """
    declared = declared_form(path)
    if declared is None:
        if coded := next(
            (tensor_name for tensor_name, header in headers.items() if header.dtype.startswith(CODES)), None
        ):
            raise InputError(
                headers[coded].file,
                f"{coded} is {headers[coded].dtype}, and config.json has no quantization_config that says what its "
                f"codes stand for; what is read is {READ}",
                "export the checkpoint again",
            )
        return None
    if (other := other_declaration(path)) is not None:
        raise InputError(path / CONFIG, f"says {other}", "say the same in both, or take one away")
    changed = next((remark for remark in declared.remarks if remark.effect == "changes"), None)
    if changed is not None:
        raise InputError(declared.source, f"has {changed}, which fp8q does not compute", ORIGINAL)
    files = {header.file for header in headers.values()}
    tensors = dict(headers)
    other_files = [path / name for name in (MODELOPT_FILE, EXPERT_FILE, CACHE_FILE) if (path / name).is_file()]
    for file in other_files:
        if file.name != MODELOPT_FILE and file not in files:
            tensors |= _read_scales(file)
    fp8 = FP8Source(Checkpoint(path, config, declared, tensors, ()), tuple(other_files))
    _check_codes(fp8, name)
    rest = fp8.headers(headers)
    if other := next(
        (
            tensor_name
            for tensor_name in rest
            if headers[tensor_name].dtype.startswith(CODES) and rest[tensor_name].dtype != "F32"
        ),
        None,
    ):
        raise InputError(
            headers[other].file,
            f"{other} is {headers[other].dtype} {list(headers[other].shape)}, and what is read are matrices in F8_E4M3",
            "give the checkpoint it was made from, in BF16",
        )
    return fp8


def _read_scales(file: Path) -> dict[str, StoredTensor]:
    """The static scales in a file that fp8q writes beside the weights, because other loaders would refuse them there.

    Raises InputError for a file that is damaged.
    """
    problems: list[tuple[str, str]] = []
    scales = {
        name: tensor
        for name, tensor in sound_tensors(file, problems)
        if name.rpartition(".")[2] in (*COMPRESSED_TENSORS.input_scales, *CACHE_SCALES)
    }
    if problems:
        raise InputError(file, problems[0][1], "copy or download it again")
    return scales


def _check_codes(fp8: FP8Source, name: str) -> None:
    """Raise InputError where no weight of the checkpoint `name` is codes, or its codes or scales are invalid."""
    if not fp8.weights:
        raise InputError(
            fp8.checkpoint.declared.source,
            f"says that {name} is quantized, and no tensor there holds FP8 codes",
            "where the weights are numbers, take quantization_config out of config.json, and hf_quant_config.json away",
        )
    for codes in fp8.weights.values():
        if len(codes.shape) != 2 or codes.weight == codes.module:
            raise InputError(
                name,
                f"{codes.weight} holds codes of the shape {list(codes.shape)}, and what is read are weights of linear "
                "layers",
                "give the checkpoint it was made from, in BF16",
            )
        scales = fp8.checkpoint.scales(codes)
        # blocks are quantized again, and one of zeros may have the scale 0
        fit = np.isfinite(scales) & (scales >= (0 if codes.granularity == "block" else SMALLEST_SCALE))
        if not fit.all():
            raise InputError(
                f"{codes.scale}",
                f"holds {float(scales[~fit][0]):g} ({int((~fit).sum()):,} of {scales.size:,} are not positive and "
                "finite), which is no scale",
                "export the checkpoint again",
            )
