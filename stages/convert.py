"""`fp8q convert`: write an FP8 checkpoint by a model's class or the names of its tensors, without running it.

The directory is no run (`convert_directory`). What can be refused is refused before anything is written
(`convert_plan`). The call that was killed goes on, and checks the files that are finished. config.json comes last, so
that no server takes half a checkpoint.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..calibrate.checkpoint.beside_weights import BesideWeights, beside_weights
from ..calibrate.checkpoint.recognizer import no_codes
from ..calibrate.checkpoint.weights import INDEX, find_weights, read_headers
from ..calibrate.input.untrusted import exists, local_path
from ..calibrate.model.architecture import read_config
from ..calibrate.model.source import locate
from ..core.errors import InputError
from ..core.files import replacing
from ..core.headers import StoredTensor, header_bytes
from ..core.reporter import Reporter
from ..core.run_files import CARD
from ..options import ConvertOptions
from ..quantize.conversion.card import card, unquantized_by_reason
from ..quantize.conversion.config import beside_config, converted_config, index_of
from ..quantize.conversion.plan import CheckpointPlan, plan_checkpoint
from ..quantize.conversion.rescaling import checkpoint_in_blocks, rescaled_plan
from ..quantize.conversion.rules import load_rules
from ..quantize.conversion.selection import select_tensors
from ..quantize.conversion.shards import CheckpointWriter
from ..quantize.reading.fp8_tensors import Checkpoint, open_checkpoint
from ..quantize.reading.quantization_config import CONFIG
from .convert_directory import PlannedFiles, check_contents, writing
from .convert_plan import check_integer_weights, check_plan, lint_written

#: Most threads by default: each takes some 50 MB.
MOST_THREADS = 8


@dataclass(frozen=True)
class Converted:
    """The checkpoint that was written.

    `quantized`: the tensors of codes; `kept`: reason -> the matrices that keep their type; `decided_by`: the class of
    transformers that said what is a linear layer, or that names did, and why; `largest_error_steps` of the
    step between neighbouring codes, `largest_relative_error` of a value that has a normal code; `resumed`: files of an
    earlier call that were checked and kept; `left`: name -> reason of what is not copied from beside the weights;
    `warnings`: findings of the lint that are no errors; `unloadable`: why transformers loads no FP8 checkpoint of this
    class, if it does not.
    """

    path: Path
    form: str
    layout: str
    quantized: int
    kept: dict[str, list[str]]
    decided_by: str
    source_bytes: int
    written_bytes: int
    largest_error_steps: float
    largest_relative_error: float
    resumed: tuple[str, ...]
    left: dict[str, str]
    warnings: tuple[str, ...]
    unloadable: str | None


@dataclass(frozen=True)
class _Source:
    """A checkpoint to convert: the name that the user gave it, its directory, config.json, files of weights with their
    headers, and what lies beside them; `blocks`: the FP8 checkpoint that it is, in blocks.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    files: tuple[Path, ...]
    headers: Mapping[str, StoredTensor]
    others: BesideWeights
    blocks: Checkpoint | None

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def convert(model: str, out: Path, options: ConvertOptions, progress: Reporter) -> Converted:
    """Write an FP8 checkpoint of `model`, a directory or a hub name, into the directory `out`: without text and
    without running a model. Its class in transformers says what is a linear layer; names and shapes do without one.

    Every code is proven. A killed call goes on where it stopped; of a call that fails nothing is left. Raises
    InputError for a source that is quantized already, pickled or damaged, for rules and patterns that match nothing,
    and for an `out` that holds anything else than a convert in progress.
    """
    source = _open_source(model, options, progress)
    _check_out(out, source)
    check_integer_weights(source.headers)
    plan = _plan(source, options)
    check_plan(plan, source.name, source.path, source.config)
    for line in source.others.remarks():
        progress.note(f"not copied: {line}")
    if plan.unloadable is not None:
        progress.note(plan.unloadable)
    with writing(out, _planned_files(source, plan), progress):
        return _write(source, plan, out, options, progress)


