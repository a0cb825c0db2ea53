"""`--kv-cache fp8 --kv-scale head`: a scale for each head of keys and values, from the statistics to the engine."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from onnx import helper, numpy_helper
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.calibrate.measure.statistics import load_arrays, load_statistics
from fp8q.core.run import Run
from fp8q.export.engine.plan import read_plan
from fp8q.export.engine.program import read_pool
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.reading.dequantized import fp8_source
from fp8q.quantize.reference.fp8_model import FP8Layer, round_to_codes
from fp8q.quantize.scales.clip import scale_of
from fp8q.quantize.scales.decisions import load_scales
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import opened
from tests.noise import check_codes

#: The demo's layers, the heads of its keys and values, and of its queries.
LAYERS, HEADS, QUERIES = range(4), 2, 4
#: The lint's words on the checkpoint.
C127 = (
    "says a scale for each head of the cache, which vLLM has attention for on Hopper and data-centre Blackwell: other "
    "GPUs end with an error, a CPU takes a layer's largest; give one a layer for those"
)


@pytest.fixture(scope="module")
def run(demo_run: Run, keeping_graphs: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo with an FP8 cache and scales of queries, chosen again for each head."""
    ignored = shutil.ignore_patterns("engines", "triton")
    with keeping_graphs():
        return api.scales(
            Path(shutil.copytree(demo_run.root, tmp_path_factory.mktemp("heads") / "run", ignore=ignored)),
            api.RescaleOptions(kv_scale="head", q_scale=True),
        )


def stored(run: Run, *endings: str) -> dict[str, torch.Tensor]:
    """The scales in the run's safetensors whose names end so."""
    found = load_file(next(run.model.glob("model-*.safetensors")))
    return {name: tensor for name, tensor in found.items() if name.endswith(endings)}


def test_the_scale_of_a_head_is_that_of_its_channels_and_the_tensors_is_the_largest(run: Run, demo_run: Run) -> None:
    scales, before, statistics = load_scales(run), load_scales(demo_run), load_statistics(run)
    for name, scale in scales.kv_cache.items():
        amax = statistics.tensors[name].amax_channels.reshape(HEADS, -1).max(1)
        assert scale.heads == scale_of(amax, E4M3).tolist()
        assert max(scale.heads or ()) == scale.scale
        assert scale.model_copy(update={"heads": None}) == before.kv_cache[name]
    measured, _ = load_arrays(run.queries)
    assert {name: scale.heads for name, scale in scales.queries.items()} == {
        name: scale_of(tensor.amax_channels.reshape(QUERIES, -1).max(1), E4M3).tolist()
        for name, tensor in measured.items()
    }
    assert any(len(set(scale.heads or ())) == HEADS for scale in scales.kv_cache.values())


