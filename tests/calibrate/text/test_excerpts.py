"""What is too large to read whole is read in parts: whole lines, whole characters, evenly spread, and in memory that
does not grow.
"""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8q.calibrate.text import documents
from fp8q.calibrate.text.documents import line_pieces, load_texts, spread, text_pieces
from fp8q.calibrate.text.rows import Reading
from fp8q.core.errors import InputError

if TYPE_CHECKING:
    from tests.calibrate.conftest import Notebook

#: 1,000 lines of 10 bytes.
LINES = [f"{number:06} ä" for number in range(1000)]


@pytest.fixture
def ten_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECES", 10)


def written(path: Path, lines: list[str], end: str = "\n") -> Path:
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def test_numbers_are_spread_evenly() -> None:
    assert spread(10, 4) == [0, 2, 5, 7]
    assert spread(3, 64) == [0, 1, 2]
    assert spread(0, 4) == []


@pytest.mark.usefixtures("ten_places")
def test_a_large_text_is_read_in_whole_lines_at_places_of_equal_distance(tmp_path: Path, report: "Notebook") -> None:
    path = written(tmp_path / "a.txt", LINES)
    texts = load_texts(str(path), Reading(limit=1000), report)
    # The ten places are lines 0, 100, 200 …; at each a tenth of 1,000 bytes, which are ten lines.
    assert texts == ["".join(line + "\n" for line in LINES[place : place + 10]) for place in range(0, 1000, 100)]
    assert report.lines == [f"{path}: 1,000 of its 10,000 bytes are read, evenly spread over it"]


@pytest.mark.usefixtures("ten_places")
def test_a_large_jsonl_is_read_in_whole_lines(tmp_path: Path, report: "Notebook") -> None:
    # 18 bytes a line
    path = written(tmp_path / "a.jsonl", [json.dumps({"text": f"{number:05}"}) for number in range(1000)])
    texts = load_texts(str(path), Reading(limit=1000), report)
    # A tenth of 1,000 bytes is reached in the sixth line.
    assert texts == [f"{number:05}" for place in range(0, 1000, 100) for number in range(place, place + 6)]
    assert report.lines == [f"{path}: 1,080 of its 18,000 bytes are read, evenly spread over it"]


def test_what_fits_is_read_whole(tmp_path: Path, report: "Notebook") -> None:
    path = written(tmp_path / "a.txt", LINES)
    assert load_texts(str(path), Reading(limit=10_000), report) == ["".join(line + "\n" for line in LINES)]
    assert report.lines == []


@pytest.mark.usefixtures("ten_places")
@pytest.mark.parametrize("character", ["a", "ü", "語", "🐎"])
@pytest.mark.parametrize("limit", [100, 101, 102, 103])
def test_a_text_without_lines_is_cut_between_characters(tmp_path: Path, character: str, limit: int) -> None:
    path = written(tmp_path / "a.txt", [character * 3000], end="")
    texts = load_texts(str(path), Reading(limit=limit))
    assert len(texts) == 10
    assert set("".join(texts)) == {character}
    # a piece runs on for as much again to look for the end of its line
    assert sum(len(text.encode()) for text in texts) <= 2 * limit


@pytest.mark.usefixtures("ten_places")
def test_pieces_never_overlap_and_are_the_files_bytes(tmp_path: Path) -> None:
    lines = ["x" * (number * 37 % 300) for number in range(200)]
    path = written(tmp_path / "a.txt", lines)
    content = path.read_bytes()
    for read in (text_pieces, line_pieces):
        for limit in (400, 3000, 20_000, len(content) - 1):
            pieces = list(read(path, limit))
            assert all(content[piece.offset : piece.offset + len(piece.content)] == piece.content for piece in pieces)
            assert all(first.offset + len(first.content) <= second.offset for first, second in pairwise(pieces))


@pytest.mark.usefixtures("ten_places")
def test_faults_of_a_large_file_are_named_by_their_byte(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [*['{"text": "one"}'] * 100, "{", *['{"text": "one"}'] * 99])
    with pytest.raises(InputError) as refused:
        load_texts(str(path), Reading(limit=1000))
    assert str(refused.value) == (
        f"{path}: the line at byte 1,600 is not JSON (Expecting property name enclosed in double quotes at column 2); "
        "each line must be one object"
    )
    latin = tmp_path / "a.txt"
    latin.write_bytes(b"plain\n" * 1000 + b"K\xf6nig\n" * 1000)
    with pytest.raises(InputError, match=rf"^{latin}: is not UTF-8: byte 0xF6 at offset 6,[0-9]{{3}}; "):
        load_texts(str(latin), Reading(limit=1200))
    long = written(tmp_path / "long.jsonl", ['{"text": "' + "x" * 5000 + '"}'])
    with pytest.raises(InputError) as refused:
        load_texts(str(long), Reading(limit=1000))
    assert (
        str(refused.value) == f"{long}: the line at byte 0 is longer than 1,000 bytes; each line must be one document"
    )


def test_rows_of_large_tables_are_spread_over_them(tmp_path: Path, report: "Notebook") -> None:
    rows = [f"{number:08}" for number in range(1000)]
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(str(tmp_path / "saved"))
    texts = load_texts(str(tmp_path / "saved"), Reading(limit=2000), report)
    assert texts == rows[:: int(texts[1])]
    assert 125 <= len(texts) <= 250  # at most 2,000 bytes; offsets take some of them
    assert report.lines == [f"{tmp_path / 'saved'}: {len(texts)} of its 1,000 rows are read, evenly spread over it"]

    pq.write_table(
        pa.table({"text": rows, "id": range(1000)}),
        tmp_path / "a.parquet",
        row_group_size=300,
        compression="none",
        use_dictionary=False,
    )
    texts = load_texts(str(tmp_path / "a.parquet"), Reading(limit=2000), report)
    assert texts == rows[:: int(texts[1])]
    assert 125 <= len(texts) <= 250


def test_few_row_groups_of_many_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8q.calibrate.text.documents.GROUPS", 2)
    rows = [f"{number:08}" for number in range(1000)]
    pq.write_table(
        pa.table({"text": rows}), tmp_path / "a.parquet", row_group_size=100, compression="none", use_dictionary=False
    )
    texts = load_texts(str(tmp_path / "a.parquet"), Reading(limit=2000))
    assert {int(text) // 100 for text in texts} == {0, 5}


_PEAK = """
import sys
from pathlib import Path
import datasets, pyarrow.parquet
from fp8q.calibrate.text.rows import Reading
from fp8q.calibrate.text.documents import load_texts
from fp8q.core.record import reset_peak_memory, peak_memory_bytes
reset_peak_memory()
before = peak_memory_bytes()
load_texts(sys.argv[1], Reading(limit=1_000_000))
print(peak_memory_bytes() - before)
"""


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_memory_does_not_grow_with_the_text(tmp_path: Path, suffix: str) -> None:
    path, line = tmp_path / f"a.{suffix}", "many words of the same text " * 20
    if suffix == "parquet":
        pq.write_table(
            pa.table({"text": [line] * 180_000}), path, compression="none", use_dictionary=False, row_group_size=20_000
        )
    else:
        written(path, [line if suffix == "txt" else json.dumps({"text": line})] * 180_000)
    assert path.stat().st_size > 100_000_000
    done = subprocess.run([sys.executable, "-c", _PEAK, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40_000_000
