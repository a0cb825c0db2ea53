"""`fp8q triton --out`: what is ours is replaced, what is not is left alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8q.core.run import Run

Fp8q = Callable[..., Any]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_repository_is_written_where_it_is_asked_for_and_again_in_its_own_place(
    fp8q: Fp8q, wide_run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "served" / "models"
    first = fp8q("triton", wide_run.root, "--out", out, "--name", "one")
    assert (first.code, first.err.splitlines()[-1]) == (0, f"wrote the Triton repository {out}")
    assert names(out) == ["Dockerfile", "README.md", "one", "repository.json"]
    (out / "one" / "1" / "__pycache__").mkdir()
    (out / "one" / "1" / "__pycache__" / "model.pyc").write_bytes(b"left by a server")
    assert fp8q("triton", wide_run.root, "--out", out, "--name", "two").code == 0
    assert names(out) == ["Dockerfile", "README.md", "repository.json", "two"]
    assert names(out.parent) == ["models"]
    assert not wide_run.triton.exists()
    assert "triton" not in wide_run.record().stages


def test_an_empty_directory_and_a_link_to_one_are_written_into(fp8q: Fp8q, wide_run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    assert fp8q("triton", wide_run.root, "--out", tmp_path / "link").code == 0
    assert (tmp_path / "link").is_symlink()
    assert "counting" in names(tmp_path / "empty")


def test_a_foreign_directory_is_named_and_left_alone(fp8q: Fp8q, wide_run: Run, tmp_path: Path) -> None:
    out = tmp_path / "foreign"
    (out / "theirs").mkdir(parents=True)
    assert fp8q("triton", wide_run.root, "--out", out).complaint() == (
        f"{out}: is not empty and is no repository that fp8q wrote; name a new or empty directory with --out"
    )
    assert names(out) == ["theirs"]
    assert (
        fp8q("triton", wide_run.root, "--out", wide_run.root).complaint().startswith(f"{wide_run.root}: is not empty")
    )
    (out / "repository.json").write_text("{}")
    assert fp8q("triton", wide_run.root, "--out", out).code == 2


def test_a_file_where_the_repository_would_be_is_named(fp8q: Fp8q, wide_run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert fp8q("triton", wide_run.root, "--out", tmp_path / "file").complaint() == (
        f"{tmp_path / 'file'}: is no directory, and the Triton repository would be one; name another with --out"
    )


def test_links_in_a_circle_are_refused_by_their_name(
    fp8q: Fp8q, wide_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("circle").symlink_to("circle")
    assert fp8q("triton", wide_run.root, "--out", "circle").complaint() == (
        "'circle': is no name that a file can have (Too many levels of symbolic links); give another"
    )


@pytest.mark.parametrize("given", [(), ("--out", "RUN/triton")])
def test_what_was_put_into_a_repository_is_not_taken_away(fp8q: Fp8q, wide_run: Run, given: tuple[str, ...]) -> None:
    out = [word.replace("RUN", str(wide_run.root)) for word in given]
    assert fp8q("triton", wide_run.root, *out, "--engine-model").code == 0
    plan = wide_run.triton / "counting_engine" / "1" / "model.plan"
    plan.write_bytes(b"built on the GPU host")
    assert fp8q("triton", wide_run.root, *out, "--engine-model").code == 0  # nothing is to be done
    assert fp8q("triton", wide_run.root, *out, "--max-batch", 2).complaint() == (
        f"{wide_run.triton}: holds counting_engine/1/model.plan, which `fp8q triton` did not write and would take "
        "away; move it, or name another directory with --out"
    )
    assert plan.read_bytes() == b"built on the GPU host"
    assert "triton" in wide_run.record().stages


def test_a_repository_of_before_there_was_a_list_is_known_by_the_runs_record(fp8q: Fp8q, wide_run: Run) -> None:
    assert fp8q("triton", wide_run.root).code == 0
    (wide_run.triton / "repository.json").unlink()
    record = json.loads(wide_run.record_file.read_text())
    del record["stages"]["triton"]["outputs"]["triton/repository.json"]
    record["stages"]["triton"]["version"] = "0.0.1"
    wide_run.record_file.write_text(json.dumps(record))
    assert fp8q("triton", wide_run.root).code == 0
    assert "repository.json" in names(wide_run.triton)
