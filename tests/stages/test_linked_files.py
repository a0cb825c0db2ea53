"""Checkpoints whose files are links, as a hub's cache lays them out: each command reads them as it reads files.

`snapshots/REVISION/config.json` is a link to `../../blobs/DIGEST` there; a pruned cache has links to nothing.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..conftest import Texts

Fp8q = Callable[..., Any]
SHORT = ("--samples", "2", "--seq-len", "32", "--no-graph")
REVISION = "0123456789abcdef0123456789abcdef01234567"


def hub_cache(checkpoint: Path, folder: Path) -> Path:
    """Lay `checkpoint` out as a hub's cache does, and return the directory of links."""
    snapshot, blobs = folder / "snapshots" / REVISION, folder / "blobs"
    blobs.mkdir(parents=True)
    for file in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blob)
        link = snapshot / file.relative_to(checkpoint)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def written(folder: Path) -> dict[str, str]:
    """The digest of each file below `folder`, of which none may be a link."""
    files = [path for path in sorted(folder.rglob("*")) if not path.is_dir()]
    assert not [path for path in files if path.is_symlink()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def linked(demo_checkpoint: Path, tmp_path: Path) -> Path:
    """The demo in a hub's cache."""
    return hub_cache(demo_checkpoint, tmp_path / "models--acme--demo")


@pytest.mark.slow
def test_a_linked_checkpoint_is_calibrated_to_the_same_files(
    fp8q: Fp8q, linked: Path, demo_checkpoint: Path, demo_texts: Texts, tmp_path: Path
) -> None:
    for model, out in ((demo_checkpoint, "files"), (linked, "links")):
        done = fp8q("calibrate", model, "--data", demo_texts.calibration, "--out", tmp_path / out, *SHORT)
        assert done.code == 0, done.err
    found, expected = written(tmp_path / "links"), written(tmp_path / "files")
    named = {"run.json", "statistics.json", "model/README.md"}  # with the path of the model
    assert found.keys() == expected.keys()
    assert {name for name in found if found[name] != expected[name]} <= named


@pytest.mark.slow
def test_a_linked_checkpoint_is_converted_linted_and_compared_as_files_are(
    fp8q: Fp8q, linked: Path, demo_checkpoint: Path, demo_texts: Texts, tmp_path: Path
) -> None:
    for model, out in ((demo_checkpoint, "files"), (linked, "links")):
        done = fp8q("convert", model, "--out", tmp_path / out)
        assert done.code == 0, done.err
    found, expected = written(tmp_path / "links"), written(tmp_path / "files")
    assert {name for name in found if found[name] != expected[name]} <= {"README.md"}
    converted = hub_cache(tmp_path / "files", tmp_path / "models--acme--fp8")
    for more in ((), ("--for", "vllm"), ("--for", "sglang")):
        told = [fp8q("lint", folder, "--json", *more) for folder in (tmp_path / "files", converted)]
        assert told[0].code == told[1].code == 0
        assert told[0].out.replace(str(tmp_path / "files"), "") == told[1].out.replace(str(converted), "")
    limits = ("--data", demo_texts.evaluation, "--context", "64", "--max-tokens", "800", "--max-ppl-increase", "5%")
    compared = fp8q("compare", linked, "--model", converted, *limits, "--out", tmp_path / "pair")
    assert compared.code == 0, compared.err
    assert {*written(tmp_path / "pair")} == {"comparison.json", "report.html", "tokens.npz", ".lock"}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_link_to_nothing_is_named_by_each_command_before_its_work(
    name: str, fp8q: Fp8q, linked: Path, demo_checkpoint: Path, demo_texts: Texts, tmp_path: Path
) -> None:
    (linked / name).resolve().unlink()
    text = ("--data", demo_texts.evaluation)
    commands = [
        ("calibrate", linked, *text, "--out", tmp_path / "run", *SHORT),
        ("convert", linked, "--out", tmp_path / "fp8"),
        ("compare", demo_checkpoint, "--model", linked, *text, "--out", tmp_path / "pair"),
    ]
    dangling = f"fp8q: {linked / name}: is a link to a file that is not there; copy or download it again\n"
    absent = f"fp8q: {linked / name}: there is no such file; copy it from the model\n"
    said = [(done.code, done.err) for command in commands if (done := fp8q(*command))]
    assert said[:2] == [(2, dangling)] * 2
    assert said[2] == (2, absent if name == "tokenizer.json" else dangling)
    assert not {"run", "fp8", "pair"} & {path.name for path in tmp_path.iterdir()}


def test_a_pipe_in_the_place_of_a_tokenizer_is_not_waited_for(
    fp8q: Fp8q, linked: Path, demo_checkpoint: Path, demo_texts: Texts, tmp_path: Path
) -> None:
    for name, remedy in (
        ("tokenizer_config.json", "name a file"), ("generation_config.json", "copy or download it again"),
    ):  # fmt: skip
        file = linked / name
        target = file.resolve()
        file.unlink()
        os.mkfifo(file)
        done = fp8q("convert", linked, "--out", tmp_path / "fp8")
        assert (done.code, done.err) == (2, f"fp8q: {file}: is a pipe; copy or download it again\n")
        done = fp8q(
            "compare", demo_checkpoint, "--model", linked, "--data", demo_texts.evaluation, "--out", tmp_path / "pair"
        )
        assert (done.code, done.err) == (2, f"fp8q: {file}: is a pipe; {remedy}\n")
        file.unlink()
        file.symlink_to(target)


def test_links_in_a_circle_are_refused_as_directories_of_results_and_as_runs(
    fp8q: Fp8q, demo_checkpoint: Path, demo_texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    circle = Path("circle")
    circle.symlink_to(circle)
    original = ("compare", demo_checkpoint, "--data", demo_texts.evaluation, "--out", circle)
    for arguments in (
        ("convert", demo_checkpoint, "--out", circle),
        (*original, "--model", demo_checkpoint),
        (*original, "--url", "http://127.0.0.1:9"),
        ("merge", circle, circle, "--out", "merged"),
    ):
        done = fp8q(*arguments)
        why = "is no name that a file can have (Too many levels of symbolic links); give another"
        assert (done.code, done.err) == (2, f"fp8q: '{circle}': {why}\n"), arguments
