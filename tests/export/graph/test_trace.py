"""When every layer is traced although layers are alike."""

from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from fp8q.export.graph import trace
from fp8q.export.modules.graph_model import GraphPlan
from fp8q.export.modules.layer_kinds import NotAlikeError

PLAN = GraphPlan({}, (), torch.bfloat16)


@pytest.fixture
def fully_traced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories of which every layer was traced."""
    directories: list[Path] = []

    def trace_all(directory: Path, *_: object) -> ir.Model:
        directories.append(directory)
        return ir.Model(ir.Graph([], [], nodes=[]), ir_version=11)

    monkeypatch.setattr(trace, "trace_all", trace_all)
    return directories


def test_layers_that_are_not_alike_are_all_traced(
    fully_traced: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stamped(*_: object) -> ir.Model:
        raise NotAlikeError("layer 2 looks at its index")

    monkeypatch.setattr(trace, "stamped", stamped)
    trace.trace(tmp_path, PLAN)
    assert fully_traced == [tmp_path]


def test_a_missing_attribute_of_anything_else_does_not_fall_into_the_slow_path(
    fully_traced: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stamped(*_: object) -> ir.Model:
        raise AttributeError("'Config' object has no attribute 'rope_theta'")

    monkeypatch.setattr(trace, "stamped", stamped)
    with pytest.raises(AttributeError, match=r"^'Config' object has no attribute 'rope_theta'$"):
        trace.trace(tmp_path, PLAN)
    assert fully_traced == []
