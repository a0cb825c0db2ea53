"""The campaign's judge sees each kind of fault, and none where there is none; a case is the same whenever drawn."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from case import Case
from mutate_json import mutate_json
from options_drawn import names
from oracle import Result, Verdict, judge, result, snapshot
from workers import SMALL_FILE, Ended

LINE = "fp8q: model: is no checkpoint\n"


@pytest.fixture
def case(tmp_path: Path) -> Case:
    folder = tmp_path / "case"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (tmp_path / "case.tmp").mkdir()
    argv = ["calibrate", "model", "--data", "text.txt", "--out", "out"]
    return Case(1, 2, "model", folder, argv, tuple(argv))


def end(code: int, err: str = LINE, out: str = "", **more: bool) -> Ended:
    return Ended(code, out, err, 1.0, **more)


def kinds(case: Case, ended: Ended) -> list[str]:
    return [verdict.kind for verdict in judge(case, snapshot(case.folder), ended, None)]


def test_a_refusal_in_one_line_and_a_good_end_are_no_faults(case: Case) -> None:
    assert kinds(case, end(2)) == []
    assert kinds(case, end(2, "a note\n" + LINE)) == []
    assert kinds(case, end(0, "a note\n", "a table\n")) == []


def test_an_output_that_takes_no_more_ends_quietly_and_only_then(case: Case) -> None:
    small = replace(case, start=frozenset({"small files"}))
    assert kinds(small, end(1, "a note\n", "x" * SMALL_FILE)) == []
    assert kinds(small, end(1, "a note\n", "x" * 10)) == ["exit 1", "line"]


@pytest.mark.parametrize(
    ("ended", "kind"),
    [
        (end(1), "exit 1"),
        (end(130), "exit 130"),
        (end(-9, "", hung=True), "hang"),
        (end(-11, ""), "died"),
        (end(2, "Traceback (most recent call last):\n" + LINE), "traceback"),
        (end(2, ""), "line"),
        (end(2, LINE + LINE), "line"),
        (end(2, LINE + "more\n"), "line"),
        (end(2, f"fp8q: {'x' * 1600}\n"), "line"),
        (end(2, "fp8q: a\x1b[2Jb\n"), "control"),
        (end(0, "", "\x85"), "control"),
        (end(0, "", orphans=True), "leftover"),
    ],
)
def test_each_fault_of_a_process_is_seen(case: Case, ended: Ended, kind: str) -> None:
    assert kinds(case, ended) == [kind]


def test_json_is_one_object_on_one_line_and_has_no_nan(case: Case) -> None:
    case.argv.append("--json")
    assert kinds(case, end(0, "", '{"a": 1}\n')) == []
    for out in ("", "[]\n", '{"a": 1}\n{}\n', '{"a": NaN}\n'):
        assert kinds(case, end(0, "", out)) == ["json"]


def test_what_a_refused_command_leaves_is_seen(case: Case) -> None:
    before = snapshot(case.folder)
    (case.folder / "out").mkdir()
    (case.folder / "out" / "run.json").write_text("{}")
    assert judge(case, before, end(2), None) == [Verdict("leftover", "out, out/run.json")]
    assert judge(case, before, end(0), None) == []
    (case.folder / "out" / ".measure.work").mkdir()
    assert judge(case, before, end(0), None) == [Verdict("leftover", "out/.measure.work")]


def test_a_file_that_the_record_of_a_run_does_not_know_is_left_over(case: Case) -> None:
    before = snapshot(case.folder)
    (case.folder / "out").mkdir()
    record = {"stages": {"measure": {"outputs": {"statistics.json": ""}}}}
    (case.folder / "out" / "run.json").write_text(json.dumps(record))
    (case.folder / "out" / "statistics.json").write_text("{}")
    (case.folder / "out" / "other.json").write_text("{}")
    assert judge(case, before, end(0), None) == [Verdict("leftover", "out/other.json")]


def test_inputs_that_changed_and_temporary_files_are_seen(case: Case) -> None:
    before = snapshot(case.folder)
    (case.folder / "model" / "config.json").write_text("{ }")
    (case.folder.with_name("case.tmp") / "x").write_text("")
    assert judge(case, before, end(2), None) == [
        Verdict("leftover", "TMPDIR/x"),
        Verdict("changed", "model/config.json"),
    ]


def test_another_result_is_silent_unless_fingerprint_option_or_note_tells_of_it(case: Case) -> None:
    before = snapshot(case.folder)

    def finished(model: str, option: int, note: str, values: bytes) -> Result:
        run = case.folder / "out"
        run.mkdir(exist_ok=True)
        stage = {
            "inputs": {},
            "options": {"n": option},
            "notes": [note],
            "version": "1",
            "outputs": {"scales.json": ""},
        }
        record = {"model": {"fingerprint": model}, "stages": {"quantize": stage}}
        (run / "run.json").write_text(json.dumps(record))
        (run / "scales.json").write_bytes(values)
        return result(case, before, end(0, ""))

    base = finished("a", 1, "", b"1")
    seen = {}
    for name, run in {
        "same": ("a", 1, "", b"1"), "silent": ("a", 1, "", b"2"), "model": ("b", 1, "", b"2"),
        "option": ("a", 2, "", b"2"), "note": ("a", 1, "lowered", b"2"),
    }.items():  # fmt: skip
        finished(*run)
        seen[name] = [verdict.seen for verdict in judge(case, before, end(0, ""), base)]
    told = ["out/scales.json differ, and nothing tells why"]
    assert seen == {"same": [], "silent": told, "model": [], "option": [], "note": []}


def test_what_a_command_that_only_shows_was_asked_for_tells_of_what_it_shows(case: Case) -> None:
    (case.folder / "run").mkdir()
    (case.folder / "run" / "run.json").write_text("{}")
    base = ("inspect", "run", "--json")
    before, asked = snapshot(case.folder), replace(case, argv=list(base), base=base)
    shown = result(asked, before, end(0, "", "{}\n"))
    other = end(0, "", '{"x": 1}\n')
    assert [each.kind for each in judge(asked, before, other, shown)] == ["silent"]
    assert judge(replace(asked, argv=[*base, "--against", "text.txt"]), before, other, shown) == []


def test_a_text_that_is_none_must_be_refused_or_spoken_of(case: Case) -> None:
    case.must_be_said = True
    assert kinds(case, end(0, "")) == ["silent"]
    assert kinds(case, end(0, "text.txt: holds NUL bytes\n")) == []
    assert kinds(case, end(2)) == []


def test_a_seed_draws_the_same_mutation_every_time() -> None:
    content = json.dumps({"a": [1, 2, {"b": "c"}], "d": None}).encode()
    drawn = [mutate_json(random.Random(f"1:{index}"), content) for index in range(200)]
    assert drawn == [mutate_json(random.Random(f"1:{index}"), content) for index in range(200)]
    assert len({changed for _, changed in drawn}) > 100
    assert sum(changed == content for _, changed in drawn) < 10


def test_options_are_those_that_the_help_names() -> None:
    assert names("│ --data  TEXT │\n│ --stream --no-stream │ as --data says, --help -h x--y") == (
        "--data", "--no-stream", "--stream",
    )  # fmt: skip


def test_a_repository_beside_the_run_is_no_leftover_and_what_it_did_not_write_is(case: Case) -> None:
    argv = ["triton", "run", "--out", "0:99"]
    written = replace(case, argv=argv, base=("triton", "run"))
    (case.folder / "run").mkdir()
    before = snapshot(case.folder)
    (case.folder / "run" / ".lock").touch()
    (case.folder / "0:99" / "tiny").mkdir(parents=True)
    (case.folder / "0:99" / "tiny" / "config.pbtxt").touch()
    assert judge(written, before, end(0, "", "a table\n"), None) == []
    (case.folder / "elsewhere").touch()
    assert [verdict.seen for verdict in judge(written, before, end(0, "", "a table\n"), None)] == ["elsewhere"]
