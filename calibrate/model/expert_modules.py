"""Experts, one module each: what transformers 5 holds as two tensors of all experts is taken apart.

transformers keeps the experts of a layer in `gate_up_proj` [experts, 2 · inner, width] and `down_proj` [experts, width,
inner], which nothing that works on linear layers can see: no observer, scale, rounding or codes. `unfold` puts modules
with three linear layers an expert in their place, `experts.N.gate_proj`, `.up_proj` and `.down_proj`, that compute the
same; from there on a mixture is a model with many linear layers.

Only the form that most of transformers' mixtures share is taken, and a class has it where it computes what ours does:
each is asked once, on random numbers. Biases, interleaved or transposed weights and limits on the gate are another
form, and refused by name (`architecture.refuse_experts`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from inspect import unwrap
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

#: The parameters of a fused module, and the linear layers that each becomes.
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
#: Sizes at which a class is tried: number of experts, width, inner width, tokens.
TRIED = (4, 8, 6, 16)
#: Which tokens an expert is shown: those routed to it; `every` one besides, which changes no output; or `all`, by the
#: object that the layer received and for no output, which is how groups are told.
TokensShown = Literal["routed", "every", "all"]


class Expert(nn.Module):
    """One expert: down(act(gate(x)) · up(x))."""

    def __init__(self, width: int, inner: int, act: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor):
        """Of weights as `like` in type and device; they have no values."""
        super().__init__()
        self.gate_proj = _empty_linear(width, inner, like)
        self.up_proj = _empty_linear(width, inner, like)
        self.down_proj = _empty_linear(inner, width, like)
        self.act_fn = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [tokens, width] to [tokens, width]."""
        y: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y

    def forward_without_hooks(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the expert's output past the hooks of the linear layers."""
        inner = self.act_fn(self.gate_proj.forward(x)) * self.up_proj.forward(x)
        y: torch.Tensor = self.down_proj.forward(inner)
        return y


class SharedInput(nn.Module):
    """The tensor that all experts of a layer read, as an object of its own: the router and shared experts read the same
    numbers, and gradients of theirs end before it.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, as another object."""
        return x.view_as(x)


class Experts(nn.Module):
    """The experts of one layer, named by their numbers; each multiplies the tokens that are routed to it."""

    shown: TokensShown = "routed"

    def __init__(self, experts: Iterable[Expert]):
        super().__init__()
        self.input = SharedInput()
        self.experts = list(experts)
        for number, expert in enumerate(self.experts):
            self.add_module(str(number), expert)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """`hidden_states` [tokens, width] to [tokens, width]; `top_k_index` int64 and `top_k_weights` [tokens, chosen].

        On the meta device nobody knows who is chosen, and all experts are shown all tokens.
        """
        out = torch.zeros_like(hidden_states)
        shared = self.input(hidden_states)
        if self.shown != "routed" or hidden_states.is_meta:
            for expert in self.experts:
                expert(shared)
        if self.shown == "all" or hidden_states.is_meta:
            return out
        for number in top_k_index.unique().tolist():
            expert = self.experts[number]
            position, token = torch.where(top_k_index.T.eq(number))
            x = shared[token]
            y = expert(x) if self.shown == "routed" else expert.forward_without_hooks(x)
            out.index_add_(0, token, (y * top_k_weights[token, position, None]).to(out.dtype))
        return out


@contextmanager
def show_tokens(experts: Iterable[Experts], shown: TokensShown) -> Iterator[None]:
    """Show `experts` those tokens in the block."""
    before = [(module, module.shown) for module in experts]
    for module, _ in before:
        module.shown = shown
    try:
        yield
    finally:
        for module, was in before:
            module.shown = was


def experts_of(model: nn.Module) -> dict[str, Experts]:
    """The experts of each layer of `model` that has any, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Experts)}


def routed_products(model: nn.Module) -> dict[str, list[str]]:
    """The experts of each layer -> the product of each expert whose input is that of no other: the last one."""
    return {
        name: [f"{name}.{number}.down_proj" for number in range(len(module.experts))]
        for name, module in experts_of(model).items()
    }


def whole_input_module(model: nn.Module, product: str) -> nn.Module:
    """The module of `model` that receives the whole tensor of which `product` may only get some tokens: what all
    experts of a layer read passes by before it is shared out. Of other products it is the product itself.
    """
    expert, _, name = product.rpartition(".")
    place = model.get_submodule(expert.rpartition(".")[0])
    return place.input if isinstance(place, Experts) and name in FUSED["gate_up_proj"] else model.get_submodule(product)


def shared_inputs(model: nn.Module, products: Iterable[str]) -> dict[nn.Module, list[str]]:
    """The modules of `model` that see what some of `products` are given copies of -> these."""
    found: dict[nn.Module, list[str]] = {}
    for name in products:
        if (place := whole_input_module(model, name)) is not model.get_submodule(name):
            found.setdefault(place, []).append(name)
    return found


def unfold(model: PreTrainedModel) -> None:
    """Put experts of one module each in place of those of `model` that transformers holds fused, as far as they have
    the form above; they lie where the fused ones do, and have no values.
    """
    for name, module in fused(model).items():
        model.set_submodule(name, apart(module))


def fused(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules of `model` that hold experts fused in the form above, by name."""
    shaped = {name: module for name, module in model.named_modules() if _has_the_shapes(module)}
    one_of_each = {type(module): module for module in shaped.values()}
    taken = {kind for kind, module in one_of_each.items() if computes_the_same(module)}
    return {name: module for name, module in shaped.items() if type(module) in taken}


def apart(module: nn.Module) -> Experts:
    """Experts, without values, for the fused `module`."""
    down = module.get_parameter("down_proj")
    number, width, inner = down.shape
    return Experts(Expert(width, inner, module.act_fn, down) for _ in range(number))  # type: ignore[arg-type]


def _empty_linear(width: int, height: int, like: torch.Tensor) -> nn.Linear:
    """A linear layer as `like` in type and device; drawing numbers for it would take seconds for thousands."""
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.in_features, linear.out_features = width, height
    linear.weight = nn.Parameter(like.new_empty(height, width))
    return linear


def _has_the_shapes(module: nn.Module) -> bool:
    """Tell whether the parameters of `module` are the two above, beside an activation."""
    own = dict(module.named_parameters())
    if own.keys() != FUSED.keys() or not hasattr(module, "act_fn"):
        return False
    number, width, inner = (*own["down_proj"].shape, 0, 0, 0)[:3]
    return tuple(own["gate_up_proj"].shape) == (number, 2 * inner, width)


def computes_the_same(module: nn.Module) -> bool:
    """Tell whether the class of a fused `module` multiplies as `Experts` do: its own forward, not one of the faster
    ones that transformers puts in its place, against ours on random numbers, large ones too, which a limit would show.
    """
    number, width, inner, tokens = TRIED
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device="cpu", dtype=torch.float64)

    trial = copy(module)
    trial._parameters = {
        "gate_up_proj": nn.Parameter(draw(number, 2 * inner, width)),
        "down_proj": nn.Parameter(draw(number, width, inner)),
    }
    vars(trial)["num_experts"] = number
    ours = apart(trial)
    for name, tensor in ours.named_parameters():
        index, _, part = name.removesuffix(".weight").partition(".")
        of, rows = next((of, parts.index(part)) for of, parts in FUSED.items() if part in parts)
        tensor.data = trial.get_parameter(of)[int(index)].chunk(len(FUSED[of]))[rows]
    chosen = torch.stack([torch.randperm(number, generator=random, device="cpu")[:2] for _ in range(tokens)])
    given = (20 * draw(tokens, width), chosen, draw(tokens, 2))
    with torch.no_grad():
        try:
            theirs = unwrap(type(module).forward)(trial, *given)
        except (TypeError, AttributeError, RuntimeError):
            return False
        return isinstance(theirs, torch.Tensor) and bool(torch.allclose(theirs, ours(*given), rtol=1e-9))
