"""Predict the loss of each choice alone, for all of them by one forward and backward pass of the float model.

As in `sensitivity.gradients`, KL ≈ ½ Σ_t E_y (g_t · e_t)². Here e is the error of a group's GEMMs under all its
choices: with x̂ for their input and ŵ for each weight, e = ŵ x̂ - w x at each output, summed before it is squared. So
the compensation of the activation's error by `gptq` weights counts, and so does the fact that q, k and v read the same
codes; the sum of the separate losses of weights and activation would include neither. Experts have tokens of their own,
and the sum is over each expert's.
"""

import torch
from torch import nn

from ...calibrate.model.expert_modules import shared_inputs
from ...calibrate.model.gemms import output_channel_axis
from ...quantize.sensitivity.document import Predicted
from ...quantize.sensitivity.gradients import along, drawn_gradient, half_square, seeing
from .candidates import Candidates
from .choices import CODES, GroupForm, variant


def predict_choices(
    candidates: Candidates, ids: torch.Tensor, draw: torch.Generator
) -> tuple[Predicted, dict[str, int]]:
    """Group or cache tensor -> variant -> the KL in nats that it adds to the scored tokens of `ids` int64 [windows,
    seq_len] in all, labels drawn by `draw`; and each cache tensor's values a position.
    """
    prompt = candidates.prompt(ids.shape[1])
    with seeing(candidates) as (seen, cache), torch.enable_grad():
        logits = candidates.model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        caches = {name: seen.cache[name] for name in candidates.cache if name in seen.cache}
        tensors = [*seen.outputs.values(), *caches.values()]
        at_logits = drawn_gradient(logits.detach(), prompt, draw)
        output_gradients = torch.autograd.grad(logits, tensors, at_logits, allow_unused=True)
    experts = {name for names in shared_inputs(candidates.model, candidates.gemms).values() for name in names}
    gradients = dict(zip([*seen.outputs, *caches], output_gradients, strict=True))
    result: Predicted = {}
    with torch.no_grad():
        for name, members in candidates.groups.items():
            reached = {member: g for member in members if (g := gradients.get(member)) is not None}
            for rounding in candidates.roundings if reached else ():
                for form in candidates.forms:
                    apart: dict[str, torch.Tensor] = {}
                    for member, g in reached.items():
                        tokens = along(g, _output_error(candidates, member, rounding, form, seen.inputs[member]))
                        owner = member.rpartition(".")[0] if member in experts else ""
                        apart[owner] = apart[owner] + tokens if owner in apart else tokens
                    squares = sum(float(tokens.square().sum(dtype=torch.float64)) for tokens in apart.values())
                    result.setdefault(name, {})[variant(rounding, form)] = 0.5 * squares
        for name, tensor in caches.items():
            if (g := gradients[name]) is not None:
                result[name] = {CODES: half_square(g, candidates.cache_error(name, tensor))}
    return result, {name: x.shape[1] * x.shape[3] for name, x in seen.cache.items()}


def _output_error(candidates: Candidates, module: str, rounding: str, form: GroupForm, x: torch.Tensor) -> torch.Tensor:
    """ŵ x̂ - w x."""
    gemm = candidates.gemms[module]
    weight = gemm.weight
    assert isinstance(weight, torch.Tensor), "a GEMM has a weight"
    rounded = nn.functional.linear(candidates.input(module, form, x), candidates.weight(module, rounding, form))
    return rounded - nn.functional.linear(x, weight.movedim(output_channel_axis(gemm), 0))
