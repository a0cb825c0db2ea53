"""Predict the KL that each site causes alone, for all sites by one forward and backward pass of the float model.

A small change e_t of a tensor at token t changes the model's distributions by

    KL ≈ ½ Σ_t E_y (g_t · e_t)²,    g_t = ∂ Σ_u -log p(y_u) / ∂ tensor_t,

with labels y drawn from the model itself: the mean of g gᵀ is then the Fisher information, which is the Hessian of the
KL (Martens 2014, arXiv 1412.1193, section 5). e_t is the actual quantization error at that token, so neither its size
nor the correlation of its channels is modelled; for a weight it is e_t = ΔW x_t at the GEMM's output. One draw of
labels for each token is enough, since sums over tokens average it. Left out are correlations between the errors of
tokens (the square of the sum over a whole window includes them, and has so few samples that it ranks worse) and changes
that are not small.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ...calibrate.measure.observe import ObservedLayer
from ...calibrate.measure.scoring import log_softmax, losses
from ...calibrate.model.caches import new_cache
from ...calibrate.model.expert_modules import shared_inputs
from ...options import DYNAMIC, TWO
from .document import AS_IT_IS, BY_TOKEN, TWO_TERMS, Predicted, Site
from .site_quantizers import Quantizer

#: The loss in other forms is predicted on one in so many windows: of two terms it is next to nothing.
TWO_TERMS_OF = 2
#: The rows of logits whose labels are drawn together.
DRAWN_ROWS = 64


@dataclass
class PassTensors:
    """The tensors of one forward pass: inputs and outputs of GEMMs, values written to the cache, and the input of a
    layer's experts, of which each expert gets a copy, by the GEMMs that read it.
    """

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    cache: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensor_of(self, site: Site) -> torch.Tensor | None:
        """Return the tensor that a site changes; None where the pass did not reach it."""
        if site.kind == "weight":
            return self.outputs.get(site.module)
        if site.kind == "activation":
            sources = [self.shared, self.inputs]
            return next((tensors[member] for tensors in sources for member in site.members if member in tensors), None)
        return self.cache.get(site.module)


@dataclass(frozen=True)
class End:
    """The end of a forward pass with the tensors `seen`: its `value`, the loss's gradient there (None: the value is the
    loss), and `begun`, the hidden states that the pass began with, where it did not begin with tokens.
    """

    seen: PassTensors
    value: torch.Tensor
    gradient: torch.Tensor | None = None
    begun: torch.Tensor | None = None


def predict_sites(
    quantizer: Quantizer,
    sites: Sequence[Site],
    ids: torch.Tensor,
    draw: torch.Generator,
    see: Callable[[dict[str, torch.Tensor]], None] = lambda inputs: None,
) -> Predicted:
    """Site -> the KL in nats that it adds to the tokens `ids` int64 [windows, seq_len] in all, for each variant of it;
    labels are drawn by `draw`. `see` is shown the activations, by their sites' modules.
    """
    prompt = quantizer.prompt(ids.shape[1])
    with seeing(quantizer) as (seen, cache), torch.enable_grad():
        logits = quantizer.model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return backward_losses(quantizer, sites, End(seen, logits, drawn_gradient(logits, prompt, draw)), see)[0]


def backward_losses(
    quantizer: Quantizer, sites: Sequence[Site], end: End, see: Callable[[dict[str, torch.Tensor]], None]
) -> tuple[Predicted, torch.Tensor | None]:
    """Predict the losses of the `sites` of a pass backward from its `end`; return them and the gradient at `begun`, if
    any. `see` is called with the pass's tensors.
    """
    seen = end.seen
    passed = {site: tensor for site in sites if (tensor := seen.tensor_of(site)) is not None and tensor.requires_grad}
    begun = [] if end.begun is None else [end.begun]
    gradients = torch.autograd.grad(end.value, [*passed.values(), *begun], end.gradient, allow_unused=True)
    reached = [
        (site, tensor, gradient)
        for (site, tensor), gradient in zip(passed.items(), gradients[: len(passed)], strict=True)
        if gradient is not None
    ]
    see({site.module: tensor.detach() for site, tensor, _ in reached if site.kind == "activation"})
    with torch.no_grad():
        losses = {site.key: _losses(quantizer, site, seen, tensor, gradient) for site, tensor, gradient in reached}
    return losses, gradients[-1] if begun else None


def _losses(
    quantizer: Quantizer, site: Site, seen: PassTensors, tensor: torch.Tensor, gradient: torch.Tensor
) -> dict[str, float]:
    """Predict the loss of a site's error of `tensor`, as it is and as it might be."""
    if site.kind == "weight":
        return {AS_IT_IS: half_square(gradient, quantizer.output_error(site.module, seen.inputs[site.module]))}
    if site.kind == "kv_cache":
        return {AS_IT_IS: half_square(gradient, quantizer.cache_error(site.module, tensor))}
    losses = {AS_IT_IS: half_square(gradient, quantizer.input_error(site.module, tensor))}
    form = quantizer.scales.activations[site.module].form
    part = tensor[::TWO_TERMS_OF]
    other_errors = {
        TWO_TERMS: None if form == TWO else quantizer.input_error(site.module, part, TWO),
        BY_TOKEN: quantizer.input_error(site.module, part, DYNAMIC) if form.static and form != TWO else None,
    }
    for name, error in other_errors.items():
        if error is not None:
            losses[name] = half_square(gradient[::TWO_TERMS_OF], error) * tensor.numel() / part.numel()
    return losses


