"""The models that may be measured together, and their sizes."""

from pathlib import Path
from typing import Any

import pytest

from fp8q.core.errors import BackendError, InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.options import BenchOptions
from fp8q.quantize.scales.serving_cost import Cost
from fp8q.serve.bench.meter import HostMeter, MemoryTaken
from fp8q.serve.bench.timing import Answers, BatchTiming, Contender
from fp8q.stages import bench as bench_stage
from fp8q.stages.pipeline import stage as steps
from fp8q.stages.pipeline.stage import Notes
from fp8q.validate.bench.document import Footprint


def made(root: Path, name: str, fingerprint: str, *stages: str) -> Run:
    """A run of a model, of which no more is there than its record."""
    run = Run(root)
    for each in ("quantize", *stages):
        with RunWriter(run).stage(each, {}, {}, {"name": name, "fingerprint": fingerprint}):
            pass
    return run


def test_all_precisions_of_the_run_are_measured_and_fp8_of_others(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "a/model", "0", "export-bf16", "export-int8")
    other = made(tmp_path / "other", "a/model", "0", "export-bf16")
    named = bench_stage.named_models(run, [other.root], "onnxruntime")
    assert [(name, its.root.name, precision) for name, its, precision in named] == [
        ("bf16", "run", "bf16"),
        ("int8", "run", "int8"),
        ("fp8", "run", "fp8"),
        (f"fp8 {other.root}", "other", "fp8"),
    ]
    assert [name for name, _, _ in bench_stage.named_models(run, [], "reference")] == ["fp8"]
    assert bench_stage.named_models(run, [], "bf16") == [("bf16", run, "bf16")]


def test_runs_of_other_models_are_named(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "a/model", "0123456789abcdef")
    same = made(tmp_path / "same", "a/model", "0123456789abcdef")
    others = [made(tmp_path / name, f"a/{name}", f"{name}-of-the-weights") for name in ("b", "c")]
    with pytest.raises(InputError) as raised:
        bench_stage.named_models(run, [each.root for each in (others[0], same, others[1])], "onnxruntime")
    assert str(raised.value) == (
        f"--against {tmp_path}/b (a/b, fingerprint b-of-the-wei), {tmp_path}/c (a/c, fingerprint c-of-the-wei): of "
        f"another model than {tmp_path}/run (a/model, fingerprint 0123456789ab); compare runs of one model"
    )


@pytest.mark.parametrize("again", ["run", "other"])
def test_a_run_is_measured_once(tmp_path: Path, again: str) -> None:
    run, other = (made(tmp_path / name, "a/model", "0") for name in ("run", "other"))
    with pytest.raises(InputError) as raised:
        bench_stage.named_models(run, [other.root, tmp_path / "run" / ".." / again], "onnxruntime")
    assert str(raised.value) == f"--against {tmp_path}/run/../{again}: is measured already; name each run once"


def test_the_source_model_is_the_same_in_all_runs(tmp_path: Path) -> None:
    run, other = (made(tmp_path / name, "a/model", "0") for name in ("run", "other"))
    with pytest.raises(InputError) as raised:
        bench_stage.named_models(run, [other.root], "bf16")
    assert str(raised.value) == (
        f"--against {tmp_path}/other: --runtime bf16 runs the source model, which is the same in both; leave one of "
        "them out"
    )


