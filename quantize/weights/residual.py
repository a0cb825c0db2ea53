"""Find the residual to which a decoder layer adds a product, by running the layer.

One batch goes through the layer. A product is added to the residual r where r plus the product's output equals, to the
last bit, the input of a later module or the output of the layer. Candidates for r are the input of the layer and the
inputs of earlier modules. A layer that adds in another way (after a norm, three terms at once) has no such sum, and no
residual is reported for it.
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
    """Find, for each of the layer's `products`, the module of `model` whose input is the residual it is added to.

    The module's name is empty for the input of `layer` itself; products without a residual are left out. `run` calls
    the layer on `hidden` [windows, seq_len, width].
    """
    names = {module: name for name, module in model.named_modules()}
    inputs: list[tuple[str, torch.Tensor]] = [("", hidden)]
    outputs: dict[str, tuple[int, torch.Tensor]] = {}  # and the number of inputs recorded before

    def record_input(module: nn.Module, arguments: tuple[object, ...]) -> None:
        if arguments and isinstance(arguments[0], torch.Tensor) and arguments[0].numel() == hidden.numel():
            inputs.append((names[module], arguments[0]))

    def record_output(module: nn.Module, arguments: tuple[object, ...], out: object) -> None:
        if isinstance(out, torch.Tensor) and out.numel() == hidden.numel():
            outputs[names[module]] = (len(inputs), out)

    with ExitStack() as stack:
        for module in layer.modules():
            if module is not layer:
                stack.callback(module.register_forward_pre_hook(record_input).remove)
        for module in products.values():
            stack.callback(module.register_forward_hook(record_output).remove)
        leaving = run()
    bases: dict[str, str] = {}
    for name, (before, out) in outputs.items():
        later = [tensor for _, tensor in inputs[before:]] + [leaving]
        for base, tensor in inputs[:before]:
            total = tensor.flatten() + out.flatten()
            if any(torch.equal(total, after.flatten()) for after in later):
                bases[name] = base
                break
    return bases
