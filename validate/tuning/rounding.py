"""The codes of every choice: nearest, and by `gptq` for each form of the activation, whose loss weights make up for."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from ...calibrate.measure.moments import SecondMoments, moments_file
from ...calibrate.model.expert_modules import whole_input_module
from ...core.reporter import Reporter
from ...quantize.scales.clip import lost_share
from ...quantize.weights.channels import QuantizedWeight, WeightMethod, quantize_weight
from ...quantize.weights.gptq import Compensations
from ...quantize.weights.rounding_progress import Rounded
from ...quantize.weights.sequential import weight_rows
from .candidates import Candidates, Kind

#: Says of a folder that what was gathered in it is complete.
DONE = "done"


def gather(candidates: Candidates, batches: Sequence[torch.Tensor], folder: Path, report: Reporter) -> None:
    """Add up the second moments of what each group gets on `batches` (ids int64 [windows, seq_len]) in `folder`, unless
    that is done.
    """
    if (folder / DONE).is_file():
        return
    moments = SecondMoments(folder)

    def adding(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda module, given: moments.add(name, given[0])

    with ExitStack() as stack, report.track("Gathering second moments", len(batches), "batches") as advance:
        for name, members in candidates.groups.items():
            module = whole_input_module(candidates.model, members[0])
            stack.callback(module.register_forward_pre_hook(adding(name)).remove)
        for ids in batches:
            with torch.inference_mode():
                candidates.model(input_ids=ids, use_cache=False)
            advance(1)
    moments.close()
    (folder / DONE).touch()


def round_weights(
    candidates: Candidates,
    codes: Mapping[Kind, Rounded],
    method: WeightMethod,
    moments: Path,
    report: Reporter,
) -> None:
    """Round every weight into `codes` that are not there yet; a group that no token of the `moments` came by is rounded
    to nearest.
    """
    first = {member: name for name, members in candidates.groups.items() for member in members}
    products, todo = candidates.products, len(first) * len({kept.folder for kept in codes.values()})
    with report.track("Rounding weights", todo, "weights") as advance:
        of_inputs = {kind: kept for kind, kept in codes.items() if kind[1] in candidates.inputs}
        for kind, kept in {kept.folder: (kind, kept) for kind, kept in of_inputs.items()}.values():
            lost = {module: lost_share(found.sqnr_db) for module, found in candidates.inputs[kind[1]].items()}
            compensations = Compensations(moments, first, lost)
            for module, name in first.items():
                if kept.of(module) is None:
                    known = kind[0] == "gptq" and moments_file(moments, name).is_file()
                    made = quantize_weight(
                        weight_rows(products[module]), method, compensations.of(module) if known else None
                    )
                    assert isinstance(made, QuantizedWeight), "scales.json says that it was quantized"
                    kept.add(module, made)
                advance(1)