class Bounded:
    """Of a session, its bounds."""

    def __init__(self, rows: int | None, positions: int | None):
        self.most_rows, self.most_positions = rows, positions


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose model has 100 positions."""
    run = made(tmp_path / "run", "a/model", "0")
    run.model.mkdir()
    (run.model / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 100}')
    return run


def sizes(run: Run, notes: Notes, bounds: Bounded, **options: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    contender: Any = Contender("fp8", bounds, MemoryTaken(HostMeter()))  # type: ignore[arg-type]
    return bench_stage.sizes(run, [contender], BenchOptions(**options), notes)


def test_what_nobody_named_is_lowered_to_what_the_models_take(run: Run) -> None:
    notes = Notes(SILENT)
    assert sizes(run, notes, Bounded(4, None)) == ((1, 4), (32, 36))
    assert notes.lines == [
        "--batch-sizes: lowered from 1,8 to 1,4",
        "--prompt-lengths: lowered from 32,256 to 32,36",
    ]
    assert sizes(run, notes, Bounded(None, 70)) == ((1, 8), (6,))
    assert sizes(run, notes, Bounded(None, None), batch_sizes="3,1,3", prompt_lengths=(36,)) == ((1, 3), (36,))


@pytest.mark.parametrize(
    ("bounds", "options", "message"),
    [
        (
            Bounded(None, None),
            {"prompt_lengths": (8, 37)},
            "--prompt-lengths 37: is, with --tokens 64, more than 100, the model's positions; ask for less of either",
        ),
        (
            Bounded(None, 64),
            {},
            "--tokens 64: leaves no room for a prompt in 64, the model's positions; ask for less",
        ),
        (
            Bounded(1, None),
            {"batch_sizes": "1,2"},
            "--batch-sizes 2: is more than 1, the most that the runtime takes at once",
        ),
    ],
)
def test_sizes_beyond_the_model_or_the_runtime(
    run: Run, bounds: Bounded, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as raised:
        sizes(run, Notes(SILENT), bounds, **options)
    assert str(raised.value) == message


def test_a_runtime_whose_library_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "find_spec", lambda name: None)
    assert not bench_stage.on_gpu("onnxruntime")
    for runtime in ("reference", "bf16"):
        with pytest.raises(BackendError) as raised:
            bench_stage.on_gpu(runtime)
        assert str(raised.value) == (
            "torch is not installed and this command needs it; install it with `pip install 'fp8q[calibrate]'`"
        )


def test_a_batch_that_no_memory_here_holds() -> None:
    meter = HostMeter()
    taken = [("fp8", Footprint(meter.total_bytes - 10_000, Cost(0, 10, 0), 10))]
    bench_stage.check_fits(10, 100, taken, meter)
    with pytest.raises(InputError) as raised:
        bench_stage.check_fits(11, 100, taken, meter)
    assert str(raised.value) == (
        "--batch-sizes 11: is more than the 10 sequences of 100 positions that the memory here holds beside the "
        "weights of fp8; ask for fewer"
    )


def test_improvement_energy_and_cost_are_of_the_answers() -> None:
    slow, fast = BatchTiming(0.04, (0.02, 0.02)), BatchTiming(0.02, (0.01, 0.01))  # 80 ms and 40 ms
    answers = [Answers(10, [slow] * 4, 2.4), Answers(5, [fast] * 4, 1.2)]
    bf16, fp8 = bench_stage.rows_of_size(["bf16", "fp8"], answers, (2, 7, 3), 3.6, emulated=False)
    assert bf16.improvement == 1
    assert fp8.improvement == pytest.approx(2)
    assert fp8.tokens_per_second == pytest.approx(150)  # 2 rows of 3 tokens in 40 ms
    assert fp8.joules_per_token == pytest.approx(1.2 / (4 * 2 * 3))
    assert fp8.cost_per_million_tokens == pytest.approx(1000 / 150)
    assert (fp8.variant, fp8.batch, fp8.prompt, fp8.memory_bytes) == ("fp8", 2, 7, 5)
    emulated = bench_stage.rows_of_size(["bf16", "fp8"], answers, (2, 7, 3), None, emulated=True)
    assert [(row.improvement, row.cost_per_million_tokens) for row in emulated] == [(None, None)] * 2


def test_one_model_alone_has_no_improvement() -> None:
    answers = [Answers(10, [BatchTiming(0.04, (0.02, 0.02))], None)]
    (row,) = bench_stage.rows_of_size(["fp8"], answers, (1, 7, 3), None, emulated=False)
    assert row.improvement is None
