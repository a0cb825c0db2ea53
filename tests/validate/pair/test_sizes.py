"""Sizes that no weights have are refused before transformers makes lists of them."""

import json
import shutil
from pathlib import Path

import pytest

from fp8q.core.errors import InputError
from fp8q.validate.pair.models import check_directory


def test_a_billion_layers_are_refused_at_once(demo_checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo_checkpoint, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(InputError, match=r"config\.json: num_hidden_layers is 1,000,000,000, and the weights hold \d+"):
        check_directory(folder, "--model ")
