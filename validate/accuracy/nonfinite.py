"""Locate the first number that is not finite: its window, module and position.

The first window with such a loss runs once more with a hook on every module. In the order in which modules finish, the
first with an output that is not finite is blamed if its inputs are finite; otherwise the module around it is, whose own
arithmetic (attention, say) made the number. The position is that of the module's output: the losses do not show it,
since attention gives zero times infinity to earlier positions too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ...calibrate.model.source import Source
from ...calibrate.text.evaluation import Evaluation, first_not_finite
from ...core.errors import InputError
from ...core.run import Run
from .compare import BASELINE, Outcome
from .document import Accuracy, NotFinite
from .runtimes import FLOATS, float_model, load_float, open_reference


def blamed(run: Run, evaluation: Evaluation, outcome: Outcome, source: Callable[[], Source], device: str) -> Accuracy:
    """Add position and module of a runtime's first number that is not finite to the results in `outcome`, and whether
    BF16 has one.

    For a runtime without visible modules these are the FP8 reference's, where it has such a number too. `source` may
    raise InputError.
    """

    def window_of(window: int) -> npt.NDArray[np.int64]:
        return evaluation.ids[window : window + 1]

    def culprit_of(name: str, window: int) -> Culprit | None:
        ids = torch.from_numpy(window_of(window)).to(device)
        if name in FLOATS:
            model = load_float(source(), name, device)
            return culprit(model, lambda: model(input_ids=ids, use_cache=False), ids.shape[1])
        loaded = open_reference(run, "fast", device)
        return culprit(
            loaded.model, lambda: loaded.model(input_ids=ids, past_key_values=loaded.new_cache()), ids.shape[1]
        )

    def bf16_too(window: int) -> bool | None:
        if BASELINE in outcome.nll:
            return not np.isfinite(outcome.nll[BASELINE][window][evaluation.scored[window]]).all()
        try:
            forward = float_model(source(), torch.bfloat16, device)
        except InputError:
            return None
        with torch.inference_mode():
            return not_finite(forward(window_of(window))) is not None

    runtimes = dict(outcome.accuracy.runtimes)
    for name, nll in outcome.nll.items():
        where = None if runtimes[name].sampled else first_not_finite(nll, evaluation.scored)
        if where:
            window, position = where
            first = culprit_of(name, window) or Culprit(None, None)
            position = position if first.position is None else first.position
            place = NotFinite(window=window, position=position, module=first.module, bf16=bf16_too(window))
            runtimes[name] = runtimes[name].model_copy(update={"not_finite": place})
    return outcome.accuracy.model_copy(update={"runtimes": runtimes})


@dataclass(frozen=True)
class Culprit:
    """A module, and the first position of its output that is not finite; None where unknown."""

    module: str | None
    position: int | None


def culprit(model: nn.Module, run: Callable[[], object], length: int) -> Culprit | None:
    """The first module of `model` whose output is not finite while `run()` runs it on one window of `length`; None
    where all are.
    """
    names = {module: name for name, module in model.named_modules()}
    culprits: list[Culprit] = []

    def look(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        if culprits or (bad := not_finite(output)) is None:
            return
        inputs = args, {name: value for name, value in kwargs.items() if "mask" not in name}  # which may hold -inf
        within = names[module] if not_finite(inputs) is None else names[module].rpartition(".")[0]
        culprits.append(Culprit(within or "the model itself", position_of(bad, length)))

    handles = [module.register_forward_hook(look, with_kwargs=True) for module in names]
    try:
        with torch.inference_mode():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return culprits[0] if culprits else None


def not_finite(value: object) -> torch.Tensor | None:
    """Mark the values that are not finite in the first tensor that holds any, bool of its shape; looks into tuples,
    lists and dictionaries.
    """
    if isinstance(value, torch.Tensor):
        bad = ~value.float().isfinite()
        if value.is_floating_point() and bool(bad.any()):
            return bad
        return None
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return next((bad for bad in map(not_finite, parts) if bad is not None), None)


def position_of(bad: torch.Tensor, length: int) -> int | None:
    """The first position at which something is `bad`, [1, length, …] or [length, …]; None for other shapes."""
    rows = bad[0] if bad.ndim > 1 and bad.shape[:2] == (1, length) else bad
    if rows.ndim == 0 or len(rows) != length:
        return None
    return int(rows.reshape(length, -1).any(1).nonzero()[0, 0])
