"""Share the parameters of a model between ranks by torch's FSDP2, so that several ranks learn what one has no room for.

`fully_shard` cuts every parameter along its first axis, a part for each rank. The parameters of a decoder layer are
gathered for its forward pass, again for its backward pass, and let go of after each; gradients come back as parts, the
mean over ranks.

Two things would stay whole on each rank. The rounded weight, which the backward pass needs, is therefore computed anew
there. The codes that a layer began with are a buffer, a byte a weight, and do stay.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...calibrate.model.gemms import language_modules
from ...calibrate.ranks.world import World
from .linear import learned_layers


class ShardedModel(nn.Module):
    """Stands before a model that is sharded already, so that transformers' Trainer does not wrap it once more."""

    def __init__(self, model: nn.Module):
        """Pass calls on to `model`."""
        super().__init__()
        self.module = model

    def forward(self, **named: Any) -> Any:
        """Call the model."""
        return self.module(**named)


def shard_model(model: PreTrainedModel, world: World) -> None:
    """Share the parameters of `model`, which are whole on each rank of `world`, between the ranks, in place."""
    mesh = init_device_mesh(world.device, (world.size,))
    for part in (*_decoder_layers(model), model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    for layer in learned_layers(model).values():
        layer.rounds_again = True


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of the outermost list of as many as the configuration says; none where there is no such."""
    count = model.config.get_text_config().num_hidden_layers
    modules = language_modules(model).values()
    lists = (module for module in modules if isinstance(module, nn.ModuleList) and len(module) == count)
    return list(next(lists, ()))


def is_sharded(model: nn.Module) -> bool:
    """Tell whether the parameters of `model` are shared between ranks."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())
