"""When an engine is built of the other form of its graph, and what is written then.

TensorRT itself is not here. Its inspector is stood in for by what NVIDIA says of it (a GEMM with per-channel scales
in its DequantizeLinear runs wide); the graphs, and the engines of TensorRT-RTX that are built of them, are real.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest

from fp8q.core.errors import BackendError
from fp8q.core.reporter import SILENT, Silent
from fp8q.export.engine.build import (
    Built,
    Job,
    better,
    build_engine,
    in_better_form,
    in_buildable_form,
    worth_trying,
)
from fp8q.export.engine.plan import Evidence, read_plan
from fp8q.export.engine.profiles import profiles
from fp8q.export.engine.runtime import MaybeAttentionError, may_be_attention
from fp8q.export.graph.weight_scale_form import recorded_form
from fp8q.export.onnx_file.loading import load_graph

Decoders = Callable[..., Any]
WIDE, ALL = {"a": "bf16 × bf16 -> bf16"}, {"a": "bf16 × bf16 -> bf16", "b": "bf16 × bf16 -> bf16"}


class Told(Silent):
    """A reporter that keeps the notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Evidence("inspector", not_fp8=WIDE), True),
        (Evidence("inspector", frozenset("ab")), False),
        (Evidence("inspector", frozenset("ab"), narrow=frozenset("a")), False),
        (Evidence("plan", not_fp8=WIDE), False),  # TensorRT-RTX makes the same of both
        (Evidence("unknown", not_fp8=ALL), False),
    ],
)
def test_the_other_form_is_tried_where_the_inspector_shows_wide_products(found: Evidence, expected: bool) -> None:
    assert worth_trying(found) is expected


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (Evidence("inspector", frozenset("ab")), True),
        (Evidence("inspector", frozenset("a"), WIDE), True),
        (Evidence("inspector", frozenset("ab"), narrow=frozenset("b")), True),
        (Evidence("inspector", frozenset("ab"), narrow=frozenset("ab")), True),  # codes at least
        (Evidence("inspector", not_fp8=ALL), False),
        (Evidence("unknown"), False),
    ],
)
def test_the_engine_with_fewer_products_short_of_the_promise_is_kept(second: Evidence, expected: bool) -> None:
    assert better(Evidence("inspector", not_fp8=ALL), second) is expected


def building(modules: tuple[str, ...], wide: dict[str, int], refused: str = "") -> Callable[[Path, Path], Built]:
    """Builds with TensorRT-RTX, and tells of the engine what an inspector would that finds the first `wide[form]`
    GEMMs wide; of the form `refused` nothing can be built.
    """
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'")
    job = Job("tensorrt-rtx", "sm89", profiles(2, 64))

    def build(graph: Path, path: Path) -> Built:
        form = recorded_form(load_graph(graph))
        if form == refused:
            raise BackendError("TensorRT 10.15 cannot build it", "no such kernel")
        info, found = build_engine(graph, path, job, modules, SILENT)
        assert (found.kind, len(found.fp8)) == ("plan", 7)
        shown = dict.fromkeys(modules[: wide[form]], "bf16 × bf16 -> bf16 in profile 0")
        return info, replace(found, kind="inspector", fp8=found.fp8 - shown.keys(), not_fp8=shown)

    return build


def test_the_other_form_is_built_and_its_graph_written_beside_the_engine(decoder: Decoders, tmp_path: Path) -> None:
    written, told = decoder(), Told()
    before = {path: path.read_bytes() for path in written.path.parent.iterdir()}
    (engines := tmp_path / "engines").mkdir()
    build = building(written.modules, {"dq": 7, "mul": 0})
    (info, found), graph = in_better_form(written.path, engines / "sm90.plan", build, told)
    assert told.lines == [
        "sm89: with --apply-scales dq 7 of 7 GEMMs are not FP8 on both sides, 0 with mul; the second is kept"
    ]
    assert (graph, info.weight_scale, found.not_fp8) == (engines / "sm90.onnx", "mul", {})
    assert {path.name for path in engines.iterdir()} == {"model.safetensors", "sm90.onnx", "sm90.plan"}
    assert recorded_form(load_graph(graph)) == "mul"
    plan = read_plan((engines / "sm90.plan").read_bytes())
    assert plan is not None
    assert any("rescale" in layer for kernel in plan.kernels[0] for layer in kernel.layers)
    assert {path: path.read_bytes() for path in written.path.parent.iterdir()} == before
    onnx.load_model(written.path)  # nothing at the data that ONNX refuses


