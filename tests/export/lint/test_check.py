"""Every rule of the lint, broken in one way on a good graph, and found under its number and with its words."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from fp8q.core.errors import InputError
from fp8q.export.lint.check import RULES, Finding, lint_file, lint_graph
from fp8q.export.lint.rules import Expectation
from fp8q.export.onnx_file.loading import load_graph
from fp8q.options import BF16

from . import cases_codes, cases_gemms, cases_graph, cases_storage
from .changes import (
    DOWN,
    KEY,
    LAYER,
    Case,
    Decoders,
    Edit,
    Q,
    add_tensor,
    each,
    insert,
    node,
    set_place,
    set_tensor,
    versions,
    zero_point,
)

GOOD: list[dict[str, Any]] = [
    {},
    {"layers": 2},
    {"fp8_cache": False},
    {"bias": True},
    {"transposed": False},
    {"per_channel": False},
    {"compute": TensorProto.FLOAT},
    {"compute": TensorProto.FLOAT16},
    {"plain_attention": True, "key_value_heads": 4},
    {"wide": (Q, DOWN)},
    {"weight_scale": "mul"},
    {"weight_scale": "mul", "bias": True, "transposed": False, "compute": TensorProto.FLOAT16},
    {"weight_scale": "mul", "compute": TensorProto.FLOAT},
    {"two_terms": True},
    {"two_terms": True, "weight_scale": "mul"},
]
CASES = [*cases_codes.CASES, *cases_gemms.CASES, *cases_graph.CASES, *cases_storage.CASES]


def scattered_codes(model: ModelProto) -> None:
    add_tensor(model, "where", np.zeros(1, np.int64))
    scatter = helper.make_node(
        "TensorScatter", ["past_key_values.0.key", "new_key_values.0.key", "where"], ["codes"], name="scatter"
    )
    insert(model, f"{KEY}.dequantize", 0, scatter)
    versions(24, 12)(model)


def start_of(name: str) -> Callable[[Path], int]:
    """Where in the safetensors file a tensor begins."""

    def read(path: Path) -> int:
        data = path.with_name("model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        return 8 + length + int(json.loads(data[8 : 8 + length])[name]["data_offsets"][0])

    return read


@pytest.mark.parametrize("options", GOOD, ids=str)
def test_a_good_graph_has_no_findings(decoder: Decoders, options: dict[str, Any]) -> None:
    written = decoder(**options)
    onnx.checker.check_model(written.path, full_check=True)
    assert lint_file(written.path, written.input_scales, written.weight_scales) == []
    assert lint_file(written.path, dict.fromkeys(written.modules)) == []
    assert lint_file(written.path) == []


def places(path: Path) -> dict[str, int | str]:
    """Numbers and names of the file that the expected texts mention."""
    size, down = path.with_name("model.safetensors").stat().st_size, start_of(f"{DOWN}.weight")(path)
    graph = onnx.load_model(path, load_external_data=False).graph
    gated = next(entry.input[0] for entry in graph.node if entry.name == f"{DOWN}.input.quantize")
    concat = next(entry.name for entry in graph.node if f"{KEY}.dequantize_past_output" in entry.input)
    return {
        "size": size,
        "size1": size + 1,
        "norm1": start_of("model.norm.weight")(path) + 1,
        "down16": down + 16,
        "down_end16": down + 16 + 32768,
        "scale": start_of(f"{DOWN}.weight_scale")(path),
        "gated": gated,
        "concat": concat,
    }


def promise_of(case: Case, written: Any) -> dict[str, float | None] | None:
    if case.foreign:
        return None
    if case.promised == {}:
        return {}
    changed = case.promised or {}
    kept = {module: scale for module, scale in written.input_scales.items() if f"-{module}" not in changed}
    return kept | {module: scale for module, scale in changed.items() if not module.startswith("-")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule} {case.expected[0][:60]}")
def test_a_broken_graph_gives_the_rule_and_its_words_and_nothing_else(
    decoder: Decoders, edited: Edit, case: Case
) -> None:
    written = decoder(**case.options)
    numbers = places(written.path) if any("{" in text for text in case.expected) else {}
    edited(written.path, case.change)
    inputs = promise_of(case, written)
    promise = None if inputs is None else Expectation(
        {name: scale for name, scale in inputs.items() if case.forms.get(name) != BF16},
        case.weight_scales, case.attention, case.cache, case.forms,
    )  # fmt: skip
    found = lint_graph(load_graph(written.path), promise)
    head = f"{case.rule} {RULES[case.rule].name}: "
    expected = [text if text.startswith("F") and text[1:4].isdigit() else head + text for text in case.expected]
    assert [str(finding) for finding in found] == [text.format(**numbers) if numbers else text for text in expected]
    assert {finding.severity for finding in found} == {RULES[case.rule].severity}


def test_every_rule_is_broken_by_a_case_above_and_says_why_it_is_there() -> None:
    assert {case.rule for case in CASES} == set(RULES)
    for rule in RULES.values():
        assert rule.why.strip().endswith(".")
        assert rule.severity in ("error", "warning")
    assert len({rule.name for rule in RULES.values()}) == len(RULES)


def test_findings_name_the_module(decoder: Decoders, edited: Edit) -> None:
    written = decoder(wide_inputs=(DOWN,))
    edited(written.path, set_place(f"{Q}.weight", length=1))
    found = lint_file(written.path, written.input_scales)
    assert [(finding.rule, finding.node, finding.module) for finding in found] == [
        ("F203", f"{DOWN}.matmul", DOWN), ("F404", f"{Q}.weight", Q),
    ]  # fmt: skip
    assert str(Finding("F302", "ir-version", "warning", "", None, "too old")) == "F302 ir-version: too old"


def test_fp8_tensor_scatter_is_refused_though_the_standard_allows_it(decoder: Decoders, edited: Edit) -> None:
    written = decoder()
    edited(written.path, scattered_codes)
    found = [str(finding) for finding in lint_file(written.path, written.input_scales)]
    assert (
        "F109 operator-takes-fp8: scatter: TensorScatter reads FP8 codes past_key_values.0.key (TensorRT refuses FP8 "
        "there); dequantize them first"
    ) in found


def test_an_opset_without_fp8_is_found(decoder: Decoders, edited: Edit) -> None:
    written = decoder()
    edited(written.path, versions(18, 11))
    found = [str(finding) for finding in lint_file(written.path)]
    assert "F301 opset: opset 18 has no FP8; export with opset 23" in found
    assert (
        f"F303 standard-operators: {LAYER}.self_attn.attention: Attention is no operator of opset 18; express it in "
        "standard ones"
    ) in found


def test_a_zero_point_of_zero_is_no_finding(decoder: Decoders, edited: Edit) -> None:
    written = decoder()
    edited(written.path, zero_point(np.array(0, ml_dtypes.float8_e4m3fn)))
    assert lint_file(written.path, written.input_scales) == []


def test_equal_scales_may_be_one_tensor(decoder: Decoders, edited: Edit) -> None:
    written = decoder()

    def merge(model: ModelProto) -> None:
        for entry in model.graph.node:
            entry.input[:] = [f"{Q}.input_scale" if name.endswith(".input_scale") else name for name in entry.input]

    edited(written.path, merge)
    assert lint_file(written.path, written.input_scales) == []


def test_a_scale_behind_a_cast_is_read(decoder: Decoders, edited: Edit) -> None:
    written = decoder()

    def widen(model: ModelProto) -> None:
        set_tensor(f"{DOWN}.input_scale", np.array(0.01953125, ml_dtypes.bfloat16))(model)
        cast = helper.make_node("Cast", [f"{DOWN}.input_scale"], ["wide_scale"], name="widen", to=TensorProto.FLOAT)
        insert(model, f"{DOWN}.input.quantize", 1, cast)
        node(model, f"{DOWN}.input.dequantize").input[1] = "wide_scale"

    edited(written.path, widen)
    assert lint_file(written.path, written.input_scales) == []
    assert [finding.rule for finding in lint_file(written.path, written.input_scales | {DOWN: 0.5})] == ["F206", "F206"]


def test_a_link_out_of_the_directory_is_found(decoder: Decoders, tmp_path: Path) -> None:
    written = decoder()
    weights = written.path.with_name("model.safetensors")
    weights.rename(tmp_path / "elsewhere.safetensors")
    weights.symlink_to(tmp_path / "elsewhere.safetensors")
    assert {finding.rule for finding in lint_file(written.path)} == {"F401"}


def test_a_file_that_is_no_safetensors_is_found(decoder: Decoders) -> None:
    written = decoder()
    weights = written.path.with_name("model.safetensors")
    weights.write_bytes(bytes(weights.stat().st_size))
    found = lint_file(written.path)
    assert (
        f"F405 external-tensor: {DOWN}.weight: its file model.safetensors has no safetensors header; copy the graph's "
        "whole directory again"
    ) in [str(finding) for finding in found]
    assert {finding.rule for finding in found} == {"F104", "F405"}


def test_external_data_in_other_files_are_held_to_their_bounds_alone(decoder: Decoders, edited: Edit) -> None:
    written = decoder()
    written.path.with_name("model.safetensors").rename(written.path.with_name("model.onnx.data"))
    stored = [
        entry.name
        for entry in onnx.load_model(written.path, load_external_data=False).graph.initializer
        if entry.external_data
    ]
    edited(written.path, each(*(set_place(name, location="model.onnx.data") for name in stored)))
    assert lint_file(written.path, written.input_scales) == []


def test_no_weight_is_read(decoder: Decoders) -> None:
    written = decoder(width=1024, hidden=2048)
    weights = written.path.with_name("model.safetensors").stat().st_size
    tracemalloc.start()
    assert lint_file(written.path, written.input_scales) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000 < 7_000_000 < weights


@pytest.mark.parametrize("data", [b"", b"\xff\xff no model", b"ONNX"], ids=str)
def test_a_file_that_is_no_graph_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(
        InputError, match=r"model\.onnx: is no ONNX model, or (is cut short|holds no node); export it again"
    ):
        lint_file(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as missing:
        lint_file(tmp_path / "model.onnx")
    assert str(missing.value) == f"{tmp_path / 'model.onnx'}: there is no such file"
