"""Give some modules of a skeleton weights for a while, so that memory holds one decoder layer.

Layers are copied to memory, since every batch reads all of their weights. An embedding, of which a batch reads a few
rows, stays in its mapped file where it is stored in BF16 and the device is the CPU. On a GPU with room for two layers,
the next layer's weights are read and copied while one computes (`copies`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from math import prod

import torch
from torch import nn
from transformers import PreTrainedModel

from ...core.errors import InputError
from .copies import Coming, copies_of
from .expert_names import Conversions, ConvertedTensor
from .memory import has_room
from .source import Source


class Materializer:
    """Fill modules of a skeleton with weights for a while, and empty them again."""

    def __init__(
        self,
        model: PreTrainedModel,
        source: Source,
        device: str,
        dtype: torch.dtype = torch.bfloat16,
        rounded: bool = True,
    ):
        """Read the weights of `source` for `model`, onto `device`, as type `dtype`, `rounded` to BF16 or as stored.

        Those that transformers keeps in FP32 stay as they are.
        """
        self.model = model
        self.weights = source.weights()
        self.device = device
        self.dtype = dtype
        self.first = torch.bfloat16 if rounded else dtype
        self.name = source.name
        self.stored = source.stored
        self.fp32 = source.fp32
        self.copies = copies_of(device)
        self._coming = dict[str, Coming]()
        self._conversions = Conversions(model, dense=True)
        self.merged = self._conversions.merged(self.weights.names())
        self.tied: Mapping[str, str] = {
            **model.all_tied_weights_keys,
            **{tied_to: tied for tied, tied_to in model.all_tied_weights_keys.items()},
        }

    @cached_property
    def converted(self) -> Mapping[str, ConvertedTensor]:
        """The tensors of the model that transformers makes of stored ones in other ways."""
        return self._conversions.converted(self.weights.names())

    @contextmanager
    def filled(self, names: Sequence[str], resident: bool = True) -> Iterator[None]:
        """Fill the parameters and buffers of the named modules themselves in this block.

        `resident` False leaves BF16 weights on the CPU in their mapped files. Raises InputError for a weight that the
        checkpoint has under another name.
        """
        modules = [(name, self.model.get_submodule(name)) for name in names]
        before = [dict(module._parameters) for _, module in modules]
        try:
            for name, module in modules:
                self._fill(name, module, resident)
            yield
        finally:
            for (_, module), parameters in zip(modules, before, strict=True):
                module._parameters.update(parameters)

    def has(self, name: str) -> bool:
        """Tell whether the model's tensor `name` is stored, as it is or in parts."""
        return self._find(name) is not None or name in self.merged

    def prefetch(self, names: Sequence[str]) -> None:
        """Begin to copy the weights of the named modules to a GPU, for the next call of `filled`.

        Nothing where there is no GPU, or no room on it.
        """
        modules = [(name, self.model.get_submodule(name)) for name in names if self.copies.ahead]
        keys = {f"{name}.{key}" for name, module in modules for key in module._parameters}
        stored = [stored_name for key in sorted(keys) if (stored_name := self._find(key)) is not None]
        if has_room(torch.device(self.device), sum(4 * prod(self.weights.shape(name)) for name in stored)):
            self._coming = {
                name: self.copies.to_device(partial(self.weights.tensor, name)) for name in dict.fromkeys(stored)
            }

    def _fill(self, name: str, module: nn.Module, resident: bool) -> None:
        prefix = f"{name}." if name else ""
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = nn.Parameter(self._read(prefix + key, resident), requires_grad=False)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                computed = key in module._non_persistent_buffers_set
                module._buffers[key] = buffer.to(self.device) if computed else self._read(prefix + key, resident)

    def _find(self, name: str) -> str | None:
        """The stored name of the model's tensor `name`, or of the one it is tied to; None where neither is stored."""
        return next((key for key in (self.stored(name), self.tied.get(name)) if key in self.weights.names()), None)

    def _read(self, name: str, resident: bool) -> torch.Tensor:
        stored = self._find(name)
        if stored is None and name in self.merged:
            return self.merged[name].joined(partial(self._of_file, resident=resident))
        if stored is None and name in self.converted:
            return self.converted[name].computed(partial(self._of_file, resident=resident))
        if stored is None:
            raise InputError(
                self.name,
                f"has no tensor {name}",
                "load the model once with transformers and save it with save_pretrained, which gives tensors their "
                "present names",
            )
        return self._of_file(stored, resident)

    def _of_file(self, stored: str, resident: bool) -> torch.Tensor:
        coming = self._coming.pop(stored, None)
        mapped = coming() if coming else self.weights.tensor(stored)
        first, dtype = (torch.float32, torch.float32) if stored in self.fp32 else (self.first, self.dtype)
        tensor = mapped.to(self.device, first).to(dtype) if mapped.is_floating_point() else mapped
        tensor = tensor.to(self.device)
        if resident and tensor is mapped and not coming:
            return tensor.clone()
        return tensor
