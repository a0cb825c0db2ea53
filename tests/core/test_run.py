"""The run directory: what counts as done, what is refused, and what a stage that dies leaves behind."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from fp8q.core.errors import InputError
from fp8q.core.files import REFUSALS, keeping_locks, replacing, sha256_file
from fp8q.core.output_folder import OutputFolder, WorkFolder
from fp8q.core.record import library_versions
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.stages.pipeline.stage import alone


def write(
    run: Run, text: str = "scales", options: dict[str, str] | None = None, inputs: dict[str, str] | None = None
) -> None:
    with RunWriter(run).stage("quantize", inputs or {"a": "1"}, options or {"method": "amax"}) as log:
        run.scales.write_text(text)
        log.outputs.append(run.scales)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "run")
    write(made)
    return made


@pytest.mark.parametrize("leads", ["nowhere", "theirs"])
def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_left_alone(tmp_path: Path, leads: str) -> None:
    (tmp_path / "theirs").write_text("kept")
    run = Run(tmp_path / "run")
    run.root.mkdir()
    (run.root / ".lock").symlink_to(tmp_path / leads)
    with pytest.raises(InputError) as refused, OutputFolder(run.root).lock():
        pass
    assert str(refused.value) == f"{run.root}/.lock: is a link, and a lock is a file of its own; remove it"
    assert (tmp_path / "theirs").read_text() == "kept"
    assert not (tmp_path / "nowhere").exists()


def test_a_finished_stage_is_current_until_inputs_or_options_change(run: Run) -> None:
    assert run.is_current("quantize", {"a": "1"}, {"method": "amax"})
    assert not run.is_current("quantize", {"a": "2"}, {"method": "amax"})
    assert not run.is_current("quantize", {"a": "1"}, {"method": "mse"})
    assert not run.is_current("measure", {"a": "1"}, {"method": "amax"})


def test_a_stage_of_another_version_is_not_current(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8q.core.run.__version__", "9.9.9")
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
            "schema must be at most 1; "
        ),
    ):
        run.record()


def test_a_directory_of_other_things_is_no_run_and_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_text("beach")
    message = rf"^{tmp_path}: is not empty and holds no run.json, so it is no fp8q run; name a new or empty directory$"
    with pytest.raises(InputError, match=message), RunWriter(Run(tmp_path)).stage("quantize", {}, {}):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_a_stage_that_dies_leaves_the_last_good_state_and_no_partial_file(run: Run) -> None:
    with pytest.raises(RuntimeError, match="^power cut$"), RunWriter(run).stage("quantize", {"a": "2"}, {}):
        (run.root / ".scales.json.partial").write_text("half")
        raise RuntimeError("power cut")
    assert not run.is_current("quantize", {"a": "2"}, {})
    assert run.is_current("quantize", {"a": "1"}, {"method": "amax"})
    assert not (run.root / ".scales.json.partial").exists()


def test_a_new_directory_of_a_stage_that_failed_is_removed(tmp_path: Path) -> None:
    fresh = Run(tmp_path / "new")
    with pytest.raises(InputError, match="^bad$"), RunWriter(fresh).stage("measure", {}, {}):
        raise InputError("", "bad")
    assert not fresh.root.exists()


def test_what_a_killed_process_left_is_cleared_by_the_next_stage(run: Run) -> None:
    left = run.root / ".model.partial"
    left.mkdir()
    (left / "shard-0").write_text("half")
    write(run, options={"method": "mse"})
    assert not left.exists()


def test_a_name_that_is_not_utf8_is_not_recorded(tmp_path: Path) -> None:
    fresh = Run(tmp_path / "new")
    with (
        pytest.raises(
            InputError, match=r"run\.json: would hold the name of a file or directory that is no text in UTF-8"
        ),
        RunWriter(fresh).stage("measure", {}, {}, {"path": "caf\udce9"}),
    ):
        pass
    assert not fresh.root.exists()


def test_two_processes_do_not_work_in_one_run(run: Run) -> None:
    message = rf"^{run.root}: another fp8q process is working here; wait for it, or name another directory$"
    with RunWriter(run).stage("measure", {}, {}):
        half = run.root / ".statistics.safetensors.partial"
        half.write_text("half")
        with pytest.raises(InputError, match=message), RunWriter(Run(run.root)).stage("quantize", {}, {}):
            pass
        assert half.exists()  # it is the other process's


def test_a_process_that_works_here_keeps_others_out_between_its_stages_too(run: Run) -> None:
    """A second process, since a thread's locks are its own."""
    code = (
        "import sys; from pathlib import Path; from fp8q.core.output_folder import OutputFolder\n"
        "with OutputFolder(Path(sys.argv[1])).lock(): pass"
    )

    def other() -> str:
        done = subprocess.run([sys.executable, "-c", code, str(run.root)], capture_output=True, text=True)
        return done.stderr.strip().rpartition("\n")[2]

    message = (
        f"fp8q.core.errors.InputError: {run.root}: another fp8q process is working here; wait for it, or name another "
        "directory"
    )
    with keeping_locks():
        assert other() == ""
        write(run, options={"method": "mse"})
        assert other() == message
        write(run)
        with keeping_locks():
            pass
        assert other() == message
    assert other() == ""


