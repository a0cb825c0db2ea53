"""The script for GPUs, as far as a CPU can hold it: its dry run, its file, and the experiments on what is simulated."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import run as script
from gpu.adder_bits import cuts, kept_bits
from gpu.products import break_even
from gpu.timing import Part, Setting, shown

from fp8q.calibrate.measure.histogram import PATTERNS
from fp8q.core.run import Run
from fp8q.quantize.reference.adder import Adder, add_in, add_products

ROOT = Path(__file__).resolve().parents[2]


def dry_run(out: Path, *words: str) -> tuple[Any, str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py"), "--dry-run", "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text(encoding="utf-8")), done.stdout


@pytest.fixture(scope="module")
def dry(demo_run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """Every part, in two calls that add to one file."""
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    _, first = dry_run(out, "--part", "products", "--part", "calibration", "--part", "decoder")
    found, second = dry_run(out, "--part", "numerics", "--part", "engines", "--run", str(demo_run.root))
    return found, first + second


def test_a_dry_run_goes_through_every_part_and_says_that_it_is_one(dry: tuple[Any, str]) -> None:
    found, printed = dry
    assert found["dry_run"] is True
    assert sorted(found["parts"]) == sorted(script.PARTS)
    assert printed.count(script.DRY) == len(script.PARTS)
    for part in found["parts"].values():
        assert set(part) == {"seconds", "error", "tables", "targets", "skipped"}
        assert part["error"] is None
        assert all(rows for rows in part["tables"].values())
        assert all(set(each) == {"target", "found", "asked", "limit", "met"} for each in part["targets"])
    assert set(found["versions"]) >= {"torch", "triton", "tensorrt"}
    assert set(found["gpu"]) >= {"name", "driver", "capability"}


def test_what_a_dry_run_can_tell_is_right(dry: tuple[Any, str]) -> None:
    parts = dry[0]["parts"]
    codes = parts["numerics"]["tables"]["codes of 65,536 BF16 patterns"]
    assert len(codes) == 6
    assert {row["differing"] for row in codes} == {0}
    perplexities = [row["perplexity"] for row in parts["numerics"]["tables"]["perplexity of the demo"]]
    assert max(perplexities) < 1.01 * min(perplexities)
    counted = [each for each in parts["calibration"]["targets"] if "counts" in each["target"]]
    assert [each["found"] for each in counted] == [0] * 6
    waits = parts["calibration"]["tables"]["waits and copies of a batch of an 8B, counted on the meta device"]
    assert [(row["waits"], row["bytes_to_gpu"], row["bytes_to_memory"]) for row in waits] == [(1, 8 * 4 * 2048, 0)] * 2
    assert [each["met"] for each in parts["engines"]["targets"]] == [None] * len(parts["engines"]["targets"])
    ways = {row["way"] for row in parts["products"]["tables"]["products"]}
    assert ways >= {"bf16", "fp8 alone", "FP8Linear", "FP8Linear, two terms"}
    assert {row["kind"] for row in parts["decoder"]["tables"]["decode"]} == {"bf16", "fp8", "fp8, two terms"}


def test_parts_of_another_gpu_are_not_added_to_a_file() -> None:
    head = {"benchmark": "gpu", "dry_run": False, "commit": "abcdef0", "gpu": {"name": "H100"}, "versions": {}}
    old, new = ({**head, "parts": {name: {"seconds": 1.0}}} for name in ("numerics", "products"))
    assert list(script.merged(old, new)["parts"]) == ["numerics", "products"]
    again = {**head, "parts": {"numerics": {"seconds": 2.0}}}
    assert script.merged(old, again)["parts"] == {"numerics": {"seconds": 2.0}}
    assert script.merged(None, new) is new
    with pytest.raises(script.MergeError, match=r"^commit was abcdef0 and is 1234567; give another --out, or remove "):
        script.merged(old, {**new, "commit": "1234567"})


@pytest.mark.parametrize("distance", [1, 32, 128, 1024])
def test_the_bits_that_a_simulated_adder_keeps_are_found(distance: int) -> None:
    def bits(adder: Adder) -> int:
        return kept_bits(partial(add_in, adder=adder), distance, length=1056, size=16)

    assert bits(Adder()) == 13
    assert bits(Adder(block=16)) == 13
    assert bits(Adder(promotion=128)) == (13 if distance < 128 else 23)
    assert bits(Adder(promotion=32)) == (13 if distance < 32 else 23)
    assert kept_bits(partial(add_products, accumulator="fp32"), distance, length=1056, size=16) == 23


def test_cutting_is_told_from_rounding() -> None:
    assert cuts(partial(add_products, accumulator="fp22"), 1, size=16)
    assert not cuts(partial(add_products, accumulator="fp32"), 1, size=16)
    assert not cuts(lambda x, w: add_products(x, w, "fp32").bfloat16().float(), 1, size=16)


def test_a_sum_rounded_to_bf16_keeps_fewer_than_eight_bits() -> None:
    assert kept_bits(lambda x, w: add_products(x, w, "fp32").bfloat16().float(), 1, size=16) == 7


@pytest.mark.parametrize("values", [0, 1, 5000])
@pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")
def test_a_kernel_in_shared_memory_counts_what_bincount_counts(values: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it comes with PyTorch for NVIDIA GPUs)")
    from gpu import counting

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(values, generator=torch.Generator().manual_seed(0)) * torch.arange(values).remainder(3)
    patterns = x.to(torch.bfloat16).abs().view(torch.int16)
    patterns[:1] = PATTERNS - 1
    found = counting.shared(patterns.to(device), 3).cpu()
    assert found.dtype == torch.int64
    assert torch.equal(found, torch.bincount(patterns, minlength=PATTERNS))


COMPILED = """
import sys
sys.path.insert(0, "benchmarks")
from fp8q.calibrate.measure import counting_kernel as k
from gpu import counting as c
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
for kernel, block, warps in ((k._private, k.BLOCK, 4), (c._shared, c.BLOCKS * k.BLOCK, 32)):
    types = {"patterns_at": "*i16", "tables_at": "*i32", "count": "i32", "bins": "constexpr", "block": "constexpr"}
    source = ASTSource(kernel, types, {"bins": k.PATTERNS, "block": block})
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    print(kernel.__name__, made.metadata.shared)
"""


def test_kernels_that_count_compile_for_hopper_within_its_shared_memory() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it comes with PyTorch for NVIDIA GPUs)")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["_private 0", f"_shared {4 * PATTERNS}"]
    assert 4 * PATTERNS < 227 * 1024


@pytest.mark.parametrize("name", ["numerics", "calibration", "decoder"])
def test_a_part_whose_time_is_over_begins_nothing_and_names_what_it_left_out(name: str) -> None:
    part = Part(strict=True)
    import_module(f"gpu.{name}").measure(Setting(dry=True, begun=time.monotonic() - 1000), part)
    assert part.tables == {}
    assert [*part.skipped.values()].count("the part's time is over") >= 3


def test_a_contender_that_fails_is_named_and_ends_nothing_but_in_a_dry_run() -> None:
    def fails() -> float:
        raise RuntimeError("no kernel image\nand more")

    part = Part()
    assert part.tried("cuBLAS", fails) is None
    assert part.tried("other", lambda: 2.0) == 2.0
    assert part.skipped == {"cuBLAS": "RuntimeError: no kernel image"}
    with pytest.raises(RuntimeError, match="no kernel image"):
        Part(strict=True).tried("cuBLAS", fails)


def test_break_even_is_the_size_from_which_on_all_are_faster() -> None:
    base = {1: 1.0, 16: 1.0, 128: 1.0, 2048: 10.0}
    assert break_even(base, {1: 0.9, 16: 1.1, 128: 0.9, 2048: 6.0}) == 128
    assert break_even(base, {1: 0.9, 16: 0.9, 128: 0.9, 2048: 11.0}) is None
    assert break_even(base, {1: 0.9, 16: 0.9, 128: 0.9, 2048: 6.0}) == 1


def test_a_target_is_met_on_its_own_side() -> None:
    part = Part()
    part.target("times", 1.6, 1.58, least=True)
    part.target("overhead", 1.2, 1.1)
    part.target("unknown", None, 1.1)
    assert [each["met"] for each in part.targets] == [True, False, None]
    assert shown([{"a": 1, "b": None}, {"a": 12.3456, "b": True}]).splitlines() == [
        "    a     b",
        "    1     -",
        "12.35  True",
    ]
