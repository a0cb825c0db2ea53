"""Take fused experts apart: one module for each expert, in place of transformers' two tensors for all of them.

transformers 5 stores the experts of a layer in stacks: `gate_up_proj` [experts, 2 · inner, width] and `down_proj`
[experts, width, inner]; those without a gate in `up_proj` [experts, inner, width] and `down_proj`. Code that works on
linear layers (observers, scales, rounding, codes) does not see these. `unfold` replaces them by modules with two or
three linear layers for each expert, `experts.N.gate_proj`, `.up_proj` and `.down_proj`, that compute the same. From
there on a mixture of experts is a model with many linear layers.

The forms are the classes in `EXPERT_FORMS`: each says once which stacks there are, in which order they hold the weights
of an expert, and what lies between its GEMMs; readers, names and loaders ask it. A class of transformers has one of
them if it computes what `Experts` of that form compute, which is tested on random numbers, once for each class and its
settings. Others are refused by name (`refuse_experts`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from inspect import unwrap
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from ...core.errors import InputError
from ..checkpoint.weights import TensorPart

#: The GEMMs of an expert that read the tokens, of any form.
INPUT_GEMMS = ("gate_proj", "up_proj")
#: Sizes at which a class is tested: number of experts, width, inner width, tokens.
TRIED = (4, 8, 6, 16)
#: The tokens that observers see of an expert: those routed to it; `every` token, without a change of outputs; or `all`
#: tokens as one tensor object, without outputs, by which groups are found.
TokensShown = Literal["routed", "every", "all"]


class Expert(nn.Module):
    """One expert: down(act(gate(x)) · up(x)).

    `fused`: the parameters of transformers' module for all experts of a layer -> the GEMMs that each becomes.
    `turned`: they hold each weight [in, out]. `alternating`: the output channels of gate and up take turns in them,
    instead of following each other. `biased`: beside each is one of biases, `<name>_bias` [experts, out].
    `scaled_inputs`: transformers' module gets, for each expert, all tokens scaled by the router, 0 for other experts'.
    """

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)
    }  # fmt: skip
    turned: ClassVar[bool] = False
    alternating: ClassVar[bool] = False
    biased: ClassVar[bool] = False
    scaled_inputs: ClassVar[bool] = False

    gate_proj: nn.Module
    up_proj: nn.Module

    def __init__(self, width: int, inner: int, act: Callable[..., torch.Tensor], like: torch.Tensor):
        """Make weights without values, of the type and on the device of `like`."""
        super().__init__()
        for name in self.inputs():
            self.add_module(name, _empty_linear(width, inner, like, self.biased))
        self.down_proj = _empty_linear(inner, width, like, self.biased)
        self.act_fn = act

    @classmethod
    def stacks(cls) -> dict[str, tuple[str, ...]]:
        """The parameters of transformers' module -> the tensors of an expert that each holds, in their order."""
        weights = {stack: tuple(f"{gemm}.weight" for gemm in gemms) for stack, gemms in cls.fused.items()}
        if not cls.biased:
            return weights
        biases = {f"{stack}_bias": tuple(f"{gemm}.bias" for gemm in gemms) for stack, gemms in cls.fused.items()}
        return weights | biases

    @classmethod
    def shapes(cls, number: int, width: int, inner: int) -> dict[str, tuple[int, ...]]:
        """The shape of each of `stacks`, for so many experts of these sizes."""
        shapes: dict[str, tuple[int, ...]] = {}
        for stack, gemms in cls.fused.items():
            out, columns = (width, inner) if stack == "down_proj" else (len(gemms) * inner, width)
            shapes[stack] = (number, columns, out) if cls.turned else (number, out, columns)
            shapes[f"{stack}_bias"] = (number, out)
        return {stack: shapes[stack] for stack in cls.stacks()}

    @classmethod
    def parts(cls, tensors: Sequence[str], name: str, shape: tuple[int, ...]) -> Iterator[tuple[int, str, TensorPart]]:
        """Yield the number of the expert, the tensor of it, and where that is, of all in the stack of these `tensors`
        that is stored as `name` in this `shape`.
        """
        turned = cls.turned and len(shape) == 3
        rows = shape[2] if turned else shape[1]
        height = rows // len(tensors)
        for expert in range(shape[0]):
            for place, tensor in enumerate(tensors):
                if cls.alternating:
                    part = TensorPart(name, expert, place, rows, len(tensors), turned)
                else:
                    part = TensorPart(name, expert, place * height, (place + 1) * height, turned=turned)
                yield expert, tensor, part

    @classmethod
    def inputs(cls) -> tuple[str, ...]:
        """The GEMMs that read the expert's tokens."""
        return next(iter(cls.fused.values()))

    @classmethod
    def activation(cls, module: nn.Module) -> Callable[..., torch.Tensor] | None:
        """The function that `module` of transformers applies to the gate, or between the GEMMs; None without one."""
        act: Callable[..., torch.Tensor] | None = getattr(module, "act_fn", None)
        return act

    def activated(self, *outputs: torch.Tensor) -> torch.Tensor:
        """Map the `outputs` of the input GEMMs [tokens, inner] to the input of the last one, of that shape."""
        gate, up = outputs
        return self.act_fn(gate) * up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [tokens, width] to [tokens, width]."""
        y: torch.Tensor = self.down_proj(self.activated(*(self.get_submodule(name)(x) for name in self.inputs())))
        return y

    def forward_without_hooks(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the expert's output without calling the hooks of its linear layers."""
        inner = self.activated(*(self.get_submodule(name).forward(x) for name in self.inputs()))
        y: torch.Tensor = self.down_proj.forward(inner)
        return y