def test_a_run_that_may_not_be_written_to_is_read_all_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(file: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))

    monkeypatch.setattr("fp8q.core.output_folder.locked", refused)
    with alone(run):
        assert run.is_current("quantize", {"a": "1"}, {"method": "amax"})


def test_what_a_kill_between_the_record_and_its_removal_left_goes_with_the_next_writer(run: Run) -> None:
    """And what an unfinished stage goes on from stays."""
    for folder in (".quantize.work", ".measure.work"):
        (run.root / folder).mkdir()
    (run.root / ".quantize.work" / "00000.safetensors").write_text("finished")

    with alone(run):
        assert run.is_current("quantize", {"a": "1"}, {"method": "amax"})
    assert {path.name for path in run.root.iterdir()} == {"run.json", ".lock", "scales.json", ".measure.work"}
    (run.root / ".quantize.work").mkdir()
    with RunWriter(run).stage("measure", {}, {}):
        assert {path.name for path in run.root.iterdir() if path.name.endswith(".work")} == {".measure.work"}


def test_a_process_at_work_loses_nothing_to_one_that_sweeps(run: Run) -> None:
    with RunWriter(run).stage("measure", {}, {}), WorkFolder(run.root, "measure").opened({}) as folder:
        half = run.root / ".statistics.safetensors.partial"
        half.write_text("half")
        with pytest.raises(InputError, match="another fp8q process is working here"), alone(run):
            raise AssertionError("it went in")
        assert half.exists()
        assert folder.exists()


@pytest.mark.parametrize(
    ("left", "told"),
    [
        ('{"threads": 1, "device": "cuda"}', ["begins anew: an earlier call, which stopped half-way, had device CUDA"]),
        ("{}", []),
        ("[]", []),
        ("{", []),
    ],
)
def test_a_work_folder_of_another_key_is_emptied(run: Run, left: str, told: list[str]) -> None:
    """A key.json may hold anything; a fact that it lacks is not named."""
    lines = list[str]()
    with RunWriter(run).stage("measure", {}, {}):
        for key in (left, None):
            with WorkFolder(run.root, "measure").opened({"threads": 1, "device": "cpu"}, note=lines.append) as folder:
                (folder / "hidden-0").touch()
            if key is not None:
                (folder / "key.json").write_text(key)
                (folder / "hidden-1").touch()
        assert [path.name for path in folder.iterdir() if path.name != "key.json"] == ["hidden-0"]
    assert lines == told


@pytest.mark.parametrize("where", ["in the work folder", "after it"])
def test_a_full_disk_leaves_no_work_folder(run: Run, where: str) -> None:
    """safetensors has an error class of its own."""
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(InputError, match=r": no space left on the disk"), RunWriter(run).stage("measure", {}, {}):
        with WorkFolder(run.root, "measure").opened({}) as folder:
            (folder / "hidden-0").write_text("states")
            if where == "in the work folder":
                raise full
        raise full
    assert {path.name for path in run.root.iterdir()} == {"run.json", ".lock", "scales.json"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", where], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", where], check=True)


def test_a_disk_that_is_really_full_names_the_file_and_the_run_goes_on_after_it(small_disk: Path) -> None:
    run = Run(small_disk / "run")
    write(run)
    with pytest.raises(InputError) as refused, RunWriter(run).stage("measure", {}, {}) as log:
        with replacing(run.statistics) as partial:
            save_file({"x": np.zeros(1 << 20, np.uint8)}, partial)
        log.outputs.append(run.statistics)
    assert str(refused.value) == (f"{run.statistics}: no space left on the disk; free some or name another directory")
    assert {path.name for path in run.root.iterdir()} == {"run.json", ".lock", "scales.json"}
    write(run, options={"method": "mse"})


