"""The way of a weight through the package gets no longer."""

import pytest

from .files_entered import WRITERS, files_entered

#: The most files that a writer enters; they may only fall.
LIMITS = {"calibrate": 15, "convert": 11}


@pytest.mark.parametrize("command", WRITERS)
def test_a_weight_passes_through_few_files_on_its_way_to_the_shard(command: str) -> None:
    assert len(files_entered(command)) <= LIMITS[command]
