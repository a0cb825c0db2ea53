"""Take fused experts apart: one module for each expert, in place of transformers' two tensors for all of them.

transformers 5 stores the experts of a layer in `gate_up_proj` [experts, 2 · inner, width] and `down_proj` [experts,
width, inner]. Code that works on linear layers (observers, scales, rounding, codes) does not see these. `unfold`
replaces them by modules with three linear layers for each expert, `experts.N.gate_proj`, `.up_proj` and `.down_proj`,
that compute the same. From there on a mixture of experts is a model with many linear layers.

Only the form that most of transformers' mixtures share is supported. A class has this form if it computes what
`Experts` compute, which is tested once for each class on random numbers. Biases, interleaved or transposed weights and
limits on the gate are other forms, and are refused by name (`architecture.refuse_experts`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from inspect import unwrap
from itertools import pairwise
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

#: The parameters of a fused module -> the linear layers of an expert that each becomes.
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
#: Sizes at which a class is tested: number of experts, width, inner width, tokens.
TRIED = (4, 8, 6, 16)
#: The tokens that observers see of an expert: those routed to it; `every` token, without a change of outputs; or `all`
#: tokens as one tensor object, without outputs, by which groups are found.
TokensShown = Literal["routed", "every", "all"]


class Expert(nn.Module):
    """One expert: down(act(gate(x)) · up(x))."""

    def __init__(self, width: int, inner: int, act: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor):
        """Make weights without values, of the type and on the device of `like`."""
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
        """Compute the expert's output without calling the hooks of its linear layers."""
        inner = self.act_fn(self.gate_proj.forward(x)) * self.up_proj.forward(x)
        y: torch.Tensor = self.down_proj.forward(inner)
        return y


class SharedInput(nn.Module):
    """The input that all experts of a layer share, as a tensor object of its own.

    The router and shared experts read the same values from another object, so that their gradients do not reach this
    one.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a view of `x`, another object of the same values."""
        return x.view_as(x)


class Experts(nn.Module):
    """The experts of one layer, named by their numbers; each computes the tokens that are routed to it.

    `routing`: the tokens of a call by expert, and the expert that computes, while one does.
    """

    shown: TokensShown = "routed"
    routing: "Routing | None" = None

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

        On the meta device the routing is unknown, and all experts are shown all tokens.
        """
        out = torch.zeros_like(hidden_states)
        shared = self.input(hidden_states)
        if self.shown != "routed" or hidden_states.is_meta:
            for expert in self.experts:
                expert(shared)
        if self.shown == "all" or hidden_states.is_meta:
            return out
        self.routing = Routing([*routes(top_k_index, len(self.experts))])
        for index, (number, position, token) in enumerate(self.routing.routes):
            expert, self.routing.current = self.experts[number], index
            x = shared[token]
            y = expert(x) if self.shown == "routed" else expert.forward_without_hooks(x)
            out.index_add_(0, token, (y * top_k_weights[token, position, None]).to(out.dtype))
        self.routing = None
        return out

    def rows_from(self, first: int, positions: int) -> torch.Tensor:
        """The rows of the expert that computes whose tokens are at position `first` or later of their sequences, of so
        many `positions` each; int64, ascending.
        """
        assert self.routing is not None, "the experts are computing"
        return self.routing.rows_from(first, positions)


Route = tuple[int, torch.Tensor, torch.Tensor]


@dataclass
class Routing:
    """The `routes` of a call of experts, and the index among them of the expert that computes."""

    routes: list[Route]
    current: int = 0
    _rows: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    def rows_from(self, first: int, positions: int) -> torch.Tensor:
        """As `Experts.rows_from` has it: the host waits for all experts at once, and once for their GEMMs."""
        if (first, positions) not in self._rows:
            late = [token % positions >= first for _, _, token in self.routes]
            counts = torch.stack([is_late.sum() for is_late in late]).tolist()
            self._rows[first, positions] = [
                is_late.byte().argsort(descending=True, stable=True)[:count]
                for is_late, count in zip(late, counts, strict=True)
            ]
        return self._rows[first, positions][self.current]


def routes(top_k_index: torch.Tensor, count: int) -> Iterator[Route]:
    """Yield each of `count` experts that has tokens, in order, with the places of its own in `top_k_index` int64
    [tokens, chosen]: positions among the chosen ones and tokens, int64 each, by position first.

    All places are sorted by their expert at once, so that the host waits once for a GPU, whatever the number of
    experts; searching the places of each expert would be a wait for each.
    """
    expert, place = top_k_index.T.flatten().sort(stable=True)
    position = place // len(top_k_index)
    token = place % len(top_k_index)
    ends = torch.searchsorted(expert, torch.arange(count, device=expert.device), right=True).tolist()
    for number, (start, end) in enumerate(pairwise([0, *ends])):
        if start < end:
            yield number, position[start:end], token[start:end]


@contextmanager
def show_tokens(experts: Iterable[Experts], shown: TokensShown) -> Iterator[None]:
    """Show the observers of `experts` the tokens `shown` in this block."""
    before = [(module, module.shown) for module in experts]
    for module, _ in before:
        module.shown = shown
    try:
        yield
    finally:
        for module, previous in before:
            module.shown = previous


def experts_of(model: nn.Module) -> dict[str, Experts]:
    """The experts of each layer of `model` that has any, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Experts)}


