"""Cast what a checkpoint does not quantize to BF16, except the tensors that transformers keeps in FP32.

BF16 has 8 significant bits, so a number of its range is rounded by at most 1 part in 256 (2^-8); one below it (3.9e-38
in FP32) may be lost. Bytes of tensors that keep FP32 are copied.
"""

from collections import Counter
from pathlib import Path

import torch

from ...calibrate.checkpoint.weights import CHUNK, Weights
from ...calibrate.model.source import Source
from ...core.headers import read_header
from ..reading.run_checkpoint import tensor_files

#: Types that are cast, as safetensors spells them -> as users do.
CAST = {"F16": "FP16", "F32": "FP32", "F64": "FP64"}


class Narrowing:
    """The casts of one checkpoint: how many tensors were cast, and the largest relative error among their values."""

    def __init__(self, source: Source, weights: Weights):
        """Cast the tensors of `source`, read by `weights`."""
        self.source = source
        self.weights = weights
        self.cast: dict[str, str] = {}
        self.largest = 0.0
        self.largest_in = ""

    def keeps(self, name: str) -> bool:
        """Tell whether the tensor `name` keeps a type that is wider than BF16."""
        return name in self.source.fp32_in_files and self.weights.dtype(name) in CAST

    def tensor(self, name: str) -> torch.Tensor:
        """Read the tensor `name` in the type in which it is written."""
        tensor = self.weights.tensor(name)
        if not tensor.is_floating_point():
            return tensor
        if self.keeps(name):
            return tensor.float()
        narrow = tensor.to(torch.bfloat16)
        if self.weights.dtype(name) in CAST and not self.weights.coded(name):
            self._count(name, tensor, narrow)
        return narrow

    def _count(self, name: str, tensor: torch.Tensor, narrow: torch.Tensor) -> None:
        self.cast[name] = CAST[self.weights.dtype(name)]
        for exact, rounded in zip(tensor.flatten().split(CHUNK), narrow.flatten().split(CHUNK), strict=True):
            share = ((rounded.double() - exact.double()) / exact.double()).abs().nan_to_num(0.0)  # 0 / 0 for zeros
            if share.numel() and (error := float(share.max())) > self.largest:
                self.largest = error
                self.largest_in = name

    @property
    def remark(self) -> str | None:
        """Describe the casts; None where there were none."""
        if not self.cast:
            return None
        counted = " and ".join(f"{count:,} in {kind}" for kind, count in Counter(self.cast.values()).items())
        where = f" ({self.largest_in})" if self.largest_in else ""
        return f"tensors cast to BF16: {counted}, with a relative error of up to {self.largest:.2g}{where}"


def rounded_remark(source: Source, directory: Path) -> str | None:
    """Name the tensors that transformers keeps in FP32, of which the checkpoint in `directory` has the roundings to
    BF16; None where there are none.

    Earlier versions of fp8q wrote such checkpoints of `source`.
    """
    weights = source.weights()
    files = tensor_files(directory)
    narrowing = Narrowing(source, weights)
    headers = {file: read_header(directory / file) for file in {*files.values()}}
    rounded = [
        name
        for name in weights.names()
        if narrowing.keeps(name) and name in files and headers[files[name]][name].dtype != "F32"
    ]
    if not rounded:
        return None
    more = f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
    return (
        f"{rounded[0]}{more}: in BF16 in {directory}, while the source has it in FP32 and transformers keeps it so; a "
        "router then chooses other experts; calibrate again into another directory"
    )
