"""`engines/<target>.sh`: run by bash with a stand-in for NVIDIA's tool, which notes what it is given; the tool itself
is not to be had here.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8q.export.engine.info import EngineInfo
from fp8q.export.engine.profiles import profiles
from fp8q.export.engine.script import script, write_script

#: Notes its arguments, one a line, and keeps the files it is told to load.
TOOL = """#!/usr/bin/env bash
printf '%s\\n' "$@" '' >> "$NOTES/arguments"
for argument in "$@"; do
  if [[ $argument == --loadInputs=* ]]; then
    mkdir "$NOTES/inputs$((++n))$$"; cp "$(dirname "${argument##*:}")"/* "$NOTES/inputs$n$$"
  fi
done
"""


def info(runtime: str, version: str, target: str) -> EngineInfo:
    known = {
        "bytes": 1,
        "promised_products": 7,
        "fp8_products": 7,
        "wide_products": [],
        "evidence": "plan",
        "build_seconds": 1.0,
    }
    return EngineInfo.model_validate(
        known
        | {"runtime": runtime, "version": version, "target": target, "profiles": list(profiles(4, 128, 64, 2, 32))}
    )


def calls(
    tmp_path: Path,
    runtime: str,
    version: str,
    target: str,
    decoder: Callable[..., Any],
    arguments: tuple[str, ...] = ("/elsewhere/engine",),
    cwd: str = "/",
) -> list[dict[str, str]]:
    """The options of each call of the tool."""
    notes, engines = tmp_path / "notes", tmp_path / "engines"
    notes.mkdir()
    (notes / "tool").write_text(TOOL)
    (notes / "tool").chmod(0o755)
    written = decoder()
    write_script(engines / f"{target}.sh", written.path, info(runtime, version, target), 512)
    environment = {"PATH": "/usr/bin:/bin", "NOTES": str(notes), "TOOL": str(notes / "tool")}
    ran = subprocess.run(
        ["bash", engines / f"{target}.sh", *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    return [
        dict(line.partition("=")[::2] for line in call.splitlines() if line)
        for call in (notes / "arguments").read_text().split("\n\n")
        if call.strip()
    ]


def test_the_same_graph_is_built_in_the_same_profiles_and_both_are_timed(
    tmp_path: Path, decoder: Callable[..., Any]
) -> None:
    arguments = (tmp_path, "tensorrt-rtx", "1.7.1", "sm120", decoder)
    build, prefill, decode = calls(*arguments)
    assert {name: value for name, value in build.items() if "Shapes" not in name} == {
        "--onnx": "../model/model.onnx",
        "--saveEngine": "/elsewhere/engine",
        "--skipInference": "",
        "--computeCapabilities": "120",
        "--memPoolSize": "workspace:512M",
        "--profile": "1",
    }
    for call, index, shapes in (
        (
            prefill,
            "0",
            (
                "input_ids:2x32,attention_mask:2x32,position_ids:2x32,"
                "past_key_values.0.key:0x64x64,past_key_values.0.value:0x64x64"
            ),
        ),
        (
            decode,
            "1",
            (
                "input_ids:2x1,attention_mask:2x65,position_ids:2x1,"
                "past_key_values.0.key:4x64x64,past_key_values.0.value:4x64x64"
            ),
        ),
    ):
        assert (call["--loadEngine"], call["--useProfile"], call["--shapes"]) == ("/elsewhere/engine", index, shapes)
    inputs = sorted((tmp_path / "notes").glob("inputs*"))
    sizes = {
        tuple(np.fromfile(folder / name, np.int64).size for name in ("input_ids", "attention_mask", "position_ids"))
        for folder in inputs
    }
    assert sizes == {(64, 64, 64), (2, 130, 2)}
    codes = {
        tuple((folder / f"past_key_values.0.{part}").read_bytes() for part in ("key", "value")) for folder in inputs
    }
    assert codes == {(b"\0", b"\0"), (bytes(2 * 2 * 64 * 64),) * 2}  # an empty past is one byte to trtexec
    for folder in inputs:
        assert [
            set(np.fromfile(folder / name, np.int64)) for name in ("input_ids", "attention_mask", "position_ids")
        ] == [{0}, {1}, {0}]


def test_both_profiles_are_told_apart_by_their_number(decoder: Callable[..., Any], tmp_path: Path) -> None:
    lines = [
        line.strip(" \\")
        for line in script(decoder().path, info("tensorrt-rtx", "1.7.1", "sm89"), None, tmp_path).splitlines()
    ]
    at = [lines.index(f"--profile={index}") for index in (0, 1)]
    assert [line.partition("=")[0] for line in lines[at[0] : at[1] + 4]] == [
        *["--profile", "--minShapes", "--optShapes", "--maxShapes"]
    ] * 2
    assert lines[at[1] + 3].startswith(
        "--maxShapes=input_ids:4x1,attention_mask:4x129,position_ids:4x1,past_key_values.0.key:16x64x64,"
    )
    assert not any("memPoolSize" in line for line in lines)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (("my.plan",), "/usr/bin/my.plan"),
        (("../my plan",), "/usr/bin/../my plan"),
        (("/my.plan",), "/my.plan"),
        ((), "sm89.tensorrt_rtx.plan"),
    ],
)
def test_a_relative_engine_is_where_the_script_is_called_and_none_is_beside_the_script(
    tmp_path: Path, decoder: Callable[..., Any], given: tuple[str, ...], meant: str
) -> None:
    build, prefill, decode = calls(tmp_path, "tensorrt-rtx", "1.7.1", "sm89", decoder, given, "/usr/bin")
    assert (build["--saveEngine"], prefill["--loadEngine"], decode["--loadEngine"]) == (meant,) * 3


@pytest.mark.parametrize(("version", "typed"), [("10.15.1", True), ("11.0.0", False)])
def test_trtexec_is_told_to_keep_the_graphs_types_where_it_would_not(
    tmp_path: Path, decoder: Callable[..., Any], version: str, typed: bool
) -> None:
    build, *_ = calls(tmp_path, "tensorrt", version, "sm90", decoder)
    assert ("--stronglyTyped" in build) == typed
    assert build["--profilingVerbosity"] == "detailed"
    assert "--computeCapabilities" not in build
