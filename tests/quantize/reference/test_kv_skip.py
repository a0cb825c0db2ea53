"""`--kv-cache fp8 --kv-skip PATTERN`: one layer's cache in the compute type, from the scales to the engine."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.core.run import Run
from fp8q.export.engine.plan import read_plan
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.stages.corpus import load_tokens
from tests.noise import check_codes

from ...pipeline.other_models import SHARE, mean_kl

WIDE = "model.layers.1.self_attn"
LAYERS = range(4)


@pytest.fixture(scope="module")
def run(rescaled: Callable[..., Run]) -> Run:
    """The demo with an FP8 cache, its scales chosen again with the second layer left out."""
    return rescaled(kv_skip=("*.layers.1.*",))


def test_the_layer_is_no_codes_and_its_scales_are_those_of_the_whole_cache(run: Run, demo_run: Run) -> None:
    scales, both = load_scales(run), load_scales(demo_run).kv_cache
    assert scales.kv_cache | scales.wide_cache == both
    assert scales.wide_cache.keys() == {f"{WIDE}.k", f"{WIDE}.v"}
    assert scales.cache_left == ", 1 of 4 layers left in BF16"
    read = load_reference(run.model, "fast", torch.bfloat16).cache_scales
    assert {name: scale.tolist() for name, scale in read.items()} == {
        name: [scale.scale] for name, scale in scales.kv_cache.items()
    }


def test_loaders_find_a_scale_for_every_layer_and_vllm_is_told_of_the_wide_one(run: Run) -> None:
    scales = load_scales(run)
    config = json.loads((run.model / "config.json").read_text())
    assert config["fp8q"]["wide_cache"] == [WIDE]
    assert config["quantization_config"]["kv_cache_scheme"]["strategy"] == "tensor"
    stored = load_file(next(run.model.glob("model-*.safetensors")))
    assert {name: float(scale[0]) for name, scale in stored.items() if name.endswith(("k_scale", "v_scale"))} == {
        f"{name}_scale": scale.scale for name, scale in (scales.kv_cache | scales.wide_cache).items()
    }
    loaded: Any = AutoModelForCausalLM.from_pretrained(run.model, output_loading_info=True)
    report = loaded[1]
    assert (set(report["missing_keys"]), set(report["unexpected_keys"])) == (set(), set())
    card = (run.model / "README.md").read_text()
    assert "vllm serve path/to/this/directory --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 1\n" in card
    assert "E4M3 keys and values with one scale each per layer (but not in layer 1)." in " ".join(card.split())


def test_the_graph_takes_and_gives_codes_in_the_other_layers(run: Run) -> None:
    for path, kind in ((run.onnx, TensorProto.BFLOAT16), (run.onnx_fp32, TensorProto.FLOAT)):
        graph = onnx.load(path, load_external_data=False).graph
        types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
        for layer in LAYERS:
            for name in ("past_key_values.{}.key", "past_key_values.{}.value", "new_key_values.{}.key"):
                assert types[name.format(layer)] == (kind if layer == 1 else TensorProto.FLOAT8E4M3FN)


def test_onnx_runtime_says_what_the_reference_says_step_by_step_too(
    run: Run, demo_run: Run, exact_logits: Callable[[Run, np.ndarray], np.ndarray]
) -> None:
    """Nearer than the model with the whole cache in codes, and far nearer than the model that is not quantized."""
    ids = load_tokens(run, run.evaluation)[:48].reshape(2, 24)
    expected = exact_logits(run, ids)
    session = OnnxRuntimeSession(run.onnx_fp32)
    batch = session.open_batch(2, 32)
    batch.reserve(24, 32, 2)
    steps = np.stack([np.stack(batch.decode(ids[:, at], np.full(2, at)).rows([0, 1])) for at in range(24)], 1)
    check_codes(run, ids, steps, expected)
    kinds = dict(zip(session.layout.names, session.layout.dtypes, strict=True))
    assert {name for name, kind in kinds.items() if kind == np.float32} == {"1.key", "1.value"}
    assert mean_kl([*expected], [*steps]) < SHARE * mean_kl([*expected], [*exact_logits(demo_run, ids)])


def test_the_engine_has_the_type_of_each_layer(run: Run) -> None:
    pytest.importorskip("tensorrt_rtx")
    (engine,) = api.build_engine(
        run.root, api.EngineOptions(runtime="tensorrt-rtx", targets=("sm89",), max_seq_len=256)
    )
    assert (engine.promised_products, engine.fp8_products, engine.evidence) == (28, 28, "plan")
    plan = read_plan((run.engines / "sm89.plan").read_bytes())
    assert plan is not None
    for program in (each for each in plan.programs if len(each.statements) > 1):  # the others are of single kernels
        inputs = {name: re.match(r"past_key_values\.\d\.(key|value)", name) for name in program.bound}
        types = {match[0]: program.type(name) for name, match in inputs.items() if match}  # without profiles
        assert len(types) == 8
        assert {name for name, kind in types.items() if kind == "bf16"} == {
            "past_key_values.1.key",
            "past_key_values.1.value",
        }
        assert set(types.values()) == {"bf16", "fp8"}


def test_values_alone_leave_the_layer_out_too(run: Run, without_graphs: Any, tmp_path: Path) -> None:
    with without_graphs():
        values = api.scales(Path(shutil.copytree(run.root, tmp_path / "run")), api.RescaleOptions(kv_cache="v"))
    assert load_scales(values).kv_cache.keys() == {f"model.layers.{layer}.self_attn.v" for layer in (0, 2, 3)}
    stored = load_file(values.model / "kv_cache.safetensors")
    assert stored.keys() == {f"model.layers.{layer}.self_attn.v_scale" for layer in (0, 2, 3)}


def test_the_way_back_leaves_nothing_behind(run: Run, demo_run: Run, keeping_graphs: Any, tmp_path: Path) -> None:
    with keeping_graphs():
        back = api.scales(Path(shutil.copytree(run.root, tmp_path / "run")), api.RescaleOptions(kv_skip=("",)))
    assert back.scales.read_bytes() == demo_run.scales.read_bytes()
    assert (back.model / "config.json").read_bytes() == (demo_run.model / "config.json").read_bytes()
