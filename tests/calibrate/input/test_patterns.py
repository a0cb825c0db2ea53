"""Regular expressions of untrusted files: those of published checkpoints match, and endless ones are refused."""

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8q.calibrate.input.patterns import MOST_MATCHES, BoundedPattern, PatternFile, match_count
from fp8q.core.errors import InputError


def ways_of(expression: str, length: int) -> float:
    return match_count(re._parser.parse(expression), length)  # type: ignore[attr-defined]  # as `patterns` does


FILE, NAME = Path("config.json"), "model.language_model.layers.61.mlp.experts.255.down_proj"


@pytest.mark.parametrize(
    ("expression", "matched"),
    [
        (r".*mlp\.experts.*", True),
        (r".*lm_head", False),
        (r".*layers\.(60|61)\..*experts\.\d+\.(gate|up|down)_proj$", True),
        (r"^(?!.*(self_attn|lm_head)).*$", True),
        (r"model\.(visual|vision_tower)\..*", False),
        (r".*\.(\d+)\..*\.(?:q|k|v|down)_proj", True),
        (NAME, True),
    ],
)
def test_what_checkpoints_have_is_matched_as_loaders_match_it(expression: str, matched: bool) -> None:
    assert (re.match(expression, NAME) is not None) is matched
    assert BoundedPattern(expression, PatternFile(FILE)).matches(NAME) is matched


@pytest.mark.parametrize(
    "expression",
    [
        "((((.+)+)+)+)+=", "(a+)+$", "(.?|.?)?" * 24, "(a|a)" * 24, ".*" * 8, ".?" * 24, r"(\w+\.)*=", "(?:a?){60}=",
        "(?:.{0,30}){0,30}=", "(?:(?:){60000}){60000}", "(?:){1001}", "(?=.*.*.*.*.*.*)x", "(.)(?(1).*.*.*.*.*.*|x)",
        "a" * 1001,
    ],
)  # fmt: skip
def test_what_may_not_end_is_refused_before_it_is_tried(expression: str) -> None:
    with pytest.raises(InputError) as raised:
        BoundedPattern(expression, PatternFile(FILE)).matches(NAME)
    assert str(raised.value) == (
        f"config.json: has the pattern {expression[:80]!r}, which is not read (it repeats too much to be tried); name "
        "the modules plainly"
    )


def test_ways_are_counted_as_by_hand() -> None:
    assert ways_of("abc.[x-z]$", 50) == 1
    assert ways_of("(ab|cd|ef)(gh|ij)f?", 50) == 3 * 2 * 2
    assert ways_of(".*a.*", 10) == 12 * 11 / 2  # how far each goes: 0 <= first <= second <= 10, C(12, 2)
    assert ways_of("a{2,5}", 10) == 4
    assert ways_of("(?:ab|cd){2}", 10) == 4


def test_the_patterns_of_a_file_have_a_time_together() -> None:
    file = PatternFile(FILE, seconds=0.0)
    with pytest.raises(InputError) as raised:
        BoundedPattern(".*=", file).matches(NAME * 20)
    assert str(raised.value) == (
        "config.json: has the pattern '.*=', which is not read (the patterns of this file take over 10 seconds); name "
        "the modules plainly"
    )


PARTS = st.sampled_from(
    ["a", ".", "(a|b)", "(a|ab|.)", "a?", ".?", "a*", ".*", "b+", "(?:a.)?", "(?:a|b){1,3}", "(?!b)"]
)


@given(st.lists(PARTS, max_size=12).map("".join))
def test_what_is_taken_ends_within_a_second(expression: str) -> None:
    """On a text that fails at its very end, after every way was tried."""
    text = "a" * 40
    if ways_of(expression + "=$", len(text)) <= MOST_MATCHES:
        begun = time.thread_time()
        BoundedPattern(expression + "=$", PatternFile(FILE)).matches(text)
        assert time.thread_time() - begun < 5
