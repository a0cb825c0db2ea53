"""Building engines: targets and runtimes, profiles, what is written, what is refused, and what the builder's errors
become.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto, TensorProto

from fp8q.errors import BackendError, GateError, InputError
from fp8q.export.engine import build as engine
from fp8q.export.engine import targets
from fp8q.export.engine.build import Job, build, build_engines, resolve
from fp8q.export.engine.build_progress import Progress
from fp8q.export.engine.failures import explain
from fp8q.export.engine.info import EngineInfo, check_share, load_engines
from fp8q.export.engine.profiles import Profile, profiles
from fp8q.files import read_document
from fp8q.options import EngineOptions
from fp8q.reporter import SILENT
from fp8q.run import Run

Decoders = Callable[..., Any]
Edit = Callable[[Path, Callable[[ModelProto], None]], None]
DOWN = "model.layers.0.mlp.down_proj"
RTX = pytest.mark.skipif(
    "tensorrt-rtx" not in targets.available_runtimes(),
    reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'",
)


class Heard:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.tracks: list[tuple[str, int, str]] = []
        self.done = 0

    def note(self, line: str) -> None:
        self.notes.append(line)

    @contextmanager
    def track(self, description: str, total: int, unit: str = "steps") -> Iterator[Callable[[int], None]]:
        self.tracks.append((description, total, unit))
        self.done = 0

        def advance(done: int) -> None:
            assert done > 0
            self.done += done

        yield advance


# Targets and runtimes.


@pytest.mark.parametrize("target", ["sm75", "sm80", "sm86"])
def test_a_gpu_too_old_for_fp8_is_refused_before_any_work(target: str) -> None:
    with pytest.raises(InputError) as refused:
        resolve(EngineOptions(runtime="tensorrt-rtx", targets=("sm89", target)))
    assert (
        str(refused.value)
        == f"--target {target}: cannot do FP8, whose tensor cores begin with sm89; choose a newer one"
    )


@RTX
@pytest.mark.parametrize("target", ["sm90", "ada", "sm8", ""])
def test_a_target_that_the_runtime_does_not_know_is_refused_with_those_it_does(target: str) -> None:
    with pytest.raises(InputError) as refused:
        resolve(EngineOptions(runtime="tensorrt-rtx", targets=(target,)))
    assert str(refused.value) == f"--target {target}: TensorRT-RTX does not know it; choose from sm89, sm120, sm121"


@RTX
def test_without_a_gpu_tensorrt_rtx_builds_for_ada_and_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "gpu_target", lambda: None)
    resolved = resolve(EngineOptions())
    assert (resolved.runtime, resolved.targets) == ("tensorrt-rtx", ("sm89", "sm120"))
    assert resolve(EngineOptions(targets=("sm120", "sm120"))).targets == ("sm120",)


def test_auto_is_tensorrt_where_its_gpu_is_here_and_meant() -> None:
    both: Any = ("tensorrt", "tensorrt-rtx")
    assert targets.choose_runtime("auto", (), both, "sm90") == "tensorrt"
    assert targets.choose_runtime("auto", ("sm90",), both, "sm90") == "tensorrt"
    assert targets.choose_runtime("auto", ("sm89",), both, "sm90") == "tensorrt-rtx"
    assert targets.choose_runtime("auto", (), both, None) == "tensorrt-rtx"
    assert targets.choose_runtime("auto", (), ("tensorrt-rtx",), "sm90") == "tensorrt-rtx"


def test_default_targets_are_the_gpu_that_is_here_or_those_built_ahead_of_time() -> None:
    known = ("sm75", "sm86", "sm89", "sm120")
    assert targets.default_targets("tensorrt", "sm90", ("sm90",)) == ("sm90",)
    assert targets.default_targets("tensorrt-rtx", "sm120", known) == ("sm120",)
    assert targets.default_targets("tensorrt-rtx", "sm90", known) == ("sm89", "sm120")
    assert targets.default_targets("tensorrt-rtx", "sm86", known) == ("sm89", "sm120")
    with pytest.raises(
        BackendError,
        match=(
            "TensorRT builds on the GPU that will run the engine, and there is none here; --runtime tensorrt-rtx "
            "builds ahead of time"
        ),
    ):
        targets.default_targets("tensorrt", None, ())


@pytest.mark.parametrize(
    ("asked", "title", "extra"),
    [
        ("tensorrt", "TensorRT", "tensorrt"),
        ("tensorrt-rtx", "TensorRT-RTX", "tensorrt-rtx"),
        ("auto", "TensorRT-RTX", "tensorrt-rtx"),
    ],
)
def test_a_missing_runtime_names_its_extra(asked: Any, title: str, extra: str) -> None:
    with pytest.raises(BackendError) as missing:
        targets.choose_runtime(asked, (), (), None)
    assert (
        str(missing.value)
        == f"{title} is not installed and this command needs it; install it with `pip install 'fp8q[{extra}]'`"
    )


def test_tensorrt_is_told_to_build_for_another_gpu() -> None:
    with pytest.raises(InputError) as refused:
        targets.check_target("sm89", "tensorrt", ("sm90",))
    assert (
        str(refused.value)
        == "--target sm89: TensorRT does not know it; it builds for the GPU in this machine; choose from sm90"
    )


def test_capabilities_are_read_off_names() -> None:
    assert [targets.capability(name) for name in ("sm89", "sm120", "sm90a", "89")] == [(8, 9), (12, 0), None, None]
    assert [targets.can_do_fp8(name) for name in ("sm80", "sm87", "sm89", "sm90", "sm120")] == [
        False,
        False,
        True,
        True,
        True,
    ]


# Profiles.


def test_every_inputs_shapes_follow_from_the_names_of_its_dimensions() -> None:
    prefill, decode = profiles(max_batch=8, max_seq_len=2048)
    assert prefill == Profile(name="prefill", batch=(1, 1, 8), seq=(1, 512, 2048), capacity=(0, 0, 2048))
    assert decode == Profile(name="decode", batch=(1, 8, 8), seq=(1, 1, 1), capacity=(0, 2048, 2048))
    assert prefill.shapes("attention_mask", ("batch", "capacity + seq")) == ((1, 1), (1, 512), (8, 4096))
    assert decode.shapes("attention_mask", ("batch", "seq + capacity")) == ((1, 1), (8, 2049), (8, 2049))
    assert decode.shapes("past", ("batch", 2, "capacity", 64)) == ((1, 2, 0, 64), (8, 2, 2048, 64), (8, 2, 2048, 64))
    assert decode.shapes("mask", ("batch", "capacity + 1")) == ((1, 1), (8, 2049), (8, 2049))


def test_profiles_of_the_smallest_engine() -> None:
    prefill, decode = profiles(max_batch=1, max_seq_len=1)
    assert (prefill.batch, prefill.seq, prefill.capacity) == ((1, 1, 1), (1, 1, 1), (0, 0, 1))
    assert (decode.batch, decode.seq, decode.capacity) == ((1, 1, 1), (1, 1, 1), (0, 1, 1))


def test_profiles_follow_the_prompt_and_the_likely_sizes() -> None:
    prefill, decode = profiles(8, 2048, max_prompt=1024, opt_batch=4, opt_seq_len=512)
    assert (prefill.batch, prefill.seq, prefill.capacity) == ((1, 4, 8), (1, 512, 1024), (0, 0, 2048))
    assert (decode.batch, decode.seq, decode.capacity) == ((1, 4, 8), (1, 1, 1), (0, 512, 2048))
    prefill, decode = profiles(8, 2048, max_prompt=256)
    # a quarter of the length would be more than a step takes
    assert (prefill.batch, prefill.seq) == (
        (1, 1, 8),
        (1, 256, 256),
    )
    assert (decode.batch, decode.capacity) == ((1, 8, 8), (0, 2048, 2048))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"max_prompt": 300, "max_seq_len": 256},
            "--max-prompt 300: is more than --max-seq-len 256; ask for at most that, or raise --max-seq-len",
        ),
        (
            {"opt_seq_len": 4096, "max_seq_len": 2048},
            "--opt-seq-len 4,096: is more than --max-seq-len 2,048; ask for at most that, or raise --max-seq-len",
        ),
        ({"opt_batch": 9}, "--opt-batch 9: is more than --max-batch 8; ask for at most that, or raise --max-batch"),
        ({"max_prompt": 0}, "--max-prompt 0: must be at least 1"),
        ({"workspace": 0}, "--workspace 0: must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError) as refused:
        EngineOptions(**sizes)  # type: ignore[arg-type]
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("dimension", "what"),
    [
        ("time", "time is none of batch, seq, capacity"),
        ("", "it has no name"),
        ("batch*seq", "batch*seq is none of batch, seq, capacity"),
    ],
)
def test_a_dimension_of_another_name_is_refused(dimension: str, what: str) -> None:
    with pytest.raises(InputError) as refused:
        profiles(1, 16)[0].shapes("features", ("batch", dimension))
    assert (
        str(refused.value)
        == f"features: its dimension {dimension!r} has no range ({what}); export the graph with `fp8q export`"
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"max_batch": 99_999_999_999},
            "--max-batch 99,999,999,999: is more than 2,147,483,647, the most that a runtime takes",
        ),
        (
            {"workspace": 99_999_999_999_999},
            "--workspace 99,999,999,999,999: is more than 8,796,093,022,207, the most that a runtime takes",
        ),
    ],
)
def test_sizes_that_no_runtime_takes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError) as refused:
        EngineOptions(**sizes)  # type: ignore[arg-type]
    assert str(refused.value) == message


# Building.


@pytest.fixture
def run(tmp_path: Path, decoder: Decoders) -> tuple[Run, Any]:
    """A run directory that holds a good graph."""
    return Run(tmp_path), decoder()


@RTX
def test_engines_are_written_with_what_is_known_of_them(run: tuple[Run, Any]) -> None:
    where, written = run
    heard = Heard()
    files = build_engines(where, written.modules, EngineOptions("tensorrt-rtx", ("sm89", "sm120"), 4, 128), heard)
    assert [file.relative_to(where.root).as_posix() for file in files] == [
        f"engines/{target}.{kind}" for target in ("sm89", "sm120") for kind in ("plan", "json", "sh")
    ]
    for target in ("sm89", "sm120"):
        raw = json.loads((where.engines / f"{target}.json").read_text())
        assert list(raw) == [
            "runtime",
            "version",
            "target",
            "bytes",
            "promised_products",
            "fp8_products",
            "wide_products",
            "narrow_products",
            "evidence",
            "profiles",
            "build_seconds",
        ]
        info = read_document(where.engines / f"{target}.json", EngineInfo)
        assert (info.runtime, info.target, info.bytes) == (
            "tensorrt-rtx",
            target,
            (where.engines / f"{target}.plan").stat().st_size,
        )
        assert (info.promised_products, info.fp8_products, info.wide_products, info.evidence) == (7, 7, [], "plan")
        assert info.profiles == list(profiles(4, 128))
        assert 0 < info.build_seconds < 60
    assert heard.tracks == [("Building the sm89 engine", 100, "%"), ("Building the sm120 engine", 100, "%")]
    assert heard.done == 100
    assert heard.notes == []
    assert sorted(path.name for path in where.engines.iterdir()) == sorted(file.name for file in files)


@RTX
def test_engines_of_an_earlier_build_do_not_outlive_it(run: tuple[Run, Any]) -> None:
    where, written = run
    where.engines.mkdir()
    (where.engines / "sm120.plan").write_bytes(b"of another checkpoint")
    (where.engines / "sm120.json").write_text("{}")
    (where.engines / "sm120.sh").write_text("")
    build_engines(where, written.modules, EngineOptions("tensorrt-rtx", ("sm89",), 1, 16), SILENT)
    assert sorted(path.name for path in where.engines.iterdir()) == ["sm89.json", "sm89.plan", "sm89.sh"]


@RTX
def test_engines_of_an_earlier_build_stay_as_they_were_when_a_second_target_fails(
    run: tuple[Run, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, written = run
    where.record_file.write_text("{}")
    with where.stage("build-engine", {}, {}) as log:
        log.outputs += build_engines(
            where, written.modules, EngineOptions("tensorrt-rtx", ("sm89", "sm120"), 1, 16), SILENT
        )
    before = {path.name: path.read_bytes() for path in where.engines.iterdir()}

    def fails_for_the_second(onnx_file: Path, job: Job, report: Any) -> memoryview:
        if job.target == "sm120":
            raise BackendError("the builder failed")
        return build(onnx_file, job, report)

    monkeypatch.setattr(engine, "build", fails_for_the_second)
    with pytest.raises(BackendError, match="the builder failed"), where.stage("build-engine", {}, {}) as log:
        log.outputs += build_engines(
            where, written.modules, EngineOptions("tensorrt-rtx", ("sm89", "sm120"), 1, 32), SILENT
        )
    assert {path.name: path.read_bytes() for path in where.engines.iterdir()} == before
    assert [info.target for info in load_engines(where)] == ["sm89", "sm120"]  # the record still counts them
    assert not [path.name for path in where.root.iterdir() if "engines" in path.name and path != where.engines]


@RTX
def test_the_options_of_a_build_reach_its_profiles_and_its_script(run: tuple[Run, Any]) -> None:
    where, written = run
    options = EngineOptions(
        "tensorrt-rtx", ("sm89",), 4, 128, max_prompt=64, opt_batch=2, opt_seq_len=32, workspace=512
    )
    build_engines(where, written.modules, options, SILENT)
    info = read_document(where.engines / "sm89.json", EngineInfo)
    assert info.profiles == list(profiles(4, 128, 64, 2, 32))
    assert info.fp8_products == 7
    assert "--memPoolSize=workspace:512M" in (where.engines / "sm89.sh").read_text()


@RTX
def test_a_graph_of_an_opset_that_the_parser_only_pretends_to_know_is_not_built(
    run: tuple[Run, Any], edited: Edit
) -> None:
    where, written = run

    def newer(model: ModelProto) -> None:
        model.opset_import[0].version = 40

    edited(written.path, newer)
    with pytest.raises(InputError) as refused:
        build_engines(where, written.modules, EngineOptions("tensorrt-rtx", ("sm89",)), SILENT)
    message = (
        "F301 opset: opset 40 is newer than 24, the last that TensorRT-RTX was seen to build in FP8; export with "
        "opset 23"
    )
    assert str(refused.value).startswith(f"{written.path}: {message}")
    assert not where.engines.exists()


@RTX
def test_a_recorded_stage_gives_its_engines_back(run: tuple[Run, Any]) -> None:
    where, written = run
    where.record_file.write_text("{}")  # a run, so that a stage may begin beside files it did not write
    with pytest.raises(InputError) as none:
        load_engines(where)
    assert str(none.value) == f"{where.engines}: holds no engine; run `fp8q build-engine {where.root}` first"
    with where.stage("build-engine", {}, {}) as log:
        log.outputs += build_engines(
            where, written.modules, EngineOptions("tensorrt-rtx", ("sm120", "sm89"), 1, 16), SILENT
        )
    assert [info.target for info in load_engines(where)] == ["sm89", "sm120"]


@RTX
def test_a_product_that_runs_wide_is_noted_and_fails_the_gate_and_the_engine_stays(
    tmp_path: Path, decoder: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = decoder(wide_inputs=(DOWN,))
    monkeypatch.setattr(engine, "check_graph", lambda *_: None)  # the lint would have stopped it
    heard = Heard()
    build_engines(Run(tmp_path), written.modules, EngineOptions("tensorrt-rtx", ("sm89",), 1, 16), heard)
    assert heard.notes == [f"sm89: {DOWN} is not FP8 on both sides: bf16 × bf16 -> bf16 in profile 0"]
    info = read_document(tmp_path / "engines" / "sm89.json", EngineInfo)
    assert (info.fp8_products, info.wide_products, info.evidence) == (6, [DOWN], "plan")
    assert (tmp_path / "engines" / "sm89.plan").stat().st_size == info.bytes
    with pytest.raises(GateError) as short:
        check_share([info], 1.0)
    assert str(short.value) == (
        f"sm89: 6 of 7 promised products take FP8 on both sides, less than --min-fp8-share 1; wide: {DOWN}; "
        "the engine is kept, `fp8q export` again or accept it with a smaller share"
    )
    check_share([info], 0.85)


@RTX
def test_scales_narrower_than_fp32_are_noted_and_do_not_count(
    tmp_path: Path, decoder: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = decoder(scale_type=TensorProto.BFLOAT16)
    monkeypatch.setattr(engine, "check_graph", lambda *_: None)
    heard = Heard()
    build_engines(Run(tmp_path), written.modules, EngineOptions("tensorrt-rtx", ("sm89",), 1, 16), heard)
    assert heard.notes == [
        (
            f"sm89: 7 FP8 products (as {DOWN}) answer in less than FP32: their weights' scales are per tensor, or "
            "narrower than FP32"
        )
    ]
    info = read_document(tmp_path / "engines" / "sm89.json", EngineInfo)
    assert (info.fp8_products, info.wide_products, sorted(info.narrow_products)) == (7, [], sorted(written.modules))
    with pytest.raises(GateError) as short:
        check_share([info], 1.0)
    assert str(short.value) == (
        "sm89: 7 of 7 promised products take FP8 on both sides and 7 of them answer in less than FP32, less than "
        f"--min-fp8-share 1; narrow: {', '.join(written.modules)}; the engine is kept, `fp8q export` again or accept "
        "it with a smaller share"
    )
    check_share([info], 0)


def info(**changes: object) -> EngineInfo:
    known = {
        "runtime": "tensorrt-rtx",
        "version": "1.8",
        "target": "sm89",
        "bytes": 1,
        "promised_products": 12,
        "fp8_products": 12,
        "wide_products": [],
    }
    return EngineInfo.model_validate(known | {"evidence": "plan", "profiles": [], "build_seconds": 1.0} | changes)


def test_evidence_that_cannot_be_read_does_not_meet_a_share() -> None:
    unknown = info(evidence="unknown", fp8_products=0, wide_products=["a"])
    with pytest.raises(GateError) as refused:
        check_share([info(), unknown], 0.5)
    assert str(refused.value) == (
        "sm89: what the engine of TensorRT-RTX 1.8 runs cannot be told from it, which does not meet --min-fp8-share "
        "0.5; "
        "use the version that fp8q pins, or accept it with --min-fp8-share 0"
    )
    check_share([unknown], 0)


def test_what_an_earlier_version_wrote_of_an_engine_still_reads() -> None:
    assert info().narrow_products == []
    check_share([info()], 1.0)


def test_wide_and_narrow_products_are_both_named() -> None:
    with pytest.raises(GateError) as short:
        check_share([info(fp8_products=11, wide_products=["a"], narrow_products=["b", "c"])], 0.8)
    assert str(short.value) == (
        "sm89: 11 of 12 promised products take FP8 on both sides and 2 of them answer in less than FP32, less than "
        "--min-fp8-share 0.8; wide: a; narrow: b, c; the engine is kept, `fp8q export` again or accept it with a "
        "smaller share"
    )
    check_share([info(fp8_products=11, wide_products=["a"], narrow_products=["b", "c"])], 0.75)


def test_a_gate_names_the_first_wide_products_and_counts_the_rest() -> None:
    wide = [f"layers.{index}" for index in range(10)]
    with pytest.raises(
        GateError,
        match=r"sm89: 2 of 12 promised products .* wide: layers\.0, .*, layers\.7 and 2 more; the engine is kept",
    ):
        check_share([info(fp8_products=2, wide_products=wide)], 1.0)


def test_a_graph_that_breaks_a_rule_is_not_built(tmp_path: Path, decoder: Decoders) -> None:
    written = decoder(wide_inputs=(DOWN,))
    with pytest.raises(InputError) as refused:
        build_engines(Run(tmp_path), written.modules, EngineOptions("tensorrt-rtx", ("sm89",)), SILENT)
    assert str(refused.value) == (
        f"{written.path}: F203 promised-product: {DOWN}.matmul: is promised on FP8: its weight is FP8 but its input "
        "is not, "
        "so it multiplies in the compute type; run `fp8q export` again"
    )
    assert not (tmp_path / "engines").exists()


def test_external_data_cut_short_are_found_before_the_build(run: tuple[Run, Any]) -> None:
    where, written = run
    weights = where.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    size = weights.stat().st_size
    with pytest.raises(InputError) as refused:
        build_engines(where, written.modules, EngineOptions("tensorrt-rtx", ("sm89",)), SILENT)
    assert str(refused.value) == (
        f"{written.path}: F403 external-bounds: model.norm.weight: its data end at byte {size + 100} of "
        f"model.safetensors, which has {size}; copy the graph's whole directory again"
    )


def test_nothing_promised_is_nothing_to_build(run: tuple[Run, Any]) -> None:
    with pytest.raises(InputError) as refused:
        build_engines(run[0], [], EngineOptions("tensorrt-rtx", ("sm89",)), SILENT)
    assert str(refused.value) == (
        f"{run[1].path}: scales.json promises no product on FP8, so there is nothing to build; calibrate with "
        "fewer --skip"
    )


@RTX
def test_ctrl_c_stops_the_builder_and_leaves_nothing(run: tuple[Run, Any]) -> None:
    where, written = run

    class Interrupting(Heard):
        @contextmanager
        def track(self, description: str, total: int, unit: str = "steps") -> Iterator[Callable[[int], None]]:
            yield lambda done: self.note("now")

        def note(self, line: str) -> None:
            """Press Ctrl-C once: a second time would find the test over and the test runner listening."""
            self.notes.append(line)
            if len(self.notes) == 1:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            build_engines(where, written.modules, EngineOptions("tensorrt-rtx", ("sm89",), 1, 16), Interrupting())
    finally:
        signal.signal(signal.SIGINT, before)
    assert not where.engines.exists()


# Timings, which TensorRT takes and TensorRT-RTX does not: its configuration has the same functions, and they do
# nothing.


@RTX
@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX 1.2:DeprecationWarning")
def test_timings_are_kept_and_loaded_and_what_does_not_read_begins_anew(tmp_path: Path) -> None:
    trt, file = engine.load("tensorrt-rtx"), tmp_path / "sm90.timings"
    logger, _ = engine.collecting_logger(trt)
    builder = trt.Builder(logger)
    for known in (None, b"of another version", "of the first round"):
        config = builder.create_builder_config()
        if isinstance(known, bytes):
            file.write_bytes(known)
        engine.load_timings(config, file)
        engine.save_timings(config, file)
        assert len(file.read_bytes()) > 100


@RTX
def test_a_workspace_limit_reaches_the_builder() -> None:
    trt = engine.load("tensorrt-rtx")
    logger, _ = engine.collecting_logger(trt)
    config = engine.configure(trt, trt.Builder(logger), Job("tensorrt-rtx", "sm89", profiles(1, 16), workspace=512))
    assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 512 * 1024 * 1024


# The builder's errors.


def job(target: str = "sm89") -> Job:
    return Job("tensorrt-rtx", target, profiles(2, 16))


def failure(path: Path, target: str = "sm89") -> str:
    with pytest.raises(BackendError) as failed:
        build(path, job(target), SILENT)
    head, _, rest = str(failed.value).partition(f" cannot build {path} for {target}: ")
    assert head.startswith("TensorRT-RTX 1.")
    assert "\n" not in rest
    return rest


@RTX
def test_an_operator_that_the_runtime_lacks_names_module_and_node(decoder: Decoders, edited: Edit) -> None:
    written = decoder()

    def rename(model: ModelProto) -> None:
        next(node for node in model.graph.node if node.name == f"{DOWN}.matmul").op_type = "BlockMatMul"

    edited(written.path, rename)
    assert failure(written.path) == (
        f"{DOWN} (node {DOWN}.matmul, BlockMatMul): the runtime does not know this operator; export with standard "
        "operators (`fp8q export`), or install a newer runtime"
    )


@RTX
def test_an_unnamed_node_that_the_parser_refuses_is_placed_by_the_module_nearest_to_it(
    decoder: Decoders, edited: Edit
) -> None:
    written, names = decoder(), []

    def refuse(model: ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "Sigmoid")
        node.op_type = "Unique"
        names.append(node.name)

    edited(written.path, refuse)
    assert failure(written.path) == (
        f"near model.layers.0.mlp.gate_proj (node {names[0]}, Unique): the runtime's parser refuses this operator and "
        "gives no reason; "
        "export with standard operators (`fp8q export`), or install a newer runtime"
    )


@RTX
def test_a_product_of_two_types_names_module_and_reason(decoder: Decoders, edited: Edit) -> None:
    written = decoder()

    def widen(model: ModelProto) -> None:
        node = next(node for node in model.graph.node if node.name == f"{DOWN}.weight.dequantize")
        next(entry for entry in node.attribute if entry.name == "output_dtype").i = TensorProto.FLOAT

    edited(written.path, widen)
    assert failure(written.path) == (
        f"{DOWN} (node {DOWN}.matmul, MatMul): {DOWN}.matmul: IMatrixMultiplyLayer must have same input types. `A` is "
        "of type BFloat16 and `B` is of type Float; "
        "run `fp8q export` again, and if it stays, report this line"
    )


@RTX
@pytest.mark.parametrize(
    "options", [{"head_size": 8}, {"compute": TensorProto.FLOAT}, {"heads": 2, "key_value_heads": 1}]
)
def test_attention_without_a_kernel_says_what_it_takes(
    decoder: Decoders, options: dict[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert failure(decoder(**options).path) == (
        "model.layers.0.self_attn (node model.layers.0.self_attn.attention): there is no fused attention kernel for "
        "its type, head size or number of heads; "
        "it takes BF16 or FP16, a head size that is a multiple of 8 from 16 to 256, and at least 4 heads to decode "
        "with; other models need plain products and a softmax"
    )
    assert capfd.readouterr().out == ""  # standard output is for results


@RTX
def test_a_gpu_without_fp8_is_explained_where_it_gets_as_far_as_the_builder(decoder: Decoders) -> None:
    assert failure(decoder().path, "sm86") == "the target has no fp8_e4m3; choose sm89 or newer with --target"


@RTX
def test_missing_and_short_external_data_are_explained(decoder: Decoders) -> None:
    written = decoder()
    weights = written.path.with_name("model.safetensors")
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    assert failure(written.path) == f"its external data {weights} is cut short; copy the whole of model/ again"
    weights.unlink()
    assert failure(written.path) == f"its external data {weights} is missing; copy the whole of model/ again"


@RTX
def test_a_file_that_is_no_graph_is_explained(tmp_path: Path, decoder: Decoders) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(decoder().path.read_bytes()[:2000])
    assert (
        failure(broken)
        == "the file is no ONNX model, or is cut short; run `fp8q export` again, and if it stays, report this line"
    )


@RTX
def test_a_graph_with_other_dynamic_dimensions_is_refused(decoder: Decoders, edited: Edit) -> None:
    written = decoder()

    def rename(model: ModelProto) -> None:
        for value in model.graph.input:
            if value.name == "input_ids":
                value.type.tensor_type.shape.dim[1].dim_param = "time"

    edited(written.path, rename)
    with pytest.raises(
        InputError, match=r"input_ids: its dimension 'time' has no range \(time is none of batch, seq, capacity\)"
    ):
        build(written.path, job(), SILENT)


def test_an_unknown_failure_is_passed_on_in_its_own_words_without_its_wrapping() -> None:
    driver = (
        "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (… (cudaError 35: CUDA driver version is "
        "insufficient for CUDA runtime version))"
    )
    message = (
        "IBuilder::build: Error Code 4: API Usage Error (model.layers.1.mlp.up_proj.matmul: dimensions\nmust match. "
        "In validate at /_src/optimizer/matrixMultiplyLayer.cpp:192)"
    )
    layers = ["model.layers.1.mlp.up_proj.matmul", "model.layers.1", "x"]
    assert explain([driver, message], layers=layers) == (
        "model.layers.1.mlp.up_proj (node model.layers.1.mlp.up_proj.matmul): model.layers.1.mlp.up_proj.matmul: "
        "dimensions must match; "
        "run `fp8q export` again, and if it stays, report this line"
    )
    assert explain([driver]) == "it gave no reason; run `fp8q export` again, and if it stays, report this line"
    assert (
        explain(["Error Code 2: OutOfMemory (requested 68 GB)"])
        == "there is not enough memory; lower --max-batch or --max-seq-len"
    )


def test_a_workspace_that_is_too_small_is_told_to_be_raised() -> None:
    message = (
        "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([tactic.cpp:1676: enumerate_tactics] Tactic "
        "Selection: no tactics to implement the operation within workspace "
        "limit. Consider increase the allowed workspace size if applicable.; [tactic.cpp:264: run] Error during "
        "tactic selection. In compileGraph at /_src/codeGenerator.cpp:2012)"
    )
    assert explain([message]) == (
        "a kernel takes more memory for intermediate results than --workspace allows; raise --workspace, or leave "
        "it out"
    )


# Progress.


def test_progress_is_the_share_of_nested_phases() -> None:
    parts: list[int] = []
    progress = Progress(parts.append)
    progress.start("building", None, 4)
    progress.start("cloning", "building", 2)
    assert progress.step("cloning", 0)  # half of the first quarter
    assert sum(parts) == 12
    progress.step("cloning", 1)
    progress.finish("cloning")
    progress.step("building", 0)
    assert sum(parts) == 25
    progress.start("timing", "building", 5)
    progress.step("timing", 4)
    assert sum(parts) == 50
    progress.step("building", 0)  # earlier than what was reached: nothing is taken back
    progress.step("unheard of", 3)
    progress.reach(1.0)
    assert sum(parts) == 100
    assert min(parts) > 0


def test_a_cancelled_build_is_told_to_stop_at_its_next_step() -> None:
    progress = Progress(lambda done: None)
    progress.start("building", None, 2)
    assert progress.step("building", 0)
    progress.cancel()
    assert not progress.step("building", 1)
