"""`fp8q convert`: write an FP8 checkpoint by the names and shapes of tensors, without text and without a model.

The directory is no run. While it is being written it holds `PROGRESS`, by which a killed call is recognized: the same
call goes on, and checks the files that are finished. config.json comes last, so that no server takes half a checkpoint.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..calibrate.checkpoint.companions import companion_files
from ..calibrate.checkpoint.recognizer import no_codes
from ..calibrate.checkpoint.weights import find_weights, read_headers
from ..calibrate.input.untrusted import AGAIN, exists, local_path
from ..calibrate.model.architecture import read_config
from ..calibrate.model.source import locate
from ..core.errors import Fp8qError, InputError
from ..core.files import PARTIAL, Strict, disk_errors, locked, read_document, regular_file, remove, write_document
from ..core.headers import header_bytes
from ..core.reporter import Reporter
from ..core.undo import at_end
from ..options import ConvertOptions
from ..quantize.conversion.card import unquantized_by_reason, write_card
from ..quantize.conversion.config import quantization_fields, write_converted_config, write_index
from ..quantize.conversion.plan import CheckpointPlan, placed, plan_checkpoint
from ..quantize.conversion.rules import load_rules, select_tensors
from ..quantize.conversion.shards import CheckpointWriter
from ..quantize.lint.check import RULES
from ..quantize.reading.fp8_tensors import Checkpoint, Located, open_checkpoint
from ..quantize.reading.quantization_config import declared_in

#: The file of a directory that is being written, and its lock.
PROGRESS, LOCK = ".convert.json", ".convert.lock"
#: The rule of the lint that reads every code.
NAN_CODES = "C123"
#: Most threads by default: each takes some 50 MB.
MOST_THREADS = 8


class ConvertProgress(Strict):
    """The record of a directory that is being written: what is converted, in one digest."""

    key: str


@dataclass(frozen=True)
class Converted:
    """The checkpoint that was written.

    `quantized`: the tensors of codes; `kept`: reason -> the matrices that keep their type; `largest_error_steps` of the
    step between neighbouring codes, `largest_relative_error` of a value that has a normal code; `resumed`: files of an
    earlier call that were checked and kept; `warnings`: findings of the lint that are no errors.
    """

    path: Path
    form: str
    layout: str
    quantized: int
    kept: dict[str, list[str]]
    source_bytes: int
    written_bytes: int
    largest_error_steps: float
    largest_relative_error: float
    resumed: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Source:
    """A checkpoint to convert: the name that the user gave it, its directory, config.json, files of weights, and what
    is copied beside them, by name.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    files: tuple[Path, ...]
    companions: Mapping[str, Path]

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def convert(model: str, out: Path, options: ConvertOptions, progress: Reporter) -> Converted:
    """Write an FP8 checkpoint of `model`, a directory or a hub name, into the directory `out`, by the names and shapes
    of its tensors: without text, without running a model, and without a class of transformers.

    Every code is proven. A killed call goes on where it stopped; of a call that fails nothing is left. Raises
    InputError for a source that is quantized already, pickled or damaged, for rules and patterns that match nothing,
    and for an `out` that holds anything else than a convert in progress.
    """
    source = _open_source(model, options, progress)
    _check_out(out, source)
    headers = read_headers(source.files)
    rules = load_rules(options.rules)
    selection = select_tensors(rules, source.config, headers, options.skip, options.mtp)
    plan = plan_checkpoint(
        source.files, headers, source.config, rules, selection, (options.form, options.chosen_layout)
    )
    _check_plan(plan, source)
    with _writing(out, _key(source, plan), plan):
        return _write(source, plan, out, options, progress)


def _open_source(model: str, options: ConvertOptions, progress: Reporter) -> _Source:
    """Open the checkpoint `model`, and refuse what is quantized already before its weights are looked for."""
    path, _ = locate(model, options.revision, False, progress)
    config = read_config(path, model)
    no_codes(path, model, config, {})
    files = find_weights(path, model, config.get("transformers_weights"))
    no_codes(path, model, config, read_headers(files))
    companions = companion_files(path)
    if config.get("auto_map"):
        companions |= {file.name: file for file in path.glob("*.py")}
    for file in companions.values():  # before hours of converting, not after them
        regular_file(file, AGAIN)
    return _Source(model, path, config, files, companions)


def _check_out(out: Path, source: _Source) -> None:
    """Raise InputError for a directory that the checkpoint cannot be written to."""
    inside, source_folder = local_path(out).resolve(), source.path.resolve()
    if inside == source_folder or source_folder in inside.parents:
        raise InputError(out, f"lies in {source.name}, which is converted", "name a directory elsewhere with --out")
    if exists(out) and not out.is_dir():
        raise InputError(out, "is a file, and a checkpoint is a directory", "name another with --out")
    if out.is_dir() and not exists(out / PROGRESS) and any(path.name != LOCK for path in out.iterdir()):
        raise InputError(out, "is not empty, and holds no convert in progress", "name a new or empty directory")


