"""The programs of a plan and the constants that they name, on real engines: each is read from its own place."""

import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fp8q.export.engine.expected_gemms import expected_gemms
from fp8q.export.engine.program import (
    Pool,
    Program,
    ProgramTensor,
    Statement,
    multiple,
    node_of,
    read_pool,
    read_programs,
    read_sizes,
    value_of,
)
from fp8q.export.onnx_file import names
from fp8q.export.onnx_file.loading import load_graph

Engines = Callable[..., tuple[Any, bytes]]
TARGETS = ("sm89", "sm120")


def main_programs(plan: bytes) -> list[Program]:
    """The programs of the two profiles."""
    return [program for program in read_programs(plan) if any(statement.nodes for statement in program.statements)]


def gemm_name(program: Program, module: str) -> Statement:
    (found,) = [statement for statement in program.statements if names.matmul(module) in statement.nodes]
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_both_profiles_name_the_same_constants_and_each_is_read_from_its_place(engine_of: Engines, target: str) -> None:
    written, plan = engine_of(target)
    pool, (own,) = read_pool(plan), expected_gemms(load_graph(written.path), ["model.layers.0.mlp.down_proj"])
    assert pool is not None
    programs = main_programs(plan)
    assert [(program.profile, program.targets) for program in programs] == [
        (profile, frozenset({target})) for profile in (0, 1)
    ]
    for program in programs:
        _, weight, alpha, beta = gemm_name(program, own.module).inputs
        for name, expected in ((alpha, [1.0]), (beta, [0.0]), (weight, own.codes)):
            found = pool.read(program.tensors[name])
            assert found is not None
            np.testing.assert_array_equal(found, expected)


def test_a_part_of_a_tensor_is_followed_to_the_product_that_makes_it(engine_of: Engines) -> None:
    program = main_programs(engine_of("sm89")[1])[0]
    merged = gemm_name(program, "model.layers.0.self_attn.k_proj")
    made, _ = program.root(merged.outputs[0])
    assert program.makers[made] is merged
    assert program.tensors[made].dims == (0, 512)  # rows are known at run time only; q, k and v are 256, 128, 128 wide
    offsets = sorted(program.root(kernel.inputs[at])[1] for kernel, at in program.readers[made])
    order = [4 * (256 if "q_proj" in node else 128) for node in merged.nodes]
    assert offsets == np.cumsum([0, *order[:-1]]).tolist()


def table(*offsets: int, count: int | None = None, size: int = 512) -> bytes:
    """A table of constants as a plan has it."""
    entries = b"".join(struct.pack("<QQ", *entry) for entry in enumerate(offsets))
    return entries + struct.pack("<IQ", len(offsets) if count is None else count, size)


def plan_of(front: bytes, end: int = 2048) -> bytes:
    """A plan of 2048 bytes whose last segment ends at `end`: a header, `front`, an empty program, constants."""
    text = b"header {\n  version = 5\n}\n\0"
    data = bytes(96) + struct.pack("<QQ", 1024, end - 1024) + bytes(9) + front + bytes(5) + text
    return data + bytes(range(256)) * 8


def test_the_pool_ends_where_the_last_segment_ends() -> None:
    front = table(0, 128, 256)
    data = plan_of(front, end=len(plan_of(front)) - 4)
    pool = read_pool(data)
    assert pool is not None
    assert pool.places == tuple(len(data) - 4 - 512 + offset for offset in (0, 128, 256))
    straight, turned = (
        pool.read(ProgramTensor("fp8", *shape, constant=1)) for shape in (((2, 3), (3, 1)), ((3, 2), (1, 3)))
    )
    assert straight is not None
    assert turned is not None
    assert straight.tobytes() == data[pool.places[1] :][:6]
    np.testing.assert_array_equal(turned, straight.T)


@pytest.mark.parametrize(
    "front",
    [
        pytest.param(b"", id="no table"),
        pytest.param(table(0, 128, 256, count=4), id="another count"),
        pytest.param(table(0, 256, 128), id="out of order"),
        pytest.param(table(0, 128, 1024), id="beyond the pool"),
        pytest.param(table(0, 128, size=1 << 40), id="a pool beyond the file"),
        pytest.param(table(0, 128) + table(0, 128), id="two tables"),
    ],
)
def test_a_table_that_does_not_read_leaves_no_pool(front: bytes) -> None:
    assert read_pool(plan_of(front)) is None


def test_a_plan_without_a_program_or_a_header_has_no_pool() -> None:
    assert read_pool(b"") is None
    assert read_pool(bytes(50)) is None
    assert read_pool(plan_of(table(0, 128)).replace(b"header {", b"HEADER {")) is None


