"""The script for GPUs, as far as a CPU can hold it: its dry run, its file, and the experiments on what is simulated."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from gpu import run as script
from gpu import serve, timing
from gpu.adder_bits import cuts, kept_bits
from gpu.products import break_even
from gpu.timing import Kind, Part, Setting, shown

from fp8q.calibrate.model import launching
from fp8q.core.run import Run
from fp8q.quantize.reference.adder import Adder, accumulated_gemm, add_in
from tests.stand_in import torch_cuda

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
    parts = ("products", "plugin", "calibration", "rounding", "decoder")
    _, first = dry_run(out, *(word for part in parts for word in ("--part", part)))
    run = "--run", str(demo_run.root)
    found, second = dry_run(out, "--part", "numerics", "--part", "engines", "--part", "serve", *run)
    return found, first + second


def test_a_dry_run_goes_through_every_part_and_says_that_it_is_one(dry: tuple[Any, str]) -> None:
    found, printed = dry
    assert found["dry_run"] is True
    assert sorted(found["parts"]) == sorted(script.PARTS)
    assert printed.count(script.DRY) == len(script.PARTS)
    for part in found["parts"].values():
        assert set(part) == {"seconds", "error", "tables", "targets", "skipped", "steps", "left_out"}
        assert part["left_out"] == []
        assert all(set(step) == {"step", "estimated_s", "by", "seconds"} for step in part["steps"])
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
    assert ways >= {"bf16", "fp8 alone", "FP8Linear", "FP8Linear, two terms", "bf16, dequantized weights"}
    least = parts["products"]["tables"]["dequantized weights in BF16 are faster than two terms from so many tokens on"]
    assert [row["product"] for row in least] == ["tiny qkv", "tiny odd"]
    assert all(row["tokens"] in (1, 16, None) for row in least)


def test_every_kind_of_products_decodes_at_the_first_batch_before_any_other(dry: tuple[Any, str]) -> None:
    rows = dry[0]["parts"]["decoder"]["tables"]["decode"]
    kinds = ["bf16", "fp8", "fp8, two terms"]
    assert [(row["batch"], row["kind"]) for row in rows[::2]] == [(batch, kind) for batch in (2, 1) for kind in kinds]


def test_a_contender_that_was_served_is_not_served_again(demo_run: Run, dry: tuple[Any, str], tmp_path: Path) -> None:
    served = dry[0]["parts"]["serve"]["tables"]["serving"]
    assert [(row["by"], row["clients"]) for row in served] == [("fp8q, onnxruntime", 1), ("fp8q, onnxruntime", 2)]
    assert all(row["tokens_per_second"] > 0 and row["memory_bytes"] > 0 and row["version"] for row in served)
    part = Part(strict=True)
    serve.measure(Setting(dry=True, run=demo_run.root, earlier={"serving": served}), part)
    assert (part.tables["serving"], part.steps) == (served, [])


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
    assert kept_bits(partial(accumulated_gemm, accumulator="fp32"), distance, length=1056, size=16) == 23


def test_cutting_is_told_from_rounding() -> None:
    assert cuts(partial(accumulated_gemm, accumulator="fp22"), 1, size=16)
    assert not cuts(partial(accumulated_gemm, accumulator="fp32"), 1, size=16)
    assert not cuts(lambda x, w: accumulated_gemm(x, w, "fp32").bfloat16().float(), 1, size=16)


def test_a_sum_rounded_to_bf16_keeps_fewer_than_eight_bits() -> None:
    assert kept_bits(lambda x, w: accumulated_gemm(x, w, "fp32").bfloat16().float(), 1, size=16) == 7


COMPILED = """
from fp8q.calibrate.measure import counting_kernel as k
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
types = {"patterns_at": "*i16", "tables_at": "*i32", "count": "i32", "bins": "constexpr", "block": "constexpr"}
made = compile(ASTSource(k._private, types, {"bins": k.PATTERNS, "block": k.BLOCK}), target=GPUTarget("cuda", 90, 32))
print(made.metadata.shared)
"""


def test_the_kernel_that_counts_compiles_for_hopper_without_shared_memory() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it comes with PyTorch for NVIDIA GPUs)")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize("name", ["numerics", "calibration", "decoder"])
def test_a_part_whose_time_is_over_begins_nothing_and_names_what_it_left_out(name: str) -> None:
    part = Part(strict=True)
    import_module(f"gpu.{name}").measure(Setting(dry=True, begun=time.monotonic() - 1000), part)
    assert (part.tables, part.steps) == ({}, [])
    assert len(part.left_out) >= 5
    assert all(set(each) == {"step", "estimated_s", "by", "left_s"} for each in part.left_out)


def test_a_step_begins_only_if_the_last_one_of_its_kind_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def takes(seconds: float) -> Callable[[], str]:
        def work() -> str:
            clock[0] += seconds
            return "done"

        return work

    part, setting = Part(), Setting(dry=True, begun=clock[0])
    assert part.step(setting, "one", takes(100), Kind("short", 10)) == "done"
    assert part.step(setting, "twice as long", takes(190), Kind("short", 10, 2.0)) == "done"  # 190 s are left
    assert part.step(setting, "three times", takes(0), Kind("short", 10, 3.0)) is None  # by 95 s each
    assert part.step(setting, "of another kind", takes(10), Kind("long", 189)) == "done"
    assert part.steps == [
        {"step": "one", "estimated_s": 10, "by": "a guess", "seconds": 100},
        {"step": "twice as long", "estimated_s": 200, "by": "short", "seconds": 190},
        {"step": "of another kind", "estimated_s": 189, "by": "a guess", "seconds": 10},
    ]
    assert part.left_out == [{"step": "three times", "estimated_s": 285, "by": "short", "left_s": 190}]


@pytest.mark.parametrize("name", ["products", "plugin", pytest.param("calibration", marks=pytest.mark.slow), "decoder"])
@pytest.mark.filterwarnings("ignore:CUDA is not available, disabling CUDA profiling:UserWarning")
def test_the_code_for_a_gpu_runs_on_a_stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, module = Part(strict=True), import_module(f"gpu.{name}")
    for place in (module, launching):
        monkeypatch.setattr(place, "has_triton", lambda: False, raising=False)  # its kernels want the driver
    with torch_cuda.cuda() as graphs:
        module.measure(Setting(dry=False, tiny=True), part)
    assert part.left_out == []
    assert set(part.skipped) <= {"quantization by the kernel", "kernels that count"}
    assert all(part.tables.values())
    if name == "decoder":
        rows = part.tables["decode"]
        assert all(row["joules_per_token"] > 0 and row["memory_bytes"] == 1 for row in rows)
        assert len(graphs) == len(rows) + 3, "tokens and joules are of one graph; a prefill has its own"
        counted = [graph.replays for graph in graphs]
        assert sorted(counted)[:3] == [1 + timing.ROUNDS] * 3
        assert min(sorted(counted)[3:]) >= 2 + timing.ROUNDS + 1


@pytest.fixture
def engines_on(demo_run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Part, list[tuple[Path, str]]]]:
    """`engines_on(capability, *runtimes)`: the part `engines` on a stand-in for that GPU, and which run was built for
    which runtime. Perplexity through an engine is `tests/pipeline/test_commands_on_a_gpu.py`'s.
    """
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'")
    from gpu import engines

    from fp8q import api
    from tests.stand_in.driver import Driver
    from tests.stand_in.runtime import machine

    build, built = api.build_engine, list[tuple[Path, str]]()
    monkeypatch.setattr(engines, "perplexity", lambda run, runtime: 1.0)

    def measured(capability: tuple[int, int], *runtimes: str) -> tuple[Part, list[tuple[Path, str]]]:
        driver = Driver()
        driver.capability = capability
        with torch_cuda.cuda(capability), machine(driver, *runtimes) as gpu:

            def building(path: Path, options: api.EngineOptions) -> Any:
                assert not [*Run(path).engines.glob("*.plan")], "a session opens the engine that it finds"
                built.append((path, options.runtime))
                found = build(path, options)
                for info in found:
                    gpu.knows(Run(path).engines / f"{info.target}.plan", Run(path).onnx_fp32)
                return found

            monkeypatch.setattr(api, "build_engine", building)
            present = {name for name in engines.RUNTIMES.values() if name in runtimes}
            monkeypatch.setattr(engines, "find_spec", lambda name: name in present or None)
            part = Part()
            engines.measure(Setting(dry=False, tiny=True, run=demo_run.root), part)
        return part, built

    return measured


@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX 1.2:DeprecationWarning")
def test_of_two_runtimes_each_opens_what_it_built(engines_on: Callable[..., Any]) -> None:
    part, built = engines_on((8, 9), "tensorrt", "tensorrt_rtx")
    assert sorted(runtime for _, runtime in built) == ["tensorrt", "tensorrt-rtx"]
    assert len({path for path, _ in built}) == 2
    of_this = [row for row in part.tables["engines"] if row["target"] == "sm89"]
    assert sorted(row["engine"].partition(",")[0] for row in of_this) == ["tensorrt", "tensorrt-rtx"]
    assert {row["engine"] for row in part.tables["answers"]} == {row["engine"] for row in of_this}
    assert sum(each["met"] is True for each in part.targets) == 2


def test_engines_of_other_gpus_meet_no_target(engines_on: Callable[..., Any]) -> None:
    part, _ = engines_on((9, 0), "tensorrt_rtx")
    assert {row["target"] for row in part.tables["engines"]} == {"sm89", "sm120"}
    assert {each["met"] for each in part.targets} == {None}
    assert part.skipped["tensorrt"] == "tensorrt is not installed"


def test_the_head_of_a_gpus_results() -> None:
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode != 0:
        pytest.skip("there is no git history here, and results name their commit")
    with torch_cuda.cuda():
        head = script.head(dry=False)
    assert head["gpu"]["name"] == torch_cuda.NAME
    assert (head["gpu"]["capability"], head["gpu"]["driver"]) == ("sm90", "0")
    assert script.file_of(head).name == "gpu_stand_in.json"


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