class ExpertWithOwnGate(Expert):
    """down(g(gate(x), up(x))), where g is the `_apply_gate` of transformers' module, as limits on the gate are."""

    @classmethod
    def activation(cls, module: nn.Module) -> Callable[..., torch.Tensor] | None:
        """`_apply_gate`, of a copy without weights."""
        without_weights = copy(module)
        without_weights._parameters = {}
        act: Callable[..., torch.Tensor] | None = getattr(without_weights, "_apply_gate", None)
        return act

    def activated(self, *outputs: torch.Tensor) -> torch.Tensor:
        """Let transformers' function have gate and up side by side."""
        return self.act_fn(torch.cat(outputs, -1))


class AlternatingExpert(ExpertWithOwnGate):
    """gpt_oss's: limits on gate and up, which take turns, biases, and weights that are stored [in, out]."""

    turned = True
    alternating = True
    biased = True

    def activated(self, *outputs: torch.Tensor) -> torch.Tensor:
        """Let transformers' function have gate and up in turn."""
        return self.act_fn(torch.stack(outputs, -1).flatten(-2))


class ExpertWithoutGate(Expert):
    """down(act(up(x)))."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}

    def activated(self, *outputs: torch.Tensor) -> torch.Tensor:
        """Map the output of the one input GEMM."""
        (up,) = outputs
        return self.act_fn(up)


class ScaledInputExpert(Expert):
    """Llama 4's: the router scales what an expert reads, and weights are stored [in, out]."""

    turned = True
    scaled_inputs = True


#: The forms of experts: the first that computes what transformers' class does is the one.
EXPERT_FORMS = (Expert, ExpertWithOwnGate, ExpertWithoutGate, AlternatingExpert, ScaledInputExpert)


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

    `routing`: the tokens of a call by expert, and the expert that computes, while one does. `places`: as `Routing` has
    it. `replaced`: the name of transformers' class of the module with all of them.
    """

    replaced = ""
    shown: TokensShown = "routed"
    routing: "Routing | None" = None
    places: torch.Tensor | None = None

    def __init__(self, experts: Iterable[Expert]):
        super().__init__()
        self.input = SharedInput()
        self.experts = list(experts)
        for number, expert in enumerate(self.experts):
            self.add_module(str(number), expert)

    @property
    def form(self) -> type[Expert]:
        """The form of the experts, which is one for all."""
        return type(self.experts[0])

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
        self.routing = Routing([*routes(top_k_index, len(self.experts))], self.places)
        for index, (number, position, token) in enumerate(self.routing.routes):
            expert, self.routing.current = self.experts[number], index
            x = shared[token]
            y = expert(x) if self.shown == "routed" else expert.forward_without_hooks(x)
            out.index_add_(0, token, (y * top_k_weights[token, position, None]).to(out.dtype))
        self.routing = None
        return out

    def choices(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The experts, int64 [tokens, chosen], of each token of the shared input, by the arguments of a call."""
        return top_k_index

    def rows_from(self, first: int, positions: int) -> torch.Tensor:
        """The rows of the expert that computes whose tokens are at position `first` or later of their sequences, of so
        many `positions` each; int64, ascending.
        """
        assert self.routing is not None, "the experts are computing"
        return self.routing.rows_from(first, positions)


