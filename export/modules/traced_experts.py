"""Experts during tracing: one of each kind, dense, between two marks; `graph.expert_branches` makes the others.

A graph has static nodes and no loop over the chosen experts, so each expert becomes a branch that runs when a token
chose it. The branches have equal nodes with other weights: tracing 128 of them in each layer would take hours. So of
the experts that differ in their number alone the first is traced, and its mark lists the others.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy

import torch
from torch import nn

from ...calibrate.model.expert_modules import Expert, Experts
from . import operators
from .attention import as_sequences


def groups_by_expert(places: Iterable[str], groups: Mapping[str, list[str]]) -> list[list[str]]:
    """Split the groups of experts (whose modules are `places`) into one group for each expert: all experts of a layer
    read one tensor, and each quantizes it in its own branch.
    """
    prefixes = tuple(f"{place}." for place in places)
    by_expert: dict[tuple[str, str], list[str]] = {}
    for first, members in groups.items():
        for member in members:
            expert = member.rpartition(".")[0] if member.startswith(prefixes) else ""
            by_expert.setdefault((first, expert), []).append(member)
    return [*by_expert.values()]


class GraphExpert(nn.Module):
    """An expert that adds its output to the total of the experts before it."""

    def __init__(self, expert: Expert):
        """Wrap an expert whose linear layers are replaced already."""
        super().__init__()
        self.gate_proj = expert.gate_proj
        self.up_proj = expert.up_proj
        self.down_proj = expert.down_proj
        linears = (self.gate_proj, self.up_proj, self.down_proj)
        self.in_two_terms = any(has_two_terms(linear) for linear in linears)
        self.with_tail = any(getattr(linear, "tail", None) is not None for linear in linears)
        self.act_fn = deepcopy(expert.act_fn)  # where modules are shared, torch's exporter names all of them otherwise

    def forward(
        self,
        hidden: torch.Tensor,
        total: torch.Tensor,
        shares: torch.Tensor,
        chosen: torch.Tensor,
        members: list[int],
    ) -> torch.Tensor:
        """Add the expert's output for `hidden` [tokens, width] to `total` [tokens, width], weighted by its column of
        `shares` [tokens, experts].

        `members`: the numbers of the experts that this one was traced for; `chosen` bool [experts]. Rows of other
        experts' tokens are set to 0, so that their values do no harm, and every branch has a tensor of its own.
        """
        total, share = operators.expert_begins(total, shares, chosen, members)
        x = torch.where(share[:, None] != 0, hidden, 0)
        if self.with_tail:
            x = as_sequences(x)
        elif self.in_two_terms:  # which then lie along an axis whose size is known, as it has to be in a branch
            x = x[None]
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        y = y.flatten(0, 1) if self.in_two_terms else y
        both: torch.Tensor = operators.expert_ends(total + (y * share[:, None]).to(total.dtype))
        return both


class GraphExperts(nn.Module):
    """Replaces `Experts` during tracing, with its experts under the same names."""

    def __init__(self, experts: Experts):
        """Wrap experts whose linear layers are replaced already."""
        super().__init__()
        for number, expert in enumerate(experts.experts):
            self.add_module(str(number), GraphExpert(expert))
        self.number = len(experts.experts)
        self.kinds = expert_kinds(experts.experts)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Map `hidden_states` [tokens, width] to [tokens, width]; `top_k_index` int64 and `top_k_weights` [tokens,
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
    """Group the numbers of the experts by kind: experts whose linear layers have equal types, terms and tail."""
    kinds: dict[object, list[int]] = {}
    for number, expert in enumerate(experts):
        linears = [expert.get_submodule(name) for names in Expert.fused.values() for name in names]
        description = tuple((type(linear), has_two_terms(linear), getattr(linear, "tail", None)) for linear in linears)
        kinds.setdefault(description, []).append(number)
    return [*kinds.values()]


def has_two_terms(linear: nn.Module) -> bool:
    """Tell whether a layer of the graph takes two codes a value."""
    return getattr(linear, "halves", None) is not None
