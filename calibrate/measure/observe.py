"""Observe the tensors of a float model while it runs: one observer for each distinct tensor.

Nothing of the model is converted, so its forward pass is the original one. The inputs of q, k and v (of gate and up)
are one Python object: a two-token probe groups modules by identity, and only the first of a group is observed. The
experts of a layer share their input too, although each gets copies of some rows: in the probe they all get the whole
tensor, and it is observed before it is distributed. Keys and values are observed where they are written to the cache,
after the rotary embedding, by a cache that stores nothing: this works for every architecture with a cache, without a
list of attention classes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ...core.memory import return_free_pages
from ..model.caches import new_cache
from ..model.expert_modules import TokensShown, experts_of, full_input_module, routed_gemms, show_tokens
from ..model.gemms import attention_modules
from ..model.processor import Inputs, on_device
from .counting import count_patterns, largest_finite
from .held_out import input_name, is_held_out
from .histogram import INFINITY, PATTERNS, Histogram, magnitudes
from .moments import SecondMoments
from .statistics import TensorStatistics


def probe_groups(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Group `modules` by the tensor object that they receive: first module -> all modules of its group.

    Runs a forward pass of two tokens, on any device, the meta device included. A module that the two tokens do not
    reach is a group of its own.
    """
    with recorded_groups(modules) as groups, show_tokens(experts_of(model).values(), "all"), torch.inference_mode():
        model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=model.device), use_cache=True)
    return groups


def image_groups(model: PreTrainedModel, modules: Mapping[str, nn.Module], inputs: Inputs) -> dict[str, list[str]]:
    """Group `modules`, which text does not reach, as `probe_groups` does, by a forward pass of the `inputs` of a row
    with images.
    """
    with recorded_groups(modules) as groups, torch.inference_mode():
        model.base_model(**on_device(inputs, model), use_cache=False)
    return groups