def test_a_file_that_may_not_grow_is_named() -> None:
    code = (
        "import resource, sys, tempfile; from pathlib import Path; from fp8q.core.files import replacing\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); path = Path(tempfile.mkdtemp(), 'model')\n"
        "try:\n"
        "    with replacing(path) as partial: partial.write_bytes(bytes(2000))\n"
        "except Exception as error: print(str(error).replace(str(path), 'model'), [*path.parent.iterdir()])\n"
        "path.parent.rmdir()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == (
        "model: the file grew larger than it may; raise the limit (`ulimit -f`), or name another directory []\n"
    ), done.stderr


@pytest.mark.parametrize("number", sorted(REFUSALS))
def test_whatever_the_disk_refuses_is_one_line_that_names_the_file(run: Run, number: int) -> None:
    with pytest.raises(InputError) as refused, RunWriter(run).stage("measure", {}, {}):
        raise OSError(number, os.strerror(number), "/some/file")
    assert str(refused.value) == f"/some/file: {'; '.join(REFUSALS[number])}"


def test_what_the_disk_does_not_refuse_is_not_told_as_such(run: Run) -> None:
    with pytest.raises(OSError, match="typewriter"), RunWriter(run).stage("measure", {}, {}):
        raise OSError(errno.ENOTTY, "no typewriter")


def test_a_full_disk_is_told_as_such(run: Run) -> None:
    with (
        pytest.raises(
            InputError, match=rf"^{run.root}: no space left on the disk; free some or name another directory$"
        ),
        RunWriter(run).stage("measure", {}, {}),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_that_numpy_writes_to_is_told_as_such(run: Run) -> None:
    with pytest.raises(InputError) as refused, RunWriter(run).stage("measure", {}, {}):
        raise OSError("524096 requested and 2000 written")  # as `tofile` and `save` say it, without a number
    assert str(refused.value) == (
        f"{run.root}: a file could not be written to its end; free space there, or name another directory"
    )


def test_a_full_disk_in_the_middle_of_safetensors_is_told_as_such(run: Run) -> None:
    with (
        pytest.raises(InputError, match=r": no space left on the disk; free some or name another directory$"),
        RunWriter(run).stage("measure", {}, {}),
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
    with RunWriter(run).stage("export", {"scales.json": sha256_file(run.scales)}, {}):
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


def test_what_a_record_lacks_is_told_with_its_name(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with RunWriter(run).stage("measure", {}, {"batch_size": 1}, {"name": "m"}):
        pass
    record = run.record()
    for look_up, lacking in (
        (lambda: record.model["fingerprint"], "fingerprint"),
        (lambda: record.stages["quantize"], "quantize"),
        (lambda: record.stages["measure"].options["moments"], "moments"),
        (lambda: record.stages["measure"].inputs["model"], "model"),
        (lambda: record.stages["measure"].outputs["statistics.json"], "statistics.json"),
    ):
        with pytest.raises(InputError) as refused:
            look_up()
        assert str(refused.value) == (
            f"{run.record_file}: does not say `{lacking}`, which every run's does; restore it, or calibrate again into "
            "a new directory"
        )


def test_a_directory_that_is_recorded_as_a_file_is_refused(tmp_path: Path) -> None:
    """A file that gave way to a directory, or a record that was changed."""
    run = Run(tmp_path / "run")
    with pytest.raises(InputError) as refused, RunWriter(run).stage("measure", {}, {}) as log:
        run.model.mkdir()
        log.outputs.append(run.model)
    assert str(refused.value) == f"{run.model}: is a directory; name a file"


@pytest.mark.parametrize(
    ("name", "fault"),
    [(name, "a place outside the run") for name in ("/etc/passwd", "../other/scales.json", "model/../../x", "a\0b")]
    + [(name, "no file") for name in ("", ".", "./.")],
)
def test_a_record_names_files_within_its_run(tmp_path: Path, name: str, fault: str) -> None:
    run = Run(tmp_path / "run")
    with RunWriter(run).stage("measure", {}, {}):
        pass
    record = json.loads(run.record_file.read_text())
    record["stages"]["measure"]["outputs"][name] = "0" * 64
    run.record_file.write_text(json.dumps(record))
    again = "restore it, or calibrate again into a new directory"
    with pytest.raises(InputError, match=rf"names {fault}; {again}$"):
        run.record()


def test_versions_are_the_callers_own() -> None:
    library_versions()["vllm"] = "changed"
    assert library_versions().get("vllm") != "changed"
