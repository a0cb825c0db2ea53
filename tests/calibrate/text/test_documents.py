"""Text comes in five forms and reads the same; what does not read is named by line, byte or column."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8q.calibrate.input.untrusted import read_bytes
from fp8q.calibrate.text.documents import FORMS, load_documents, load_texts
from fp8q.calibrate.text.formats import SUFFIXES, listed
from fp8q.calibrate.text.rows import Reading
from fp8q.core.errors import InputError

if TYPE_CHECKING:
    from tests.calibrate.conftest import Hub, Notebook

DOCUMENTS = ["Wer reitet so spät\ndurch Nacht und Wind?", "", "Es ist der Vater\r\nmit seinem Kind. 🐎"]
FORM_LIST = (
    f"a {listed(SUFFIXES)} file, a directory saved by `datasets`, or a hub data set (name, name:config or "
    "name:config:split)"
)


def refusal(spec: str | Path, reading: Reading = Reading()) -> str:
    with pytest.raises(InputError) as refused:
        load_texts(str(spec), reading)
    return str(refused.value)


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_the_forms_are_told_in_full() -> None:
    assert FORMS == FORM_LIST
    assert listed((".txt", ".jsonl", ".parquet")) == ".txt, .jsonl or .parquet"
    assert listed((".txt",)) == ".txt"


def test_a_txt_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "one.TXT"
    path.write_bytes(DOCUMENTS[2].encode())
    assert load_texts(str(path)) == [DOCUMENTS[2]]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(b"\xef\xbb\xbfone")
    assert load_texts(str(path)) == ["one"]


def test_every_table_gives_the_same_documents(tmp_path: Path) -> None:
    rows = [{"id": number, "text": text} for number, text in enumerate(DOCUMENTS)]
    jsonl(tmp_path / "a.jsonl", *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(
        {"test": datasets.Dataset.from_list(rows[:1]), "train": datasets.Dataset.from_list(rows)}
    ).save_to_disk(str(tmp_path / "splits"))
    for name in ("a.jsonl", "a.parquet", "saved", "splits"):
        assert load_texts(str(tmp_path / name)) == DOCUMENTS, name


def test_parquet_strings_may_be_large_or_dictionary_encoded(tmp_path: Path) -> None:
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(pa.table({"text": pa.array(DOCUMENTS).cast(kind)}), tmp_path / "a.parquet")
        assert load_texts(str(tmp_path / "a.parquet")) == DOCUMENTS


def test_missing_values_and_blank_lines_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null}\n\n{"text": "one"}\n{"id": 3}\n   \n{"text": "two"}', encoding="utf-8")
    assert load_texts(str(path)) == ["one", "two"]
    pq.write_table(pa.table({"text": ["one", None, "two"]}), tmp_path / "a.parquet")
    assert load_texts(str(tmp_path / "a.parquet")) == ["one", "two"]


def test_the_only_column_of_strings_is_read(tmp_path: Path) -> None:
    assert load_texts(str(jsonl(tmp_path / "a.jsonl", {"id": 1, "content": "one"}))) == ["one"]


def test_tokens_are_read_without_padding_where_there_is_no_text(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]},
        {"id": "b", "input_ids": [7, 8, 9], "attention_mask": [1, 1, 1]},
        {"id": "c", "input_ids": [0, 4], "attention_mask": [0, 1]},
    ]
    jsonl(tmp_path / "a.jsonl", *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for name in ("a.jsonl", "a.parquet", "saved"):
        loaded = load_documents(str(tmp_path / name))
        assert (loaded.ids, loaded.texts) == ([[5, 6], [7, 8, 9], [4]], []), name
    without = jsonl(tmp_path / "b.jsonl", *({"input_ids": row["input_ids"]} for row in rows))
    assert load_documents(str(without)).ids == [row["input_ids"] for row in rows]
    with_text = jsonl(tmp_path / "c.jsonl", *({"text": "one", **row} for row in rows))
    assert load_documents(str(with_text)).ids is None
    assert load_documents(str(with_text), Reading(column="input_ids")).ids == loaded.ids


def test_what_are_no_tokens_is_named_by_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert f"{path}: line 2 holds [5, -1] under `input_ids`, which are no ids of tokens; each must be" in refusal(
        jsonl(path, {"input_ids": [5]}, {"input_ids": [5, -1]})
    )
    assert f"{path}: line 1 has no attention_mask of the length of its input_ids, 2; save it with one" in refusal(
        jsonl(path, {"input_ids": [5, 6], "attention_mask": [1]})
    )
    assert f"{path}: holds no tokens under `input_ids`" in refusal(
        jsonl(path, {"input_ids": [5, 6], "attention_mask": [0, 0]})
    )


def test_a_column_and_a_split_may_be_asked_for(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"text": "one", "title": "eins"}])
    datasets.DatasetDict({"train": rows, "test": rows.map(lambda row: {"title": "zwei"})}).save_to_disk(
        str(tmp_path / "saved")
    )
    assert load_texts(str(tmp_path / "saved"), Reading(column="title", split="test")) == ["zwei"]


def test_saved_tables_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.Dataset.from_list([{"text": "one"}]).save_to_disk(str(tmp_path / "saved"))
    pq.write_table(pa.table({"text": ["one"]}), tmp_path / "a.parquet")
    before = sorted(tmp_path.rglob("*"))
    capfd.readouterr()
    for name in ("saved", "a.parquet"):
        load_texts(str(tmp_path / name))
    assert sorted(tmp_path.rglob("*")) == before
    assert capfd.readouterr() == ("", "")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for name in (tmp_path / "none.txt", tmp_path / "none"):
        assert refusal(name) == f"{name}: there is no such file; give {FORM_LIST}"
    assert refusal("none.jsonl") == f"none.jsonl: there is no such file; give {FORM_LIST}"
    assert (
        refusal("owner/name:config:split:more")
        == f"owner/name:config:split:more: there is no such file; give {FORM_LIST}"
    )


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.xyz"
    path.write_text("text\none\n", encoding="utf-8")
    assert refusal(path) == f"{path}: does not end in {listed(SUFFIXES)}, which tell how to read it; give {FORM_LIST}"


def test_a_directory_that_datasets_did_not_save_is_refused(tmp_path: Path) -> None:
    assert (
        refusal(tmp_path)
        == f"{tmp_path}: is no directory that `datasets` saved (no state.json or dataset_dict.json); give {FORM_LIST}"
    )


@pytest.mark.parametrize(("content", "what"), [(b"", "no text"), (b" \n\t\n", "no text but white space")])
def test_text_without_text_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert refusal(path) == f"{path}: holds {what}; give {FORM_LIST}"


def test_tables_without_text_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "a.jsonl"
    empty.write_bytes(b"\n\n")
    assert refusal(empty) == f"{empty}: holds no text; give {FORM_LIST}"
    assert (
        refusal(jsonl(empty, {"text": ""}, {"text": " "}))
        == f"{empty}: holds no text but white space; give {FORM_LIST}"
    )


@pytest.mark.parametrize(
    ("content", "byte", "offset", "encoding"),
    [
        ("Es war ein K\u00f6nig".encode("latin1"), "F6", "12", "latin1"),
        (b"\xef\xbb\xbfK\xf6nig", "F6", "4", "latin1"),
        ("one".encode("utf-16"), "FF", "0", "utf-16"),
        (b"x" * 5000 + b"\xc3", "C3", "5,000", "latin1"),
    ],
)
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_what_is_not_utf8_is_named_by_its_first_wrong_byte(
    tmp_path: Path, suffix: str, content: bytes, byte: str, offset: str, encoding: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(content)
    assert refusal(path) == (
        f"{path}: is not UTF-8: byte 0x{byte} at offset {offset}; convert it, perhaps with `iconv -f {encoding} "
        "-t utf-8`"
    )


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": two}\n', encoding="utf-8")
    assert refusal(path) == f"{path}: line 3 is not JSON (Expecting value at column 10); each line must be one object"
    path.write_text('{"text": "one"}\n["two"]\n', encoding="utf-8")
    assert refusal(path) == f'{path}: line 2 is no object but ["two"]; each line must be one like {{"text": …}}'


@pytest.mark.parametrize(("value", "shown"), [(7, "7"), (["a", "b"], '["a", "b"]'), ("a\ud83d", '"a\\ud83d"')])
def test_a_line_whose_text_is_none_is_named(tmp_path: Path, value: object, shown: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": value})
    assert (
        refusal(path)
        == f"{path}: line 2 holds {shown} under `text`, which is no text; each line must hold a string there"
    )


def test_columns_are_named_when_none_is_the_text(tmp_path: Path) -> None:
    none = jsonl(tmp_path / "a.jsonl", {"tokens": [7, 8], "id": 1})
    assert refusal(none) == (
        f"{none}: has no column `text` of strings; its columns are tokens (no strings), id (no strings); name the "
        "one to read `text`"
    )
    two = tmp_path / "a.parquet"
    pq.write_table(pa.table({"question": ["?"], "answer": ["!"], "score": [1.0]}), two)
    assert refusal(two) == (
        f"{two}: has no column `text` of strings; its columns are question, answer, score (no strings); name the "
        "one to read `text`"
    )
    assert refusal(two, Reading(column="score")).startswith(
        f"{two}: has no column `score` of strings; its columns are question,"
    )


def test_splits_are_named_when_none_is_train(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"text": "one"}])
    datasets.DatasetDict({"dev": rows, "test": rows}).save_to_disk(str(tmp_path / "saved"))
    assert refusal(tmp_path / "saved") == f"{tmp_path / 'saved'}: has no split `train`; it has dev, test"
    datasets.DatasetDict({"dev": rows}).save_to_disk(str(tmp_path / "single"))
    assert load_texts(str(tmp_path / "single")) == ["one"]


def test_damaged_tables_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one"] * 100}), path)
    path.write_bytes(path.read_bytes()[:-20])
    found = refusal(path)
    assert found.startswith(f"{path}: does not read: Parquet magic bytes not found in footer.")
    assert found.endswith("; write or copy it again")
    datasets.Dataset.from_list([{"text": "one"}]).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / "data-00000-of-00001.arrow").unlink()
    found = refusal(tmp_path / "saved")
    assert found.startswith(f"{tmp_path / 'saved'}: does not read: ")
    assert "\n" not in found


@pytest.fixture
def hub_data(hub: "Hub", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Hub":
    """A hub with the data set acme/poems, in two splits, and a cache of `datasets` that nothing should write to."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    files = {
        f"{split}.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in kept).encode()
        for split, kept in (("train", DOCUMENTS), ("test", ["one"]))
    }
    hub.add("datasets/acme/poems", files)
    return hub


