"""The run directory: what counts as done, what is refused, and what a stage that dies leaves behind."""

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from fp8q.errors import InputError
from fp8q.files import replacing, sha256_file
from fp8q.run import Run


def write(
    run: Run, text: str = "scales", options: dict[str, str] | None = None, inputs: dict[str, str] | None = None
) -> None:
    with run.stage("quantize", inputs or {"a": "1"}, options or {"method": "amax"}) as log:
        run.scales.write_text(text)
        log.outputs.append(run.scales)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "run")
    write(made)
    return made


def test_a_finished_stage_is_current_until_inputs_or_options_change(run: Run) -> None:
    assert run.is_current("quantize", {"a": "1"}, {"method": "amax"})
    assert not run.is_current("quantize", {"a": "2"}, {"method": "amax"})
    assert not run.is_current("quantize", {"a": "1"}, {"method": "mse"})
    assert not run.is_current("measure", {"a": "1"}, {"method": "amax"})


def test_a_stage_of_another_version_is_not_current(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8q.run.__version__", "9.9.9")
    assert not run.is_current("quantize", {"a": "1"}, {"method": "amax"})


def test_a_stage_whose_output_is_gone_is_not_current(run: Run) -> None:
    run.scales.unlink()
    assert not run.is_current("quantize", {"a": "1"}, {"method": "amax"})


def test_the_record_holds_time_memory_versions_and_hashes(run: Run) -> None:
    record = run.record().stages["quantize"]
    assert record.outputs == {"scales.json": sha256_file(run.scales)}
    assert 0 <= record.seconds < 60
    assert record.peak_memory_bytes > 1 << 20
    assert record.libraries["numpy"]


def test_an_output_that_was_changed_is_refused_by_name(run: Run) -> None:
    run.scales.write_text("other")
    message = (
        rf"^{run.scales}: is not the file that `fp8q calibrate` wrote \(its SHA-256 differs from run.json\); restore "
        r"it, or delete it and run `fp8q calibrate` again$"
    )
    with pytest.raises(InputError, match=message):
        run.require(run.scales, "quantize")
    with pytest.raises(InputError, match=message):
        run.is_current("quantize", {"a": "1"}, {"method": "amax"})


def test_a_file_of_a_stage_that_has_not_run_names_the_command(run: Run) -> None:
    with pytest.raises(
        InputError, match=rf"^{run.accuracy}: is missing; `fp8q validate {run.root}` writes it, run that first$"
    ):
        run.require(run.accuracy, "validate")


def test_a_damaged_run_json_is_refused_with_the_field(run: Run) -> None:
    run.record_file.write_text('{"schema": 2}')
    with pytest.raises(
        InputError,
        match=(
            rf"^{run.record_file}: does not read as fp8q's run.json: "
            "schema: Input should be less than or equal to 1; "
        ),
    ):
        run.record()


def test_a_directory_of_other_things_is_no_run_and_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_text("beach")
    message = rf"^{tmp_path}: is not empty and holds no run.json, so it is no fp8q run; name a new or empty directory$"
    with pytest.raises(InputError, match=message), Run(tmp_path).stage("quantize", {}, {}):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_a_stage_that_dies_leaves_the_last_good_state_and_no_partial_file(run: Run) -> None:
    with pytest.raises(RuntimeError, match="^power cut$"), run.stage("quantize", {"a": "2"}, {}):
        (run.root / ".scales.json.partial").write_text("half")
        raise RuntimeError("power cut")
    assert not run.is_current("quantize", {"a": "2"}, {})
    assert run.is_current("quantize", {"a": "1"}, {"method": "amax"})
    assert not (run.root / ".scales.json.partial").exists()


def test_a_new_directory_of_a_stage_that_failed_is_removed(tmp_path: Path) -> None:
    fresh = Run(tmp_path / "new")
    with pytest.raises(InputError, match="^bad$"), fresh.stage("measure", {}, {}):
        raise InputError("bad")
    assert not fresh.root.exists()


def test_what_a_killed_process_left_is_cleared_by_the_next_stage(run: Run) -> None:
    left = run.root / ".model.partial"
    left.mkdir()
    (left / "shard-0").write_text("half")
    write(run, options={"method": "mse"})
    assert not left.exists()


def test_two_processes_do_not_work_in_one_run(run: Run) -> None:
    message = rf"^{run.root}: another fp8q process is working here; wait for it, or name another directory$"
    with run.stage("measure", {}, {}):
        half = run.root / ".statistics.safetensors.partial"
        half.write_text("half")
        with pytest.raises(InputError, match=message), Run(run.root).stage("quantize", {}, {}):
            pass
        assert half.exists()  # it is the other process's


def test_a_full_disk_is_told_as_such(run: Run) -> None:
    with (
        pytest.raises(
            InputError, match=rf"^{run.root}: no space left on the disk; free some or name another directory$"
        ),
        run.stage("measure", {}, {}),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_in_the_middle_of_safetensors_is_told_as_such(run: Run) -> None:
    with (
        pytest.raises(InputError, match=r": no space left on the disk; free some or name another directory$"),
        run.stage("measure", {}, {}),
    ):
        # what save_file raises on a full tmpfs
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("stage", "command"),
    [
        ("measure", "fp8q calibrate"),
        ("export", "fp8q export {run}"),
        ("queries", "fp8q export {run} --attention fp8"),
        ("build-engine-int8", "fp8q build-engine {run} --precision int8"),
    ],
)
def test_a_command_is_named_with_the_run_it_works_on(run: Run, stage: str, command: str) -> None:
    with pytest.raises(InputError) as error:
        run.require(run.accuracy, stage)
    assert str(error.value) == f"{run.accuracy}: is missing; `{command.format(run=run.root)}` writes it, run that first"


def test_a_stage_whose_input_was_made_anew_is_stale(run: Run) -> None:
    with run.stage("export", {"scales.json": sha256_file(run.scales)}, {}):
        pass
    assert not run.is_stale("export")
    write(run, text="other scales", options={"method": "mse"})
    assert run.is_stale("export")


def test_replacing_keeps_the_old_file_when_the_block_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="^no$"), replacing(path) as partial:
        partial.write_text("new")
        raise RuntimeError("no")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_replacing_swaps_a_whole_directory(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "stale").write_text("old")
    with replacing(path) as partial:
        partial.mkdir()
        (partial / "fresh").write_text("new")
    assert [file.name for file in path.iterdir()] == ["fresh"]