class ExpertsOfScaledInputs(Experts):
    """The experts of one layer of Llama 4, whose input the router has scaled: all tokens for the first expert, then all
    for the next, and 0 where a token chose another.
    """

    def choices(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The expert, int64 [rows, 1], of each row that is not 0: these are the shared input."""
        return self._rows(hidden_states)[:, None] // (len(hidden_states) // len(self.experts))

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`hidden_states` [experts · tokens, width] to [experts · tokens, width]."""
        if hidden_states.is_meta:
            nowhere = hidden_states.new_zeros(0, 1)
            return super().forward(hidden_states, nowhere, nowhere)
        rows = self._rows(hidden_states)
        self.places = rows % (len(hidden_states) // len(self.experts))
        chosen = self.choices(hidden_states)
        y = super().forward(hidden_states[rows], chosen, hidden_states.new_ones(chosen.shape))
        return torch.zeros_like(hidden_states).index_copy_(0, rows, y)

    def _rows(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.any(-1).nonzero()[:, 0]


Route = tuple[int, torch.Tensor, torch.Tensor]


@dataclass
class Routing:
    """The `routes` of a call of experts, and the index among them of the expert that computes.

    `places`: the numbers of the tokens that rows of the shared input are; None where it has all of them in order.
    """

    routes: list[Route]
    places: torch.Tensor | None = None
    current: int = 0
    _rows: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    def rows_from(self, first: int, positions: int) -> torch.Tensor:
        """As `Experts.rows_from` has it: the host waits for all experts at once, and once for their GEMMs."""
        if (first, positions) not in self._rows:
            numbers = [token if self.places is None else self.places[token] for _, _, token in self.routes]
            late = [number % positions >= first for number in numbers]
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
    shared = isinstance(experts, Experts) and name in INPUT_GEMMS
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
    """Replace the fused experts of `model` that have a supported form by a module for each expert, without values."""
    for name, form in fused(model).items():
        model.set_submodule(name, apart(model.get_submodule(name), form))


def fused(model: PreTrainedModel) -> dict[str, type[Expert]]:
    """The modules of `model` with fused experts in a supported form, by name, and the form."""
    forms: dict[tuple[object, ...], type[Expert] | None] = {}
    modules: dict[str, type[Expert]] = {}
    for name, module in model.named_modules():
        shaped = [form for form in EXPERT_FORMS if _has_the_shapes(module, form)]
        if not shaped:
            continue
        kind = _class_and_settings(module)
        if kind not in forms:
            forms[kind] = next((form for form in shaped if computes_the_same(module, form)), None)
        if (form := forms[kind]) is not None:
            modules[name] = form
    return modules


def apart(module: nn.Module, form: type[Expert]) -> Experts:
    """Make experts of that form without values for the fused `module`."""
    down = module.get_parameter("down_proj")
    number, width, inner = _sizes(form, down)
    act = form.activation(module)
    assert act is not None, "a module of the form has one"
    kind = ExpertsOfScaledInputs if form.scaled_inputs else Experts
    experts = kind(form(width, inner, act, down) for _ in range(number))
    experts.replaced = type(module).__name__
    return experts


def _empty_linear(width: int, height: int, like: torch.Tensor, biased: bool) -> nn.Linear:
    """Make a linear layer of the type and on the device of `like`, without drawing values, which would take seconds."""
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.in_features = width
    linear.out_features = height
    linear.weight = nn.Parameter(like.new_empty(height, width))
    if biased:
        linear.bias = nn.Parameter(like.new_empty(height))
    return linear


def _sizes(form: type[Expert], down: torch.Tensor) -> tuple[int, int, int]:
    """The number of experts, the width and the inner width by the stack of their last GEMMs; 0 for what it lacks."""
    number, out, columns = (*down.shape, 0, 0, 0)[:3]
    if form.turned:
        return number, columns, out
    return number, out, columns


def _class_and_settings(module: nn.Module) -> tuple[object, ...]:
    """The class of `module` and its numbers: Step 3.7 limits the gates of its last layers alone."""
    numbers = ((name, value) for name, value in vars(module).items() if isinstance(value, int | float))
    return (type(module), *numbers)


def _has_the_shapes(module: nn.Module, form: type[Expert]) -> bool:
    """Tell whether `module` has the fused parameters of `form`, in matching shapes, and an activation."""
    parameters = dict(module.named_parameters())
    if parameters.keys() != form.stacks().keys() or form.activation(module) is None:
        return False
    shapes = form.shapes(*_sizes(form, parameters["down_proj"]))
    return all(tuple(parameter.shape) == shapes[stack] for stack, parameter in parameters.items())


def computes_the_same(module: nn.Module, form: type[Expert]) -> bool:
    """Tell whether the class of a fused `module` computes what `Experts` of that `form` compute.

    Its own forward pass, not one of the faster ones that transformers puts in its place, is compared on random numbers,
    some of them so large that a limit on the gate would show.
    """
    number, width, _, tokens = TRIED
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device="cpu", dtype=torch.float64)

    trial = copy(module)
    trial._parameters = {stack: nn.Parameter(draw(*shape)) for stack, shape in form.shapes(*TRIED[:3]).items()}
    vars(trial).update(num_experts=number, hidden_size=width)
    ours = apart(trial, form)
    for stack, parameter in trial.named_parameters():
        for expert, tensor, part in form.parts(form.stacks()[stack], stack, tuple(parameter.shape)):
            ours.get_parameter(f"{expert}.{tensor}").data = part.cut(parameter.data)
    chosen = torch.stack([torch.randperm(number, generator=random, device="cpu")[:2] for _ in range(tokens)])
    x = 20 * draw(tokens, width)
    shares = draw(tokens, 2)
    arguments = [x, chosen, shares]
    if form.scaled_inputs:
        scores = x.new_zeros(tokens, number).scatter_(1, chosen, shares)
        arguments = [(scores.T[:, :, None] * x).flatten(0, 1)]
    with torch.no_grad():
        try:
            theirs = unwrap(type(module).forward)(trial, *arguments)
            expected = ours(*arguments)  # whose activation may take gate and up at once (Inkling 2)
        except (TypeError, AttributeError, RuntimeError):
            return False
        return isinstance(theirs, torch.Tensor) and bool(torch.allclose(theirs, expected, rtol=1e-9))


def refuse_experts(model: nn.Module, name: str, architecture: str) -> None:
    """Raise InputError when `model`, on the meta device or not, has experts that `unfold` could not take apart."""
    taken: tuple[str, ...] = ()
    for module_name, module in model.named_modules():
        if isinstance(module, Experts):
            taken += (f"{module_name}.",)
        elif not module_name.startswith(taken) and _holds_experts(module_name.rpartition(".")[2], module):
            raise InputError(
                name,
                f"{architecture} is a mixture of experts ({module_name}, {type(module).__name__}) in a form that fp8q "
                "does not do for now: its weights are not gate_up_proj (or up_proj) and down_proj alone, or it "
                "computes something else with them",
                "give a model of another architecture, or use `fp8q convert`",
            )


def _holds_experts(name: str, module: nn.Module) -> bool:
    """Tell whether a module holds several experts, by its names; a shared expert is an ordinary feed-forward block."""
    if name.startswith("shared_expert") and not any(parameter.dim() > 2 for parameter in module.parameters()):
        return False
    return "expert" in name.lower() or "expert" in type(module).__name__.lower()


def stack_of(form: type[Expert], gemm: str) -> str:
    """The fused parameter that holds the weights of `gemm` of all experts."""
    return next(stack for stack, gemms in form.fused.items() if gemm in gemms)


def gemms_of_stack(stack: str) -> tuple[str, ...]:
    """The GEMMs of an expert whose weights the fused parameter `stack` of any form holds, in their order."""
    return Expert.fused.get(stack, (stack,))
