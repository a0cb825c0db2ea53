"""Learn the codes of weights decoder layer by decoder layer, for models larger than memory.

The float model and the FP8 one go through memory one layer at a time, as in `weights.sequential`. Each layer of the FP8
model gets the hidden states that the layers before it give, with the codes that those learned, and learns toward the
hidden states that leave the float layer (`block_training`): so it also makes up for errors of layers before it.

Memory holds the learned state of one layer: some 18 bytes a weight. The hidden states of all windows lie on the disk:
those that enter a layer and those that leave it, of both models, 4 · tokens · width bytes each, and on the held-out
windows those of the FP8 model as it was. From these the divergence of the whole model is known before and after, and
where it did not fall nothing changes. A killed call goes on at the layer it was in.

`LearnedBlocks` stores the layers that have learned in a folder: a file of codes and scales for each, and their losses.
A layer counts once its losses are written (`LayerSteps`); one that a killed call left unfinished learns again.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ...calibrate.measure.chain import Chain, cloned_calls
from ...calibrate.measure.hidden_states import HiddenStates, files_in_turn
from ...calibrate.measure.scoring import kl_terms, log_softmax
from ...calibrate.measure.stream import LayerSteps, states_in_turn
from ...calibrate.model.caches import new_cache
from ...calibrate.model.decoder import LayerCall
from ...calibrate.model.source import Source
from ...core.files import replacing
from ...core.memory import release_memory
from ...core.reporter import Reporter
from ..codes.encoding import CODE
from ..reference.fp8_model import StoredCodes
from ..reference.linear import replace_linears
from ..scales.decisions import TensorScale
from .block_training import BlockSchedule, LearningBlock, learn_block
from .document import BlockLoss
from .linear import LearnedLinear

Calls = Mapping[tuple[int, ...], Sequence[LayerCall]]
Tokens = npt.NDArray[np.int64]
#: Positions whose logits are held at a time.
POSITIONS = 64


@dataclass(frozen=True)
class BlockText:
    """Token ids int64 [windows, seq_len] to learn from and to hold out, in batches by their numbers."""

    train: Mapping[int, Tokens]
    held_out: Mapping[int, Tokens]

    @classmethod
    def cut(cls, train: Tokens, held_out: Tokens, batch_size: int, seed: int) -> "BlockText":
        """Cut windows into batches of `batch_size`; those to learn from are shuffled by `seed` first."""
        shuffled = np.random.default_rng(seed).permutation(train)
        parts = [
            [windows[start : start + batch_size] for start in range(0, len(windows), batch_size)]
            for windows in (shuffled, held_out)
        ]
        return cls(dict(enumerate(parts[0])), dict(enumerate(parts[1], len(parts[0]))))

    @property
    def batches(self) -> dict[int, Tokens]:
        """All batches by their numbers."""
        return {**self.train, **self.held_out}


class BlockLearning(Chain):
    """The float model and the FP8 one, with the layers that have learned so far.

    Invariant: `float_states[n % 2]` and `fp8_states[n % 2]` hold the hidden states that enter layer n, of all batches,
    and `old_states[n % 2]` those of the held-out batches in the FP8 model as it was, when n layers have learned.
    """

    def __init__(
        self,
        source: Source,
        stored: StoredCodes,
        activations: Mapping[str, TensorScale],
        text: BlockText,
        folder: Path,
    ):
        """Prepare to learn the codes of `stored`, whose device is used, on `text`.

        `activations`: GEMM -> the scale of its input; GEMMs without one get their input as it is. `folder`, which
        exists, holds the hidden states and the layers that have learned. A killed call goes on from what it left there,
        so its arguments must have been the same.

        Raises InputError where the disk has no room, and NoChainError for a model that is no chain of layers.
        """
        super().__init__(source, stored.device, torch.float32, rounded=False)
        self.stored = stored
        self.activations = activations
        self.text = text
        self.done: LearnedBlocks = LearnedBlocks.of(folder / "learned.json")
        output = self.layer_output
        self.float_states, self.fp8_states = states_in_turn(
            ("float", "learned"), text.batches, output, folder, "--stream", "or ask for fewer --samples"
        )
        self.old_states = [HiddenStates(file, text.held_out, output) for file in files_in_turn(folder, "unlearned")]

    def run(self, schedule: BlockSchedule, report: Reporter) -> None:
        """Let the layers learn that have not, one after the other."""
        remaining = self.done.layers_left(self.layers.count, report)
        if not remaining:
            return
        calls = self._calls()
        what = f"Learning {len(remaining)} layers, one by one"
        losses: list[BlockLoss] = []

        def standing() -> str:
            return losses[-1].change if losses else ""

        with report.track(what, len(remaining) * schedule.steps, "steps", standing) as advance:
            for index in remaining:
                started = time.monotonic()
                losses.append(self._layer(index, calls, replace(schedule, seed=schedule.seed + index), advance))
                if index == remaining.start and len(remaining) > 1:
                    total_s = (time.monotonic() - started) * len(remaining)
                    report.note(f"distill: by what the first layer took, some {total_s:,.0f} s here")

    def divergences(self) -> tuple[float, float]:
        """KL(float || FP8) on the held-out windows, nats a token, with the codes that the model had, and with those
        that its layers learned.
        """
        count = self.layers.count
        sums = [0.0, 0.0]
        tokens = sum(ids.size for ids in self.text.held_out.values())
        with self.behind_layers() as logits, torch.inference_mode():
            for batch, ids in self.text.held_out.items():
                models = (self.float_states, self.old_states, self.fp8_states)
                states = [hidden[count % 2].read(batch, self.device) for hidden in models]
                for window in range(len(ids)):
                    for start in range(0, ids.shape[1], POSITIONS):
                        part = slice(start, start + POSITIONS)
                        wanted, *had = (log_softmax(logits(hidden[window : window + 1, part])) for hidden in states)
                        for number, log_p in enumerate(had):
                            sums[number] += float(kl_terms(wanted, log_p).sum())
        return sums[0] / tokens, sums[1] / tokens

    def outside_codes(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The codes and scales of the GEMMs outside the layers, as they were."""
        return {name: self._codes(name) for name in self.stored.modules if self.layers.index(name) is None}

    def _calls(self) -> Calls:
        """The arguments of all layers for each shape of batch, as tensors that gradients may pass by.

        The hidden states that enter the first layer are written first, where they are not there: the same in all
        models.
        """

        def keep(batch: int, hidden: torch.Tensor) -> None:
            self.float_states[0].write(batch, hidden)
            self.fp8_states[0].write(batch, hidden)
            if batch in self.text.held_out:
                self.old_states[0].write(batch, hidden)

        entered = self.done.steps > 0
        calls = self.enter(self.text.batches, None if entered else keep)
        if not entered:
            self._flush(0)
            self.done.end(1)
        return cloned_calls(calls)

    def _flush(self, index: int) -> None:
        """Write the hidden states that enter layer `index` to the disk."""
        for states in (self.float_states, self.fp8_states, self.old_states):
            states[index % 2].flush()

    def _layer(self, index: int, calls: Calls, schedule: BlockSchedule, advance: Callable[[int], None]) -> BlockLoss:
        """Take the float model past a layer, let the layer of the FP8 model learn, and take that past it too; return
        its losses.
        """
        layer = self.layers.modules(self.model)[index]
        before = index % 2
        after = (index + 1) % 2

        def run_layer(states: HiddenStates, batch: int) -> torch.Tensor:
            shape = tuple(states.shapes[batch][:2])
            return calls[shape][index].run(layer, states.read(batch, self.device), new_cache(self.model))

        with self.weights.filled(self.inside(index)), torch.inference_mode():
            for batch in self.text.batches:
                self.float_states[after].write(batch, run_layer(self.float_states[before], batch))
        with self._learning(index, schedule.scales) as layers:
            with torch.inference_mode():
                for batch in self.text.held_out:
                    self.old_states[after].write(batch, run_layer(self.old_states[before], batch))
            prefix = f"{self.layers.prefix}.{index}."
            block = LearningBlock(
                layer,
                partial(run_layer, self.fp8_states[before]),
                lambda batch: self.float_states[after].read(batch, self.device),
            )
            result, by_module = learn_block(block, ([*self.text.train], [*self.text.held_out]), schedule, advance)
            codes = {name: by_module[name.removeprefix(prefix)] for name in layers}
            changed = sum(linear.settle(*codes[name]) for name, linear in layers.items())
            with torch.inference_mode():
                for batch in self.text.batches:
                    self.fp8_states[after].write(batch, run_layer(self.fp8_states[before], batch))
        release_memory()
        self._flush(index + 1)
        loss = BlockLoss(
            layer=index,
            before=result.before,
            after=result.after,
            step=result.step,
            codes=sum(values.numel() for values, _ in codes.values()),
            changed=changed,
            stopped=result.stopped,
        )
        self.done.add(loss, codes)
        return loss

    @contextmanager
    def _learning(self, index: int, scales: bool) -> Iterator[dict[str, LearnedLinear]]:
        """Fill a layer in this block, with learned GEMMs of the stored codes, whose `scales` may learn too; yield
        the GEMMs by name.
        """
        names = [name for name in self.stored.modules if self.layers.index(name) == index]
        modules = {name: self.model.get_submodule(name) for name in names}
        layers = {}
        for name in names:
            bias = self.stored.read(f"{name}.bias") if self.stored.has(f"{name}.bias") else None
            layers[name] = LearnedLinear(*self._codes(name), self.activations.get(name), bias, scales)
        with self.weights.filled([name for name in self.inside(index) if name not in layers]):
            replace_linears(self.model, layers)
            try:
                yield layers
            finally:
                replace_linears(self.model, modules)

    def _codes(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes float8_e4m3fn [out, in] and the scale float32 [out] of a GEMM in the checkpoint."""
        codes, scale = self.stored.weight(name)
        return codes.to(CODE), scale


Coded = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass
class LearnedBlocks(LayerSteps):
    """The layers that have learned, with their `losses` in order.

    Invariant: the codes of every layer whose loss is written lie beside the file.
    """

    losses: list[BlockLoss] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Take the losses as JSON has them too."""
        self.losses = [BlockLoss.model_validate(loss) for loss in self.losses]

    def add(self, loss: BlockLoss, codes: Coded) -> None:
        """Store the codes float8_e4m3fn [out, in] and scales float32 [out] of a layer by GEMM, then its loss, which
        ends its step.
        """
        with replacing(self._file(loss.layer)) as partial:
            _save(codes, partial)
        self.losses.append(loss)
        self.end(self.steps + 1)

    def save_codes(self, file: Path, others: Coded) -> None:
        """Write the codes of all layers, and those of GEMMs outside of them, to one `file`.

        The codes of layers are mapped from their files and take no memory.
        """
        tensors = _tensors(others)
        for index in range(len(self.losses)):
            with safe_open(self._file(index), "pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
        with replacing(file) as partial:
            save_file(tensors, partial, metadata={"format": "pt"})

    def _file(self, index: int) -> Path:
        return self.path.parent / f"block-{index:05}.safetensors"


def _tensors(codes: Coded) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{part}": tensor.cpu().contiguous()
        for name, both in codes.items()
        for part, tensor in zip(("codes", "scale"), both, strict=True)
    }


def _save(codes: Coded, file: Path) -> None:
    save_file(_tensors(codes), file, metadata={"format": "pt"})
