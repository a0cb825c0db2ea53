"""Prompts of needles: the length that was asked for, the sentence at its depth, the question at the end."""

from pathlib import Path

import numpy as np
import pytest

from fp8q.core.errors import InputError
from fp8q.validate.needles.prompts import DEPTHS, Haystack, Needle, digest_of, make_needles, read_haystack

#: A haystack of tokens that no letter encodes to.
FILLER = np.arange(1000, 2000)


def encode(text: str) -> list[int]:
    """Characters as tokens."""
    return [ord(letter) for letter in text]


def written(needle: Needle) -> str:
    """The prompt's own letters; a dot for each token of the filler."""
    return "".join("." if token >= 1000 else chr(token) for token in needle.ids)


def test_a_needle_lies_at_its_depth_and_its_answer_ends_the_prompt() -> None:
    needles = make_needles(Haystack("text", FILLER, "{key}: {value}!", (2,)), [41], 1, encode)
    assert [needle.depth for needle in needles] == [0, 0.25, 0.5, 0.75, 1]
    for needle, before in zip(needles, (0, 3, 6, 9, 12), strict=True):
        asked = f"\n{needle.key}: {needle.value}"
        assert written(needle) == "\x02" + "." * before + asked + "!\n" + "." * (12 - before) + asked
        assert [chr(token) for token in needle.ids[-needle.answer :]] == [" ", *needle.value]
        assert len(needle.ids) == 41


def test_filler_is_a_part_of_the_text_in_its_order() -> None:
    (needle, *_) = make_needles(Haystack("text", FILLER), [256], 1, encode)
    filler = needle.ids[needle.ids >= 1000]
    assert (np.diff(filler) == 1).all()


def test_an_answer_begins_where_the_tokens_of_question_and_answer_part() -> None:
    """A tokenizer may draw the answer's first letters into a token of the question."""

    def merged(text: str) -> list[int]:
        return [999 if letter == "~" else ord(letter) for letter in text.replace(": ", "~")]

    (needle, *_) = make_needles(Haystack("text", FILLER, "{key}: {value}"), [64], 1, merged)
    assert needle.ids[-needle.answer :].tolist() == [999, *map(ord, needle.value)]


def test_every_needle_has_its_own_name_and_number_and_all_are_the_same_again() -> None:
    haystack = Haystack("text", FILLER)
    needles = make_needles(haystack, [128, 256], 3, encode)
    assert len(needles) == 2 * 3 * len(DEPTHS)
    assert len({(needle.key, needle.value) for needle in needles}) == len(needles)
    assert digest_of(needles) == digest_of(make_needles(haystack, [128, 256], 3, encode))
    assert digest_of(needles) != digest_of(make_needles(haystack, [128, 257], 3, encode))


MORE_TEXT = "give more with --needle-text FILE, or fewer tokens"


@pytest.mark.parametrize(
    ("length", "told"),
    [
        (72, "--needles 72: leaves no token of the text beside 74 of the sentence and the question; give at least 75"),
        (2000, "--needles 2000: hides a needle in 1,926 tokens of text, and text has 1,000; " + MORE_TEXT),
    ],
)
def test_a_length_without_room_or_beyond_the_text_is_refused(length: int, told: str) -> None:
    with pytest.raises(InputError) as refused:
        make_needles(Haystack("text", FILLER), [length], 1, encode)
    assert str(refused.value) == told


def test_a_file_has_its_sentence_on_the_first_line_and_the_text_behind(tmp_path: Path) -> None:
    path = tmp_path / "needles.txt"
    path.write_text("Der Code von {key} ist {value}.\nErste Zeile\nzweite", encoding="utf-8")
    haystack = read_haystack(path, encode, (1,))
    assert haystack.sentence == "Der Code von {key} ist {value}."
    assert "".join(map(chr, haystack.ids)) == "Erste Zeile\nzweite"
    assert (haystack.name, haystack.prefix) == (str(path), (1,))


@pytest.mark.parametrize("first", ["no place for either", "{value} belongs to {key}", "{key} {value} {other}"])
def test_a_first_line_that_hides_nothing_is_refused(tmp_path: Path, first: str) -> None:
    path = tmp_path / "needles.txt"
    path.write_text(f"{first}\ntext", encoding="utf-8")
    with pytest.raises(InputError) as refused:
        read_haystack(path, encode, ())
    assert str(refused.value) == (
        f"--needle-text {path}: its first line is '{first}'; give there the sentence to hide, with {{key}} and behind "
        "it {value}, such as 'The secret number of {key} is {value}.', and the filler text behind that line"
    )
