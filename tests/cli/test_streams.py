"""Standard streams that are closed, full, cut off or in another encoding: results that nobody takes end the program
quietly with exit code 1, messages that nobody takes are lost, and no character is too much.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: A command that is quick and prints a table, help, or what is wrong.
TABLE, HELP, WRONG = ["doctor"], ["--help"], ["inspect", "nowhere"]
NOWHERE = (
    "fp8q: nowhere: there is no such directory; make a run with `fp8q calibrate MODEL --data TEXT --out nowhere`\n"
)


def shell(line: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`line` in bash, in which `fp8q` is the command line with `arguments`."""
    return subprocess.run(
        ["bash", "-c", line.replace("fp8q", '"$0" -m fp8q "$@"'), sys.executable, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=60,
    )


@pytest.mark.parametrize("arguments", [TABLE, HELP])
@pytest.mark.parametrize("line", ["fp8q >/dev/full", "fp8q >&-", "fp8q | :; exit ${PIPESTATUS[0]}"])
def test_results_that_nobody_takes_end_it_quietly(line: str, arguments: list[str]) -> None:
    done = shell(line, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize("line", ["fp8q 2>&-", "fp8q 2>/dev/full"])
def test_messages_that_nobody_takes_are_lost_and_the_exit_code_stays(line: str) -> None:
    done = shell(line, *WRONG)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    assert shell(line, *TABLE).returncode == 0


def test_a_closed_standard_input_is_no_concern() -> None:
    assert shell("fp8q <&-", *WRONG).stderr == NOWHERE
    assert shell("fp8q <&- >&- 2>&-", *TABLE).returncode == 1


def test_a_file_of_the_run_does_not_take_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """What a library prints to descriptor 1 must not go into the first file that fp8q opens."""
    code = (
        "import os, sys; from fp8q.cli import streams; streams.settle_streams();"
        f"file = open({str(tmp_path / 'file')!r}, 'w'); print(file.fileno() > 2, file=sys.stderr)"
    )
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" >&-', sys.executable, code], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "True\n")


@pytest.mark.parametrize(
    "variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_what_an_encoding_lacks_is_written_as_its_escape(variables: dict[str, str], tmp_path: Path) -> None:
    code = r"from fp8q.cli import streams; streams.settle_streams(); print('KL \xd7 10\u2076')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "KL \\xd7 10\\u2076\n", "")
    assert shell("fp8q", *HELP, **variables).returncode == 0


def test_a_name_that_is_not_utf8_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fp8q", "inspect", b"caf\xe9"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "fp8q: caf\\udce9: is no text in UTF-8, and names are kept in files that are; rename what is called so\n"
    )


def test_what_a_library_prints_does_not_come_among_the_results() -> None:
    """tokenizers, which is written in Rust, prints such a line to descriptor 1."""
    code = (
        "from fp8q.cli import streams; streams.settle_streams();"
        "import tokenizers; tokenizers.AddedToken('a', text_config=False); print('a result')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "a result\n")
    assert done.stderr == "Ignored unknown kwarg option text_config\n"
