"""What is read of a checkpoint in a run, where somebody has changed it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fp8q.core.errors import InputError
from fp8q.quantize.reading.run_checkpoint import in_files, stored_patterns, stored_scales, tensor_files

INDEX = "model.safetensors.index.json"


def checkpoint(directory: Path, weight_map: object) -> Path:
    save_file({"up.weight_scale": np.full((2, 1), 0.5, np.float32)}, directory / "model.safetensors")
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map}))
    return directory


def test_scales_are_one_row_of_numbers(tmp_path: Path) -> None:
    found = stored_scales(checkpoint(tmp_path, {"up.weight_scale": "model.safetensors"}), ["up"])
    assert {name: scale.tolist() for name, scale in found.items()} == {"up": [0.5, 0.5]}


@pytest.mark.parametrize(
    ("weight_map", "why"),
    [
        (None, "weight_map must be an object"),
        ({"up.weight_scale": None}, "weight_map.up.weight_scale must be text"),
        (
            {"up.weight_scale": "../other.safetensors"},
            f"{INDEX}: names ../other.safetensors, which is not a file beside it; copy the whole of model/ again",
        ),
        ({}, "has no up.weight_scale, which scales.json expects; copy the whole of model/ again"),
    ],
)
def test_an_index_that_does_not_tell_where_a_scale_lies_is_wrong_input(
    tmp_path: Path, weight_map: object, why: str
) -> None:
    with pytest.raises(InputError, match=re.escape(why)) as told:
        stored_scales(checkpoint(tmp_path, weight_map), ["up"])
    assert str(told.value).startswith(str(tmp_path))


def test_an_index_of_no_json_is_wrong_input(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("[" * 100_000)
    with pytest.raises(InputError, match=rf"^{re.escape(str(tmp_path / INDEX))}: does not read as fp8q's"):
        tensor_files(tmp_path)


def test_a_file_that_is_not_there_is_the_systems_error(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, {"up.weight_scale": "model-2.safetensors"})
    with pytest.raises(FileNotFoundError):
        stored_scales(directory, ["up"])


def test_patterns_of_names_have_the_numbers_of_their_modules(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"fp8q": {"stored": {"layers.{}.up": "layers.{}.w{}"}}}))
    with pytest.raises(InputError) as told:
        stored_patterns(tmp_path)
    assert str(told.value) == (
        f"{tmp_path}/config.json: does not read as fp8q's config.json: fp8q.stored must have as many numbers ({{}}) in "
        "a name in files as in the module's; restore it, or calibrate again into a new directory"
    )


def test_braces_in_the_name_of_a_file_are_no_field_of_a_format() -> None:
    assert in_files("layers.3.up", {"layers.{}.up": "{a}.{}.w1"}) == "{a}.3.w1"
