"""Move the learned weights of a layer by Adam, in steps of a share of their own magnitude.

    W ← W - rate · rms(W) · m̂ / (√v̂ + ε)

m̂ and v̂ are Adam's means of the gradient and of its square (Kingma and Ba 2014, arXiv 1412.6980, algorithm 1). The root
mean square of a layer's first weights makes one `rate` serve layers and models of any magnitude. A step is the same for
all weights of a layer: in spacings of the grid, which grow with a weight, it would leave small weights where they are.
A gain, which is 1 at first, moves a whole channel, and its scale by a spacing of BF16 at a time, 0.4 to 0.8 %: it has a
part of the rate.
"""

from typing import Any

import torch
from torch import nn

from .linear import learned_layers

#: Far below the gradients of a divergence near zero, so that a step does not depend on their magnitude.
EPSILON = 1e-15
#: A gain's part of the rate. By hand, the demo in two codes comes from 371 × 10⁻⁶ to 356 with all of it, to 331 with a
#: fourth, and to 328 with less or none, from 184,320 tokens.
GAIN_RATE = 0.25
#: The share of steps in which the learning rate rises.
WARM_UP = 0.05
#: A training that made the model worse begins anew, at most so often in all, each time in steps so many times smaller.
ATTEMPTS, SMALLER = 3, 3.0


def weight_steps(student: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Make the optimizer of the learned layers of `student`, in the weights that they begin with; `learning_rate`: the
    step as a share of the root mean square of a layer's weights.
    """
    groups = list[dict[str, Any]]()
    for layer in learned_layers(student).values():
        weight = layer.first_weight()
        groups.append({"params": [layer.weight], "lr": learning_rate * float(weight.square().mean().sqrt())})
        if layer.gain is not None:
            groups.append({"params": [layer.gain], "lr": GAIN_RATE * learning_rate})
    return torch.optim.Adam(groups, eps=EPSILON)
