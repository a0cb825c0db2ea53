"""Files of somebody else's are looked at before they are opened, and read within bounds."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8q.calibrate.input.untrusted import JSON_DEPTH, error_text, foreign, local_path, read_bytes, read_json
from fp8q.core.errors import InputError

AGAIN = "copy or download it again"


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as refused:
        call()
    return str(refused.value)


def test_what_is_no_file_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    os.mkfifo(path)
    assert refusal(lambda: read_bytes(path, 9)) == f"{path}: is a pipe; {AGAIN}"
    path.unlink()
    path.mkdir()
    assert refusal(lambda: read_bytes(path, 9)) == f"{path}: is a directory; {AGAIN}"
    path.rmdir()
    path.symlink_to("/dev/zero")
    assert refusal(lambda: read_bytes(path, 9)) == f"{path}: is a device; {AGAIN}"
    path.unlink()
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("x")
        assert refusal(lambda: read_bytes(path, 9)) == f"{path}: is a socket; {AGAIN}"


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert refusal(lambda: read_bytes(path, 9)) == f"{path}: there is no such file; {AGAIN}"
    path.symlink_to(tmp_path / "gone")
    assert refusal(lambda: read_bytes(path, 9)) == f"{path}: is a link to a file that is not there; {AGAIN}"
    path.unlink()
    path.symlink_to(path)
    assert refusal(lambda: read_bytes(path, 9)) == (
        f"{path}: cannot be read (Too many levels of symbolic links); mend that, or {AGAIN}"
    )
    memory = Path("/proc/self/mem")
    assert refusal(lambda: read_bytes(memory, 9)) == (
        f"{memory}: cannot be read (Input/output error); mend that, or {AGAIN}"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, whom permissions stop")
def test_a_file_of_mode_0_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("{}", encoding="utf-8")
    path.chmod(0)
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(0o755)
    os.seteuid(65534)
    try:
        found = refusal(lambda: read_json(path))
    finally:
        os.seteuid(0)
    assert found == f"{path}: cannot be read (Permission denied); mend that, or {AGAIN}"


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    assert refusal(lambda: read_bytes(path, 4)) == (
        f"{path}: has 5 bytes, and 4 are the most that are read of such a file; it is damaged, or not to be trusted"
    )
    with open(path, "ab") as handle:
        handle.truncate(1 << 40)  # a hole: no room on the disk
    assert refusal(lambda: read_json(path)).startswith(f"{path}: has 1,099,511,627,776 bytes, and 67,108,864 are")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[" * 100_000, "does not parse: maximum recursion depth exceeded while decoding a JSON array from a unicode"),
        ('{"a":' * 65 + "1" + "}" * 65, "is nested more than 64 deep"),
        ("9" * 5000, "does not parse: Exceeds the limit (4300 digits) for integer string conversion: value has 5000"),
        ('{"a": [1, {"b": NaN}]}', "a.1.b is nan, which is no finite number"),
        ('{"a": -Infinity}', "a is -inf, which is no finite number"),
        ('{"a": 1e999}', "a is inf, which is no finite number"),
    ],
)
def test_json_that_python_should_not_believe(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content, encoding="utf-8")
    found = refusal(lambda: read_json(path))
    assert found.startswith(f"{path}: {why}")
    assert found.endswith(f"; {AGAIN}")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(), inside, max_size=4),
        max_leaves=20,
    )
)
def test_all_other_json_is_read_as_it_is(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    assert read_json(path) == value


def test_the_deepest_json_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[" * JSON_DEPTH + "]" * JSON_DEPTH, encoding="utf-8")
    value = read_json(path)
    for _ in range(JSON_DEPTH - 1):
        (value,) = value
    assert value == []


@pytest.mark.parametrize(("text", "why"), [("x" * 300, "File name too long"), ("a\0b", "embedded null byte")])
def test_names_that_no_file_can_have(text: str, why: str) -> None:
    shown = text if len(text) <= 60 else f"{text[:60]}…"
    assert refusal(lambda: local_path(text)) == f"{shown!r}: is no name that a file can have ({why}); give another"


class PanicException(BaseException):
    """pyo3's exception for a panic, under its name: no library that has the class can be imported."""


@pytest.mark.parametrize("error", [ValueError("a\n b"), RecursionError("a b"), PanicException("a b")])
def test_whatever_a_library_raises_is_blamed_on_its_file(error: BaseException) -> None:
    with (
        pytest.raises(InputError, match="^file: a b$"),
        foreign(lambda found: InputError("file", error_text(found))),
    ):
        raise error


@pytest.mark.parametrize(
    "error", [InputError("", "ours"), MemoryError(), KeyboardInterrupt(), SystemExit(3), OSError("x")]
)
def test_what_is_not_the_files_fault_goes_through(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, foreign(lambda found: InputError("", "file"), OSError):
        raise error
    assert raised.value is error


def test_a_librarys_message_is_one_short_line() -> None:
    assert error_text(ValueError("\x1b[2Ka\n\n b")) == "[2Ka b"
    assert error_text(KeyError()) == "KeyError"
    assert error_text(ValueError("x" * 2000)) == "x" * 400 + "…"
