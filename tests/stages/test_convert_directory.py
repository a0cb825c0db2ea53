"""The directory that `fp8q convert` writes to: nobody removes what another process writes, and nothing stale stays."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8q.core.errors import InputError
from fp8q.core.files import locked
from fp8q.core.reporter import SILENT
from fp8q.options import ConvertOptions
from fp8q.quantize.conversion import shards
from fp8q.stages.convert import convert
from fp8q.stages.convert_directory import LOCK, PROGRESS

from .test_convert import digests, sharded

__all__ = ["sharded"]
Fp8q = Callable[..., Any]
OPTIONS = ConvertOptions(threads=1)
FIRST = "model-00001-of-00003.safetensors"


def begun(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave in `out` what a call has that is killed behind its first file."""
    finish = shards._finish

    def killed(partial: Path, file: Path) -> None:
        if file.name != FIRST:
            raise KeyboardInterrupt
        finish(partial, file)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shards, "_finish", killed)
        convert(str(source), out, OPTIONS, SILENT)


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}


@pytest.mark.parametrize("fault", ["the lock", "the disk", "another key", "a strange file"])
def test_a_refused_call_leaves_what_another_has_written(
    sharded: Path, tmp_path: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    out = tmp_path / "fp8"
    begun(sharded, out, monkeypatch)
    before = content(out)
    if fault == "the lock":
        with locked(out / LOCK):
            told = fp8q("convert", sharded, "--out", out).complaint()
        assert told == f"{out}: another fp8q process is writing here; wait for it, or name another"
    elif fault == "the disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
        assert fp8q("convert", sharded, "--out", out).complaint().startswith(f"{out}: has 1 bytes free, and ")
    elif fault == "another key":
        told = fp8q("convert", sharded, "--out", out, "--form", "block").complaint()
        assert told.startswith(f"{out}: holds a convert in progress of another model, or with other options")
    else:
        (out / "mine.txt").write_text("mine")
        before = content(out)
        told = fp8q("convert", sharded, "--out", out).complaint()
        assert told == (
            f"{out / 'mine.txt'}: is not of the conversion in progress there; move it away, or name another with --out"
        )
    assert content(out) == before


def test_a_lock_without_progress_is_nobodys_to_remove(sharded: Path, tmp_path: Path, fp8q: Fp8q) -> None:
    out = tmp_path / "fp8"
    out.mkdir()
    with locked(out / LOCK):
        assert "another fp8q process is writing here" in fp8q("convert", sharded, "--out", out).complaint()
        assert [path.name for path in out.iterdir()] == [LOCK]


def test_a_lock_that_its_holder_has_removed_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opened the file before it was removed would hold a lock that nobody else meets."""
    file, lock, calls = tmp_path / LOCK, fcntl.flock, list[int]()

    def removed_first(handle: Any, how: int) -> None:
        if not calls:
            file.unlink()
        calls.append(how)
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with locked(file):
        monkeypatch.undo()
        assert len(calls) == 2
        with pytest.raises(BlockingIOError), locked(file):
            pass


def test_a_planted_link_is_replaced_and_its_target_stays(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sharded / "1_Pooling").mkdir()
    (sharded / "1_Pooling" / "config.json").write_text("{}")
    whole, out = convert(str(sharded), tmp_path / "whole", OPTIONS, SILENT).path, tmp_path / "fp8"
    begun(sharded, out, monkeypatch)
    victims = tmp_path / "victims"
    victims.mkdir()
    planted = ["tokenizer.json", "config.json", "README.md", "model-00002-of-00003.safetensors", "notes"]
    planted += [".model-00003-of-00003.safetensors.partial", ".config.json.partial"]
    for name in planted:
        (victims / name).write_text("mine")
        (out / name).symlink_to(victims / name)
    (victims / "folder").mkdir()
    (out / "1_Pooling").symlink_to(victims / "folder")
    found = convert(str(sharded), out, OPTIONS, SILENT)
    assert found.resumed == (FIRST,)
    assert {path.read_text() for path in victims.iterdir() if path.is_file()} == {"mine"}
    assert list((victims / "folder").iterdir()) == []
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert digests_of_files(out) == digests_of_files(whole)


def digests_of_files(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_stale_weights_do_not_stay(sharded: Path, tmp_path: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, out = convert(str(sharded), tmp_path / "whole", OPTIONS, SILENT).path, tmp_path / "fp8"
    begun(sharded, out, monkeypatch)
    for name in ("model-00009-of-00009.safetensors", "other.safetensors.index.json"):
        (out / name).write_text("stale")
    (out / "config.json").write_text("{}")
    done = fp8q("convert", sharded, "--out", out)
    assert done.code == 0
    assert f"model-00009-of-00009.safetensors: was removed from {out}, since it is not of this conversion" in done.err
    assert digests(out) == digests(whole)


def test_a_fault_removes_what_the_call_wrote_and_nothing_else(
    sharded: Path, tmp_path: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write = tmp_path / "a" / "b" / "fp8", os.pwrite

    def full(*arguments: Any) -> int:
        (out / "mine.txt").write_text("mine")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert fp8q("convert", sharded, "--out", out).complaint().endswith("free some or name another directory")
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    (out / "mine.txt").unlink()
    out.rmdir()
    (tmp_path / "a" / "b").rmdir()
    (tmp_path / "a").rmdir()
    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(InputError):
        convert(str(sharded), out, OPTIONS, SILENT)
    assert not (tmp_path / "a").exists()


def test_a_refused_call_leaves_no_lock_of_its_own(sharded: Path, tmp_path: Path, fp8q: Fp8q) -> None:
    out = tmp_path / "fp8"
    out.mkdir()
    (out / PROGRESS).write_text('{"key": "another"}')
    assert "holds a convert in progress of another model" in fp8q("convert", sharded, "--out", out).complaint()
    assert [path.name for path in out.iterdir()] == [PROGRESS]


def test_a_call_that_is_killed_before_its_record_is_gone_on_with(sharded: Path, tmp_path: Path) -> None:
    out = tmp_path / "fp8"
    out.mkdir()
    (out / LOCK).touch()
    (out / f".{PROGRESS}.partial").write_text("{")
    assert convert(str(sharded), out, OPTIONS, SILENT).resumed == ()