def next_token_log_probabilities(
    model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache, prompt: int = 1
) -> torch.Tensor:
    """log p of each token that may follow each of the tokens `ids` int64 [windows, seq_len] from the last of the
    `prompt` on, but the last, float32 [windows, seq_len - prompt, vocabulary].
    """
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, prompt - 1 : -1]
    return log_softmax(logits)


def drawn_gradient(logits: torch.Tensor, prompt: int, draw: torch.Generator) -> torch.Tensor:
    """Compute the gradient at `logits` float32 [windows, seq_len, vocabulary] of Σ -log p(y) over the tokens behind a
    `prompt`, y drawn from the model itself by `draw`, in the place of the logits.

    A few rows at a time: in one piece it takes five more tables of that size.
    """
    logits = logits.detach()
    numbers = uniform(logits.shape[0] * (logits.shape[1] - prompt), draw).view(logits.shape[0], -1, 1)
    for window, of_window in enumerate(numbers):
        for first in range(0, len(of_window), DRAWN_ROWS):
            some = slice(prompt - 1 + first, prompt - 1 + min(first + DRAWN_ROWS, len(of_window)))
            with torch.enable_grad():
                rows = logits[window, some].clone().requires_grad_()
                log_p = log_softmax(rows)
                loss = losses(log_p, drawn(log_p.detach().exp(), of_window[first : first + DRAWN_ROWS])).sum()
            (gradient,) = torch.autograd.grad(loss, [rows])
            logits[window, some] = gradient
    logits[:, : prompt - 1] = 0
    logits[:, -1] = 0
    return logits


def uniform(rows: int, draw: torch.Generator) -> torch.Tensor:
    """Draw a number from 0 to 1 for each row, float32 [rows, 1]."""
    return torch.rand(rows, 1, generator=draw, device=draw.device)


def drawn(p: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """One of the classes for each row of the probabilities `p` float32 [rows, classes], int64 [rows]: where uniform
    `numbers` [rows, 1] fall among their sums. `torch.multinomial` draws a number for each class of each row.
    """
    sums = p.cumsum(-1)
    fallen = numbers * sums[:, -1:]
    return torch.searchsorted(sums, fallen, right=True)[:, 0].clamp_max_(p.shape[1] - 1)


def half_square(gradient: torch.Tensor, error: torch.Tensor) -> float:
    """½ Σ (g · e)² over tokens: rows of [..., width], or all heads of [windows, heads, seq, size]."""
    return 0.5 * float(along(gradient, error).square().sum(dtype=torch.float64))


def along(gradient: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """g · e for each token, summed over the width, and over heads where there are any."""
    both = gradient * error
    if both.dim() == 4:
        return both.sum((1, 3))
    return both.sum(-1)


def summed(batches: Iterable[Predicted]) -> Predicted:
    """Site -> variant -> nats, over all batches."""
    total: Predicted = {}
    for batch in batches:
        for site, variants in batch.items():
            site_total = total.setdefault(site, {})
            for name, nats in variants.items():
                site_total[name] = site_total.get(name, 0.0) + nats
    return total


class Watched(Protocol):
    """A model whose tensors are recorded: its GEMMs by name, and the modules that write each layer of its cache."""

    @property
    def model(self) -> PreTrainedModel:
        """The model, in FP32."""

    @property
    def gemms(self) -> Mapping[str, nn.Module]:
        """The GEMMs that are quantized."""

    @property
    def attention(self) -> Mapping[int, str]:
        """Layer index -> name of the module that writes that layer of the cache."""


@contextmanager
def seeing(quantizer: Watched) -> Iterator[tuple[PassTensors, DynamicCache]]:
    """Record the tensors that pass through the model, from an embedding on that gradients go back to."""
    seen = PassTensors()

    def note(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
            seen.inputs[name], seen.outputs[name] = inputs[0], y

        return hook

    def writing(attention: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def see(keys: torch.Tensor, values: torch.Tensor) -> None:
            seen.cache[f"{attention}.k"], seen.cache[f"{attention}.v"] = keys, values

        return see

    def sharing(names: Sequence[str]) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
            seen.shared |= dict.fromkeys(names, y)

        return hook

    cache = new_cache(
        quantizer.model, {number: ObservedLayer(writing(name)) for number, name in quantizer.attention.items()}
    )
    embedding = quantizer.model.get_input_embeddings()
    with ExitStack() as stack:
        for name, module in quantizer.gemms.items():
            stack.callback(module.register_forward_hook(note(name)).remove)
        for place, names in shared_inputs(quantizer.model, quantizer.gemms).items():
            stack.callback(place.register_forward_hook(sharing(names)).remove)
        stack.callback(embedding.register_forward_hook(lambda module, inputs, y: y.requires_grad_()).remove)
        yield seen, cache
