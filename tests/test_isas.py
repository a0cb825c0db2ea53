"""Which levels of instructions a processor has, what holds libraries to one, and how a run under each of them ends."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tiers
from tests.conftest import computing
from tests.isas import (
    LEVELS,
    Level,
    available_levels,
    chosen_levels,
    levels_of,
    main,
    processor_flags,
    within_budget,
)

ROOT = Path(__file__).resolve().parent.parent
#: Flags of processors as /proc/cpuinfo has them, without those that no level asks for.
ZEN_3 = "processor\t: 0\nflags\t\t: fpu sse4_2 f16c fma avx avx2 bmi2\n\nprocessor\t: 1\nflags\t\t: fpu\n"
SKYLAKE = ZEN_3.replace("bmi2", "bmi2 avx512f avx512dq avx512cd avx512bw avx512vl")
ZEN_4 = SKYLAKE.replace("avx512vl", "avx512vl avx512_vnni avx512_bf16")
SAPPHIRE_RAPIDS = ZEN_4.replace("avx512_bf16", "avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_int8")


@pytest.mark.parametrize(
    ("cpuinfo", "levels"),
    [
        ("", ["default"]),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", ["default"]),  # an Arm processor
        (ZEN_3, ["default", "avx2"]),
        (SKYLAKE, ["default", "avx2", "avx512"]),
        (ZEN_4, ["default", "avx2", "avx512", "avx512-bf16"]),
        (SAPPHIRE_RAPIDS, ["default", "avx2", "avx512", "avx512-bf16", "amx"]),
    ],
)
def test_a_processor_has_the_levels_whose_instructions_it_lists(cpuinfo: str, levels: list[str]) -> None:
    assert [level.name for level in levels_of(processor_flags(cpuinfo))] == levels


def test_avx_512_without_bf16_is_told_to_each_library_in_its_words() -> None:
    (level,) = chosen_levels(["avx512"], LEVELS)
    assert level.environment(["X86_V3", "X86_V4", "AVX512_ICL", "AVX512_SPR"]) == {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "OPENBLAS_CORETYPE": "SkylakeX",
        "NPY_DISABLE_CPU_FEATURES": "AVX512_ICL AVX512_SPR",
    }


SAID = """
import json, numpy, torch
from numpy._core._multiarray_umath import __cpu_features__ as numpys
sets = [name for name in ("X86_V3", "X86_V4", "AVX512_SPR") if numpys[name]]
print(json.dumps([torch.backends.cpu.get_cpu_capability(), sets]))
"""
SETS = "import json; from tests.isas import numpys_sets; print(json.dumps(numpys_sets()))"
#: What a process says of itself: PyTorch's kernels, and NumPy's loops.
EXPECTED = {
    "default": ["DEFAULT", []],
    "avx2": ["AVX2", ["X86_V3"]],
    "avx512": ["AVX512", ["X86_V3", "X86_V4"]],
    "avx512-bf16": ["AVX512", ["X86_V3", "X86_V4"]],
    "amx": ["AVX512", ["X86_V3", "X86_V4", "AVX512_SPR"]],
}


def said(code: str, environment: dict[str, str]) -> Any:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def unheld() -> dict[str, str]:
    """The environment of a process that is held to no level, also where this one is."""
    return {name: value for name, value in os.environ.items() if name not in LEVELS[0].environment([])}


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are those of x86-64")
@pytest.mark.parametrize("level", available_levels(), ids=lambda level: level.name)
def test_a_process_held_to_a_level_has_its_instructions_and_no_more(level: Level, unheld: dict[str, str]) -> None:
    held = level.environment(said(SETS, unheld))
    assert said(SAID, unheld | held) == EXPECTED[level.name]


def test_levels_are_chosen_by_name_and_come_lowest_first() -> None:
    available = levels_of(processor_flags(ZEN_4))
    assert chosen_levels([], available) == available
    assert [level.name for level in chosen_levels(["avx512", "avx2"], available)] == ["avx2", "avx512"]
    assert [level.name for level in chosen_levels(["below"], available)] == ["default", "avx2", "avx512"]


def test_a_level_that_the_processor_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.isas.available_levels", lambda: levels_of(processor_flags(ZEN_3)))
        assert main(["--levels", "avx512"]) == 2
    assert capsys.readouterr().err == "--levels avx512: is none of this processor's; it has default, avx2\n"


def test_a_budget_is_shared_by_as_many_levels_as_have_two_minutes_each(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = set()
    for commit in ("a1", "b2", "c3", "d4", "e5", "f6"):
        monkeypatch.setattr(tiers, "commit", lambda commit=commit: commit)
        assert within_budget(LEVELS, None) == [*LEVELS]
        assert within_budget(LEVELS, 10) == [*LEVELS]
        assert len(within_budget(LEVELS, 5)) == 2
        (level,) = within_budget(LEVELS, 1)
        drawn.add(level.name)
    assert len(drawn) > 1


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """What is run instead of pytest: each command, without the interpreter, and the level's word for oneDNN. It ends
    with 1 under AVX2.
    """
    commands: list[tuple[list[str], str]] = []

    def run(command: list[str], env: dict[str, str], check: bool) -> SimpleNamespace:
        commands.append((command[1:], env["ONEDNN_MAX_CPU_ISA"]))
        return SimpleNamespace(returncode=int(env["ONEDNN_MAX_CPU_ISA"] == "AVX2"))

    monkeypatch.setattr("tests.isas.available_levels", lambda: levels_of(processor_flags(SKYLAKE)))
    monkeypatch.setattr(tiers, "commit", lambda: "a1")
    monkeypatch.setattr("tests.isas.numpys_sets", lambda: ["X86_V3", "X86_V4"])
    monkeypatch.setattr("subprocess.run", run)
    return commands


def test_one_red_level_makes_the_whole_red(runs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--levels", "avx2", "avx512", "--minutes", "5", "-n", "2", "-x"]) == 1
    words = ["-m", "pytest", "-o"]
    assert runs == [
        ([*words, "cache_dir=.pytest_cache/avx2", "-n", "2", "-x", "--minutes", "2.50"], "AVX2"),
        ([*words, "cache_dir=.pytest_cache/avx512", "-n", "2", "-x", "--minutes", "2.50"], "AVX512_CORE"),
    ]
    shown = capsys.readouterr().out
    assert "level avx512: ATEN_CPU_CAPABILITY='avx512' ONEDNN_MAX_CPU_ISA='AVX512_CORE' " in shown
    assert shown.endswith(
        "\n"
        "level         exit  minutes\n"
        "avx2             1      0.0\n"
        "avx512           0      0.0\n"
    )  # fmt: skip


def test_all_green_levels_end_in_success(runs: Any) -> None:
    assert main(["--levels", "default", "avx512"]) == 0
    assert [level for _, level in runs] == ["SSE41", "AVX512_CORE"]


class Item:
    """A test as pytest collects it, as far as its order asks."""

    def __init__(self, module: SimpleNamespace | None) -> None:
        self.module = module


def test_under_a_level_what_computes_comes_first() -> None:
    """Groups of files that import torch, and those of the pipeline, whose runs are made in fixtures."""
    modules = {
        "quantize/test_linear.py": SimpleNamespace(torch=None),
        "cli/test_help.py": SimpleNamespace(json=None),
        "pipeline/test_compare.py": SimpleNamespace(json=None),
        "architecture phi3": None,
    }
    groups: Any = {Item(module): group for group, module in modules.items()}
    assert computing(groups) == {"quantize/test_linear.py", "pipeline/test_compare.py", "architecture phi3"}