def _check_plan(plan: CheckpointPlan, source: _Source) -> None:
    """Raise InputError where nothing is quantized, or where projections that loaders join would differ."""
    if not plan.quantized:
        reason = next(iter(plan.unquantized.values()))
        raise InputError(source.name, f"has nothing that can be quantized in this form ({reason})", "try --form block")
    tensors = {
        name: Located(place.dtype, place.shape, place.start, place.end, shard.source)
        for shard in plan.shards
        for name, place in placed(shard.written)[1].items()
    }
    config = {**source.config, "quantization_config": quantization_fields(plan, source.config)}
    declared = declared_in(config, source.path / "config.json")
    assert declared is not None, "the configuration says how it is quantized"
    planned = Checkpoint(source.path, config, declared, tensors, ())
    for rule in ("C116", "C121", "C122"):
        for finding in RULES[rule].findings(planned):
            raise InputError(
                finding.node, f"would break rule {rule}: {finding.message}", "change --skip or --rules accordingly"
            )


def _key(source: _Source, plan: CheckpointPlan) -> str:
    """A digest of the source's headers and of the plan: what a killed call must have had in common with this one."""
    digest = hashlib.sha256(json.dumps([__version__, plan.form, plan.layout, sorted(plan.unquantized)]).encode())
    for file in source.files:
        digest.update(file.name.encode() + header_bytes(file))
    digest.update(json.dumps(source.config, sort_keys=True).encode())
    return digest.hexdigest()


@contextmanager
def _writing(out: Path, key: str, plan: CheckpointPlan) -> Iterator[None]:
    """Hold the directory `out` while it is written; leave nothing of a call that fails, and what is finished of one
    that is killed.
    """
    made = not out.exists()
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        fresh = not exists(out / PROGRESS)
        if not fresh and read_document(out / PROGRESS, ConvertProgress).key != key:
            raise InputError(
                out, "holds a convert in progress of another model, or with other options", "remove it, or name another"
            )
        done = sum((out / shard.name).stat().st_size for shard in plan.shards if (out / shard.name).is_file())
        free, needed = shutil.disk_usage(out).free, plan.nbytes - done

        def sweep() -> None:
            for partial in out.glob(f".*{PARTIAL}"):
                remove(partial)

        try:
            if free < needed:
                raise InputError(
                    out, f"has {free:,} bytes free, and the checkpoint takes {needed:,}", "free some, or name another"
                )
            with _held(out):
                sweep()
                write_document(out / PROGRESS, ConvertProgress(key=key))
                with at_end(sweep):
                    yield
                (out / PROGRESS).unlink()
            (out / LOCK).unlink(missing_ok=True)
        except Fp8qError:
            _clear(out, fresh, made, sweep)
            raise
        except BaseException:
            sweep()
            raise


def _clear(out: Path, fresh: bool, made: bool, sweep: Callable[[], None]) -> None:
    """Remove what a failed call wrote: everything where it was the first, otherwise files that are not whole."""
    if not fresh:
        sweep()
        return
    for path in out.iterdir():
        remove(path)
    if made:
        out.rmdir()


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """Hold the lock of the directory; raises InputError where another process does."""
    try:
        with locked(out / LOCK):
            yield
    except BlockingIOError:
        raise InputError(out, "another fp8q process is writing here", "wait for it, or name another") from None


def _write(source: _Source, plan: CheckpointPlan, out: Path, options: ConvertOptions, progress: Reporter) -> Converted:
    """Write the weights, then what lies beside them, and lint the whole."""
    threads = options.threads or min(len(os.sched_getaffinity(0)), MOST_THREADS)
    with progress.track("Converting weights", source.nbytes, "bytes") as advance:
        writer = CheckpointWriter(plan, out, threads, advance)
        writer.write()
    if writer.checked:
        progress.note(f"{len(writer.checked)} files of an earlier call were checked part by part, and kept")
    write_index(plan, out)
    _copy_companions(source, out)
    title = source.name if not Path(source.name).expanduser().is_dir() else source.path.resolve().name
    write_card(plan, title, writer.errors, out)
    write_converted_config(plan, source.config, out)
    return Converted(
        out,
        plan.form,
        plan.layout,
        plan.quantized,
        unquantized_by_reason(plan.unquantized),
        source.nbytes,
        sum((out / shard.name).stat().st_size for shard in plan.shards),
        writer.errors.steps,
        writer.errors.relative,
        tuple(writer.checked),
        _lint(out),
    )


def _copy_companions(source: _Source, out: Path) -> None:
    """Copy tokenizer, templates and licence, and the Python files that config.json names, unread."""
    for name, file in source.companions.items():
        (out / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, out / name)


def _lint(out: Path) -> tuple[str, ...]:
    """Lint the checkpoint in `out`, and return what is no error; raises InputError for the first error.

    The rule that reads every code for NaN is left out: no NaN is within half a step of a number, as the proof found.
    """
    checkpoint = open_checkpoint(out)
    assert checkpoint is not None, "config.json says how it is quantized"
    findings = [
        finding for number in sorted(RULES) if number != NAN_CODES for finding in RULES[number].findings(checkpoint)
    ]
    for finding in findings:
        if finding.severity == "error":
            raise InputError(out, str(finding), "report it, with the checkpoint's name")
    return tuple(map(str, findings))
