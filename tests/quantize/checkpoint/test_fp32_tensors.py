"""What transformers keeps in FP32 is FP32, byte for byte, in what is written and in all that reads it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fp8q.calibrate.measure.statistics import load_record, load_statistics
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.export.graph.trace import graph_plan, trace
from fp8q.options import CalibrateOptions
from fp8q.quantize.checkpoint.baselines import write_bf16
from fp8q.quantize.checkpoint.narrowing import Narrowing, rounded_remark
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages.shared.sources import gemms_of
from tests.mixtures import random_of

Calibrated = Callable[[Run, Source, Path, CalibrateOptions], None]

ONE_GROUP = {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "n_routed_experts": 16, "n_shared_experts": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "glm4_moe": (
        "Glm4MoeConfig",
        ONE_GROUP | {"head_dim": 16, "first_k_dense_replace": 1},
        {"model.layers.1.mlp.gate.e_score_correction_bias"},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        ONE_GROUP | {"first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                     "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4},
        {"model.layers.1.mlp.gate.e_score_correction_bias"},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 16, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1,
         "moe_num_shared_experts": 1},
        {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.moe_statics.e_score_correction_bias"},
    ),
}  # fmt: skip


def family(path: Path, name: str) -> Source:
    """A mixture in BF16 whose biases that choose experts are as close as those of GLM-5.2, in FP32 as published."""
    config, fields, kept = FAMILIES[name]
    file = random_of(path, config, fields) / "model.safetensors"
    tensors = load_file(file)
    for key in kept:
        noise = torch.rand(tensors[key].shape)
        tensors[key] = 6.817 + 0.246 * noise if key.endswith("bias") else tensors[key].float() + 1e-4 * noise
    save_file(tensors, file, {"format": "pt"})
    return open_source(str(path))


def written(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def kept(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """The FP32 tensors that are no scales, as bytes."""
    return {
        name: tensor.numpy().tobytes()
        for name, tensor in tensors.items()
        if tensor.dtype == torch.float32 and not name.endswith("_scale")
    }


def chosen(model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The experts that the second layer's router of `model` chooses for `hidden`, sorted, by a hook on the experts."""
    seen: list[torch.Tensor] = []
    block = model.get_submodule("model.layers.1.mlp")

    def see(module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append((args[1] if len(args) > 1 else named["top_k_index"]).sort(-1).values)

    with block.get_submodule("experts").register_forward_pre_hook(see, with_kwargs=True), torch.inference_mode():
        block(hidden)
    return seen[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_bytes_are_those_of_the_source_and_the_same_experts_are_chosen(
    tmp_path: Path, calibrated: Calibrated, data: Path, name: str
) -> None:
    source, run = family(tmp_path / "source", name), Run(tmp_path / "run")
    calibrated(run, source, data, CalibrateOptions(samples=4, seq_len=64))
    stored = kept(load_file(tmp_path / "source" / "model.safetensors"))
    assert stored.keys() == FAMILIES[name][2] == source.fp32
    assert kept(written(run.model)) == stored

    hidden = torch.randn((1, 256, 64), generator=torch.Generator().manual_seed(1)).bfloat16()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16)
    expected = chosen(theirs, hidden)
    assert torch.equal(chosen(load_model(source, torch.bfloat16), hidden), expected)
    assert torch.equal(chosen(load_reference(run.model, "fast", torch.bfloat16).model, hidden), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_layer_by_layer_the_same_is_measured_as_in_memory(
    tmp_path: Path, calibrated: Calibrated, data: Path, name: str
) -> None:
    source = family(tmp_path / "source", name)
    runs = {stream: Run(tmp_path / f"run-{stream}") for stream in (False, True)}
    for stream, run in runs.items():
        calibrated(run, source, data, CalibrateOptions(samples=4, seq_len=64, stream=stream))
    whole, streamed = (load_statistics(run).tensors for run in runs.values())
    assert whole.keys() == streamed.keys()
    assert all((whole[key].histogram.counts == streamed[key].histogram.counts).all() for key in whole)


@pytest.mark.slow
def test_the_graph_reads_them_where_they_lie(tmp_path: Path, calibrated: Calibrated, data: Path) -> None:
    source, run = family(tmp_path / "source", "glm4_moe"), Run(tmp_path / "run")
    calibrated(run, source, data, CalibrateOptions(samples=4, seq_len=64))
    (name,) = source.fp32
    graph = trace(run.model, graph_plan(load_record(run), load_scales(run), "bf16")).graph
    held = graph.initializers[name].const_value
    assert isinstance(held, ir.ExternalTensor)
    assert held.dtype == ir.DataType.FLOAT
    assert held.numpy().tobytes() == kept(load_file(tmp_path / "source" / "model.safetensors"))[name]


def test_weights_that_fp8_is_compared_with_have_them_too(tmp_path: Path) -> None:
    """All else is BF16 there, so that the files are the source's own."""
    source = family(tmp_path / "source", "glm4_moe")
    write_bf16(source, tmp_path / "bf16", SILENT)
    file = tmp_path / "source" / "model.safetensors"
    assert (tmp_path / "bf16" / file.name).read_bytes() == file.read_bytes()


def test_products_that_transformers_keeps_in_fp32_are_known_by_their_names(tmp_path: Path) -> None:
    source = family(tmp_path / "source", "ernie4_5_moe")
    assert gemms_of(source).fp32 == {"model.layers.1.mlp.gate"}


def test_a_checkpoint_of_roundings_is_named(tmp_path: Path) -> None:
    source = family(tmp_path / "source", "ernie4_5_moe")
    write_bf16(source, tmp_path / "now", SILENT)
    file = tmp_path / "now" / "model.safetensors"
    index = {"weight_map": dict.fromkeys(load_file(file), file.name)}
    (tmp_path / "now" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert rounded_remark(source, tmp_path / "now") is None
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    assert rounded_remark(source, tmp_path / "now") == (
        f"model.layers.1.mlp.gate.weight and 1 more: in BF16 in {tmp_path / 'now'}, while the source has it in FP32 "
        "and transformers keeps it so; a router then chooses other experts; calibrate again into another directory"
    )


def test_what_is_cast_is_counted_with_the_largest_relative_error(tmp_path: Path, demo_checkpoint: Path) -> None:
    """1 + 2^-8 lies between 1 and 1 + 2^-7, and goes to the even one: 1/257 of it is lost."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )
    for tensor in model.parameters():
        tensor.data = tensor.data.bfloat16().float()
    model.model.norm.weight.data[3] = 1 + 2**-8
    model.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_bytes((demo_checkpoint / "tokenizer.json").read_bytes())
    source = open_source(str(tmp_path / "source"))
    narrowing = Narrowing(source, source.weights())
    assert narrowing.remark is None
    tensors = {name: narrowing.tensor(name) for name in source.weights().names()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert narrowing.remark == (
        "tensors cast to BF16: 12 in FP32, with a relative error of up to 0.0039 (model.norm.weight)"
    )