def test_a_hub_data_set_is_streamed(hub_data: "Hub", tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert load_texts("acme/poems") == DOCUMENTS
    assert load_texts("acme/poems:default:test") == load_texts("acme/poems::test") == ["one"]
    assert not (tmp_path / "datasets-cache").exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_rows_without_a_chat_or_text_are_counted_in_a_note(tmp_path: Path, report: "Notebook", form: str) -> None:
    said = [{"role": "user", "content": "a"}]
    for column, value, reading in (
        ("messages", said, Reading(render=lambda where, chat: "a")),
        ("text", "a", Reading()),
    ):
        rows, path = [{column: each} for each in (None, value, None, value, None)], tmp_path / f"{column}.{form}"
        if form == "jsonl":
            jsonl(path, *rows)
        elif form == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            datasets.Dataset.from_list(rows).save_to_disk(str(path))
        assert load_texts(str(path), reading, report) == ["a", "a"]
        assert report.lines == [f"{path}: 3 of 5 rows have no `{column}` and are left out"]
        report.lines.clear()


def test_a_hub_data_set_is_read_up_to_a_limit(hub_data: "Hub", report: "Notebook") -> None:
    assert load_texts("acme/poems", Reading(limit=30), report) == DOCUMENTS[:1]
    assert report.lines == ["acme/poems: only its first 30 characters are read"]


def test_what_a_hub_data_set_lacks_is_named(hub_data: "Hub") -> None:
    assert refusal("acme/poems::dev") == "acme/poems::dev: has no split `dev`; it has train, test"
    assert refusal("acme/poems:old") == (
        "acme/poems:old: does not read: BuilderConfig 'old' not found. Available: ['default']; "
        "name one of its configurations as acme/poems:config, or save its text to a file and give that"
    )
    assert refusal("acme/prose") == (
        "acme/prose: there is no such file or directory, and no data set of that name on the hub; check the "
        "spelling, or `hf auth login` if it is private"
    )


def test_without_a_network_a_hub_data_set_is_an_error_with_a_remedy(
    hub_data: "Hub", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    assert refusal("acme/poems") == (
        "acme/poems: there is no such file or directory, and the hub cannot be reached to look for a data set of that "
        "name; "
        "connect, or save its text to a .txt or .jsonl file elsewhere and give that"
    )


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"text": ' + "1" * 5_000 + "}"], ids=["brackets without end", "a number of 5,000 digits"]
)
def test_json_that_python_cannot_read_is_refused_in_a_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(
        InputError, match=rf"^{path}: line 1 is no JSON that can be read \(.+\); each line must be one object$"
    ):
        load_texts(str(path))


# Texts that are none


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    for suffix in ("txt", "jsonl", "parquet"):
        path = tmp_path / f"a.{suffix}"
        os.mkfifo(path)
        assert refusal(path) == f"{path}: is a pipe; copy or download it again"
        path.unlink()
        path.symlink_to("gone")
        assert refusal(path) == f"{path}: is a link to a file that is not there; copy or download it again"


@pytest.mark.parametrize(
    ("encoding", "offset", "likely"),
    [
        ("utf-16le", 1, "perhaps UTF-16; convert it with `iconv -f utf-16le -t utf-8`"),
        ("utf-16be", 0, "perhaps UTF-16; convert it with `iconv -f utf-16be -t utf-8`"),
    ],
)
def test_utf_16_without_its_mark(tmp_path: Path, encoding: str, offset: int, likely: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("plain words\n".encode(encoding))
    assert refusal(path) == f"{path}: holds a NUL at offset {offset}, which is in no text: it is {likely}"


def test_nul_bytes_are_in_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"plain words and one \0 among them")
    assert refusal(tmp_path / "a.txt") == (
        f"{tmp_path}/a.txt: holds a NUL at offset 20, which is in no text: it is binary data; give a text"
    )
    (tmp_path / "a.jsonl").write_text('{"text": "plain"}\n{"text": "a\\u0000b"}\n', encoding="utf-8")
    assert refusal(tmp_path / "a.jsonl") == (
        f"{tmp_path}/a.jsonl: line 2 holds a NUL, which is in no text, under `text`; take it out, or convert what it "
        "was made from to UTF-8"
    )


@pytest.mark.parametrize("content", ["[]", "null", "[" * 100_000, '{"features": 7}'])
def test_a_saved_data_set_whose_description_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "saved"
    datasets.Dataset.from_list([{"text": "plain words"}]).save_to_disk(str(path))
    (path / "dataset_info.json").write_text(content, encoding="utf-8")
    found = refusal(path)
    assert found.startswith(f"{path}: does not read: ")
    assert found.endswith("; save or copy it again")
    assert "\n" not in found


def test_rows_that_repeat_one_long_value_are_bounded(tmp_path: Path, report: "Notebook") -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x" * 1000] * 10_000}), path)  # 10 MB of text in 2 kB
    assert path.stat().st_size < 10_000
    texts = load_texts(str(path), Reading(limit=5_000), report)
    assert sum(map(len, texts)) == 20_000
    assert report.lines == [f"{path}: only its first 20,000 characters are read"]


def test_a_file_takes_the_memory_of_its_size_whatever_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(b"x" * 1000)
    assert read_bytes(file, 2**62) == b"x" * 1000
    with pytest.raises(
        InputError, match=r"text\.txt: has 1,000 bytes, and 999 are the most that are read of such a file; "
    ):
        read_bytes(file, 999)
