"""The parts that a rank has of shared tensors, and of an optimizer's state, and the whole of them.

A shared tensor is torch's DTensor, cut along its first axis. Adam is element by element, so that the step of a part is
that part of the step.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor of which this rank may have a part; all ranks call it then."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that this rank has, which is a view of it; the tensor itself where it is not shared."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def part_of(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of `values`, which every rank has whole, that this rank has of `like`."""
    if not isinstance(like, DTensor):
        return values
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None).to_local()


def local_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of `optimizer` with the parts that this rank has in the place of shared tensors."""
    state = optimizer.state_dict()
    parts = {
        index: {
            name: local_part(value) if isinstance(value, torch.Tensor) else value
            for name, value in parameter_state.items()
        }
        for index, parameter_state in state["state"].items()
    }
    return state | {"state": parts}


def load_local_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `local_state` had on this rank into an `optimizer` of the same parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shared = {
        index: {name: _shared_like(value, parameters[index]) for name, value in parameter_state.items()}
        for index, parameter_state in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": shared})


def _shared_like(value: Any, parameter: torch.Tensor) -> Any:
    """Return this rank's part of a tensor of the shape of `parameter` as that tensor; any other `value` as it is."""
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
