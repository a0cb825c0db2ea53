"""A whole graph with a cache in blocks: prompts and steps agree on ONNX Runtime, and an engine reads the cache once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fp8q.core.reporter import SILENT
from fp8q.export.engine.build import Job, build
from fp8q.export.engine.cache_traffic import cache_traffic
from fp8q.export.engine.plan import read_plan
from fp8q.export.engine.profiles import profiles
from fp8q.export.graph.trace import trace
from fp8q.export.modules.graph_model import GraphPlan
from fp8q.export.onnx_file.loading import load_graph
from fp8q.serve.loop.device_batch import DeviceBatch
from fp8q.serve.loop.device_kernels import load_kernels
from fp8q.serve.loop.sessions import OnnxRuntimeSession, SessionError
from tests.serve.host_engine import HostDevice, HostProgram

if TYPE_CHECKING:
    from pathlib import Path

    from fp8q.serve.loop.cache import HostCache

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, with its graphs in FP32 and BF16."""
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.Module.to(model, torch.bfloat16).save_pretrained(folder)
    for name, dtype in (("model.fp32.onnx", torch.float32), ("model.onnx", torch.bfloat16)):
        ir.save(trace(folder, GraphPlan({}, (), dtype)), folder / name)
    return folder


def test_rows_decoded_over_blocks_have_the_logits_of_whole_ones(checkpoint: Path) -> None:
    session = OnnxRuntimeSession(checkpoint / "model.fp32.onnx", 1)
    assert session.layout.in_blocks
    ids = np.random.default_rng(0).integers(0, 64, (2, 76))
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(76), ids.shape))
    whole = session.forward(ids, np.ones_like(ids), positions)[0]
    lengths = np.array([70, 3])
    batch = session.open_batch(2, 76)
    batch.reserve(76, 76, 0)
    for row, length in enumerate(lengths.tolist()):  # in chunks, of which the last has one token
        for at in range(0, length, 23):
            count = min(23, length - at)
            logits = batch.prefill(row, ids[row : row + 1, at : at + count], np.array([at]), np.array([count]))
        np.testing.assert_allclose(logits[0], whole[row, length - 1], atol=1e-4)
    for step in range(6):
        tokens = np.array([ids[0, 70 + step], ids[1, 3 + step]])
        logits = np.stack(batch.decode(tokens, lengths + step).rows([0, 1]))
        for row, length in enumerate(lengths.tolist()):
            np.testing.assert_allclose(logits[row], whole[row, length + step], atol=1e-4)


def test_a_device_decodes_over_blocks_what_host_memory_decodes(checkpoint: Path) -> None:
    """In memory that is as late as a GPU's: prompts by copies, steps by the kernel, rows that move and grow."""
    session, device = OnnxRuntimeSession(checkpoint / "model.fp32.onnx", 1), HostDevice()
    program = HostProgram(session, device)
    kernels = load_kernels(device, session.layout)
    assert kernels is not None
    on_device, on_host = DeviceBatch(program, device, 3, 512, kernels), session.open_batch(3, 512)
    ids = np.random.default_rng(2).integers(0, 64, (3, 160))
    lengths = np.array([70, 3, 128])
    for batch in (on_device, on_host):
        batch.reserve(140, 512, 0)
    for row, length in enumerate(lengths.tolist()):
        found, expected = [
            batch.prefill(row, ids[row : row + 1, :length], np.zeros(1, np.int64), np.array([length]))
            for batch in (on_device, on_host)
        ]
        np.testing.assert_allclose(found, expected, atol=1e-4)
    for step in range(8):
        tokens = ids[np.arange(3), lengths + step]
        found, expected = (
            np.stack(batch.decode(tokens, lengths + step).rows([0, 1, 2])) for batch in (on_device, on_host)
        )
        np.testing.assert_allclose(found, expected, atol=1e-4)
    for batch in (on_device, on_host):
        batch.reserve(300, 512, 3)
        batch.move(2, 0, 136)
    for step in range(3):
        tokens, filled = ids[[2, 1], [136 + step, 11 + step]], np.array([136 + step, 11 + step])
        found, expected = (np.stack(batch.decode(tokens, filled).rows([0, 1])) for batch in (on_device, on_host))
        np.testing.assert_allclose(found, expected, atol=1e-4)
    assert "scatter" in device.launched


def test_the_bits_of_a_row_do_not_depend_on_the_room_of_others(checkpoint: Path) -> None:
    session = OnnxRuntimeSession(checkpoint / "model.fp32.onnx", 1)
    ids = np.random.default_rng(1).integers(0, 64, (2, 320))
    batch, alone = session.open_batch(2, 1024), session.open_batch(1, 1024)
    batch.reserve(600, 1024, 0)
    alone.reserve(300, 1024, 0)
    assert (batch.capacity, alone.capacity) == (768, 512)  # a sum over 10 blocks has another order than over 5
    eight = np.array([8, 8])
    for at in range(0, 288, 8):
        among = batch.prefill(0, ids[:, at : at + 8], np.array([at, at]), eight)
        lone = alone.prefill(0, ids[:1, at : at + 8], np.array([at]), eight[:1])
        np.testing.assert_array_equal(lone[0], among[0])
    for at in range(288, 293):
        among = np.stack(batch.decode(ids[:, at], np.array([at, at])).rows([0]))
        lone = np.stack(alone.decode(ids[:1, at], np.array([at])).rows([0]))
        np.testing.assert_array_equal(lone[0], among[0])


def test_a_buffer_of_broken_blocks_is_refused(checkpoint: Path) -> None:
    def cache(slots: int) -> HostCache:
        return OnnxRuntimeSession(checkpoint / "model.fp32.onnx", 1).new_cache(1, slots)

    assert cache(128).capacity == 128
    with pytest.raises(SessionError) as refused:
        cache(100)
    assert str(refused.value) == "a cache of 100 slots is not of whole blocks of 64; take 128"


@pytest.mark.parametrize("target", ["sm89", "sm120"])
def test_a_decode_step_of_the_engine_reads_each_byte_of_the_cache_once(checkpoint: Path, target: str) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'")
    graph, sizes = load_graph(checkpoint / "model.onnx"), profiles(4, 256)
    plan = read_plan(build(checkpoint / "model.onnx", Job("tensorrt-rtx", target, sizes), SILENT))
    assert plan is not None
    found = cache_traffic(plan, graph, sizes)
    assert found is not None
    assert (found.read, found.written, found.copying) == (2 * found.values, 0, ())
    assert [kernel.name for kernel in plan.kernels[0] if "mha" in kernel.name] == ["_gemm_mha_v2"] * 2
