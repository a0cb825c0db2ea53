"""Observing a real model: what ModelOpt measures, each tensor once, and nothing left attached."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fp8q.calibrate.measure.measurement import Measurement, measure_in_memory
from fp8q.calibrate.measure.observe import Observer, Watch, probe_groups
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity, Statistics, save_arrays
from fp8q.calibrate.model.gemms import gemm_modules, output_head
from fp8q.core.reporter import SILENT
from fp8q.quantize.codes.formats import E4M3

IDENTITY = ModelIdentity(name="demo", architecture="LlamaForCausalLM", fingerprint="0")
CORPUS = Corpus(name="random tokens", fingerprint="0", windows=6, seq_len=32, batch_size=2)
WINDOWS = np.random.default_rng(0).integers(0, 2048, (6, 32))


@pytest.fixture(scope="module")
def model(demo_checkpoint: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.bfloat16)
    loaded.eval()
    return loaded


@pytest.fixture(scope="module")
def statistics(model: PreTrainedModel) -> Statistics:
    return measure_in_memory(model, Measurement(WINDOWS, IDENTITY, CORPUS), SILENT)


def test_q_k_v_and_gate_up_share_one_observer(model: PreTrainedModel, statistics: Statistics) -> None:
    layer = "model.layers.0"
    groups = {name: members for name, members in statistics.record.groups.items() if name.startswith(layer)}
    assert groups == {
        f"{layer}.self_attn.q_proj": [f"{layer}.self_attn.{part}_proj" for part in "qkv"],
        f"{layer}.self_attn.o_proj": [f"{layer}.self_attn.o_proj"],
        f"{layer}.mlp.gate_proj": [f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"],
        f"{layer}.mlp.down_proj": [f"{layer}.mlp.down_proj"],
    }
    assert len(statistics.tensors) == 4 * (4 + 2)


def test_groups_are_the_same_on_the_meta_device(model: PreTrainedModel, statistics: Statistics) -> None:
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    modules = {name: module for name, module in gemm_modules(empty).items() if name != output_head(empty)}
    assert probe_groups(empty, modules) == statistics.record.groups


def test_every_value_of_every_tensor_is_counted_once(statistics: Statistics) -> None:
    tokens = WINDOWS.size
    widths = {
        "self_attn.q_proj.input": 256,
        "self_attn.o_proj.input": 256,
        "mlp.gate_proj.input": 256,
        "mlp.down_proj.input": 704,
        "self_attn.k": 128,
    }
    for name, width in widths.items():
        tensor = statistics.tensors[f"model.layers.2.{name}"]
        assert tensor.histogram.samples == tokens * width
        assert len(tensor.amax_channels) == width
        assert tensor.amax_channels.max() == tensor.amax_batches.max() == tensor.histogram.amax
    assert statistics.record.tokens == tokens


def test_amax_is_the_largest_value_that_a_plain_hook_sees(model: PreTrainedModel, statistics: Statistics) -> None:
    seen: list[torch.Tensor] = []
    handle = model.get_submodule("model.layers.1.mlp.down_proj").register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0])
    )
    with torch.inference_mode():
        for batch in np.split(WINDOWS, 3):
            model(input_ids=torch.from_numpy(batch))
    handle.remove()
    tensor = statistics.tensors["model.layers.1.mlp.down_proj.input"]
    assert tensor.amax_batches.tolist() == [x.abs().amax().item() for x in seen]
    np.testing.assert_array_equal(tensor.amax_channels, torch.cat(seen).abs().flatten(0, 1).amax(0).float().numpy())


def test_nothing_stays_attached(model: PreTrainedModel, statistics: Statistics) -> None:
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_batches_in_another_order_or_measured_in_two_runs_give_the_same_bytes(
    model: PreTrainedModel, statistics: Statistics, tmp_path: Path
) -> None:
    backwards = measure_in_memory(model, Measurement(WINDOWS, IDENTITY, CORPUS, batches=[2, 0, 1]), SILENT)
    added = measure_in_memory(model, Measurement(WINDOWS, IDENTITY, CORPUS, batches=[1]), SILENT).merge(
        measure_in_memory(model, Measurement(WINDOWS, IDENTITY, CORPUS, batches=[2, 0]), SILENT)
    )
    save_arrays(tmp_path / "forwards", statistics.tensors, statistics.weights)
    for other in (backwards, added):
        assert other.record == statistics.record
        save_arrays(tmp_path / "other", other.tensors, other.weights)
        assert (tmp_path / "other").read_bytes() == (tmp_path / "forwards").read_bytes()
        for name, tensor in statistics.tensors.items():
            assert other.tensors[name].histogram == tensor.histogram
            np.testing.assert_array_equal(other.tensors[name].amax_batches, tensor.amax_batches)
            np.testing.assert_array_equal(other.tensors[name].amax_channels, tensor.amax_channels)


def test_a_module_of_another_type_rounds_its_input_to_bf16(demo_checkpoint: Path) -> None:
    wide = AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32).eval()
    watch = Watch(wide, gemm_modules(wide), {"model.layers.0.mlp.down_proj": ["model.layers.0.mlp.down_proj"]}, 1)
    watch.forward(torch.from_numpy(WINDOWS[:1]), 0)
    assert watch.statistics()["model.layers.0.mlp.down_proj.input"].histogram.samples == 32 * 704


def test_activation_and_cache_amax_equal_modelopts_to_the_last_bit(
    demo_checkpoint: Path, statistics: Statistics
) -> None:
    import modelopt.torch.quantization as mtq

    peer = AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.bfloat16).eval()
    config = {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {
                "quantizer_name": "*weight_quantizer",
                "parent_class": "nn.Linear",
                "cfg": {"num_bits": (4, 3), "axis": 0},
            },
            {
                "quantizer_name": "*input_quantizer",
                "parent_class": "nn.Linear",
                "cfg": {"num_bits": (4, 3), "axis": None},
            },
            {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}},
            {"quantizer_name": "*lm_head*", "enable": False},
        ],
        "algorithm": "max",
    }

    def forward(module: torch.nn.Module) -> None:
        for batch in np.split(WINDOWS, 3):
            module(input_ids=torch.from_numpy(batch))

    mtq.quantize(peer, config, forward_loop=forward)
    first = {member: group for group, members in statistics.record.groups.items() for member in members}
    compared = 0
    for name, module in peer.named_modules():
        if name in first:
            ours = np.float32(statistics.tensors[f"{first[name]}.input"].histogram.amax)
            assert ours / np.float32(E4M3.max) == module.input_quantizer.amax.float().numpy() / np.float32(448)
            np.testing.assert_array_equal(
                statistics.weights[name], module.weight_quantizer.amax.float().flatten().numpy()
            )
            compared += 1
        for part in "kv":
            if hasattr(module, f"{part}_bmm_quantizer"):
                assert (
                    statistics.tensors[f"{name}.{part}"].histogram.amax
                    == getattr(module, f"{part}_bmm_quantizer").amax.item()
                )
                compared += 1
    assert compared == 4 * 7 + 4 * 2


def test_the_amax_of_a_batch_is_that_of_its_finite_values() -> None:
    observer, inf, nan = Observer(4), float("inf"), float("nan")
    for batch, values in enumerate(([[1.0, inf], [nan, -3.0]], [[inf, -inf], [inf, nan]], [[0.0, -0.0], [0.5, -2.0]])):
        observer.update(torch.tensor(values), batch)
    found = observer.statistics()
    assert found is not None
    assert found.amax_batches[:3].tolist() == [3.0, 0.0, 2.0]
    assert np.isnan(found.amax_batches[3])
    assert (found.histogram.infinities, found.histogram.nans) == (4, 2)


def test_a_batch_that_comes_in_parts_has_the_amax_of_all_of_them() -> None:
    """As experts see it, or layers that share weights: the larger part first, then the smaller."""
    observer = Observer(2)
    for batch, values in ((0, [[1.0, -4.0]]), (0, [[3.0, 2.0]]), (1, [[2.0, 1.0]])):
        observer.update(torch.tensor(values), batch)
    found = observer.statistics()
    assert found is not None
    assert found.amax_batches.tolist() == [4.0, 2.0]
    assert found.amax_channels.tolist() == [3.0, 4.0]
    assert found.histogram.samples == 6
