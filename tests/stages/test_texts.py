"""A typo in the name of a text is told before any weight is read."""

from pathlib import Path

import pytest

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.stages.shared.texts import check_there


@pytest.mark.parametrize("name", ["texts.txt", "a folder/of my own", "owner/texts.jsonl"])
def test_a_file_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(InputError) as error:
        check_there(name)
    assert str(error.value).startswith(f"{name}: there is no such file; give a ")


def test_what_is_there_and_names_on_the_hub_are_left_to_reading(tmp_path: Path) -> None:
    (tmp_path / "text.txt").touch()
    check_there(str(tmp_path / "text.txt"))
    check_there(str(tmp_path))
    check_there("owner/name:config:split")


def test_calibrate_refuses_it_without_opening_the_model(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time", encoding="utf-8")
    for data, eval_data in (("typo.txt", None), (str(tmp_path / "text.txt"), "typo.txt")):
        with pytest.raises(InputError, match=r"^typo\.txt: there is no such file; give "):
            api.calibrate(tmp_path / "no model", data, tmp_path / "run", eval_data)
