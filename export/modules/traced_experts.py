"""The experts of a layer as they are traced: one of each kind, dense, between two marks (`graph.expert_branches` makes
the rest).

A graph has shapes and no loop over who was chosen, so each expert becomes a branch that runs when a token chose it. All
branches are one expert's nodes with other weights: tracing 128 of them in each layer would take hours and say nothing
new. So of the experts that differ in nothing but their number the first is traced, and marked with the others'.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy

import torch
from torch import nn

from ...calibrate.model.expert_modules import FUSED, Expert, Experts
from . import operators


def groups_by_expert(places: Iterable[str], groups: Mapping[str, list[str]]) -> list[list[str]]:
    """The members of `groups`, those of experts (which are in the modules `places`) apart: all experts of a layer read
    one tensor, and each quantizes it in its own branch.
    """
    prefixes = tuple(f"{place}." for place in places)
    found: dict[tuple[str, str], list[str]] = {}
    for first, members in groups.items():
        for member in members:
            own = member.rpartition(".")[0] if member.startswith(prefixes) else ""
            found.setdefault((first, own), []).append(member)
    return [*found.values()]


class GraphExpert(nn.Module):
    """An expert that adds to what those before it came to, under the names of its linear layers."""

    def __init__(self, expert: Expert):
        """Of an expert whose linear layers are the graph's already."""
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = expert.gate_proj, expert.up_proj, expert.down_proj
        self.in_two_terms = any(has_two_terms(linear) for linear in (self.gate_proj, self.up_proj, self.down_proj))
        self.act_fn = deepcopy(expert.act_fn)  # where modules are shared, torch's exporter names all of them otherwise

    def forward(
        self,
        hidden: torch.Tensor,
        total: torch.Tensor,
        shares: torch.Tensor,
        chosen: torch.Tensor,
        members: list[int],
    ) -> torch.Tensor:
        """`total` [tokens, width], and what this expert makes of `hidden` [tokens, width] for its tokens; it stands for
        `members` of those whose `shares` [tokens, experts] are not 0 where they are `chosen` [experts].

        Rows that are not its own are 0, so that what they hold does no harm, and every branch has a tensor of its own.
        """
        total, share = operators.expert_begins(total, shares, chosen, members)
        x = torch.where(share[:, None] != 0, hidden, 0)
        if self.in_two_terms:  # which then lie along an axis whose size is known, as it has to be in a branch
            x = x[None]
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        y = y[0] if self.in_two_terms else y
        both: torch.Tensor = operators.expert_ends(total + (y * share[:, None]).to(total.dtype))
        return both


class GraphExperts(nn.Module):
    """Stands for `Experts` while the graph is traced, its experts under the same names."""

    def __init__(self, experts: Experts):
        """Of experts whose linear layers are the graph's already."""
        super().__init__()
        for number, expert in enumerate(experts.experts):
            self.add_module(str(number), GraphExpert(expert))
        self.number, self.kinds = len(experts.experts), expert_kinds(experts.experts)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """`hidden_states` [tokens, width] to [tokens, width]; `top_k_index` int64 and `top_k_weights` [tokens,
        chosen].
        """
        numbers = torch.arange(self.number, device=top_k_index.device)
        shares = torch.where(top_k_index[..., None] == numbers, top_k_weights[..., None], 0).sum(1)
        chosen = (shares != 0).any(0)
        total = torch.zeros_like(hidden_states)
        for kind in self.kinds:
            total = self.get_submodule(str(kind[0]))(hidden_states, total, shares, chosen, kind)
        return total


def expert_kinds(experts: Sequence[Expert]) -> list[list[int]]:
    """The numbers of the experts by kind: which of their products are of codes, and of how many terms."""
    kinds: dict[object, list[int]] = {}
    for number, expert in enumerate(experts):
        linears = [expert.get_submodule(name) for names in FUSED.values() for name in names]
        told = tuple((type(linear), has_two_terms(linear)) for linear in linears)
        kinds.setdefault(told, []).append(number)
    return [*kinds.values()]


def has_two_terms(linear: nn.Module) -> bool:
    """Tell whether a layer of the graph multiplies two codes a value."""
    return getattr(linear, "halves", None) is not None
