"""Which exit code and which line whatever a command raises ends in."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from fp8q.cli.main import ended
from fp8q.cli.streams import OutputClosedError
from fp8q.core.errors import BackendError, GateError, InputError
from fp8q.core.files import REFUSALS, sha256_file
from fp8q.core.run import Run
from fp8q.validate.accuracy.decision import noise_floor
from fp8q.validate.accuracy.document import load_accuracy
from fp8q.validate.report.verdict import next_steps, report_verdict, standing

Fp8q = Callable[..., Any]


class PanicException(BaseException):
    """What a panic in Rust comes to in Python (pyo3): no Exception."""


class OutOfMemoryError(RuntimeError):
    """What torch raises for a GPU's memory."""


FAULT = "(a fault of fp8q: run again with FP8Q_DEBUG=1 and report what it prints)"
MORE = "give the process more, calibrate with --stream or a smaller --batch-size, or validate with a smaller --context"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("bad.txt", "is empty"), 2, "bad.txt: is empty"),
        (GateError("", "too much"), 3, "too much"),
        (BackendError("", "no GPU"), 4, "no GPU"),
        (OutputClosedError("[Errno 28]"), 1, None),
        (
            KeyboardInterrupt(),
            130,
            "interrupted; what is finished is kept, and the same command goes on from there",
        ),
        (SystemExit(3), 3, None),
        (PanicException("unwrap on None"), 1, f"PanicException: unwrap on None {FAULT}"),
        (KeyError("x"), 1, f"KeyError: 'x' {FAULT}"),
        (MemoryError(), 4, f"there is not enough memory (MemoryError); {MORE}"),
        (OutOfMemoryError("CUDA out of memory"), 4, f"there is not enough memory (CUDA out of memory); {MORE}"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            4,
            f"there is not enough memory (DefaultCPUAllocator: can't allocate memory); {MORE}",
        ),
        (
            RecursionError("maximum recursion depth exceeded"),
            4,
            (
                "something read is nested more deeply than Python can follow (RecursionError); FP8Q_DEBUG=1 shows "
                "where, simplify that file"
            ),
        ),
        (PermissionError(13, "Permission denied", "/x/text"), 2, f"/x/text: {'; '.join(REFUSALS[errno.EACCES])}"),
        (FileNotFoundError(2, "No such file", "/x/link"), 2, f"/x/link: {'; '.join(REFUSALS[errno.ENOENT])}"),
        (SafetensorError("I/O error: File too large (os error 27)"), 2, "; ".join(REFUSALS[errno.EFBIG])),
        (OSError(errno.ENOTTY, "no typewriter"), 1, f"OSError: [Errno 25] no typewriter {FAULT}"),
    ],
)
def test_every_end_has_its_code_and_its_line(
    error: BaseException, code: int, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FP8Q_DEBUG", raising=False)
    assert ended(error) == (code, line)


def test_what_is_no_exception_is_one_line_too(fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic() -> None:
        raise PanicException("called `Option::unwrap()`\non a `None` value")

    monkeypatch.setattr("fp8q.cli.checklist.examine", panic)
    line = fp8q("doctor").complaint(code=1)
    assert line == f"PanicException: called `Option::unwrap()` on a `None` value {FAULT}"


@pytest.mark.parametrize(
    ("damaged", "parts", "missing", "command"),
    [
        ("accuracy.json", ["accuracy", "verdict"], {"accuracy", "verdict", "next"}, "fp8q validate RUN"),
        ("tokens.npz", ["accuracy"], {"accuracy"}, "fp8q validate RUN"),
        ("engines/sm89.json", ["engines", "sizes"], {"engines", "sizes"}, "fp8q build-engine RUN"),
        ("statistics.json", ["modules"], {"quantized", "skipped"}, "fp8q calibrate"),
    ],
)
def test_a_damaged_file_that_a_command_does_not_need_is_named_and_left_out_of_its_summary(
    fp8q: Fp8q, demo_run: Run, tmp_path: Path, damaged: str, parts: list[str], missing: set[str], command: str
) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    whole = json.loads(fp8q("triton", run.root, "--json").out)
    (run.root / damaged).write_bytes(b"{")
    found = fp8q("triton", run.root, "--json")
    assert found.code == 0
    assert whole.keys() - json.loads(found.out).keys() == missing
    by = command.replace("RUN", str(run.root))
    assert found.err.splitlines() == [
        f"left out here, since it cannot be read: {part}: {run.root / damaged}: is not the file that `{by}` wrote (its "
        f"SHA-256 differs from run.json); restore it, or delete it and run `{by}` again"
        for part in parts
    ]
    assert fp8q("triton", run.root).code == 0


def test_a_summary_ends_with_the_verdict_and_the_next_command(fp8q: Fp8q, demo_run: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    verdict = report_verdict(run)
    noise, *_, decision, step = (
        line
        for line in fp8q("validate", run.root).out.splitlines()
        if line.startswith(("Noise", verdict.sentence, "next"))
    )
    assert noise == noise_floor(load_accuracy(run))
    assert decision == f"{verdict.sentence}. {verdict.detail}"
    commands = [command.command for command in next_steps(verdict, standing(run))]
    assert step.startswith(f"next: `{commands[0]}`   ")
    assert str(run.root) in commands[0]
    shown = json.loads(fp8q("triton", run.root, "--json").out)
    assert shown["next"] == commands
    assert shown["verdict"]["sentence"] == verdict.sentence


def test_what_no_reader_foresees_is_left_out_of_the_summary_too(fp8q: Fp8q, demo_run: Run, tmp_path: Path) -> None:
    """A header that says it is longer than any file, where the sizes are read."""
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    more = run.model / "more.safetensors"
    more.write_bytes(b"\x01" * 4)
    record = json.loads((run.root / "run.json").read_text(encoding="utf-8"))
    record["stages"]["quantize"]["outputs"]["model/more.safetensors"] = sha256_file(more)  # or no command reads it
    (run.root / "run.json").write_text(json.dumps(record), encoding="utf-8")
    found = fp8q("triton", run.root, "--json")
    assert found.code == 0
    assert found.err.splitlines()[-1].startswith("left out here, since it cannot be read: sizes: ")
    assert "sizes" not in json.loads(found.out)
