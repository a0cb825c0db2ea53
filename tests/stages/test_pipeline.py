"""Every stage as a value: its key is all of its options, inputs and facts, and its record reads back."""

import dataclasses
import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, Clipping, ScaleOptions
from fp8q.options.declare import OPTIONS, Options, Unkeyed, option
from fp8q.stages.pipeline.stage import Key, Notes, Stage
from fp8q.stages.pipeline.stages import (
    CORPUS,
    DISTILL,
    EXPORT,
    MEASURE,
    QUANTIZE,
    STAGES,
    QuantizeFacts,
)

Any_Stage = Stage[Any, Any]
#: Facts that stages require, by their types.
REQUIRED_FACTS: dict[Any, Any] = {str: "text", int: 48, float: 0.01}
#: What has to go with another value of a field than its default.
COMPANIONS: dict[str, dict[str, Any]] = {
    **{name: {"method": field.of} for name, field in Clipping.declared().items() if field.of},
    "exact_tail": {"activation_terms": "tail"},
    "block_scale_grid": {"form": ("block",)},
    "kv_skip": {"kv_cache": "fp8"},
    "kv_scale": {"kv_cache": "fp8"},
    "q_scale": {"kv_cache": "fp8"},
    "needle_trials": {"needles": (64,)},
    "needle_text": {"needles": (64,)},
}
#: Other values of fields whose type does not tell one.
OTHERS: dict[str, Any] = {
    "percentile": 99.0,
    "form": ("*.mlp.*=two",),
    "runtimes": ("bf16",),
    "batch_sizes": (2,),
    "prompt_lengths": (2,),
    "needles": (2,),
    "gpus": (1,),
}


def another(kind: type[Options], name: str) -> Any:
    """A value of a field that is allowed and not its default."""
    if name in OTHERS:
        return OTHERS[name]
    default = getattr(kind, name)
    if choices := kind.declared()[name].choices:
        return next(choice for choice in choices if choice != default)
    return another_of(get_type_hints(kind)[name], default)


def another_of(hint: Any, default: Any) -> Any:
    """A value of the type `hint`, and not `default`; of a union of the first of its types."""
    parts: tuple[Any, ...] = get_args(hint)
    if get_origin(hint) is Literal:
        return parts[-1]
    if get_origin(hint) in (Union, UnionType):
        literals = [part for part in parts if get_args(part) and not isinstance(get_args(part)[0], type)]
        return another_of((literals or parts)[0], default)
    if get_origin(hint) is tuple:
        return (0, 2) if parts == (int, int) else (Path("other") if parts[0] is Path else "*.mlp.*",)
    return {bool: not default, int: (default or 3) + 1, float: 0.5, Path: Path("other"), str: "other"}[hint]


def options_with(kind: type[Options], given: dict[str, Any]) -> Options:
    """Options of a class, those of its nested class among the `given`."""
    if kind is Options:
        return Options()
    nested = {
        field.name: type(field.default) for field in dataclasses.fields(kind) if isinstance(field.default, Options)
    }
    inside = {
        name: options_with(inner, {key: value for key, value in given.items() if key in inner.declared()})
        for name, inner in nested.items()
    }
    return kind(**inside, **{name: value for name, value in given.items() if name in kind.declared()})


def fields_of(kind: type[Options]) -> list[tuple[type[Options], str]]:
    """Each field of a class with the class that declares it, those of nested classes among them."""
    nested = [field.default for field in dataclasses.fields(kind) if isinstance(field.default, Options)]
    return [(type(each), name) for each in nested for name in type(each).declared()] + [
        (kind, name) for name in kind.declared()
    ]


def facts_of(stage: Any_Stage) -> Any:
    """Facts of a stage that has nothing but those that it requires."""
    fields = stage.facts.model_fields.items()
    return stage.facts(**{name: REQUIRED_FACTS[field.annotation] for name, field in fields if field.is_required()})


