"""`--kv-cache v`: values in FP8, keys as they are, from the scales to the engine."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from gpu.waits import host_waits
from onnx import TensorProto
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.core.run import Run
from fp8q.quantize.reference.fp8_model import FP8Layer, round_to_codes
from fp8q.quantize.scales.decisions import load_scales
from fp8q.serve.loop.cache import BLOCK
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.stages.corpus import load_tokens
from tests.noise import check_codes

LAYERS = range(4)


@pytest.fixture(scope="module")
def run(demo_run: Run, keeping_graphs: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo with an FP8 cache, its scales chosen again with values alone in FP8."""
    with keeping_graphs():
        return api.scales(
            Path(shutil.copytree(demo_run.root, tmp_path_factory.mktemp("values") / "run")),
            api.RescaleOptions(kv_cache="v"),
        )


def test_rounding_a_part_uploads_no_scale() -> None:
    """Counted on the meta device."""
    scales = torch.empty(2, 1, device="meta").unbind()
    with host_waits() as counted:
        FP8Layer(*scales).update(*torch.empty(2, 1, 2, 3, 8, device="meta").unbind())
    assert (counted.waits, counted.to_device) == (0, 0)
    assert round_to_codes(torch.full((1,), 0.8), torch.tensor([0.1])).item() == 8 * np.float32(0.1)


def test_a_layer_rounds_the_part_that_has_a_scale() -> None:
    keys, values = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    scale = torch.tensor([0.0078125])
    kept, rounded = FP8Layer(None, scale).update(keys, values)
    assert torch.equal(kept, keys)
    assert torch.equal(rounded, round_to_codes(values, scale))
    assert not torch.equal(rounded, values)


def test_only_values_have_scales_and_they_are_those_of_the_whole_fp8_cache(run: Run, demo_run: Run) -> None:
    both = load_scales(demo_run).kv_cache
    assert load_scales(run).kv_cache == {
        f"model.layers.{layer}.self_attn.v": both[f"model.layers.{layer}.self_attn.v"] for layer in LAYERS
    }


def test_the_checkpoint_names_no_cache_scheme_and_transformers_finds_every_key_it_knows(run: Run) -> None:
    config = json.loads((run.model / "config.json").read_text())["quantization_config"]
    assert config.get("kv_cache_scheme") is None
    index = json.loads((run.model / "model.safetensors.index.json").read_text())["weight_map"]
    assert not [name for name in index if name.endswith(("k_scale", "v_scale"))]
    stored = load_file(run.model / "kv_cache.safetensors")
    assert {name: float(scale[0]) for name, scale in stored.items()} == {
        f"{name}_scale": scale.scale for name, scale in load_scales(run).kv_cache.items()
    }
    loaded: Any = AutoModelForCausalLM.from_pretrained(run.model, output_loading_info=True)
    report = loaded[1]
    assert (set(report["missing_keys"]), set(report["unexpected_keys"])) == (set(), set())
    card = (run.model / "README.md").read_text()
    assert "the values of the KV cache in E4M3 with one scale per layer, its keys in the compute type" in " ".join(
        card.split()
    )
    assert "compressed-tensors has no form for such a cache" in " ".join(card.split())


def test_the_graph_takes_and_gives_codes_for_values_alone(run: Run) -> None:
    for path, kind in ((run.onnx, TensorProto.BFLOAT16), (run.onnx_fp32, TensorProto.FLOAT)):
        graph = onnx.load(path, load_external_data=False).graph
        types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
        for layer in LAYERS:
            for side in ("past_key_values", "new_key_values"):
                assert types[f"{side}.{layer}.key"] == kind
                assert types[f"{side}.{layer}.value"] == TensorProto.FLOAT8E4M3FN


def test_onnx_runtime_says_what_the_reference_says_step_by_step_too(
    run: Run, exact_logits: Callable[[Run, np.ndarray], np.ndarray]
) -> None:
    ids = load_tokens(run, run.evaluation)[:24].reshape(2, 12)
    expected = exact_logits(run, ids)
    session = OnnxRuntimeSession(run.onnx_fp32)
    cache = session.new_cache(2, BLOCK)
    positions = np.broadcast_to(np.arange(12), ids.shape)
    steps = []
    for at in range(12):
        filled = (np.arange(BLOCK + 1) < at) | (np.arange(BLOCK + 1) == BLOCK)
        logits, new = session.forward(
            ids[:, at : at + 1],
            np.tile(filled, (2, 1)).astype(np.int64),
            positions[:, at : at + 1].copy(),
            cache.past(0, 2),
        )
        cache.write(0, positions[:, at : at + 1], new)
        steps.append(logits[:, 0])
    check_codes(run, ids, np.stack(steps, 1), expected)
    assert [buffer.dtype for buffer in cache.past(0, 1)[:2]] == [np.float32, np.uint8]


def test_every_promised_product_stays_fp8_in_the_engine(run: Run) -> None:
    pytest.importorskip("tensorrt_rtx")
    (engine,) = api.build_engine(
        run.root, api.EngineOptions(runtime="tensorrt-rtx", targets=("sm89",), max_seq_len=256)
    )
    assert (engine.promised_products, engine.fp8_products, engine.evidence) == (28, 28, "plan")


def test_the_way_back_leaves_no_scales_behind(run: Run, demo_run: Run, keeping_graphs: Any, tmp_path: Path) -> None:
    with keeping_graphs():
        back = api.scales(Path(shutil.copytree(run.root, tmp_path / "run")), api.RescaleOptions(kv_cache="fp8"))
    assert not (back.model / "kv_cache.safetensors").exists()
    assert back.scales.read_bytes() == demo_run.scales.read_bytes()