def test_the_checkpoint_is_of_compressed_tensors_schema_and_of_vllms_shapes(run: Run) -> None:
    config = json.loads((run.model / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).kv_cache_scheme
    assert scheme is not None
    assert (scheme.strategy, scheme.num_bits) == ("attn_head", 8)
    scales = load_scales(run)
    found = stored(run, "k_scale", "v_scale", "q_scale")
    assert {name: (list(tensor.shape), tensor.ravel().tolist()) for name, tensor in found.items()} == {
        f"{name}_scale": ([len(scale.heads or ()), 1, 1], scale.heads)
        for name, scale in (scales.kv_cache | scales.queries).items()
    }
    assert [note.partition(":")[0] for note in run.record().stages["quantize"].notes if note.startswith("--")] == [
        "--kv-scale head", "--q-scale",
    ]  # fmt: skip
    card = " ".join((run.model / "README.md").read_text().split())
    assert "E4M3 keys and values with one scale each per head." in card
    assert "on a CPU it takes a layer's largest for all of its heads" in card


def test_transformers_holds_them_and_rounds_keys_by_them(run: Run) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(run.model, output_loading_info=True)
    model, report = loaded
    queries = {f"model.layers.{layer}.self_attn.q_scale" for layer in LAYERS}
    assert (set(report["missing_keys"]), set(report["unexpected_keys"])) == (set(), queries)
    for name, tensor in stored(run, "k_scale", "v_scale").items():
        held = model.get_parameter(name)
        assert torch.equal(held.float(), tensor)
    with torch.inference_mode():
        cache = model(torch.arange(1, 25).reshape(2, 12), use_cache=True).past_key_values
    for layer, held in enumerate(cache.layers):
        for part, values in (("k", held.keys), ("v", held.values)):
            scale = stored(run, f"{layer}.self_attn.{part}_scale").popitem()[1]
            assert torch.equal(round_to_codes(values, scale), values)  # on the grid of each head already
            assert not torch.equal(round_to_codes(values, scale.flip(0)), values)


def test_a_layer_rounds_each_head_by_its_own_scale() -> None:
    keys = torch.full((1, 2, 3, 8), 448.0)
    scale = torch.tensor([1.0, 0.5]).view(2, 1, 1)
    rounded, _ = FP8Layer(scale, None).update(keys, keys)
    assert rounded[0, :, 0, 0].tolist() == [448.0, 224.0]
    alone = torch.cat([round_to_codes(keys[:, at : at + 1], each) for at, each in enumerate(scale)], 1)
    assert torch.equal(rounded, alone)


def test_the_graph_quantizes_along_the_heads_by_the_bytes_of_the_checkpoint(run: Run) -> None:
    for path in (run.onnx, run.onnx_fp32):
        graph = onnx.load(path).graph
        tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        nodes = {node.name: node for node in graph.node}
        for name, scale in load_scales(run).kv_cache.items():
            for step in ("quantize", "dequantize", "dequantize_past"):
                node = nodes[f"{name}.{step}"]
                attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
                assert attributes["axis"] == 1
                assert tensors[node.input[1]].tolist() == scale.heads
        assert api.lint(path).findings == []
    assert [str(finding) for finding in api.lint(run.model).findings] == [f"C127 cache-heads: config.json: {C127}"]


@pytest.mark.parametrize(("part", "gemm"), [("k", "scores"), ("v", "values")])
def test_the_lint_holds_a_decode_step_to_the_scales_of_the_heads(
    run: Run, tmp_path: Path, part: str, gemm: str
) -> None:
    """A step dequantizes by a half, and applies twice the scales behind its GEMM."""
    copied = Run(Path(shutil.copytree(run.root, tmp_path / "run")))
    model = onnx.load(copied.onnx, load_external_data=False)
    attention = "model.layers.1.self_attn"
    (half,) = [node for node in model.graph.node if node.name == f"{attention}.{part}.dequantize_step"]
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.25, np.float32), "quarter"))
    half.input[1] = "quarter"
    copied.onnx.write_bytes(model.SerializeToString())
    scales = load_scales(run).kv_cache[f"{attention}.{part}"].heads or ()
    halves, wanted = (", ".join(f"{scale * factor:.9g}" for scale in scales) for factor in (0.5, 1))
    (finding,) = api.lint(copied.onnx).findings
    assert str(finding) == (
        f"F318 cache-scale: {attention}.step_{gemm}: applies the scales {halves}, and scales.json has {wanted}; run "
        "`fp8q export` again"
    )


def test_onnx_runtime_says_what_the_reference_says_step_by_step_too(
    run: Run, exact_logits: Callable[[Run, np.ndarray], np.ndarray]
) -> None:
    ids = load_tokens(run, run.evaluation)[:24].reshape(2, 12)
    expected = exact_logits(run, ids)
    batch = OnnxRuntimeSession(run.onnx_fp32).open_batch(2, 16)
    batch.reserve(12, 16, 2)
    steps = np.stack([np.stack(batch.decode(ids[:, at], np.full(2, at)).rows([0, 1])) for at in range(12)], 1)
    check_codes(run, ids, steps, expected)


