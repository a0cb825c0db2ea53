"""`make test-isas`: run the suite as it runs on processors with fewer instructions than this one has.

A level is a set of instructions that processors have been sold with. The variables hold to it every library that takes
orders: PyTorch's own kernels, oneDNN (its BF16 GEMMs), MKL (its FP32 GEMMs, on Intel's processors), OpenBLAS (NumPy's
GEMMs) and NumPy's own loops; fp8q asks PyTorch and reads oneDNN's variable. ONNX Runtime, TensorRT-RTX's builder,
tokenizers and Triton's interpreter ask the processor itself, and compute as they always do here. So does PyTorch for
products of codes, which tests/conftest.py takes care of. No variable makes a processor slower, or changes the size of
its caches.

    python -m tests.isas [--levels NAME …] [--minutes N] [PYTEST'S OPTIONS]
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .tiers import by_commit

CPUINFO = Path("/proc/cpuinfo")
#: Minutes of a budget that a level has at least: collecting the tests takes half a minute of it.
LEAST_MINUTES = 2.0
#: Instead of a level's name: all but the highest, which any other run of the suite has.
BELOW = "below"


@dataclass(frozen=True)
class Level:
    """A set of instructions, with what each library calls it."""

    name: str
    #: What the processor must have, as Linux names it.
    flags: frozenset[str]
    pytorch: str
    onednn: str
    mkl: str
    openblas: str
    #: What NumPy may use, of the sets that it compiles its loops for.
    numpy: frozenset[str]

    def environment(self, compiled: Iterable[str]) -> dict[str, str]:
        """Return the variables that hold all libraries to this level, where NumPy has `compiled` for this processor."""
        return {
            "ATEN_CPU_CAPABILITY": self.pytorch,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
            "OPENBLAS_CORETYPE": self.openblas,
            "NPY_DISABLE_CPU_FEATURES": " ".join(name for name in compiled if name not in self.numpy),
        }


AVX2 = frozenset({"avx2", "bmi2", "f16c", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BF16 = AVX512 | {"avx512_bf16", "avx512_vnni"}
AMX = BF16 | {"avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"}
#: Lowest first: any x86-64 processor; AMD's Zen 1 to 3 and Intel's desktops; Skylake and Cascade Lake; AMD's Zen 4 and
#: 5, and Cooper Lake; Sapphire Rapids.
LEVELS = (
    Level("default", frozenset(), "default", "SSE41", "SSE4_2", "Nehalem", frozenset()),
    Level("avx2", AVX2, "avx2", "AVX2", "AVX2", "Haswell", frozenset({"X86_V3"})),
    Level("avx512", AVX512, "avx512", "AVX512_CORE", "AVX512", "SkylakeX", frozenset({"X86_V3", "X86_V4"})),
    Level(
        "avx512-bf16", BF16, "avx512", "AVX512_CORE_BF16", "AVX512_E3", "SkylakeX",
        frozenset({"X86_V3", "X86_V4", "AVX512_ICL"}),
    ),
    Level(
        "amx", AMX, "avx512", "AVX512_CORE_AMX", "AVX512_E4", "SkylakeX",
        frozenset({"X86_V3", "X86_V4", "AVX512_ICL", "AVX512_SPR"}),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How the suite ended under one level."""

    level: str
    exit_code: int
    minutes: float


def processor_flags(cpuinfo: str) -> frozenset[str]:
    """Return the instructions that the first processor of /proc/cpuinfo has; none where it lists none."""
    for line in cpuinfo.splitlines():
        name, _, listed = line.partition(":")
        if name.strip() == "flags":
            return frozenset(listed.split())
    return frozenset()


def available_levels() -> list[Level]:
    """Return the levels of this machine's processor, lowest first."""
    return levels_of(processor_flags(CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""))


def levels_of(flags: frozenset[str]) -> list[Level]:
    """Return the levels of a processor with these flags, lowest first."""
    return [level for level in LEVELS if level.flags <= flags]


def chosen_levels(names: Sequence[str], available: Sequence[Level]) -> list[Level]:
    """Return the levels of these names, in the order of `available`; all of them where there are no names.

    Raises:
        ValueError: The processor lacks a level, or there is none of this name.
    """
    if not names:
        return [*available]
    if list(names) == [BELOW]:
        return [*available[:-1]]
    known = [level.name for level in available]
    for name in names:
        if name not in known:
            raise ValueError(f"--levels {name}: is none of this processor's; it has {', '.join(known)}")
    return [level for level in available if level.name in names]


def within_budget(levels: Sequence[Level], minutes: float | None) -> list[Level]:
    """Return as many of `levels` as have `LEAST_MINUTES` each, and one at least; the commit decides which."""
    if minutes is None:
        return [*levels]
    most = max(1, int(minutes // LEAST_MINUTES))
    drawn = sorted(levels, key=lambda level: by_commit(level.name))[:most]
    return [level for level in levels if level in drawn]


def numpys_sets() -> list[str]:
    """Return the sets of instructions that NumPy has loops for and this processor can run; NumPy warns of others."""
    config: dict[str, Any] = np.show_config(mode="dicts")  # type: ignore[assignment]
    return list(config["SIMD Extensions"].get("found", []))


def run_suite(level: Level, arguments: Sequence[str]) -> Outcome:
    """Run pytest under `level`, with a cache of its own: graphs hold constants that this processor computed."""
    held = level.environment(numpys_sets())
    print(f"\nlevel {level.name}: {' '.join(f'{name}={value!r}' for name, value in held.items())}", flush=True)
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir=.pytest_cache/{level.name}", *arguments]
    begun = time.monotonic()
    done = subprocess.run(command, env=os.environ | held, check=False)
    return Outcome(level.name, done.returncode, (time.monotonic() - begun) / 60)


def table(outcomes: Iterable[Outcome]) -> str:
    """Write a line for each outcome."""
    rows = [f"{each.level:<12}  {each.exit_code:>4}  {each.minutes:>7.1f}" for each in outcomes]
    return "\n".join([f"{'level':<12}  exit  minutes", *rows])


def main(arguments: Sequence[str]) -> int:
    """Run the suite under each level that is asked for; return 0 where it is green under all."""
    parser = argparse.ArgumentParser(prog="python -m tests.isas", allow_abbrev=False)
    parser.add_argument("--levels", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--minutes", type=float, metavar="N", help="for all levels together")
    options, others = parser.parse_known_args(arguments)
    try:
        levels = within_budget(chosen_levels(options.levels, available_levels()), options.minutes)
    except ValueError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    if options.minutes is not None:
        others += ["--minutes", f"{options.minutes / max(1, len(levels)):.2f}"]
    outcomes = [run_suite(level, others) for level in levels]
    print(f"\n{table(outcomes)}", flush=True)
    return int(any(outcome.exit_code for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