@pytest.mark.parametrize(
    "tensor",
    [
        None,
        ProgramTensor("fp32", (4,), (1,)),
        ProgramTensor("fp32", (4,), (1,), constant=9),
        ProgramTensor("int64", (4,), (1,), constant=0),
        ProgramTensor("fp32", (0, 4), (4, 1), constant=0),
        ProgramTensor("fp32", (4,), (1, 1), constant=0),
        ProgramTensor("fp32", (1 << 40,), (1,), constant=0),
    ],
)
def test_what_is_no_constant_of_known_size_and_type_is_not_read(tensor: ProgramTensor | None) -> None:
    assert Pool(bytes(64), (0, 32)).read(tensor) is None


def test_numbers_of_every_type_are_read() -> None:
    numbers = np.array([1.5, -2.0], np.float32)
    for name, kind in (("fp32", np.float32), ("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)):
        found = Pool(bytes(4) + numbers.astype(kind).tobytes(), (4,)).read(ProgramTensor(name, (2,), (1,), constant=0))
        assert found is not None
        assert found.astype(np.float32).tolist() == [1.5, -2.0]


def test_a_label_names_its_node_and_profile() -> None:
    assert node_of("a.b.matmul") == ("a.b.matmul", 0)
    assert node_of(" a.b.matmul [profile 12]") == ("a.b.matmul", 12)


def test_a_kernel_finished_at_run_time_states_its_number_in_hexadecimal() -> None:
    lines = (
        b"header {\n  version = 4\n}\nmain {",
        b'  fully_connected={ name="a.values [profile 1]" output={"x" } input={"p" "v" "i" "j" } stream=0 }',
        b'  mul={ name="y" stream=0 alpha=43939A86f32  layers="[ONNX Layer: a.o.input.quantize]" }',
    )
    text = b"\n".join(lines) + b"\n}\n\0"
    (program,) = read_programs(text)
    assert (program.profile, program.scalings) == (1, (("a.o.input.quantize", np.float32(295.20721435546875)),))


def test_a_size_is_computed_from_those_that_are_known() -> None:
    """The rows of a tail of 64, as TensorRT-RTX computes them: seq + max(0, seq - max(0, seq - 64))."""
    text = b"""
  sub={ name="a" output={"over" } input={"seq" "__s^64i64" } stream=0  layers="" }
  max={ name="b" output={"begin" } input={"__s^0i64" "over" } stream=0  layers="" }
  mul={ name="c" output={"minus" } input={"begin" "__s^M1i64" } stream=0  layers="" }
  add={ name="d" output={"tail" } input={"minus" "seq" } stream=0  layers="" }
  add={ name="e" output={"rows" } input={"tail" "seq" } stream=0  layers="" }
  min={ name="f" output={"clamped" } input={"seq" "shape_subg0___s^8i64" } stream=0  layers="" }
  mul={ name="g" output={"whole" } input={"rows" "batch" } stream=0  layers="" }
  copy={ name="h" output={"again" } input={"again" }  stream=0  speculate={ }}
"""
    sizes = read_sizes(text)
    assert [value_of(sizes, "rows", {"seq": seq}) for seq in (1, 64, 65, 200)] == [2, 128, 129, 264]
    assert [value_of(sizes, "begin", {"seq": seq}) for seq in (1, 64, 65, 200)] == [0, 0, 1, 136]
    assert value_of(sizes, "clamped", {"seq": 200}) == 8
    assert value_of(sizes, "whole", {"seq": 1, "batch": 3}) == 6
    assert value_of(sizes, "256", {}) == 256
    for name in ("whole", "unknown", "again"):
        assert value_of(sizes, name, {"seq": 1}) is None


def test_a_size_is_a_number_of_times_another() -> None:
    text = b"""
  copy={ name="c" output={"rows_proxy" } input={"rows" }  stream=0  speculate={ }}
  mul={ name="m" output={"rows" } input={"{Node[a...b]}_half" "__s^4i64" } stream=0  layers="" }
  add={ name="a" output={"{Node[a...b]}_half" } input={"seq" "seq" } stream=0  layers="" }
  add={ name="s" output={"total" } input={"capacity" "seq" } stream=0  layers="" }
  mul={ name="r" output={"minus" } input={"seq" "__s^M1i64" } stream=0  layers="" }
"""
    sizes = read_sizes(text)
    assert multiple(sizes, "rows_proxy") == (8, "seq")
    assert multiple(sizes, "{Node[a...b]}_half") == (2, "seq")
    assert multiple(sizes, "4") == (4, "")
    for name in ("total", "minus", "unknown"):
        assert multiple(sizes, name) == (1, name)
    assert multiple({"a": ("copy", ("b",)), "b": ("copy", ("a",))}, "a")[0] == 1