def key_of(run: Run, stage: Any_Stage, options: Options) -> Key[Any, Any]:
    """The key of a stage in `run`: its declared inputs, as the other stages wrote them."""
    inputs = {
        name: digest
        for other, record in run.record().stages.items()
        for name, digest in record.outputs.items()
        if other != stage.name and any(fnmatchcase(name, pattern) for pattern in stage.inputs)
    }
    return Key(inputs, options, facts_of(stage))


def make(run: Run, stage: Any_Stage, options: Options, content: str = "") -> None:
    """Run a stage whose outputs hold `content` and the stage's name."""
    with stage.writing(run, key_of(run, stage, options), Notes(SILENT)) as log:
        for pattern in stage.outputs:
            path = run.root / pattern.replace("*", f"{stage.name}.bin")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{stage.name} {content}")
            log.outputs.append(path)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of all stages, with their default options."""
    run = Run(tmp_path_factory.mktemp("finished") / "run")
    for stage in STAGES:
        make(run, stage, stage.options())
    return run


@pytest.fixture
def run(finished_run: Run, tmp_path: Path) -> Run:
    """A copy of it, for a test to change."""
    return Run(Path(shutil.copytree(finished_run.root, tmp_path / "run")))


def test_every_stage_is_current_after_it_was_run(run: Run) -> None:
    assert len(STAGES) == len({stage.name for stage in STAGES})
    for stage in STAGES:
        assert stage.is_current(run, key_of(run, stage, stage.options())), stage.name


@pytest.mark.parametrize(
    ("stage", "kind", "name"),
    [(stage, kind, name) for stage in STAGES for kind, name in fields_of(stage.options)],
    ids=lambda value: getattr(value, "name", getattr(value, "__name__", value)),
)
def test_another_value_of_a_field_makes_the_stage_and_what_follows_stale(
    run: Run, stage: Any_Stage, kind: type[Options], name: str
) -> None:
    companions = COMPANIONS.get(name, {})
    before, after = (options_with(stage.options, companions | changed) for changed in ({}, {name: another(kind, name)}))
    make(run, stage, before)
    assert stage.is_current(run, key_of(run, stage, before))
    marks = get_type_hints(kind, include_extras=True)[name].__metadata__
    unkeyed = any(isinstance(mark, Unkeyed) for mark in marks)
    assert stage.is_current(run, key_of(run, stage, after)) is unkeyed
    if unkeyed:
        return
    followers = [
        other
        for other in STAGES
        if other is not stage
        and set(key_of(run, other, other.options()).inputs) & set(run.record().stages[stage.name].outputs)
    ]
    for other in followers:
        make(run, other, other.options())
        assert other.is_current(run, key_of(run, other, other.options()))
    make(run, stage, after, content="made by other options")
    for other in followers:
        assert not other.is_current(run, key_of(run, other, other.options())), other.name


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_new_field_is_part_of_the_key_without_another_line(run: Run, stage: Any_Stage) -> None:
    @dataclasses.dataclass(frozen=True)
    class Wider(stage.options):  # type: ignore[name-defined,misc]  # a class that is known at run time
        later: Annotated[int, option(OPTIONS, "A field that did not exist before.")] = 0

    wider = dataclasses.replace(stage, options=Wider)
    assert wider.is_current(run, key_of(run, wider, Wider())), "a run that is older than the field"
    assert not wider.is_current(run, key_of(run, wider, Wider(later=1)))
    assert wider.dump(Wider(later=1), key_of(run, wider, Wider()).facts)["later"] == 1


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_what_was_recorded_is_read_back(run: Run, stage: Any_Stage) -> None:
    for kind, name in fields_of(stage.options):
        if name in stage.recorded_fields:
            options = options_with(stage.options, COMPANIONS.get(name, {}) | {name: another(kind, name)})
            assert options != stage.options()
            assert stage.read(stage.dump(options, key_of(run, stage, options).facts), run.record_file)[0] == options
    assert run.options(stage) == stage.options()
    assert run.facts(stage) == key_of(run, stage, stage.options()).facts


def test_options_of_a_subclass_are_cut_to_the_stages_own() -> None:
    wide = CalibrateOptions(samples=3, batch_size=7, clip=Clipping("mse"))
    assert QUANTIZE.dump(wide, QuantizeFacts()) == QUANTIZE.dump(ScaleOptions(clip=Clipping("mse")), QuantizeFacts())


#: The options of each stage as they were recorded before fields that are at their default were.
OLD: dict[str, dict[str, Any]] = {
    "corpus": {
        "data": "a.txt", "eval_data": "b.txt", "model": "model", "chat_template": False, "seed": None,
        "sources": [{"name": "a.txt", "weight": 1.0, "windows": 2, "tokens": 9, "fingerprint": "f", "chat": False}],
    },
    "measure": {"batch_size": 8, "moments": False},
    "quantize": {
        "method": "amax", "percentile": 99.99, "margin": 0, "scale_grid": "bf16", "amax_history_len": 1024,
        "amax_compute_algo": "max", "interval": 1, "weight_method": "mse", "kv_cache": "off", "skip": [], "only": [],
        "weight_rounding": "nearest", "activation_terms": 1, "two_terms": [], "min_expert_tokens": 512,
    },
    "queries": {},
    "export": {"dtype": "bf16"},
    "export-bf16": {},
    "export-int8": {
        "method": "amax", "percentile": 99.99, "margin": 0, "scale_grid": "bf16", "amax_history_len": 1024,
        "amax_compute_algo": "max", "interval": 1,
    },
    "build-engine": {
        "runtime": "tensorrt-rtx", "targets": ["sm89", "sm120"], "max_batch": 8, "max_seq_len": 512,
        "max_prompt": None, "opt_batch": None, "opt_seq_len": None, "workspace": None, "precision": "fp8",
    },
    "validate": {"runtimes": ["bf16", "reference", "onnxruntime"], "context": 512, "stride": 512},
    "needles": {},
    "compare": {"url": "http://127.0.0.1:8000", "model": None, "served": None, "windows": None},
    "evaluate": {"tasks": ["hellaswag"], "limit": None, "seeds": 3, "harness": "0.4.13"},
    "distill": {
        "samples": None, "allow_overlap": False, "epochs": 2.0, "batch_size": 4, "learning_rate": 0.001, "seed": 0,
        "data": "text.txt", "start": "0",
    },
    "adapter": {
        "samples": None, "allow_overlap": False, "epochs": 2.0, "batch_size": 4, "seed": 0, "rank": 16, "alpha": 32,
        "adapter_rate": 0.0001, "data": "text.txt",
    },
    "triton": {"name": None, "max_batch": 8, "engine_model": False},
    "sensitivity": {"windows": 16, "measure": None},
    "forms": {"server": "vllm", "limit": 0.01, "scales": "0"},
    "tune": {"max_kl": None, "max_ppl_increase": 0.01, "prefer": "memory", "windows": 32},
    "bench": {
        "runtime": "auto", "batch_sizes": None, "prompt_lengths": None, "tokens": 64, "rounds": 5, "memory": None,
        "gpu_hour_price": None,
    },
    "continue": {"continuations": 3, "tokens": 48},
    "report": {"compare": 0},
}  # fmt: skip
OLDER_STAGES = [stage for stage in STAGES if stage.name in OLD]


@pytest.mark.parametrize("stage", OLDER_STAGES, ids=lambda stage: stage.name)
def test_records_of_the_version_before_are_read(stage: Any_Stage, run: Run) -> None:
    """Each has what was asked for then, and what is younger at the value that it had then."""
    options, facts = stage.read(OLD[stage.name], run.record_file)
    for name, value in OLD[stage.name].items():
        there = facts if name in stage.facts.model_fields else getattr(options, "clip", options)
        if name in stage.recorded_fields and name != "sources":
            found = getattr(there, name) if hasattr(there, name) else getattr(options, name)
            assert found == (tuple(value) if isinstance(value, list) else value), name
    if stage is CORPUS:
        assert options.bos == "never"
    if stage.name == "sensitivity":
        assert options.stream is False
    if stage is DISTILL:
        assert (options.stream, options.shard) == (False, False)


@pytest.mark.parametrize("stage", OLDER_STAGES, ids=lambda stage: stage.name)
def test_a_run_of_the_version_before_is_current(stage: Any_Stage, run: Run) -> None:
    record = json.loads(run.record_file.read_text())
    record["stages"][stage.name]["options"] = OLD[stage.name]
    run.record_file.write_text(json.dumps(record))
    options, facts = stage.read(OLD[stage.name], run.record_file)
    key = dataclasses.replace(key_of(run, stage, options), facts=facts)
    assert stage.is_current(run, key)


@pytest.mark.parametrize(
    ("stage", "recorded", "told"),
    [
        (QUANTIZE, {"zeal": 1}, "has `zeal`, which this version of fp8q does not know"),
        (QUANTIZE, {"skip": 5}, "has `skip` 5, which must be a list"),
        (QUANTIZE, {"skip": ["a", 5]}, "has `skip.1` 5, which must be text"),
        (QUANTIZE, {"kv_cache": "fp4"}, "has `kv_cache` \"fp4\", which must be 'off', 'v' or 'fp8'"),
        (
            QUANTIZE,
            {"activation_terms": "2"},
            "has `activation_terms` \"2\", which must be 1, 2, 'tail' or 'bf16'",
        ),
        (QUANTIZE, {"weight_method": None}, "has `weight_method` null, which must be 'amax' or 'mse'"),
        (QUANTIZE, {"interval": 0, "method": "delayed"}, "has --interval 0: must be at least 1"),
        (MEASURE, {"batch_size": "x"}, 'has `batch_size` "x", which must be a whole number'),
        (MEASURE, {"prefix": [-1]}, "has `prefix.0` -1, which must be at least 0"),
        (EXPORT, {"opset": 23}, "has `opset`, which this version of fp8q does not know"),
    ],
)  # fmt: skip
def test_a_record_that_does_not_read_is_refused_with_the_command_that_makes_it_again(
    run: Run, stage: Any_Stage, recorded: dict[str, Any], told: str
) -> None:
    record = json.loads(run.record_file.read_text())
    record["stages"][stage.name]["options"] |= recorded
    run.record_file.write_text(json.dumps(record))
    assert not stage.is_current(run, key_of(run, stage, stage.options())), "it is made again"
    with pytest.raises(InputError) as refused:
        run.options(stage)
    again = f"fp8q export {run.root}" if stage is EXPORT else "fp8q calibrate"
    assert str(refused.value) == f"{run.record_file}: the stage {stage.name} {told}; `{again}` makes it again"


def test_a_record_that_lacks_what_every_one_has_is_refused(run: Run) -> None:
    with pytest.raises(InputError) as refused:
        CORPUS.read({"seed": 1}, run.record_file)
    assert str(refused.value) == (
        f"{run.record_file}: does not say `data` of the stage corpus; `fp8q calibrate` makes it again"
    )


def test_a_stage_writes_and_reads_only_what_it_declares(run: Run) -> None:
    with (
        pytest.raises(AssertionError, match="^measure: elsewhere.bin is no output of the stage$"),
        MEASURE.writing(run, key_of(run, MEASURE, MEASURE.options()), Notes(SILENT)) as log,
    ):
        log.outputs.append(run.root / "elsewhere.bin")
    key = Key({"bench.json": "0"}, MEASURE.options(), MEASURE.facts())
    with (
        pytest.raises(AssertionError, match="^measure: bench.json is no input of the stage$"),
        MEASURE.writing(run, key, Notes(SILENT)),
    ):
        pass


def test_nothing_is_lost_where_a_later_record_does_not_read(run: Run) -> None:
    """The graph's options are read before a checkpoint is written that they belong to."""
    record = json.loads(run.record_file.read_text())
    record["stages"]["export"]["options"]["opset"] = 23
    run.record_file.write_text(json.dumps(record))
    before = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"the stage export has `opset`, which this version of fp8q does not know"):
        api.scales(run.root)
    assert {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()} == before
