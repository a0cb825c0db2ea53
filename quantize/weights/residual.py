"""Find the residual to which a decoder layer adds a product, by running the layer.

One batch goes through the layer. A product is added to a tensor r where r plus its output is, to the last bit, what a
later module of the layer gets, or what the layer returns; r is what the layer got, or what an earlier module of it got.
A layer that adds otherwise (after a norm, three terms at once) has no such sum, and nothing is claimed of it.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch import nn


def residual_bases(
    model: nn.Module,
    layer: nn.Module,
    products: Mapping[str, nn.Module],
    hidden: torch.Tensor,
    run: Callable[[], torch.Tensor],
) -> dict[str, str]:
    """Product -> the module of `model` whose input it is added to, empty for the input of `layer` itself; those of the
    layer's `products` for which one is found.

    `run` calls the layer on `hidden` [windows, seq_len, width].
    """
    names = {module: name for name, module in model.named_modules()}
    inputs: list[tuple[str, torch.Tensor]] = [("", hidden)]
    made: dict[str, tuple[int, torch.Tensor]] = {}

    def see(module: nn.Module, given: tuple[object, ...]) -> None:
        if given and isinstance(given[0], torch.Tensor) and given[0].numel() == hidden.numel():
            inputs.append((names[module], given[0]))

    def note(module: nn.Module, given: tuple[object, ...], out: object) -> None:
        if isinstance(out, torch.Tensor) and out.numel() == hidden.numel():
            made[names[module]] = (len(inputs), out)

    with ExitStack() as stack:
        for module in layer.modules():
            if module is not layer:
                stack.callback(module.register_forward_pre_hook(see).remove)
        for module in products.values():
            stack.callback(module.register_forward_hook(note).remove)
        leaving = run()
    found: dict[str, str] = {}
    for name, (place, out) in made.items():
        later = [tensor for _, tensor in inputs[place:]] + [leaving]
        for base, tensor in inputs[:place]:
            total = tensor.flatten() + out.flatten()
            if any(torch.equal(total, after.flatten()) for after in later):
                found[name] = base
                break
    return found
