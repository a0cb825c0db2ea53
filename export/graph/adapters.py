"""LoRA adapters in the graph: two GEMMs in the compute type behind each adapted GEMM, named `M.adapter.…`.

The adapter's tensors stay in PEFT's own file, in a folder below the graph's, and are external data of the graph. Each
adapter has a graph of its own, and all graphs share one copy of the base's weights.
"""

from functools import partial
from pathlib import Path

import torch
from torch import nn

from ...calibrate.checkpoint.adapter import ENDS, PREFIX, TENSORS, Adapter, LoraPart, open_adapter
from ...calibrate.model.adapter_addition import add_lora_output
from ...quantize.reading.run_checkpoint import ADAPTERS

#: The name of the submodule that holds a linear layer's adapter in the traced model.
CHILD = "adapter"


class Added(nn.Module):
    """The two GEMMs that `part` of an adapter adds behind a GEMM from `width` inputs to `out` outputs, in
    `dtype`.
    """

    def __init__(self, part: LoraPart, width: int, out: int, dtype: torch.dtype):
        super().__init__()
        self.scale = part.scale
        self.register_buffer("a", torch.empty((part.rank, width), dtype=dtype, device="meta"))
        self.register_buffer("b", torch.empty((out, part.rank), dtype=dtype, device="meta"))

    a: torch.Tensor
    b: torch.Tensor

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add the adapter's output for `x` [..., in] to the GEMM `y` [..., out]."""
        return add_lora_output(y, x, self.a, self.b, self.scale)


def stored_adapter(directory: Path, name: str) -> Adapter:
    """Open the adapter `name` beside the checkpoint in `directory`."""
    return open_adapter(directory / ADAPTERS / name)


def file_of(name: str) -> str:
    """The path of an adapter's tensors, relative to the graph's directory."""
    return f"{ADAPTERS}/{name}/{TENSORS}"


def lay_in_graph(model: nn.Module, adapter: Adapter, dtype: torch.dtype) -> None:
    """Put `adapter` behind the GEMMs of `model`, which is prepared for the graph; changed in place."""
    for module, part in adapter.parts.items():
        linear = model.get_submodule(module)
        out = adapter.headers[part.b].shape[0]
        width = adapter.headers[part.a].shape[1]
        linear.add_module(CHILD, Added(part, width, out, dtype))
        linear.forward = partial(_adapted, linear)  # of plain parts, so that layers can be told to be alike


def _adapted(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    added: torch.Tensor = linear.get_submodule(CHILD)(x, type(linear).forward(linear, x))
    return added


def initializer_name(name: str) -> str:
    """Name the initializer of a tensor of the traced model: `M.adapter.a` is PEFT's `M.lora_A.weight`."""
    for part, end in zip("ab", ENDS, strict=True):
        if name.endswith(suffix := f".{CHILD}.{part}"):
            return name.removesuffix(suffix) + end
    return name


def stored_names(adapter: Adapter) -> dict[str, str]:
    """Map the names of initializers to the names in PEFT's file."""
    return {name.removeprefix(PREFIX): name for name in adapter.headers}
