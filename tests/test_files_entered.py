"""The ways of a weight, of an activation and of a request through the package get no longer."""

import pytest

from .files_entered import WRITERS, files_answering, files_entered

#: The most files that a way enters; they may only fall.
LIMITS = {"weight, calibrate": 16, "weight, convert": 11, "activation": 16, "request": 18}


@pytest.mark.parametrize("way", WRITERS)
def test_few_files_are_entered_until_a_file_is_written(way: str) -> None:
    assert len(files_entered(way)) <= LIMITS[way]


def test_few_files_are_entered_until_a_request_has_its_first_token() -> None:
    files = files_answering()
    assert len(files) <= LIMITS["request"]
    assert "serve/loop/sampling.py" in files