def test_the_engine_is_built_and_its_program_holds_the_scales_of_all_heads(run: Run) -> None:
    pytest.importorskip("tensorrt_rtx")
    (engine,) = api.build_engine(
        run.root, api.EngineOptions(runtime="tensorrt-rtx", targets=("sm89",), max_seq_len=256)
    )
    assert (engine.promised_products, engine.fp8_products, engine.evidence) == (28, 28, "plan")
    data = (run.engines / "sm89.plan").read_bytes()
    plan, pool = read_plan(data), read_pool(data)
    assert plan is not None
    assert pool is not None
    of_prompts, of_steps = ([each.name for each in plan.kernels[at] if "mha" in each.name] for at in (0, 1))
    assert (len(of_prompts), len(set(of_prompts)), of_steps) == (len(LAYERS), 1, [])
    (view,) = api.engine(run.root)
    assert view.cache is not None
    assert (view.cache.read_per_value, view.cache.written) == (1, 0)
    held = set()
    for program in plan.programs:
        for tensor in program.tensors.values():
            numbers = pool.read(tensor)
            if numbers is not None and numbers.size == HEADS and numbers.dtype == np.float32:
                held.add(tuple(numbers.ravel().tolist()))
    wanted = {tuple(scale.heads or ()) for scale in load_scales(run).kv_cache.values()}
    assert wanted <= held


def test_as_a_source_its_heads_are_inherited_where_that_is_asked(
    run: Run, demo_texts: Any, without_graphs: Any, tmp_path: Path
) -> None:
    source = fp8_source(opened(str(run.model)))
    assert source is not None
    assert {name: scale.ravel().tolist() for name, scale in source.cache_scales.items()} == {
        name: scale.heads for name, scale in load_scales(run).kv_cache.items()
    }
    asked = api.CalibrateOptions(inherit=True, kv_cache="fp8", kv_scale="head", samples=2, seq_len=64)
    text = str(demo_texts.calibration)
    with pytest.raises(api.InputError) as raised:
        api.calibrate(str(run.model), text, tmp_path / "run", options=replace(asked, kv_scale="tensor"))
    assert str(raised.value).endswith(
        " has one scale a head of the cache of model.layers.0.self_attn.k; give --kv-scale head, or leave --inherit "
        "out, and they are measured"
    )
    with without_graphs():
        again = api.calibrate(str(run.model), text, tmp_path / "run", options=asked)
    assert {name: scale.heads for name, scale in load_scales(again).kv_cache.items()} == {
        name: scale.heads for name, scale in load_scales(run).kv_cache.items()
    }


def test_values_alone_have_scales_of_heads_beside_the_model(run: Run, without_graphs: Any, tmp_path: Path) -> None:
    with without_graphs():
        values = api.scales(
            Path(shutil.copytree(run.root, tmp_path / "run")), api.RescaleOptions(kv_cache="v", kv_skip=("*.0.*",))
        )
    found = load_file(values.model / "kv_cache.safetensors")
    assert {name: tensor.shape for name, tensor in found.items()} == {
        f"model.layers.{layer}.self_attn.v_scale": (HEADS, 1, 1) for layer in LAYERS[1:]
    }
    assert load_scales(values).per_head


def test_the_way_back_leaves_nothing_behind(run: Run, demo_run: Run, keeping_graphs: Any, tmp_path: Path) -> None:
    with keeping_graphs():
        back = api.scales(
            Path(shutil.copytree(run.root, tmp_path / "run")), api.RescaleOptions(kv_scale="tensor", q_scale=False)
        )
    assert back.scales.read_bytes() == demo_run.scales.read_bytes()
    assert (back.model / "config.json").read_bytes() == (demo_run.model / "config.json").read_bytes()


def test_attention_in_fp8_is_refused_beside_it(run: Run) -> None:
    with pytest.raises(api.InputError) as raised:
        api.export(run.root, api.ExportOptions(attention="fp8"))
    assert str(raised.value) == (
        "--attention fp8: attends by one scale a layer, which would round keys of a cache with a scale for each head "
        "once more; choose scales again with --kv-scale tensor, or leave it out"
    )
