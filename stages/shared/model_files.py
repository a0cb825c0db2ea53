"""The files of a run that runtimes read, checkpoint and graphs: checked to be what their stages wrote, and reused."""

import shutil
from fnmatch import fnmatchcase
from pathlib import Path

from ... import __version__
from ...calibrate.checkpoint.companions import COMPANIONS
from ...core.commands import stage_command
from ...core.errors import InputError
from ...core.files import sha256_file
from ...core.headers import header_bytes
from ...core.record import FP8_STAGES
from ...core.run import Run
from ...core.run_files import GRAPH, graph_names
from ...options import ExportOptions, Precision
from ...quantize.reading.run_checkpoint import ADAPTERS, checkpoint_of
from ..pipeline.stages import EXPORT
from .adapters import adapters_of

#: The names of files that loaders read where they find them beside weights, whoever put them there.
LOADED = (*(name for name in COMPANIONS if name != "LICENSE*"), "*.safetensors", "*.jinja", "config.json")


def fp8_graphs(run: Run) -> list[Path]:
    """The FP8 graphs of `run`: both of the model, and both for each adapter beside it."""
    return [run.model / name for adapter in (None, *adapters_of(run)) for name in graph_names(adapter)]


def has_graphs(run: Run) -> bool:
    """Tell whether the run has graphs that this version exported.

    A checkpoint that they do not fit has removed them (`carry_graphs`).
    """
    exported = run.record().stages.get("export")
    if exported is None or exported.version != __version__ or exported.refused:
        return False
    return all(
        (run.root / name).is_file() and sha256_file(run.root / name) == digest
        for name, digest in exported.outputs.items()
    )


def carry_graphs(run: Run, checkpoint: Path) -> None:
    """Copy the graphs of `run` into `checkpoint`, which is about to replace `run.model`, where they still fit it:
    other scales leave names, shapes, types and offsets as they are.

    A graph holds no scale and no code: it points at them in the safetensors beside it, each scale at its own place
    (`passes.simplify` merges none). Tracing takes a minute, so the graphs move from the old checkpoint to the new one
    where all that they follow from is equal: config.json with its quantization scheme, and the header of every shard
    (each tensor's name, type, shape and offset). They are linted against the new scales like every graph. Nothing is
    copied where a file that they follow from no longer reads.
    """
    try:
        same = layout(run.model) == layout(checkpoint)
    except (InputError, FileNotFoundError):
        return
    if same:
        for graph in run.model.glob("model*.onnx"):
            shutil.copyfile(graph, checkpoint / graph.name)


def layout(checkpoint: Path) -> dict[str, bytes]:
    """The files that graphs follow from, by name: config.json, and the headers of the shards and of the adapters."""
    adapters = checkpoint / ADAPTERS
    configs = [checkpoint / "config.json", *sorted(adapters.glob("*/*.json"))]
    shards = [*sorted(checkpoint.glob("*.safetensors")), *sorted(adapters.glob("*/*.safetensors"))]
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in configs} | {
        str(shard.relative_to(checkpoint)): header_bytes(shard) for shard in shards
    }


def export_options(run: Run) -> ExportOptions:
    """Read back the options that the run's graph was exported with; the defaults without a graph."""
    if EXPORT.name in run.record().stages:
        return run.options(EXPORT)
    return ExportOptions()


def fp8_files(run: Run, *, graph: bool = True) -> dict[str, str]:
    """Name -> SHA-256 of the files that every FP8 runtime reads, checked against their stages. Raises InputError.

    `graph` False: only the checkpoint, for models without a graph.
    """
    run.refuse_stale(*FP8_STAGES)
    hashes = checked_model(run) | hashes_of(run, "export")
    if graph or not run.without_graph():
        run.require(run.onnx, "export")
    return hashes


def checked_model(run: Run) -> dict[str, str]:
    """Name -> SHA-256 of the files that `quantize` wrote, scales.json and the checkpoint: every command that loads
    `RUN/model` begins with this check.

    Raises InputError for a changed or missing file, and for one in `RUN/model` that loaders read and no stage wrote.
    """
    hashes = hashes_of(run, "quantize")
    if not hashes:
        run.require(run.scales, "quantize")
    refuse_unwritten(run)
    return hashes


def refuse_unwritten(run: Run) -> None:
    """Raise InputError for a file in `RUN/model` that loaders read and no stage wrote."""
    written = {name for record in run.record().stages.values() for name in record.outputs}
    for path in sorted(run.model.rglob("*")):
        name = str(path.relative_to(run.root))
        if name not in written and any(fnmatchcase(path.name, pattern) for pattern in LOADED):
            raise InputError(
                path,
                "no stage of this run wrote it, and loaders read such a file",
                "delete it (generate and serve take a chat template with --template)",
            )


def files_of(run: Run, precision: Precision) -> dict[str, str]:
    """Name -> SHA-256 of the files that the runtimes of a precision read."""
    run.refuse_without_graph()
    if precision == "fp8":
        return fp8_files(run)
    hashes = hashes_of(run, f"export-{precision}")
    run.require(checkpoint_of(run, precision) / GRAPH, f"export-{precision}")
    if run.is_stale(f"export-{precision}"):
        raise InputError(
            checkpoint_of(run, precision),
            "was made of other statistics or scales than the run has now",
            f"run `fp8q export {run.root} --precision {precision}` again",
        )
    return hashes


def hashes_of(run: Run, *stages: str) -> dict[str, str]:
    """Name -> SHA-256 of the outputs of `stages`, checked against the files.

    Raises InputError for a changed or missing file, naming the folder where all of it is gone.
    """
    hashes: dict[str, str] = {}
    for by in stages:
        outputs = run.record().stages[by].outputs if by in run.record().stages else {}
        for name, digest in outputs.items():
            if not (folder := (run.root / name).parent).is_dir():
                raise InputError(folder, "is missing", f"`{stage_command(by, run.root)}` writes it, run that first")
            run.require(run.root / name, by)
            hashes[name] = digest
    return hashes


def may_change_card(run: Run) -> bool:
    """Tell whether later stages may write into the model card: not into one that is an output in the record, as those
    of earlier versions are.
    """
    return str(run.card.relative_to(run.root)) not in run.record().stages["quantize"].outputs


def source_path(run: Run) -> str:
    """The directory of the run's source checkpoint; raises InputError when it is missing."""
    path = run.record().model["path"]
    if not Path(path).is_dir() and run.loaded_model.is_dir():
        path = str(run.loaded_model)  # the run was moved, and its source with it
    if not Path(path).is_dir():
        raise InputError(
            path,
            f"the model that {run.root} was made of is no longer there",
            "put it back, or calibrate again",
        )
    return path
