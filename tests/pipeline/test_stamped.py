"""Layers made from others of their kind are, byte for byte, what tracing each of them gives."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen3Config

from fp8q.calibrate.measure.statistics import load_record
from fp8q.core.reporter import Standing
from fp8q.export.graph.trace import export_graphs, graph_plan, stamped, trace_all
from fp8q.export.modules.graph_model import GraphPlan
from fp8q.export.modules.layer_kinds import NotAlikeError
from fp8q.quantize.scales.decisions import load_scales

from ..architectures import ARCHITECTURES
from .conftest import what_it_is

pytestmark = pytest.mark.slow

SLIDING, FULL = "sliding_attention", "full_attention"
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def written(model: ir.Model, path: Path) -> bytes:
    """The model as it is saved."""
    ir.save(model, path)
    return path.read_bytes()


#: Trained, with biases and Conv1D: the layers of the other trained ones have no part that these, or the random ones
#: below, lack, and a full trace takes half a minute.
TRACED_IN_FULL = [case for case in ARCHITECTURES if case.name in ("qwen2", "gpt2")]


@pytest.mark.parametrize("finished", TRACED_IN_FULL, ids=what_it_is, indirect=True)
def test_the_graph_of_a_run_is_that_of_a_full_trace(finished: Any, tmp_path: Path) -> None:
    run = finished.run
    plan = graph_plan(load_record(run), load_scales(run), finished.architecture.dtype)
    copied = run.onnx.read_bytes()
    assert b"layers.2." in copied or b".h.2." in copied
    assert copied == written(trace_all(run.model, plan), tmp_path / "traced.onnx")


def test_so_it_is_of_a_random_architecture_with_as_many_layers(deep: tuple[Path, GraphPlan]) -> None:
    folder, plan = deep
    copied, traced = (
        written(make(folder, plan), folder / name)
        for make, name in ((stamped, "copied.onnx"), (trace_all, "traced.onnx"))
    )
    assert b"layers.2." in copied
    assert copied == traced


def test_so_it_is_of_two_kinds_in_turn(tmp_path: Path, as_if_quantized: Callable[..., GraphPlan]) -> None:
    """With one GEMM of the third layer left in BF16, which makes that a kind of its own."""
    types = [SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, FULL]
    config = Qwen3Config(
        **TINY, head_dim=16, num_hidden_layers=9, use_sliding_window=True, sliding_window=4, layer_types=types
    )
    plan = as_if_quantized(tmp_path, config, "kv", torch.float32, "layers.2.mlp.down_proj")
    assert written(stamped(tmp_path, plan), tmp_path / "a.onnx") == written(
        trace_all(tmp_path, plan), tmp_path / "b.onnx"
    )


def test_a_model_whose_layers_compute_with_their_index_is_not_copied(
    tmp_path: Path, as_if_quantized: Callable[..., GraphPlan]
) -> None:
    """GPT-2 divides its scores by the layer's number there."""
    fields: dict[str, Any] = {
        "vocab_size": 64,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 5,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = GPT2Config(**fields, scale_attn_by_inverse_layer_idx=True)
    plan = as_if_quantized(tmp_path, config, "", torch.bfloat16)
    with pytest.raises(NotAlikeError, match="every layer is one of the first two or the last of its kind"):
        stamped(tmp_path, plan)


class Counting:
    """A reporter that keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.total = (0, "")

    def note(self, line: str) -> None:
        """Notes do not matter here."""

    @contextmanager
    def track(
        self, description: str, total: int, unit: str = "steps", standing: Standing | None = None
    ) -> Iterator[Callable[[int], None]]:
        """Keep each number."""
        self.total = (total, unit)
        yield self.told.append


def test_the_bar_moves_with_each_layer_and_ends_at_its_total(
    tmp_path: Path, as_if_quantized: Callable[..., GraphPlan]
) -> None:
    plan, report = as_if_quantized(tmp_path, LlamaConfig(**TINY, num_hidden_layers=1), "", torch.bfloat16), Counting()
    export_graphs(tmp_path, plan, report)
    assert report.total == (4, "steps")
    assert report.told == [1, 1] * 2
