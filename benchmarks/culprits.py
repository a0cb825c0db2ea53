"""Models and runs with one damaged module, to see whether fp8q finds it: each damage is one that a tool could make.

`rescale_outliers` changes a source checkpoint and not what it computes: a channel of a norm's output grows by a power
of two, and the columns that read it shrink by the same. A migration of outliers in the wrong direction does this; E4M3,
which has 17.8 octaves from its smallest number to its largest, loses all other channels. `scale_too_small` and
`saturating_k` change one scale of a finished run, in `scales.json` and in `model/`, as a calibrator does that divides
twice or reads a maximum wrongly; all that the record of the run says of these files is brought up to date, so that the
run opens, and what was made of the scales afterwards (engines, numbers) is dropped from it.
"""

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from fp8q.calibrate.measure.observe import probe_groups
from fp8q.calibrate.measure.statistics import load_record
from fp8q.calibrate.model.gemms import observed_gemms, output_channel_axis
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.core.files import sha256_file
from fp8q.core.headers import read_header
from fp8q.core.run import Run
from fp8q.quantize.reading.run_checkpoint import tensor_files
from fp8q.quantize.scales.clip import bf16_ceil
from fp8q.quantize.scales.decisions import load_scales

#: Octaves by which the outlier grows: more than E4M3 has. By 16, in models whose channels are alike, products still err
#: by no more than 5 to 7 %, which is to be watched.
OCTAVES = 18
#: The stages that are as they were, or read the damaged files.
KEPT = ("corpus", "measure", "quantize", "queries", "export")


def rescale_outliers(checkpoint: Path, out: Path, module: str, channel: int = 7, octaves: int = OCTAVES) -> list[str]:
    """Copy `checkpoint` to `out` (new), and let `channel` of what `module` reads be 2^octaves times what it was.

    The module reads a norm's output. Returns all modules that read it, the first of the group first; the model computes
    what it did. Raises ValueError for a module that reads something else.
    """
    source = open_source(str(checkpoint))
    model = load_model(source, torch.bfloat16)  # on the meta device OPT, whose mask looks at values, does not run
    norm, readers = _norm_before(model, module)
    shutil.copytree(checkpoint, out)
    files = [out / path.name for path in source.weight_files]
    held = {path: load_file(path) for path in files}
    factor = 2.0**octaves
    for part in ("weight", "bias"):
        if getattr(model.get_submodule(norm), part, None) is not None:
            tensor = _tensor(held, source, f"{norm}.{part}")
            offset = 1.0 if part == "weight" and _adds_one(model.get_submodule(norm)) else 0.0
            tensor[channel] = ((tensor[channel].double() + offset) * factor - offset).to(tensor.dtype)
    for reader in readers:
        rows = _tensor(held, source, f"{reader}.weight").movedim(output_channel_axis(model.get_submodule(reader)), 0)
        rows[:, channel] /= factor
    for path, tensors in held.items():
        save_file(tensors, path, metadata={"format": "pt"})
    return readers


def scale_too_small(run: Run, module: str, factor: float = 10.0) -> list[str]:
    """Let the scale of what `module` reads be `factor` times too small, for all that read it; returns these."""
    scales = load_scales(run)
    groups = load_record(run).groups.values()
    members = [name for group in groups if module in group for name in group if name in scales.activations]
    small = float(bf16_ceil(scales.activations[module].scale / factor))
    _write(run, "activations", {name: (f"{name}.input_scale", small) for name in members})
    return members


def saturating_k(run: Run, attention: str, factor: float = 16.0) -> str:
    """Let the scale of the keys that `attention` caches be `factor` times too small; returns the tensor's name."""
    name = f"{attention}.k"
    small = float(bf16_ceil(load_scales(run).kv_cache[name].scale / factor))
    _write(run, "kv_cache", {name: (f"{name}_scale", small)})
    return name


def _norm_before(model: PreTrainedModel, module: str) -> tuple[str, list[str]]:
    """The norm whose output `module` reads, and all products that do."""
    groups = probe_groups(model, observed_gemms(model))
    readers = next(members for members in groups.values() if module in members)
    made: dict[int, str] = {}
    alive: list[torch.Tensor] = []
    found: list[str] = []

    def note(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def hook(norm: nn.Module, given: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
            alive.append(y)
            made[id(y)] = name

        return hook

    def reads(reader: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        found.append(made.get(id(given[0]), ""))

    with ExitStack() as stack, torch.inference_mode():
        stack.callback(model.get_submodule(module).register_forward_pre_hook(reads).remove)
        for name, part in model.named_modules():
            if "norm" in type(part).__name__.lower() and getattr(part, "weight", None) is not None:
                stack.callback(part.register_forward_hook(note(name)).remove)
        model(input_ids=torch.zeros((1, 2), dtype=torch.int64), use_cache=True)
    if not found or not found[0]:
        raise ValueError(f"{module}: does not read a norm's output")
    return found[0], readers


def _adds_one(norm: nn.Module) -> bool:
    """Whether a norm multiplies by 1 + weight, as Gemma's do."""
    own = copy.deepcopy(norm).float()
    with torch.inference_mode():
        for parameter in own.parameters():
            parameter.zero_()
        width = next(own.parameters()).shape[-1]
        given = torch.linspace(-1, 1, width)[None]
        return bool(own(given).abs().max() > 0)


def _tensor(held: dict[Path, dict[str, torch.Tensor]], source: Source, name: str) -> torch.Tensor:
    stored = source.stored(name)
    return next(tensors[stored] for tensors in held.values() if stored in tensors)


def _write(run: Run, part: str, changes: dict[str, tuple[str, float]]) -> None:
    """Put other scales into `scales.json` (entry -> its value) and into the checkpoint (the tensor of that name), and
    bring the record up to date.
    """
    document = json.loads(run.scales.read_text(encoding="utf-8"))
    where = tensor_files(run.model)
    for entry, (tensor, scale) in changes.items():
        document[part][entry]["scale"] = scale
        file = run.model / where[tensor]
        with open(file, "r+b") as handle:
            handle.seek(read_header(file)[tensor].start)
            handle.write(np.float32(scale).tobytes())
    run.scales.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    _record(run, [run.scales, *(run.model / where[tensor] for tensor, _ in changes.values())])


def _record(run: Run, changed: Sequence[Path]) -> None:
    """Let `run.json` know the `changed` files, as whoever had written them so would."""
    record = json.loads(run.record_file.read_text(encoding="utf-8"))
    record["stages"] = {name: stage for name, stage in record["stages"].items() if name in KEPT}
    for path in set(changed):
        name, digest = str(path.relative_to(run.root)), sha256_file(path)
        for stage in record["stages"].values():
            for files in (stage["inputs"], stage["outputs"]):
                if name in files:
                    files[name] = digest
    run.record_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