@pytest.mark.parametrize(
    ("wide", "refused", "note"),
    [
        ({"dq": 2, "mul": 2}, "", "2 of 7 GEMMs are not FP8 on both sides, 2 with mul; the first is kept"),
        (
            {"dq": 2, "mul": 0},
            "mul",
            (
                "2 of 7 GEMMs are not FP8 on both sides; with mul it cannot be built: TensorRT 10.15 cannot build "
                "it: no such kernel"
            ),
        ),
    ],
)
def test_where_the_other_form_does_no_better_nothing_of_it_stays(
    decoder: Decoders, tmp_path: Path, wide: dict[str, int], refused: str, note: str
) -> None:
    written, told, path = decoder(), Told(), tmp_path / "sm90.plan"
    build = building(written.modules, wide, refused)
    (info, found), graph = in_better_form(written.path, path, build, told)
    assert told.lines == [f"sm89: with --apply-scales dq {note}"]
    assert (graph, info.weight_scale, len(found.not_fp8)) == (written.path, None, 2)
    assert {each.name for each in tmp_path.iterdir()} == {"model", "sm90.plan"}


def known_heads(model: onnx.ModelProto) -> None:
    """State the shapes of keys and values, which a graph that fp8q exports states."""
    for node in model.graph.node:
        for name in node.input[1:3] if node.op_type == "Attention" else ():
            shape: list[str | int | None] = ["batch", 2, "slots", 8]
            model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.BFLOAT16, shape))


def test_attention_without_a_fused_kernel_is_built_as_plain_gemms(
    decoder: Decoders, edited: Callable[..., None], tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'")
    written, told = decoder(head_size=8), Told()
    edited(written.path, known_heads)
    (engines := tmp_path / "engines").mkdir()
    job = Job("tensorrt-rtx", "sm89", profiles(2, 64))
    build = partial(build_engine, job=job, fp8_modules=written.modules, report=SILENT)
    (info, found), graph = in_buildable_form(written.path, engines / "sm89.plan", build, told)
    assert "there is no fused attention kernel for its type, head size" in told.lines[0]
    assert told.lines[0].endswith("; building it with plain attention in 1 layer")
    assert (info.plain_attention, info.weight_scale, info.fp8_products, len(found.fp8)) == (True, None, 7, 7)
    assert graph == engines / "sm89.onnx"
    assert {path.name for path in engines.iterdir()} == {"model.safetensors", "sm89.onnx", "sm89.plan"}


def test_a_graph_that_builds_in_no_form_fails_by_both_reasons(
    decoder: Decoders, edited: Callable[..., None], tmp_path: Path
) -> None:
    written = decoder(head_size=8)
    edited(written.path, known_heads)
    tried = list[Path]()

    def build(graph: Path, path: Path) -> Built:
        tried.append(graph)
        kind = MaybeAttentionError if graph == written.path else BackendError
        raise kind(f"TensorRT 10.15 cannot build {graph.name}", f"for reason {len(tried)}", f"remedy {len(tried)}")

    expected = "TensorRT 10.15 cannot build model.onnx: for reason 1; with plain attention: for reason 2; remedy 2"
    with pytest.raises(BackendError, match=f"^{re.escape(expected)}$"):
        in_buildable_form(written.path, tmp_path / "sm90.plan", build, Told())
    assert tried == [written.path, tmp_path / "sm90.onnx"]


def test_a_graph_without_attention_is_not_built_twice(decoder: Decoders, tmp_path: Path) -> None:
    written, tried = decoder(plain_attention=True), list[Path]()

    def build(graph: Path, path: Path) -> Built:
        tried.append(graph)
        raise MaybeAttentionError("TensorRT 10.15 cannot build it", "it gave no reason")

    with pytest.raises(MaybeAttentionError, match="it gave no reason"):
        in_buildable_form(written.path, tmp_path / "sm90.plan", build, Told())
    assert tried == [written.path]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("the attention is not supported by a dedicated kernel", True),
        ("Internal error: no implementation", True),
        ("the model contains HW-specific datatypes: fp8_e4m3", False),
        ("out of memory", False),
    ],
)
def test_an_unknown_failure_may_be_of_attention(message: str, expected: bool) -> None:
    assert may_be_attention([message]) is expected
