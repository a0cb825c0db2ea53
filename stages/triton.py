"""The stage `triton`: write the model repository, in the run or elsewhere, with a plain model of an engine."""

from dataclasses import replace
from pathlib import Path

from ..calibrate.input.untrusted import local_path
from ..calibrate.text.corpus import lower_default
from ..core.errors import InputError
from ..core.run import Run
from ..export.engine.info import load_engines
from ..export.engine.profiles import Profile, profiles
from ..options import DEFAULT_SEQ_LEN, EngineOptions, TritonOptions
from ..serve.triton.engine_model import describe
from ..serve.triton.ownership import refuse_foreign
from ..serve.triton.repository import Engine, PythonModelEngine, write_repository
from .other_text import positions
from .pipeline.stage import NO_FACTS, Key, Notes
from .pipeline.stages import BUILD_ENGINE, TRITON
from .shared.adapters import note_base_alone
from .shared.model_files import fp8_files

BUILT = BUILD_ENGINE.name


def triton(run: Run, notes: Notes, options: TritonOptions) -> list[Path]:
    """Write the repository of a run where it is not current, and return its files.

    In another place than RUN/triton it is written each time, since the run records its own files only. Raises
    InputError for a place with foreign files.
    """
    note_base_alone(run, "the Triton repository serves", notes)
    refuse_without_engine(run, options)
    inputs = fp8_files(run) | engine_files(run)
    key = Key(inputs, options, NO_FACTS)
    out = options.out
    if out is not None and (target := local_path(out).resolve()) != run.triton.resolve():
        refuse_foreign(out)
        options = replace(options, out=target)  # not a link to it
        files = write_repository(
            run, options, notes, plain_engine(run, options.engine_model, notes), python_model_engines(run)
        )
        notes.note(f"wrote the Triton repository {out}")
        return files
    if not TRITON.is_current(run, key):
        recorded = run.record().stages.get("triton")
        names = [str(Path(name).relative_to(run.triton.name)) for name in recorded.outputs] if recorded else []
        refuse_foreign(run.triton, names)
        with TRITON.writing(run, key, notes) as log:
            engine = plain_engine(run, options.engine_model, notes)
            log.outputs += write_repository(run, replace(options, out=None), notes, engine, python_model_engines(run))
    return [run.root / name for name in run.record().stages["triton"].outputs]


def refuse_without_engine(run: Run, options: TritonOptions) -> None:
    """Raise InputError for GPUs that the run has no engine for, of any kind."""
    if options.gpus is not None and not engine_files(run):
        raise InputError(
            f"--gpus {','.join(map(str, options.gpus))}",
            f"{run.root} has no engine of its graph to run there",
            f"build one with `fp8q build-engine {run.root}`, or leave --gpus out",
        )


def engine_files(run: Run) -> dict[str, str]:
    """Name -> SHA-256 of the engine files that the repository takes; empty without engines of this graph."""
    built = run.record().stages.get(BUILT)
    if built is None or run.is_stale(BUILT):
        return {}
    return {name: digest for name, digest in built.outputs.items() if name.endswith((".plan", ".json"))}


def python_model_engines(run: Run) -> list[PythonModelEngine]:
    """The engines that the Python model runs itself."""
    return [  # load_engines has looked at the records beside the plans
        PythonModelEngine(
            info.runtime, info.version, info.target, run.require(run.engines / f"{info.target}.plan", BUILT)
        )
        for info in (load_engines(run) if engine_files(run) else [])
    ]


def plain_engine(run: Run, asked: bool, notes: Notes) -> Engine | None:
    """The plain engine of the repository: with the run's plan where TensorRT built one of this graph, without one where
    it is `asked` for; None, with a note, where an engine stays out.

    Raises InputError where it is asked for and Triton lacks the type of one of its tensors.
    """
    plans = bool(engine_files(run)) and run.options(BUILD_ENGINE).runtime == "tensorrt"
    if not plans and not asked:
        note_left_out(run, notes)
        return None
    built = load_engines(run)[0] if plans else None
    graph = run.require(run.onnx, "export")
    model = describe(graph, built.profiles if built else profiles_of(run, notes), built)
    if model.untyped:
        name = model.untyped[0]
        why = f"Triton has no type for {name}, which is {model.tensors[name].type}"
        if asked:
            raise InputError(
                "--engine-model",
                why,
                "leave it out (the Python model keeps the cache to itself), or calibrate with --kv-cache off",
            )
        notes.note(f"no plain model of the engine: {why}; the Python model runs it")
        return None
    return Engine(model, run.require(run.engines / f"{built.target}.plan", BUILT) if built else None)


def profiles_of(run: Run, notes: Notes) -> tuple[Profile, ...]:
    """The optimization profiles for an engine of the run: those of its engines, whatever their runtime, or the defaults
    of `fp8q build-engine`.
    """
    if BUILT in run.record().stages:
        return tuple(load_engines(run)[0].profiles)
    longest = lower_default("--max-seq-len", None, DEFAULT_SEQ_LEN, positions(run), "the model's positions", notes)
    return profiles(EngineOptions.max_batch, longest)


def note_left_out(run: Run, notes: Notes) -> None:
    """Note why engines of the run are no plain models, or not in the repository."""
    built = run.record().stages.get(BUILT)
    if built is None:
        return
    targets = ", ".join(Path(name).stem for name in built.outputs if name.endswith(".plan"))
    if run.is_stale(BUILT):
        notes.note(
            f"engines {targets}: stay out of the Triton repository, which would be of another model: they are of other "
            "files than the run has now; the model runs on ONNX Runtime"
        )
        return
    notes.note(
        f"engines {targets}: the Python model runs them; no plain model of them, for Triton's tensorrt backend reads "
        "TensorRT plans and no TensorRT-RTX engines"
    )
