"""How the vLLM plugin finds what a vLLM lacks; on vLLM itself in tests/elsewhere."""

import pytest
from fp8q_vllm.interface import NEEDED, missing_part


@pytest.mark.parametrize(
    ("needed", "found"),
    [
        ({"json:dumps": ("obj", "indent")}, None),
        ({"json:JSONEncoder.encode": ("o",), "json:load": ()}, None),
        ({"json:dumps": ("obj", "color")}, "json:dumps takes no color"),
        ({"json:JSONEncoder.paint": ()}, "there is no json:JSONEncoder.paint"),
        ({"json.paint:brush": ()}, "there is no json.paint:brush"),
    ],
)
def test_the_first_part_that_is_not_there_is_named(needed: dict[str, tuple[str, ...]], found: str | None) -> None:
    assert missing_part(needed) == found


def test_without_vllm_the_first_part_is_missing() -> None:
    assert missing_part() == f"there is no {next(iter(NEEDED))}"