def routed_gemms(model: nn.Module) -> dict[str, list[str]]:
    """Map the experts of each layer to the last GEMM of each expert, whose input no other GEMM reads."""
    return {
        name: [f"{name}.{number}.down_proj" for number in range(len(module.experts))]
        for name, module in experts_of(model).items()
    }


def full_input_module(model: nn.Module, gemm: str) -> nn.Module:
    """The module of `model` that receives the whole input tensor of `gemm`.

    An expert's gate and up projections read only the tokens that are routed to it; the whole tensor passes through the
    input module of the experts. For other GEMMs it is the GEMM itself.
    """
    expert, _, name = gemm.rpartition(".")
    experts = model.get_submodule(expert.rpartition(".")[0])
    shared = isinstance(experts, Experts) and name in FUSED["gate_up_proj"]
    if isinstance(experts, Experts) and shared:
        return experts.input
    return model.get_submodule(gemm)


def shared_inputs(model: nn.Module, gemms: Iterable[str]) -> dict[nn.Module, list[str]]:
    """Map each module of `model` that receives a whole input to the `gemms` that read only some tokens of it."""
    readers: dict[nn.Module, list[str]] = {}
    for name in gemms:
        if (module := full_input_module(model, name)) is not model.get_submodule(name):
            readers.setdefault(module, []).append(name)
    return readers


def unfold(model: PreTrainedModel) -> None:
    """Replace the fused experts of `model` that have the supported form by a module for each expert, without values."""
    for name, module in fused(model).items():
        model.set_submodule(name, apart(module))


def fused(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules of `model` with fused experts in the supported form, by name."""
    shaped = {name: module for name, module in model.named_modules() if _has_the_shapes(module)}
    first_of_type = {type(module): module for module in shaped.values()}
    taken = {kind for kind, module in first_of_type.items() if computes_the_same(module)}
    return {name: module for name, module in shaped.items() if type(module) in taken}


def apart(module: nn.Module) -> Experts:
    """Make experts without values for the fused `module`."""
    down = module.get_parameter("down_proj")
    number, width, inner = down.shape
    return Experts(Expert(width, inner, module.act_fn, down) for _ in range(number))  # type: ignore[arg-type]


def _empty_linear(width: int, height: int, like: torch.Tensor) -> nn.Linear:
    """Make a linear layer of the type and on the device of `like`, without drawing values, which would take seconds."""
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.in_features = width
    linear.out_features = height
    linear.weight = nn.Parameter(like.new_empty(height, width))
    return linear


def _has_the_shapes(module: nn.Module) -> bool:
    """Tell whether `module` has the two fused parameters, in matching shapes, and an activation."""
    parameters = dict(module.named_parameters())
    if parameters.keys() != FUSED.keys() or not hasattr(module, "act_fn"):
        return False
    number, width, inner = (*parameters["down_proj"].shape, 0, 0, 0)[:3]
    return tuple(parameters["gate_up_proj"].shape) == (number, 2 * inner, width)


def computes_the_same(module: nn.Module) -> bool:
    """Tell whether the class of a fused `module` computes what `Experts` compute.

    Its own forward pass, not one of the faster ones that transformers puts in its place, is compared on random numbers,
    some of them so large that a limit on the gate would show.
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
    arguments = (20 * draw(tokens, width), chosen, draw(tokens, 2))
    with torch.no_grad():
        try:
            theirs = unwrap(type(module).forward)(trial, *arguments)
            expected = ours(*arguments)  # whose activation may take gate and up at once (Inkling 2)
        except (TypeError, AttributeError, RuntimeError):
            return False
        return isinstance(theirs, torch.Tensor) and bool(torch.allclose(theirs, expected, rtol=1e-9))
