"""The model card says names of somebody else's as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8q.quantize.checkpoint.card_additions import markdown_code, markdown_message, markdown_text


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Llama-3.2-1B", "Llama-3.2-1B"),
        ("stories_260k (demo)", "stories_260k (demo)"),
        ("<script>alert(1)</script>", r"\<script\>alert(1)\</script\>"),
        ("a\n\n# b", "a # b"),
        ("[x](https://example.org)", r"\[x\](https://example.org)"),
        ("![x](y) &amp; `c` *d* _e_", r"!\[x\](y) \&amp; \`c\` \*d\* \_e\_"),
        ("a\x1b[2Kb\u202ec", r"a \[2Kb c"),
    ],
)
def test_a_name_is_text(name: str, shown: str) -> None:
    assert markdown_text(name) == shown


@given(st.text())
def test_no_name_is_html_or_has_lines(name: str) -> None:
    assert markdown_text(name).isprintable()
    assert all(
        before == "\\" for before, letter in zip(" " + markdown_text(name), markdown_text(name)) if letter in "<>[`"
    )


def test_a_modules_name_is_code_whatever_stands_in_it() -> None:
    assert markdown_code("model.layers.0") == "`model.layers.0`"
    assert markdown_code("a`b``c\n") == "``` a`b``c ```"


def test_commands_of_a_message_are_code_and_the_rest_is_text() -> None:
    message = "weights alone has no graph (`fp8q scales RUN --form one` chooses *another*)"
    shown = r"weights alone has no graph (`fp8q scales RUN --form one` chooses \*another\*)"
    assert markdown_message(message) == shown
    assert markdown_message("a ` b") == r"a \` b"  # no pair
