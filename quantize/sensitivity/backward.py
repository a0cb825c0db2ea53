"""Run a model larger than memory forward and back, decoder layer by decoder layer.

The model is a chain of layers (`calibrate.model.decoder`). On the way forward the hidden states that enter each layer
are stored on disk, for all batches; behind the last layer labels are drawn and the gradient of the loss is taken. On
the way back each layer runs once more on its stored input and passes the gradient to the layer before it; the two
gradients that are needed at a time are on disk too. Memory holds the FP32 weights of one layer, or the embedding, or
the output head, whatever the number of layers; each layer's weights are read twice. What is made of the gradients is
the subclasses' own: `layerwise` predicts losses by them, `output_gradients` weighs tokens.

Each step (modules before the layers, each layer, the head, each layer back, modules before them back) saves its results
at its end; a killed call goes on after the last saved step.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from ...calibrate.measure.chain import Chain, cloned_calls
from ...calibrate.measure.hidden_states import Batches, HiddenStates, states_bytes
from ...calibrate.measure.stream import LayerSteps, check_space, going_on
from ...calibrate.model.caches import new_cache
from ...calibrate.model.decoder import LayerCall, LayersReached, NoChainError, standing_in
from ...calibrate.model.memory import weight_bytes
from ...calibrate.model.source import Source
from ...core.errors import InputError
from ...core.reporter import Reporter
from .gradients import End, PassTensors, Watched, drawn_gradient, seeing

#: The largest model, in its own type, that runs forward and back as a whole on a CPU. Its weights and codes in FP32
#: take four times as much, and the tensors of a pass of 1,024 tokens three times more (22.7 GB for a 1.5B); layer by
#: layer it takes an eighth longer.
WHOLE_BYTES = 512 << 20
Calls = Mapping[tuple[int, ...], list[LayerCall]]
#: A pass of one batch up to where it ends, from which gradients go back.
Forward = Callable[[int, torch.Tensor, PassTensors, DynamicCache], End]
#: Takes the position of a batch among all and the end of its pass; returns the gradient at the hidden states that it
#: began with, if any.
Collect = Callable[[int, End], torch.Tensor | None]


class Backward(Chain):
    """All steps of one pass forward and back over some batches.

    Invariant: `entering(n)` is complete when n + 1 steps are done, and the gradient there when the step back that makes
    it is.
    """

    #: The tensors that gradients are wanted at, and the saved results; a subclass sets both.
    watched: Watched
    results: LayerSteps

    def __init__(self, source: Source, batches: Batches, folder: Path, device: str, option: str, remedy: str):
        """Prepare a pass over `batches` (index -> token ids int64 [windows, seq_len]) in the existing `folder`; a
        killed call's results there are continued, so it must have had the same arguments.

        Raises InputError where the disk has no room, which names the `option` that asks for it and a `remedy`, and for
        a model that is no chain of layers.
        """
        with self.refused():
            super().__init__(source, device, torch.float32, rounded=False)
            self.ends()
        self.batches = batches
        self.folder = folder
        files = [*map(self._entering_file, range(self.layers.count + 1)), *map(self._gradient_file, range(2))]
        check_space(folder, files, states_bytes(batches, self.layer_output), option, remedy)
        for file in files:
            HiddenStates(file, self.batches, self.layer_output)  # takes its blocks from the disk

    @abstractmethod
    def refused(self) -> AbstractContextManager[None]:
        """Describe the remedy for a model that is no chain of layers, where this block finds it out."""

    @abstractmethod
    def prompt(self, positions: int) -> int:
        """The tokens of a window of so many `positions` before the first that is scored."""

    @abstractmethod
    def collecting(self, index: int | None) -> AbstractContextManager[Collect]:
        """Collect what the gradients of one layer give, or (None) of the modules outside all layers."""

    @property
    @abstractmethod
    def before_layers(self) -> bool:
        """Tell whether gradients are wanted at modules before the layers."""

    @abstractmethod
    def note_time(self, seconds: float, report: Reporter) -> None:
        """Note the time of all steps, by that of the first layer forward: `seconds` for all layers."""

    def run(self, report: Reporter, what: str) -> None:
        """Do the steps that are not done; `what`: the work in words, for the progress bar."""
        calls = self._calls()
        done = self.results.steps
        steps = self._steps(calls)
        if done:
            going_on(report, self._layer(done), self.layers.count)
        else:
            self.results.end(1)
        remaining = range(max(done, 1), len(steps) + 1)
        with report.track(f"{what} {self.layers.count} layers, one by one", len(remaining), "steps") as advance:
            for step in remaining:
                begun = time.perf_counter()
                steps[step - 1]()
                self.results.end(step + 1)
                if step == 1:
                    self.note_time((time.perf_counter() - begun) * self.layers.count, report)
                advance(1)

    def _steps(self, calls: Calls) -> list[Callable[[], None]]:
        """All steps but the first, which is the `calls`."""
        layers = range(self.layers.count)
        onward = [partial(self._onward, index, calls) for index in layers]
        back = [partial(self._backward, index, calls) for index in reversed(layers)]
        return [*onward, self._head, *back, *([self._beginning] if self.before_layers else [])]

    def _layer(self, step: int) -> int:
        """The number of the layer that a step is at, from 1; the head is with the last."""
        count = self.layers.count
        if step <= count + 1:
            return min(step, count)
        return max(2 * count + 2 - step, 1)

    def _entering_file(self, layer: int) -> Path:
        return self.folder / f"entering-{layer:05}"

    def _gradient_file(self, layer: int) -> Path:
        return self.folder / f"gradient-{layer % 2}"

    def _entering(self, layer: int) -> HiddenStates:
        """Return the hidden states that enter a layer; for the index after the last, those that leave it."""
        return HiddenStates(self._entering_file(layer), self.batches, self.layer_output)

    def _gradient(self, layer: int) -> HiddenStates:
        """Return the loss's gradient at the hidden states that enter a layer."""
        return HiddenStates(self._gradient_file(layer), self.batches, self.layer_output)

    def _calls(self) -> dict[tuple[int, ...], list[LayerCall]]:
        """Step 0, where that is not done, and the layers' calls for each shape of batch: tensors that gradients may
        pass by.
        """
        first = self._entering(0)
        with self.refused():
            calls = self.enter(self.batches, None if self.results.steps else first.write)
        first.flush()
        return cloned_calls(calls)

    def _onward(self, index: int, calls: Calls) -> None:
        """All batches through one layer."""
        layer = self.layers.modules(self.model)[index]
        before = self._entering(index)
        after = self._entering(index + 1)
        with self.weights.filled(self.inside(index)), torch.inference_mode():
            for batch, ids in self.batches.items():
                hidden = before.read(batch, self.device)
                after.write(batch, calls[ids.shape][index].run(layer, hidden, new_cache(self.model)))
        after.flush()

    def _head(self) -> None:
        """Run the modules after the layers and the loss, forward and back. The embedding is not read."""
        count = self.layers.count
        leaving = self._entering(count)
        name, embedding, head = self.ends()
        needed = [module for module in self.outside if module != name and not module.startswith(f"{name}.")]

        def blank(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.zeros((*ids.shape, embedding.embedding_dim), device=self.device)

        def pass_on(*args: Any, **kwargs: Any) -> Any:
            return self.layer_output.wrap(LayerCall.split(args, kwargs)[1])

        def forward(batch: int, ids: torch.Tensor, seen: PassTensors, cache: DynamicCache) -> End:
            hidden = leaving.read(batch, self.device).requires_grad_()
            stands = [pass_on] * (count - 1) + [lambda *args, **kwargs: self.layer_output.wrap(hidden)]
            draw = torch.Generator(self.device).manual_seed(batch)
            with standing_in([*self.layers.modules(self.model), embedding], [*stands, blank]):
                logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits
                return End(seen, logits, drawn_gradient(logits, self.prompt(ids.shape[1]), draw), hidden)

        with self.weights.filled([*needed, head]):
            self._back(None, forward, self._gradient(count))

    def _backward(self, index: int, calls: Calls) -> None:
        """All batches back through one layer."""
        layer = self.layers.modules(self.model)[index]
        entering = self._entering(index)
        above = self._gradient(index + 1)

        def forward(batch: int, ids: torch.Tensor, seen: PassTensors, cache: DynamicCache) -> End:
            hidden = entering.read(batch, self.device).requires_grad_()
            value = calls[tuple(ids.shape)][index].run(layer, hidden, cache)
            return End(seen, value, above.read(batch, self.device), hidden)

        with self.weights.filled(self.inside(index)):
            self._back(index, forward, self._gradient(index))

    def _beginning(self) -> None:
        """Back through what comes before the layers, for models that multiply by a matrix there."""
        above = self._gradient(0)

        def forward(batch: int, ids: torch.Tensor, seen: PassTensors, cache: DynamicCache) -> End:
            entering: list[torch.Tensor] = []

            def reached(*args: Any, **kwargs: Any) -> Any:
                entering.append(LayerCall.split(args, kwargs)[1])
                raise LayersReached

            layers = self.layers.modules(self.model)
            with standing_in(layers, [reached] * len(layers)), suppress(LayersReached):
                self.model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
            return End(seen, entering[0], above.read(batch, self.device))

        with self.weights.filled(self.outside, resident=False):
            self._back(None, forward, None)

    def _back(self, index: int | None, forward: Forward, gradient: HiddenStates | None) -> None:
        """Run each batch `forward` through the modules of one layer, or of none, and back; collect what the gradients
        give, and write the gradient at the begin to `gradient`.
        """
        with self.collecting(index) as collect:

            def run_batch(number: int, batch: int) -> torch.Tensor | None:
                ids = torch.from_numpy(self.batches[batch]).to(self.device)
                with seeing(self.watched) as (seen, cache), torch.enable_grad():
                    end = forward(batch, ids, seen, cache)
                return collect(number, end)

            for number, batch in enumerate(self.batches):
                back = run_batch(number, batch)  # a function, so that its tensors are freed before the next batch's
                if gradient is not None and back is not None:
                    gradient.write(batch, back)
        if gradient is not None:
            gradient.flush()


def by_layer_on_cpu(source: Source, device: str) -> bool:
    """Tell whether a pass forward and back goes layer by layer though memory may hold the whole model: on a CPU, for a
    chain of layers of more than `WHOLE_BYTES`.
    """
    if device != "cpu" or weight_bytes(source) <= WHOLE_BYTES:
        return False
    try:
        check_chain(source, device, "")
    except InputError:
        return False
    return True


def check_chain(source: Source, device: str, remedy: str) -> None:
    """Raise InputError, with a `remedy`, for a model that cannot run forward and back layer by layer."""
    with refused_with(remedy):
        Chain(source, device, torch.float32, rounded=False).ends()


@contextmanager
def refused_with(remedy: str) -> Iterator[None]:
    """Add a `remedy` to the refusal of a model that is no chain of layers."""
    try:
        yield
    except NoChainError as error:
        raise InputError(error.subject, f"{error.reason}, so it cannot be streamed layer by layer", remedy) from error
