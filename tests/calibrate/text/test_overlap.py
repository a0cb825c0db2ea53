"""When two texts are the same text, whatever they came in, and when they only look alike."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fp8q.calibrate.text.overlap import RUN, Overlap, _shares, _units, check_disjoint, measure_overlap, repeated
from fp8q.core.errors import InputError

if TYPE_CHECKING:
    from tests.calibrate.conftest import Notebook


def prose(words: int, seed: int) -> str:
    """Text of so many words, four letters each, in lines of ten; other seeds give other words."""
    chosen = random.Random(seed)
    letters = ["".join(chosen.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(words)]
    return "".join(" ".join(letters[start : start + 10]) + "\n" for start in range(0, words, 10))


def shared_runs(first: list[str], second: list[str]) -> tuple[float, float]:
    """The share of the distinct runs of each text that the other contains, without the longer passages."""
    return _shares(_units(first), _units(second), RUN)


def refusal(calibration: list[str], evaluation: list[str]) -> str:
    with pytest.raises(InputError) as refused:
        check_disjoint(calibration, evaluation, "c.txt", "e.txt")
    return str(refused.value)


def message(share: int, of: str, within: str) -> str:
    return (
        f"--eval-data e.txt: is not apart from the calibration text: {share}% of {of} is in {within}; "
        "evaluate on other text, leave --eval-data out to hold out the last tenth of --data, or give --allow-overlap"
    )


def test_the_same_text_is_refused() -> None:
    text = prose(1000, 1)
    assert refusal([text], [text]) == message(100, "e.txt", "c.txt")


def test_the_same_text_is_refused_when_lines_and_documents_are_broken_elsewhere() -> None:
    text = prose(1000, 1)
    lines = text.splitlines()
    assert refusal([text], lines) == message(100, "e.txt", "c.txt")
    assert refusal(lines, [" ".join(lines).replace(" ", "\r\n\t")]) == message(100, "e.txt", "c.txt")


def test_a_text_is_refused_when_it_is_part_of_the_other() -> None:
    text, more = prose(200, 1), prose(5000, 2)
    assert refusal([more + text + more], [text]) == message(100, "e.txt", "c.txt")
    assert refusal([text], [more + text]) == message(100, "c.txt", "e.txt")


def test_the_share_is_that_of_the_distinct_runs_of_64_units() -> None:
    # 1,000 units have 937 runs; of the first 563, 500 are in the other text as well.
    text = prose(1000, 1)
    copied = " ".join(text.split()[:563])
    assert shared_runs([text], [copied, prose(1000, 2)]) == (500 / 937, 500 / 1500)


def test_copies_shorter_than_a_run_do_not_count() -> None:
    text = prose(1000, 1)
    quoted = " ".join(text.split()[100:163])
    assert shared_runs([text], [prose(300, 2), quoted]) == (0.0, 0.0)


def test_a_licence_header_in_every_file_counts_once(report: "Notebook") -> None:
    header = prose(150, 0)
    first, second = ([header + prose(500, seed) for seed in range(start, start + 20)] for start in (1, 21))
    # 150 units make 87 runs; 20 files of 650 units, whose last unit runs on into the next header, hardly any fewer than
    # 13,000.
    assert max(shared_runs(first, second)) < 0.01
    check_disjoint(first, second, "c.txt", "e.txt", report)
    assert report.lines == []


def test_a_few_hundredths_are_noted(report: "Notebook") -> None:
    text = prose(1000, 1)
    copied = " ".join(text.split()[:103])
    check_disjoint([text], [copied, prose(960, 2)], "c.txt", "e.txt", report)
    assert report.lines == ["--eval-data e.txt: 4.3% of c.txt is in e.txt"]  # 40 of 937 runs


def test_a_tenth_is_refused_and_a_little_less_is_noted(report: "Notebook") -> None:
    """Of 937 runs 94 are 10.03 %, and 93 are 9.93 %; no passage of 256 units is among them."""
    text, other = prose(1000, 1), prose(960, 2)
    words = text.split()
    assert refusal([text], [" ".join(words[:157]), other]) == message(10, "c.txt", "e.txt")
    check_disjoint([text], [" ".join(words[:156]), other], "c.txt", "e.txt", report)
    assert report.lines == ["--eval-data e.txt: 9.9% of c.txt is in e.txt"]


def test_a_passage_that_is_no_boilerplate_is_refused_from_a_hundredth_on(report: "Notebook") -> None:
    # a window of 512 units in 20,000: runs of 64 are 449 of 20,000 less 63; those of 256, 257 of 20,000 less 255
    text, window = prose(20_000, 1), " ".join(prose(1000, 2).split()[:512])
    assert refusal([prose(1000, 2)], [window + " " + text]) == message(48, "c.txt", "e.txt")
    calibration = [window + " " + prose(40_000, 3)]
    assert refusal(calibration, [window + " " + text]) == (
        "--eval-data e.txt: is not apart from the calibration text: 2.2% of e.txt is in c.txt; evaluate on other text, "
        "leave --eval-data out to hold out the last tenth of --data, or give --allow-overlap"
    )
    header = " ".join(window.split()[:250])
    check_disjoint([header + " " + prose(6_000, 3)], [header + " " + prose(5_000, 4)], "c.txt", "e.txt", report)
    assert report.lines == ["--eval-data e.txt: 3.6% of e.txt is in c.txt"]


def test_what_is_too_much_passes_with_a_note_where_it_is_allowed(report: "Notebook") -> None:
    text = prose(1000, 1)
    found = check_disjoint([text], [text + prose(1000, 2)], "c.txt", "e.txt", report, allowed=True)
    assert (found.too_much, found.of_first) == (True, 1.0)
    assert report.lines == ["--eval-data e.txt: 100% of c.txt is in e.txt"]


def test_windows_of_a_text_are_found_in_it_wherever_they_were_cut() -> None:
    words = prose(4000, 1).split()
    windows = [" ".join(words[start : start + 48]) for start in range(7, 3900, 480)]
    found = measure_overlap(windows, [" ".join(words)], window=64)
    assert found.of_first > 0.6
    assert measure_overlap(windows, [prose(4000, 2)], window=64) == Overlap()


def test_a_text_that_repeats_itself_is_told_by_its_tokens() -> None:
    ids = np.random.default_rng(0).integers(0, 2**32, 1000)
    assert repeated(ids, ids[:500]) == 1.0
    assert repeated(ids, np.concatenate([ids[100:227], ids[:436] + 1])) == pytest.approx(64 / 500, abs=1e-3)
    assert repeated(ids, ids + 1) == 0.0


def test_a_text_shorter_than_a_run_is_compared_as_far_as_it_goes() -> None:
    # runs of 4 units, 7 against 4
    assert shared_runs(["to be or not to be that is the question"], ["to be or\nnot to be that"]) == (
        4 / 7,
        1.0,
    )
    assert shared_runs(["one two"], ["three"]) == (0.0, 0.0)
    assert shared_runs([""], ["three"]) == (0.0, 0.0)


def test_the_order_within_a_run_counts() -> None:
    units = [f"w{number}" for number in range(64)]
    for half in (1, 2, 4, 8, 16):  # the inner two of four equal parts change places
        swapped = [*units[:half], *units[2 * half : 3 * half], *units[half : 2 * half], *units[3 * half :]]
        assert sorted(swapped) == sorted(units)
        assert shared_runs([" ".join(units)], [" ".join(swapped)]) == (0.0, 0.0)


def test_signs_that_are_not_ascii_are_units_of_their_own() -> None:
    text = "".join(chr(0x4E00 + number) for number in range(200))
    assert shared_runs([text], [text[:100]]) == (37 / 137, 1.0)


@pytest.mark.parametrize(
    ("calibration", "evaluation"),
    [
        ("python-calibration.txt", "python-evaluation.txt"),
        ("wikitext-2-raw-valid.txt", "wikitext-2-raw-test.txt"),
        ("tinystories-train-1000.txt", "tinystories-valid-excerpt.txt"),
    ],
)
def test_ordinary_corpora_pass_without_a_note(
    calibration: str, evaluation: str, shared_data: Callable[[str], Path], report: "Notebook"
) -> None:
    texts = [shared_data(name).read_text(encoding="utf-8") for name in (calibration, evaluation)]
    check_disjoint([texts[0]], [texts[1]], calibration, evaluation, report)
    assert report.lines == []
