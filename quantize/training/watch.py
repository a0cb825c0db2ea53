"""Watch a training run: at every Nth step the exact histogram of each linear layer's input, weight and output gradient.

The hooks are attached at a step that is recorded, and removed after it, so the other steps cost nothing. They are
torch's hooks of all modules, which pass over those that are not watched: a hook of a module itself would go into every
copy of it (an average of weights, `copy.deepcopy`), stay there, and keep the copy from being pickled. At a recorded
step each value is read once more, rounded to BF16, and counted by its bit pattern (`calibrate.measure.counting`). The
gradient is that of the layer's output, which the backward pass multiplies with weight and input: in FP8 training it is
the tensor in E5M2 (Micikevicius et al. 2022, arXiv 2209.05433, section 3). Nothing of the model is changed.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import PreTrainedModel

from ...calibrate.measure.counting import count_patterns
from ...calibrate.measure.histogram import Histogram
from ...calibrate.model.gemms import LINEAR, output_head
from ...core.errors import InputError
from ...core.files import disk_errors
from ...options import WatchOptions
from .training_log import COLUMNS, FILE_NAME, KINDS, Head, Line, append_line, begin_log, four_digits, tensor_numbers


def watched_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of `model` and GPT's Conv1D by name, without the output head of a model of transformers.

    Raises InputError where there is none.
    """
    head = output_head(model) if isinstance(model, PreTrainedModel) else None
    every: dict[str, nn.Module] = dict(model.named_modules())
    linear_layers: dict[str, nn.Module] = {
        name: module for name, module in every.items() if isinstance(module, LINEAR) and name != head
    }
    if not linear_layers:
        raise InputError(type(model).__name__, "has no linear layer to watch", "give them as `modules`")
    return linear_layers


class StepCounts:
    """The counts of one recorded step: tensor -> int64 [32768], on the device of its values."""

    def __init__(self) -> None:
        """Begin without a value."""
        self.counts: dict[str, torch.Tensor] = {}
        self.squares: dict[int, torch.Tensor] = {}
        self._inputs: dict[int, weakref.ref[torch.Tensor]] = {}

    def add(self, tensor: str, values: torch.Tensor) -> None:
        """Count `values`, any float type and shape, for `tensor`."""
        patterns = values.detach().to(torch.bfloat16).abs().view(torch.int16).flatten()
        counts = count_patterns(patterns)
        self.counts[tensor] = self.counts[tensor] + counts if tensor in self.counts else counts

    def is_new(self, x: torch.Tensor) -> bool:
        """Tell whether `x` is none of the tensors that were asked about before and are still alive."""
        before = self._inputs.get(id(x))
        self._inputs[id(x)] = weakref.ref(x)
        return before is None or before() is not x


