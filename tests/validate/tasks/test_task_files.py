"""Folders of task files that cannot be read are named before lm-eval, which would pass over them, sees any."""

from pathlib import Path

import pytest

from fp8q.core.errors import InputError
from fp8q.validate.tasks.task_files import check_task_files

MEND = "mend it, or take it out of --include-path"


def complaint(folder: Path) -> str:
    with pytest.raises(InputError) as refused:
        check_task_files([folder])
    return str(refused.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    assert complaint(folder) == f"--include-path {folder}: there is no such folder; give one that has task files (YAML)"


def test_a_folder_without_task_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("task: a")
    assert complaint(tmp_path) == f"--include-path {tmp_path}: holds no task file (*.yaml); give a folder that does"


UNKNOWN_TAG = "could not determine a constructor for the tag 'tag:yaml.org,2002:python/name:os' at line 1, column 4"


@pytest.mark.parametrize(("text", "fault"), [
    ("task: [a\nb: : c", "is no YAML: expected ',' or ']', but got ':' at line 2, column 2"),
    ("task: a\n\ttag: b\n", "is no YAML: found character '\\t' that cannot start any token at line 2, column 1"),
    ("just words", "is no task file, which has `task: NAME` and more such lines"),
    ("", "is no task file, which has `task: NAME` and more such lines"),
    ("task: 5", "`task` must be text"),
    ("task: {a: b}", "`task` must be text"),
    ("task: [a]\ngroup: 5", "`group` must be text"),
    ("task: a\ngroup: [b]", "`group` must be text"),
    ("task: a\ntag: 5", "`tag` must be text"),
    ("task: a\ntag: [b, 5]", "`tag` must be text"),
    ("task: a\nrepeats: '{{ 9 ** 9 }}'", "`repeats` must be a whole number"),
    ("task: a\nrepeats: 0", "`repeats` must be at least 1"),
    ("task: a\nnum_fewshot: none", "`num_fewshot` must be a whole number"),
    ("a: !!python/name:os x", f"is no YAML: {UNKNOWN_TAG}"),
])  # fmt: skip
def test_a_file_that_is_no_task_is_named_with_the_place(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "within" / "broken.yaml"
    file.parent.mkdir()
    file.write_text(text)
    assert complaint(tmp_path) == f"{file}: {fault}; {MEND}"


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_bytes(b"task: \xff\xfe")
    assert complaint(tmp_path).startswith(f"{file}: is no YAML: ")


def test_functions_of_a_task_file_are_read_as_names_and_not_imported(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("raise SystemExit('imported')")
    (tmp_path / "task.yaml").write_text("task: mine\nprocess_docs: !function utils.process\n")
    check_task_files([tmp_path])


@pytest.mark.parametrize("text", ["task: mine", "group: mine\ntask: [other]", "task: mine\nclass: !function own.Task"])
def test_two_files_of_one_name_are_both_named(text: str, tmp_path: Path) -> None:
    """lm-eval takes the first of a folder, and of two folders the last, without a word."""
    (first := tmp_path / "a").mkdir()
    (second := tmp_path / "b").mkdir()
    (first / "task.yaml").write_text("task: mine\n")
    (second / "copy.yaml").write_text(text)
    (second / "included.yaml").write_text("dataset_path: json\n")
    with pytest.raises(InputError) as refused:
        check_task_files([first, second])
    assert str(refused.value) == (
        f"{second / 'copy.yaml'}: names the task mine, as {first / 'task.yaml'} does; name each task once, or take one "
        "of the files out of --include-path"
    )
    check_task_files([first, first])


def with_questions(folder: Path, rows: Path) -> None:
    files = f"{{test: ['{rows}', missing.jsonl]}}"
    (folder / "task.yaml").write_text(f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {files}}}\n")


@pytest.mark.parametrize("row", ["null", "[1]", "5", '"text"', "\0"])
def test_a_row_of_questions_that_is_no_object_is_named(tmp_path: Path, row: str) -> None:
    """pyarrow's reader of JSON ends the process at `null` (26.0.1)."""
    rows = tmp_path / "rows.jsonl"
    with_questions(tmp_path, rows)
    rows.write_text('\ufeff{"a": 1}\n\n  {"a": 2}\n' + "{" + " " * 3_000_000 + "}\n" + row, encoding="utf-8")
    assert complaint(tmp_path) == f"{rows}: row 5 is no JSON object, such as a question is; {MEND}"
    rows.write_text('\ufeff{"a": 1}\n\n  {"a": 2}\n', encoding="utf-8")
    (tmp_path / "of no task.jsonl").write_text(row)
    check_task_files([tmp_path])


@pytest.mark.parametrize("entry", ["null", "[1]", "5", '"text"'])
def test_an_entry_of_a_list_of_questions_that_is_no_object_is_named(tmp_path: Path, entry: str) -> None:
    questions = tmp_path / "questions.json"
    with_questions(tmp_path, questions)
    questions.write_text(f' \n[{{"a": 1}},\n{entry}]')
    assert complaint(tmp_path) == f"{questions}: entry 2 is no JSON object, such as a question is; {MEND}"
    questions.write_text(f'{{"a": 1}}\n{entry}\n')
    assert complaint(tmp_path) == f"{questions}: row 2 is no JSON object, such as a question is; {MEND}"
    for sound in (
        '[{"a": 1}, {"a": [2]}]',
        '{"a": 1}\n{"a": 2}\n',
        "[]",
        '["a", "b"]',
        '\ufeff[{"a": 1}]',
        '{\n"data":\n[1]\n}',
    ):
        questions.write_text(sound)
        check_task_files([tmp_path])
    questions.write_text('[{"a": 1},')
    assert complaint(tmp_path).startswith(f"{questions}: does not parse")


def test_a_large_hole_in_the_place_of_questions_is_refused_at_once(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    with_questions(tmp_path, rows)
    with open(rows, "wb") as sparse:
        sparse.truncate(1 << 40)
    assert complaint(tmp_path) == f"{rows}: row 1 is no JSON object, such as a question is; {MEND}"
