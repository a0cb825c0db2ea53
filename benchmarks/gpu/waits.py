"""Count the host's waits for a GPU and the bytes that are copied, on a machine without one.

The meta device stands in for the GPU: it has shapes and no values, so an 8B takes seconds and no memory. Every
operation of torch's own level passes by `HostWaits`, which knows those that make the host wait on CUDA. An operation
that reads a value back finds zeros. Kernels in Triton, which wait for nothing, are not on the way: patterns are counted
by sorting instead.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, PreTrainedModel

from fp8q.calibrate.measure import moments
from fp8q.calibrate.measure.observe import Watch, probe_groups
from fp8q.calibrate.model.gemms import observed_gemms
from fp8q.calibrate.model.skeleton import empty

from .llama import Shape

aten = torch.ops.aten
#: Operation -> how many values the host reads back for it on CUDA (ATen/native/cuda of PyTorch 2.13).
READS_BACK: dict[Any, int] = {
    aten._local_scalar_dense.default: 1,  # item, int, float, bool
    aten.equal.default: 1,
    aten.nonzero.default: 1,  # and so masks as indices, and where with one argument
    aten.masked_select.default: 1,
    aten.bincount.default: 2,  # the smallest and the largest value
    aten._unique2.default: 1,
    aten.unique_consecutive.default: 1,
}
COPIES = {aten._to_copy.default: 0, aten.copy_.default: 1}


class HostWaits(TorchDispatchMode):
    """Counts `waits`, and bytes copied `to_device` and `to_memory`, while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.waits = self.to_device = self.to_memory = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Count one operation, and give what the meta device cannot."""
        kwargs = kwargs or {}
        with self:  # in inference mode operations arrive that are made of others
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        if func in READS_BACK and args[0].is_meta:
            self.waits += READS_BACK[func]
            return self._nothing(func, args[0], kwargs)
        if func in COPIES:
            return self._copy(func, args, kwargs)
        return func(*args, **kwargs)

    def _nothing(self, func: Any, x: torch.Tensor, kwargs: Any) -> Any:
        """The result of an operation that reads back, of a tensor of zeros."""
        if func in (aten._local_scalar_dense.default, aten.equal.default):
            return torch.zeros((), dtype=x.dtype).item()
        if func is aten.bincount.default:
            return x.new_empty(kwargs.get("minlength", 1), dtype=torch.int64)
        return func(torch.zeros(x.shape, dtype=x.dtype), **kwargs).to("meta")

    def _copy(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """A copy; between devices it waits, unless it is told not to, as from pinned memory."""
        source: torch.Tensor = args[COPIES[func]]
        target = (
            torch.device(kwargs.get("device") or source.device) if func is aten._to_copy.default else args[0].device
        )
        if source.is_meta == (target.type == "meta"):
            return func(*args, **kwargs)
        blocking = not (kwargs.get("non_blocking") or args[2:] == (True,))
        self.waits += blocking
        if not source.is_meta:
            self.to_device += source.nbytes
            return func(*args, **kwargs)
        self.to_memory += source.nbytes
        dtype = kwargs.get("dtype") or source.dtype
        return torch.zeros((), dtype=dtype).expand(source.shape) if func is aten._to_copy.default else args[0]


class Uploads(TorchFunctionMode):
    """Counts the numbers that `torch.tensor` puts on the device, which make no operation, into `counted`."""

    def __init__(self, counted: HostWaits):
        super().__init__()
        self.counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Count one call."""
        made = func(*args, **(kwargs or {}))
        if func is torch.tensor and made.is_meta and made.nbytes:
            self.counted.waits += 1
            self.counted.to_device += made.nbytes
        return made


@contextmanager
def host_waits() -> Iterator[HostWaits]:
    """Count waits and copies in this block."""
    with HostWaits() as counted, Uploads(counted):
        yield counted


def calibration_batch(shape: Shape, windows: int, seq_len: int, with_moments: bool) -> HostWaits:
    """Count waits and copies of one batch of the product's own calibration of a Llama of that `shape`; `with_moments`:
    of its second batch with second moments, whose files, made in the first, are here of no bytes.
    """
    ids = torch.zeros(windows, seq_len, dtype=torch.int64)
    with mock.patch.object(moments, "new_matrix", _no_file):
        watch = watching(llama(shape, seq_len), moments.SecondMoments(Path(".")) if with_moments else None)
        with host_waits():
            watch.forward(ids, 0)
        with host_waits() as counted:
            watch.forward(ids, 1)
    return counted


def warned_waits(shape: Shape, windows: int, seq_len: int, device: str) -> int:
    """Count PyTorch's warnings of waits in such a batch on a GPU, with weights of any values, without moments."""
    watch = watching(torch.nn.Module.to_empty(llama(shape, seq_len), device=device))
    ids = torch.zeros(windows, seq_len, dtype=torch.int64)
    watch.forward(ids, 0)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            watch.forward(ids, 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in warned)


def llama(shape: Shape, positions: int) -> PreTrainedModel:
    """A Llama on the meta device."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size, max_position_embeddings=positions,
    )  # fmt: skip
    return empty(config, torch.bfloat16)


def watching(model: PreTrainedModel, store: moments.SecondMoments | None = None) -> Watch:
    """The product's observers of `model`, for two batches."""
    products = observed_gemms(model)
    return Watch(model, products, probe_groups(model, products), 2, store)


def _no_file(path: Path, width: int) -> Any:
    """Zeros float32 [width, width] that take four bytes in all."""
    return np.broadcast_to(np.float32(0), (width, width))