@contextmanager
def recorded_groups(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[str]]]:
    """Record the groups of `modules` during the forward pass in this block; the mapping is empty until it ends."""
    received: dict[int, list[str]] = {}
    alive: list[torch.Tensor] = []  # a living object cannot share its id with a later one

    def note(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            alive.append(inputs[0])
            received.setdefault(id(inputs[0]), []).append(name)

        return hook

    groups: dict[str, list[str]] = {}
    with hooked({name: note(name) for name in modules}, modules):
        yield groups
    groups |= {names[0]: names for names in received.values()}
    reached = {name for names in groups.values() for name in names}
    groups |= {name: [name] for name in modules if name not in reached}


Hook = Callable[[nn.Module, tuple[torch.Tensor, ...]], None]


@contextmanager
def hooked(hooks: Mapping[str, Hook], modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Attach forward pre-hooks in this block, and remove them after it."""
    handles = [modules[name].register_forward_pre_hook(hook) for name, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Observer:
    """Count the magnitudes of one tensor.

    Invariant: all state is a sum or a maximum, so the order of updates does not matter. It stays on the device of the
    values until `statistics` reads it, so that the host waits for no GPU in between.
    """

    def __init__(self, batches: int):
        """Make an observer without values, for `batches` batches."""
        self.batches = batches
        self._counts: torch.Tensor | None = None
        self._channels = self._batches = torch.empty(0)

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing was observed yet."""
        return self._counts is None

    def update(self, x: torch.Tensor, batch: int) -> None:
        """Add the values `x` [..., width], any float type (rounded to BF16), of batch number `batch`."""
        patterns = x.detach().to(torch.bfloat16).abs().view(torch.int16).flatten(0, -2)
        counts = count_patterns(patterns.flatten())
        channels = patterns.amax(0)
        largest = channels.amax()
        if largest.device.type != "cpu" or largest >= INFINITY:  # a GPU would wait for the comparison
            largest = largest_finite(counts)
        if self._counts is None:
            self._counts = counts
            self._channels = channels
            self._batches = torch.full((self.batches,), -1, dtype=torch.int16, device=counts.device)
        else:
            self._counts.add_(counts)
            torch.maximum(self._channels, channels, out=self._channels)
        torch.maximum(self._batches[batch], largest, out=self._batches[batch])

    def statistics(self, width: int | None = None) -> TensorStatistics | None:
        """The statistics of the tensor; where it was never observed, None, or empty statistics of this `width`."""
        amax_batches = np.full(self.batches, np.nan, np.float32)
        if self._counts is None:
            if width is None:
                return None
            return TensorStatistics(
                Histogram.from_dense(np.zeros(PATTERNS, np.int64)), amax_batches, np.zeros(width, np.float32)
            )
        largest = self._batches.cpu().numpy()
        amax_batches[largest >= 0] = magnitudes(largest[largest >= 0])
        return TensorStatistics(
            Histogram.from_dense(self._counts.cpu().numpy()), amax_batches, magnitudes(self._channels.cpu().numpy())
        )


class ObservedLayer(DynamicLayer):
    """A cache layer that passes keys and values to a callback and stores nothing."""

    def __init__(self, see: Callable[[torch.Tensor, torch.Tensor], None]):
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        self.see = see

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass keys and values [batch, heads, seq, head_size] to the callback, and return them unchanged."""
        self.see(key_states, value_states)
        return key_states, value_states


class Watch:
    """All observers of a model: `<module>.input` for each group, `<attention>.k` and `.v` for each layer."""

    def __init__(
        self,
        model: PreTrainedModel,
        modules: Mapping[str, nn.Module],
        groups: Mapping[str, list[str]],
        batches: int,
        moments: SecondMoments | None = None,
        all_experts: bool = False,
    ):
        """Prepare to observe `groups` of `modules` and the cache of `model`, for `batches` batches.

        `moments`: the store that second moments of the inputs are added to; `all_experts`: run every expert on every
        token.
        """
        self.model = model
        self.groups = groups
        self.moments = moments
        self.batches = batches
        self.modules = {first: full_input_module(model, first) for first in groups}
        self.experts = list(experts_of(model).values())
        self.shown: TokensShown = "every" if all_experts else "routed"
        routed = {name for names in routed_gemms(model).values() for name in names} & groups.keys()
        self.widths = {f"{name}.input": modules[name].get_parameter("weight").shape[1] for name in routed}
        shared = {first for first in groups if self.modules[first] is not modules[first]}
        self.of_experts = routed | shared
        members = sorted(member for first in self.of_experts for member in groups[first])
        readers = {input_name(member): modules[member] for member in reversed(members)}  # gate, where there is one
        self.judged = {name: readers[name] for name in sorted(readers)} if moments is not None else {}
        self.attention = attention_modules(model)
        names = [f"{first}.input" for first in groups] + [
            f"{name}.{part}" for name in self.attention.values() for part in "kv"
        ]
        self.observers = {name: Observer(batches) for name in names}

    def forward(self, input_ids: torch.Tensor, batch: int) -> None:
        """Run the decoder (not the output head) on `input_ids` int64 [windows, seq_len], batch number `batch`."""
        self.run({"input_ids": input_ids}, batch)

    def run(self, inputs: Inputs, batch: int) -> None:
        """Run the model without its output head on the `inputs` of batch number `batch`: `input_ids` int64 [windows,
        seq_len], and what else a processor made of images.
        """
        with self.observing(batch) as cache, torch.inference_mode():
            self.model.base_model(**on_device(inputs, self.model), past_key_values=cache, use_cache=True)

    @contextmanager
    def observing(self, batch: int) -> Iterator[DynamicCache]:
        """Attach the observers for batch number `batch`; yields the cache to run it with, which stores nothing."""
        held_out = is_held_out(batch, self.batches)

        def see_input(name: str) -> Hook:
            def see(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
                self.observers[f"{name}.input"].update(inputs[0], batch)
                if self.moments is not None and not (held_out and name in self.of_experts):
                    self.moments.add(name, inputs[0])

            return see

        def hold_out(name: str) -> Hook:
            def keep(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
                if self.moments is not None:
                    self.moments.hold_out(name, inputs[0].flatten(0, -2), batch, self.batches)

            return keep

        def see_cache(name: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
            def see(keys: torch.Tensor, values: torch.Tensor) -> None:
                if self.observers[f"{name}.k"].is_empty:
                    return_free_pages()  # what a layer's observers begin to hold lies between its large tensors
                for part, x in (("k", keys), ("v", values)):
                    self.observers[f"{name}.{part}"].update(x.transpose(1, 2).flatten(2), batch)

            return see

        layers = {number: ObservedLayer(see_cache(name)) for number, name in self.attention.items()}
        cache = new_cache(self.model, layers)
        with (
            show_tokens(self.experts, self.shown),
            hooked({first: see_input(first) for first in self.groups}, self.modules),
            hooked({name: hold_out(name) for name in self.judged} if held_out else {}, self.judged),
        ):
            yield cache

    def statistics(self) -> dict[str, TensorStatistics]:
        """Tensor name -> statistics, of the tensors that were reached.

        Inputs of experts are included even where no token was routed there: another rank or batch may have reached
        them.
        """
        measured = {name: observer.statistics(self.widths.get(name)) for name, observer in self.observers.items()}
        return {name: tensor for name, tensor in measured.items() if tensor is not None}