def _plan(source: _Source, options: ConvertOptions) -> CheckpointPlan:
    """Choose what is quantized, and plan the files; of a checkpoint in blocks the scales alone are chosen."""
    if source.blocks is not None:
        return rescaled_plan(source.blocks, source.name, source.files, options)
    selection = select_tensors(load_rules(options.rules), source.config, source.headers, options.skip, options.mtp)
    form = options.form, options.chosen_layout
    return plan_checkpoint(source.files, source.headers, selection, form, options.block_scale_grid)


def _open_source(model: str, options: ConvertOptions, progress: Reporter) -> _Source:
    """Open the checkpoint `model`, and refuse what is quantized already before its weights are looked for, unless it is
    in blocks and blocks are asked for.
    """
    path, _ = locate(model, options.revision, False, progress)
    config = read_config(path, model)
    blocks = checkpoint_in_blocks(path) if options.form == "block" and "quantization_config" in config else None
    if blocks is None:
        no_codes(path, model, config, {})
    files = find_weights(path, model, config.get("transformers_weights"))
    headers = read_headers(files)
    if blocks is None:
        no_codes(path, model, config, headers)
    return _Source(model, path, config, files, headers, beside_weights(path, files, config), blocks)


def _check_out(out: Path, source: _Source) -> None:
    """Raise InputError for a directory that the checkpoint cannot be written to."""
    inside = local_path(out).resolve()
    source_folder = source.path.resolve()
    if inside == source_folder or source_folder in inside.parents:
        raise InputError(out, f"lies in {source.name}, which is converted", "name a directory elsewhere with --out")
    if exists(out) and not out.is_dir():
        raise InputError(out, "is a file, and a checkpoint is a directory", "name another with --out")
    check_contents(out)


def _planned_files(source: _Source, plan: CheckpointPlan) -> PlannedFiles:
    """The files that are written, and what they take."""
    others = {CONFIG, CARD, *source.others.copied, *beside_config(plan, source.config)}
    if index_of(plan) is not None:
        others.add(INDEX)
    shards = frozenset(shard.name for shard in plan.shards)
    return PlannedFiles(shards, frozenset(others), plan.nbytes + source.others.nbytes, _key(source, plan))


def _key(source: _Source, plan: CheckpointPlan) -> str:
    """A digest of the source's headers and of the plan: what a killed call must have had in common with this one."""
    digest = hashlib.sha256(
        json.dumps([__version__, plan.form, plan.layout, plan.blocks, sorted(plan.unquantized)]).encode()
    )
    for file in source.files:
        digest.update(file.name.encode() + header_bytes(file))
    digest.update(json.dumps(source.config, sort_keys=True).encode())
    return digest.hexdigest()


def _write(source: _Source, plan: CheckpointPlan, out: Path, options: ConvertOptions, progress: Reporter) -> Converted:
    """Write the weights, then what lies beside them, and lint the whole."""
    threads = options.threads or min(len(os.sched_getaffinity(0)), MOST_THREADS)
    with progress.track("Converting weights", source.nbytes, "bytes") as advance:
        writer = CheckpointWriter(plan, out, threads, advance)
        writer.write()
    if writer.checked:
        progress.note(f"{len(writer.checked)} files of an earlier call were checked part by part, and kept")
    index = index_of(plan)
    if index is not None:
        _put(out / INDEX, index)
    for name, file in source.others.copied.items():
        with replacing(out / name) as partial:
            shutil.copyfile(file, partial)
    title = source.name if not Path(source.name).expanduser().is_dir() else source.path.resolve().name
    _put(out / CARD, card(plan, title, writer.errors, source.others.remarks()))
    for name, text in beside_config(plan, source.config).items():
        _put(out / name, text)
    _put(out / CONFIG, converted_config(plan, source.config))
    checkpoint = open_checkpoint(out)
    assert checkpoint is not None, "config.json says how it is quantized"
    return Converted(
        out,
        plan.form,
        plan.layout,
        plan.quantized,
        unquantized_by_reason(plan.unquantized),
        plan.decided_by,
        source.nbytes,
        sum((out / shard.name).stat().st_size for shard in plan.shards),
        writer.errors.steps,
        writer.errors.relative,
        tuple(writer.checked),
        dict(source.others.left),
        lint_written(checkpoint),
        plan.unloadable,
    )


def _put(file: Path, text: bytes) -> None:
    with replacing(file) as partial:
        partial.write_bytes(text)
