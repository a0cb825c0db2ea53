"""A directory that one process at a time writes to, and the folder with which a killed one goes on."""

import fcntl
import gc
import os
import warnings
from pathlib import Path

import pytest

from fp8q.core.errors import InputError
from fp8q.core.files import keeping_locks, locked
from fp8q.core.output_folder import OutputFolder, WorkFolder


def test_another_process_is_refused_by_the_name_that_the_user_gave(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    with OutputFolder(out).opened() as created:
        assert created == [out, tmp_path / "a"]
        other = OutputFolder(out, "comparing", f"--out {out}", "wait for it")
        with pytest.raises(InputError) as refused, other.opened():
            pass
    assert str(refused.value) == f"--out {out}: another fp8q process is comparing here; wait for it"


def test_of_what_is_left_only_the_lock_and_new_directories_go(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    folder = OutputFolder(out, lock_file=".mine")
    with folder.opened() as created:
        (out / "results").touch()
        folder.leave(created)
        assert [path.name for path in out.iterdir()] == ["results"]
        (out / "results").unlink()
        folder.leave(created)
    assert [*tmp_path.iterdir()] == []


def test_half_written_files_go_and_links_to_others_do_not_reach_them(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").touch()
    out = tmp_path / "out"
    (out / "model").mkdir(parents=True)
    (out / "model" / ".a.partial").touch()
    (out / ".b.partial").mkdir()
    (out / ".c.partial").symlink_to(mine)
    (out / "whole").touch()
    OutputFolder(out).sweep()
    assert sorted(path.name for path in out.iterdir()) == ["model", "whole"]
    assert [*(out / "model").iterdir()] == []
    assert (mine / "file").exists()


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (None, False),
        (InputError("--data", "is empty"), False),
        (OSError(28, os.strerror(28), "file"), False),
        (KeyboardInterrupt(), True),
        (ValueError("a bug"), True),
    ],
)
def test_work_that_cannot_go_on_leaves_nothing(tmp_path: Path, error: BaseException | None, stays: bool) -> None:
    """What was interrupted goes on; a finished, refused or full one does not."""
    work = WorkFolder(tmp_path, "compare")
    try:
        with work.until_done({"key": "1"}) as folder:
            (folder / "step").touch()
            if error:
                raise error
    except (InputError, KeyboardInterrupt, ValueError):
        pass
    assert work.path.exists() == stays
    assert work.left({"key": "1"}) == (work.path if stays else None)
    assert work.left({"key": "2"}) is None
    with work.until_done({"key": "1"}) as folder:
        assert (folder / "step").exists() == stays


def test_a_lock_whose_file_was_removed_is_closed_where_it_is_taken_again(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    with warnings.catch_warnings(record=True) as caught, keeping_locks():
        warnings.simplefilter("always", ResourceWarning)  # of a file that is dropped while it is open
        with locked(file):
            file.unlink()
        with locked(file):
            gc.collect()
        with open(file, "w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not caught


def test_no_process_holds_a_lock_that_its_holder_has_removed(tmp_path: Path) -> None:
    """Else two would write at once: the one that waited for the old file, and one that made a new one."""
    folder = OutputFolder(tmp_path)
    with folder.opened() as created:
        folder.leave(created)
        with OutputFolder(tmp_path).opened(), pytest.raises(BlockingIOError), locked(tmp_path / folder.lock_file):
            pass
