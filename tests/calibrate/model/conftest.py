"""A copy of the demo to damage."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def damaged(demo_checkpoint: Path, tmp_path: Path) -> Path:
    """The demo; its weights are a link, to be replaced and not written to."""
    path = tmp_path / "damaged"
    shutil.copytree(demo_checkpoint, path, ignore=shutil.ignore_patterns("*.safetensors"))
    (path / "model.safetensors").symlink_to(demo_checkpoint / "model.safetensors")
    return path


@pytest.fixture
def changed() -> Callable[..., None]:
    """`changed(file, key=value)`: change a file of JSON."""

    def change(file: Path, **changes: object) -> None:
        file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")

    return change