class TrainingRecorder:
    """The recorder of a training run. Call `step` once after each backward pass; `fp8q.api.watch` makes and ends it.

    Invariant: hooks are attached while a step that is recorded is under way, and at no other time; none after `close`.
    """

    def __init__(
        self,
        model: nn.Module,
        out: Path,
        options: WatchOptions,
        modules: Mapping[str, nn.Module] | None = None,
        first_step: int = 0,
    ):
        """Prepare to record `modules` of `model` (None: `watched_modules`) in `out`/training.jsonl."""
        self.model = model
        self.options = options
        self.current = first_step
        self.modules = dict(modules) if modules is not None else watched_modules(model)
        self.path = Path(out) / FILE_NAME
        self.tensors = [f"{name}.{kind}" for name in self.modules for kind in KINDS]
        self._amax = {tensor: deque[float](maxlen=options.history) for tensor in self.tensors}
        self._recorded: StepCounts | None = None
        self._closed = False
        self._hooks = ExitStack()
        self._started = time.monotonic()
        with disk_errors(Path(out)):
            Path(out).mkdir(parents=True, exist_ok=True)
            head = Head(
                model=type(model).__name__, every=options.every, history=options.history, scaling=options.scaling,
                tensors=self.tensors, columns=list(COLUMNS),
            )  # fmt: skip
            for line in begin_log(self.path, head, first_step):
                for tensor, row in zip(self.tensors, line.rows, strict=True):
                    if row is not None:  # four digits of a BF16 number tell which one it was
                        self._amax[tensor].append(float(torch.tensor(row[0] or 0.0).bfloat16()))
        self._attach()

    def step(self, loss: torch.Tensor | float | None = None) -> None:
        """End a training step, whose `loss` joins the record; call it after the backward pass, once a step. Nothing is
        recorded after `close`.

        Raises InputError where a recorded step ran none of the layers, as a compiled model's hooks never run.
        """
        if self._closed:
            return
        if self._recorded is not None:
            self._hooks.close()
            self._write(self._recorded, loss)
        self.current += 1
        self._attach()

    def close(self) -> None:
        """Remove the hooks; a step that has not ended is not recorded."""
        self._hooks.close()
        self._recorded = None
        self._closed = True

    def _attach(self) -> None:
        """Attach the hooks where the current step is one to record."""
        self._recorded = None
        if self.current % self.options.every:
            return
        step = self._recorded = StepCounts()
        watched = {id(module): name for name, module in self.modules.items()}  # alive as long as the recorder
        for handle in (
            register_module_forward_pre_hook(_input_hook(step, watched)),
            register_module_forward_hook(_output_hook(step, watched)),
        ):
            self._hooks.callback(handle.remove)
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                self._hooks.callback(parameter.register_post_accumulate_grad_hook(_norm_hook(step)).remove)

    def _write(self, step: StepCounts, loss: torch.Tensor | float | None) -> None:
        """Append the record of `step`."""
        if not step.counts:
            raise InputError(
                f"step {self.current}",
                f"none of the {len(self.modules)} watched layers ran",
                "watch the module that runs (a compiled one never calls hooks: watch before torch.compile, or train a "
                "few steps without it)",
            )
        rows: list[list[float | None] | None] = []
        for tensor in self.tensors:
            counts = step.counts.get(tensor)
            if counts is None:
                rows.append(None)
                continue
            before = self._amax[tensor]
            histogram = Histogram.from_dense(counts.cpu().numpy())
            numbers = tensor_numbers(histogram, np.array(before, np.float32), self.options)
            before.append(histogram.amax)
            rows.append([four_digits(number) for number in numbers])
        value = float("nan") if loss is None else float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        norm = (
            float(torch.stack([square.cpu() for square in step.squares.values()]).sum().sqrt())
            if step.squares
            else None
        )
        line = Line(
            step=self.current,
            loss=four_digits(value),
            loss_finite=loss is None or bool(np.isfinite(value)),
            gradient_norm=None if norm is None else four_digits(norm),
            gradient_finite=norm is None or bool(np.isfinite(norm)),
            seconds=round(time.monotonic() - self._started, 3),
            rows=rows,
        )
        with disk_errors(self.path.parent):
            append_line(self.path, line)


def _input_hook(step: StepCounts, watched: Mapping[int, str]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        name = watched.get(id(module))
        # without gradients it is an evaluation, or the first pass of a checkpointed layer, which comes again
        if name is None or not torch.is_grad_enabled():
            return
        x = _first_tensor(inputs)
        if x is not None and step.is_new(x):
            step.add(f"{name}.input", x)
        weight = getattr(module, "weight", None)
        if f"{name}.weight" not in step.counts and isinstance(weight, torch.Tensor):
            step.add(f"{name}.weight", weight)

    return hook


def _output_hook(step: StepCounts, watched: Mapping[int, str]) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        name = watched.get(id(module))
        if name is not None and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: step.add(f"{name}.gradient", gradient))

    return hook


def _first_tensor(inputs: Any) -> torch.Tensor | None:
    """The first tensor of floats among a module's arguments, which may be tuples of tensors; None where none is."""
    if isinstance(inputs, tuple | list):
        return next((tensor for entry in inputs if (tensor := _first_tensor(entry)) is not None), None)
    if isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
        return inputs
    return None


def _norm_hook(step: StepCounts) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            step.squares[id(parameter)] = parameter.grad.detach().float().square().sum()

    return hook
