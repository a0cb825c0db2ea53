"""Building engines: what is written, what is kept, what is refused."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto, TensorProto

from fp8q.core.errors import BackendError, GateError, InputError
from fp8q.core.files import disk_errors, read_document
from fp8q.core.reporter import SILENT, Standing
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.export.engine import build as engine
from fp8q.export.engine import runtime, targets
from fp8q.export.engine.build import BuildProgress, Job, build, build_engines
from fp8q.export.engine.info import EngineInfo, check_share, load_engines
from fp8q.export.engine.profiles import profiles
from fp8q.options import ONE, EngineOptions

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
    def track(
        self, description: str, total: int, unit: str = "steps", standing: Standing | None = None
    ) -> Iterator[Callable[[int], None]]:
        self.tracks.append((description, total, unit))
        self.done = 0

        def advance(done: int) -> None:
            assert done > 0
            self.done += done

        yield advance


@pytest.fixture
def run(tmp_path: Path, decoder: Decoders) -> tuple[Run, Any]:
    """A run directory that holds a good graph."""
    return Run(tmp_path), decoder()


@RTX
def test_engines_are_written_with_what_is_known_of_them(run: tuple[Run, Any]) -> None:
    where, written = run
    heard = Heard()
    files = build_engines(
        where, dict.fromkeys(written.modules, ONE), EngineOptions("tensorrt-rtx", ("sm89", "sm120"), 4, 128), heard
    )
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
            "unknown_products",
            "branches",
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
        assert info.branches is False
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
    build_engines(where, dict.fromkeys(written.modules, ONE), EngineOptions("tensorrt-rtx", ("sm89",), 1, 16), SILENT)
    assert sorted(path.name for path in where.engines.iterdir()) == ["sm89.json", "sm89.plan", "sm89.sh"]


@RTX
def test_engines_of_an_earlier_build_stay_as_they_were_when_a_second_target_fails(
    run: tuple[Run, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, written = run
    where.record_file.write_text("{}")
    with RunWriter(where).stage("build-engine", {}, {}) as log:
        log.outputs += build_engines(
            where, dict.fromkeys(written.modules, ONE), EngineOptions("tensorrt-rtx", ("sm89", "sm120"), 1, 16), SILENT
        )
    before = {path.name: path.read_bytes() for path in where.engines.iterdir()}

    def fails_for_the_second(onnx_file: Path, job: Job, report: Any) -> memoryview:
        if job.target == "sm120":
            raise BackendError("", "the builder failed")
        return build(onnx_file, job, report)

    monkeypatch.setattr(engine, "build", fails_for_the_second)
    with pytest.raises(BackendError, match="the builder failed"), RunWriter(where).stage("build-engine", {}, {}) as log:
        log.outputs += build_engines(
            where, dict.fromkeys(written.modules, ONE), EngineOptions("tensorrt-rtx", ("sm89", "sm120"), 1, 32), SILENT
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
    build_engines(where, dict.fromkeys(written.modules, ONE), options, SILENT)
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
        build_engines(where, dict.fromkeys(written.modules, ONE), EngineOptions("tensorrt-rtx", ("sm89",)), SILENT)
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
    with RunWriter(where).stage("build-engine", {}, {}) as log:
        log.outputs += build_engines(
            where, dict.fromkeys(written.modules, ONE), EngineOptions("tensorrt-rtx", ("sm120", "sm89"), 1, 16), SILENT
        )
    assert [info.target for info in load_engines(where)] == ["sm89", "sm120"]


@RTX
def test_a_product_that_runs_wide_is_noted_and_fails_the_gate_and_the_engine_stays(
    tmp_path: Path, decoder: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = decoder(wide_inputs=(DOWN,))
    monkeypatch.setattr(engine, "check_buildable", lambda *_: None)  # the lint would have stopped it
    heard = Heard()
    build_engines(
        Run(tmp_path), dict.fromkeys(written.modules, ONE), EngineOptions("tensorrt-rtx", ("sm89",), 1, 16), heard
    )
    assert heard.notes == [f"sm89: {DOWN} is not FP8 on both sides: bf16 × bf16 -> bf16 in profile 0"]
    info = read_document(tmp_path / "engines" / "sm89.json", EngineInfo)
    assert (info.fp8_products, info.wide_products, info.evidence) == (6, [DOWN], "plan")
    assert (tmp_path / "engines" / "sm89.plan").stat().st_size == info.bytes
    with pytest.raises(GateError) as short:
        check_share([info], 1.0)
    assert str(short.value) == (
        f"sm89: 6 of 7 expected GEMMs take FP8 on both sides, less than --min-fp8-share 1; wide: {DOWN}; "
        "the engine is kept, `fp8q export` again or accept it with a smaller share"
    )
    check_share([info], 0.85)


@RTX
def test_scales_narrower_than_fp32_are_noted_and_do_not_count(
    tmp_path: Path, decoder: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = decoder(scale_type=TensorProto.BFLOAT16)
    monkeypatch.setattr(engine, "check_buildable", lambda *_: None)
    heard = Heard()
    build_engines(
        Run(tmp_path), dict.fromkeys(written.modules, ONE), EngineOptions("tensorrt-rtx", ("sm89",), 1, 16), heard
    )
    assert heard.notes == [
        (
            f"sm89: 7 FP8 GEMMs (as {DOWN}) answer in less than FP32: their weights' scales are per tensor, or "
            "narrower than FP32"
        )
    ]
    info = read_document(tmp_path / "engines" / "sm89.json", EngineInfo)
    assert (info.fp8_products, info.wide_products, sorted(info.narrow_products)) == (7, [], sorted(written.modules))
    with pytest.raises(GateError) as short:
        check_share([info], 1.0)
    assert str(short.value) == (
        "sm89: 7 of 7 expected GEMMs take FP8 on both sides and 7 of them answer in less than FP32, less than "
        f"--min-fp8-share 1; narrow: {', '.join(written.modules)}; the engine is kept, `fp8q export` again or accept "
        "it with a smaller share"
    )
    check_share([info], 0)


def test_a_graph_that_breaks_a_rule_is_not_built(tmp_path: Path, decoder: Decoders) -> None:
    written = decoder(wide_inputs=(DOWN,))
    with pytest.raises(InputError) as refused:
        build_engines(
            Run(tmp_path), dict.fromkeys(written.modules, ONE), EngineOptions("tensorrt-rtx", ("sm89",)), SILENT
        )
    assert str(refused.value) == (
        f"{written.path}: F203 promised-product: {DOWN}.matmul: is expected on FP8: its weight is FP8 but its input "
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
        build_engines(where, dict.fromkeys(written.modules, ONE), EngineOptions("tensorrt-rtx", ("sm89",)), SILENT)
    assert str(refused.value) == (
        f"{written.path}: F403 external-bounds: model.norm.weight: its data end at byte {size + 100} of "
        f"model.safetensors, which has {size}; copy the graph's whole directory again"
    )


def test_nothing_promised_is_nothing_to_build(run: tuple[Run, Any]) -> None:
    with pytest.raises(InputError) as refused:
        build_engines(run[0], {}, EngineOptions("tensorrt-rtx", ("sm89",)), SILENT)
    assert str(refused.value) == (
        f"{run[1].path}: scales.json expects no GEMM on FP8, so there is nothing to build; calibrate with fewer --skip"
    )


@RTX
def test_ctrl_c_stops_the_builder_and_leaves_nothing(run: tuple[Run, Any]) -> None:
    where, written = run

    class Interrupting(Heard):
        @contextmanager
        def track(
            self, description: str, total: int, unit: str = "steps", standing: Standing | None = None
        ) -> Iterator[Callable[[int], None]]:
            yield lambda done: self.note("now")

        def note(self, line: str) -> None:
            """Press Ctrl-C once: a second time would find the test over and the test runner listening."""
            self.notes.append(line)
            if len(self.notes) == 1:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            build_engines(
                where,
                dict.fromkeys(written.modules, ONE),
                EngineOptions("tensorrt-rtx", ("sm89",), 1, 16),
                Interrupting(),
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert not where.engines.exists()


# Timings, which TensorRT takes and TensorRT-RTX does not: its configuration has the same functions, and they do
# nothing.


@RTX
@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX 1.2:DeprecationWarning")
def test_timings_are_kept_and_loaded_and_what_does_not_read_begins_anew(tmp_path: Path) -> None:
    trt, file = runtime.import_runtime("tensorrt-rtx"), tmp_path / "sm90.timings"
    logger, _ = runtime.collecting_logger(trt)
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
    trt = runtime.import_runtime("tensorrt-rtx")
    logger, _ = runtime.collecting_logger(trt)
    config = engine.configure(trt, trt.Builder(logger), Job("tensorrt-rtx", "sm89", profiles(1, 16), workspace=512))
    assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 512 * 1024 * 1024


@pytest.mark.parametrize("link", [False, True])
def test_a_file_where_the_engines_belong_is_named_before_anything_is_built(
    run: tuple[Run, Any], tmp_path: Path, link: bool
) -> None:
    place = tmp_path / "engines"
    if link:
        place.symlink_to(tmp_path / "nowhere")
    else:
        place.write_bytes(b"")
    heard = Heard()
    with pytest.raises(InputError) as refused, disk_errors(tmp_path):
        build_engines(
            run[0], dict.fromkeys(run[1].modules, ONE), EngineOptions(runtime="tensorrt-rtx", targets=("sm89",)), heard
        )
    assert str(refused.value) == f"{place}: stands where a directory belongs; remove it, or name another"
    assert heard.tracks == []


def test_progress_is_the_share_of_nested_phases() -> None:
    parts: list[int] = []
    progress = BuildProgress(parts.append)
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
    progress = BuildProgress(lambda done: None)
    progress.start("building", None, 2)
    assert progress.step("building", 0)
    progress.cancel()
    assert not progress.step("building", 1)
