"""ModelOpt's layout, written: held against what ModelOpt itself exports, and against the other layout of a run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8q import api
from fp8q.calibrate.model.source import open_source
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.options import RescaleOptions, ScaleOptions
from fp8q.quantize.lint.check import checkpoint_findings
from fp8q.quantize.reading.codecs import other_declaration
from fp8q.quantize.reading.compressed_tensors import quantization_config
from fp8q.quantize.reading.dequantized import fp8_source, recognize
from fp8q.quantize.reading.run_checkpoint import stored_arrays
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.policy import ModelGemms, check_layout
from fp8q.quantize.scales.scheme import Scheme
from fp8q.stages.shared.sources import gemms_of
from tests.noise import check_codes

from ..reading import fp8_checkpoints

#: The fixture `rescaled_layer`.
RescaledLayer = Callable[..., Run]
FILE = "hf_quant_config.json"
STATIC = {"weight_scale": "tensor", "kv_cache": "fp8"}
DYNAMIC = {"form": ("dynamic",), "kv_cache": "fp8"}
#: ModelOpt's own configuration for each.
CONFIGURATIONS = [(STATIC, "FP8_DEFAULT_CFG"), (DYNAMIC, "FP8_PER_CHANNEL_PER_TOKEN_CFG")]
IDS = torch.arange(3, 131).reshape(2, 64)


@pytest.fixture(scope="module")
def static(rescaled_layer: RescaledLayer) -> Run:
    """A run with one scale for each weight and an FP8 cache, in ModelOpt's layout."""
    return rescaled_layer(**STATIC, layout="modelopt")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    (shard,) = folder.glob("*.safetensors")
    return load_file(shard)


def said_in(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What config.json and ModelOpt's file say."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    return config, json.loads((folder / FILE).read_text(encoding="utf-8"))


@pytest.mark.parametrize(("options", "configuration"), CONFIGURATIONS, ids=["static", "dynamic"])
def test_names_shapes_types_and_fields_are_those_of_modelopts_own_export(
    options: dict[str, Any], configuration: str, rescaled_layer: RescaledLayer, demo_checkpoint: Path, tmp_path: Path
) -> None:
    ours = rescaled_layer(**options, layout="modelopt").model
    theirs = fp8_checkpoints.modelopt(demo_checkpoint, tmp_path / "theirs", configuration, cache=True)

    def kinds(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        stored = tensors_of(folder).items()
        first = "model.layers.0."  # of the others the cache alone is in FP8 in the run
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored if name.startswith(first)}

    assert kinds(ours) == kinds(theirs)
    caches = {name for name in tensors_of(theirs) if name.endswith((".k_scale", ".v_scale"))}
    assert {name for name in tensors_of(ours) if name.endswith((".k_scale", ".v_scale"))} == caches
    for mine, other in zip(said_in(ours), said_in(theirs), strict=True):
        assert mine.keys() == other.keys()
        assert mine["producer"]["name"] == other["producer"]["name"] == "modelopt"
    mine, other = (said_in(folder)[1]["quantization"] for folder in (ours, theirs))
    assert mine.keys() == other.keys()
    assert (mine["quant_algo"], mine["kv_cache_quant_algo"]) == (other["quant_algo"], other["kv_cache_quant_algo"])


@pytest.mark.parametrize("options", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_codes_scales_and_logits_are_those_of_the_other_layout(
    options: dict[str, Any], rescaled_layer: RescaledLayer
) -> None:
    runs = [rescaled_layer(**options, layout=layout) for layout in ("compressed-tensors", "modelopt")]
    before, after = (tensors_of(run.model) for run in runs)
    named = {name.replace(".k_proj.k_scale", ".k_scale").replace(".v_proj.v_scale", ".v_scale"): name for name in after}
    assert named.keys() == before.keys()
    for name, other in named.items():
        assert torch.equal(before[name].flatten().view(torch.uint8), after[other].flatten().view(torch.uint8)), name
    assert runs[0].scales.read_bytes() == runs[1].scales.read_bytes()
    with torch.inference_mode():
        loaded = [load_reference(run.model, "exact", torch.float32) for run in runs]
        logits = [
            model.model(input_ids=IDS, past_key_values=model.new_cache(), use_cache=True).logits for model in loaded
        ]
    assert torch.equal(*logits)


def test_modelopts_own_function_reads_the_values_of_its_weights(static: Run) -> None:
    """Its wheel has no loader of such checkpoints, only that for one weight."""
    from modelopt.torch.export.quant_utils import QUANTIZATION_FP8, from_quantized_weight

    fp8 = fp8_source(open_source(str(static.model), recognize=recognize))
    assert fp8 is not None
    stored = tensors_of(static.model)
    weights = [name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(weights) == 7
    for name in weights:
        values = from_quantized_weight(stored[name], stored[f"{name}_scale"], QUANTIZATION_FP8, torch.float32)
        decoded = fp8.decoded(name, stored.__getitem__)
        assert decoded is not None
        assert torch.equal(values.to(decoded.dtype), decoded), name


def test_what_reads_a_run_reads_it(static: Run, fp8q: Callable[..., Any]) -> None:
    checkpoint, findings = checkpoint_findings(static.model)
    assert (findings, checkpoint.declared.form, len(checkpoint.cache_scales)) == ([], "modelopt", 8)
    stored = stored_arrays(static.model, ["model.layers.0.self_attn.k_scale"])
    assert stored["model.layers.0.self_attn.k_scale"].shape == (1,)
    card = (static.model / "README.md").read_text(encoding="utf-8")
    assert "The layout is NVIDIA ModelOpt's (`hf_quant_config.json`), which vLLM, SGLang, TensorRT-LLM and " in card
    assert "tags: [fp8, modelopt]" in card
    assert "from transformers" not in card
    assert fp8q("lint", static.model, "--for", "vllm").code == 0
    told = fp8q("lint", static.model, "--for", "transformers")
    assert told.code == 3
    assert "S112 form-misread: config.json: is ModelOpt's form, which transformers does not know" in told.err
    assert fp8q("inspect", static.root).code == 0


def test_its_layers_are_read_as_a_source_with_all_scales(static: Run) -> None:
    source = open_source(str(static.model), recognize=recognize)
    fp8 = fp8_source(source)
    assert fp8 is not None
    assert fp8.input_scale("model.layers.0.mlp.down_proj.weight") is not None
    assert len(fp8.cache_scales) == 8


def test_the_other_layout_again_gives_back_the_files_of_before(
    static: Run, first_layer: Run, rescaled_layer: RescaledLayer
) -> None:
    again = rescaled_layer(static, layout="compressed-tensors", weight_scale="channel", kv_cache="off")
    assert not (again.model / FILE).exists()
    for path in (*first_layer.model.rglob("*"), first_layer.scales):
        assert (again.root / path.relative_to(first_layer.root)).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_the_graph_reads_its_scales_where_they_lie(
    static: Run, tmp_path: Path, exact_logits: Callable[[Run, np.ndarray], np.ndarray]
) -> None:
    from fp8q.serve.loop.cache import BLOCK
    from fp8q.serve.loop.sessions import OnnxRuntimeSession

    run = Run(Path(shutil.copytree(static.root, tmp_path / "run")))
    api.export(run.root)  # which lints the graphs
    names = {each.name for each in onnx.load(run.onnx, load_external_data=False).graph.initializer}
    assert "model.layers.0.self_attn.k_scale" in {f"model.{name.removeprefix('model.')}" for name in names}
    ids = np.arange(3, 35, dtype=np.int64).reshape(2, 16)
    session = OnnxRuntimeSession(run.onnx_fp32)
    filled = np.repeat([[0, 1]], [BLOCK, 16], axis=1).repeat(2, axis=0)
    logits, _ = session.forward(ids, filled, np.tile(np.arange(16), (2, 1)), session.new_cache(2, BLOCK).past(0, 2))
    check_codes(run, ids, logits, exact_logits(run, ids))


OTHER = "give --layout compressed-tensors"
ONE_A_TENSOR = "says --form one with one scale a tensor, and --weight-scale is channel"
ONE_A_CHANNEL = "says --form dynamic with one scale a channel, and --weight-scale is tensor"
EITHER = f"give --form one with --weight-scale tensor, or --form dynamic, or {OTHER}"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, f"{ONE_A_TENSOR}; give --weight-scale tensor, or {OTHER}"),
        ({"form": ("dynamic",), "weight_scale": "tensor"}, f"{ONE_A_CHANNEL}; give --weight-scale channel, or {OTHER}"),
        ({"form": ("two",)}, f"does not say --form two, as of a; {EITHER}"),
        ({"form": ("tail:64",)}, f"does not say --form tail:64, as of a; {EITHER}"),
        ({"form": ("block",)}, f"does not say --form block, as of a; {EITHER}"),
        ({"form": ("bf16",)}, f"does not say --form bf16, as of a; {EITHER}"),
        (
            {"form": ("b=dynamic",), "weight_scale": "tensor"},
            f"says one form of all modules, and b is in dynamic beside a in one; {EITHER}",
        ),
        ({"inherit": True}, f"{ONE_A_TENSOR}; leave --inherit out, give --weight-scale tensor, or {OTHER}"),
        (
            {"weight_scale": "tensor", "kv_cache": "v"},
            f"says keys and values in FP8 together, and --kv-cache is v; give --kv-cache fp8 or off, or {OTHER}",
        ),
        (
            {"weight_scale": "tensor", "kv_cache": "fp8", "kv_scale": "head"},
            f"has one scale for the keys of a layer, and --kv-scale is head; leave that out, or {OTHER}",
        ),
        (
            {"weight_scale": "tensor", "kv_cache": "fp8", "q_scale": True},
            f"has no place for the scales of --q-scale; leave that out, or {OTHER}",
        ),
    ],
)  # fmt: skip
def test_what_it_does_not_say_is_refused(options: dict[str, Any], told: str) -> None:
    gemms = ModelGemms(("a", "b"), None, {})
    with pytest.raises(InputError) as refused:
        check_layout(ScaleOptions(layout="modelopt", **options), gemms, ["a", "b"], (), ())
    assert str(refused.value) == f"--layout modelopt: {told}"
    check_layout(ScaleOptions(**options), gemms, ["a", "b"], (), ())


def test_conv1d_and_experts_are_refused() -> None:
    options = ScaleOptions(layout="modelopt", form=("dynamic",))
    gemms = ModelGemms(("a", "m.experts.0.up"), None, {})
    for conv1d, experts, told in (
        (["a"], [], "has no FP8 weights of a Conv1D, as a is"),
        ([], ["m.experts"], "has no reader that takes scales of channels for experts, as m.experts.0.up"),
    ):
        with pytest.raises(InputError) as refused:
            check_layout(options, gemms, ["a", "m.experts.0.up"], conv1d, experts)
        assert str(refused.value) == f"--layout modelopt: {told}; {OTHER}"


def test_it_is_refused_before_anything_is_computed(
    fp8q: Callable[..., Any], demo_checkpoint: Path, tmp_path: Path, data: Path
) -> None:
    out = tmp_path / "run"
    done = fp8q("calibrate", demo_checkpoint, "--data", data, "--out", out, "--layout", "modelopt", "--form", "two")
    assert (done.code, out.exists()) == (2, False)
    assert done.err == (
        f"fp8q: --layout modelopt: does not say --form two, as of model.layers.0.self_attn.q_proj; {EITHER}\n"
    )


def test_a_run_in_it_is_not_given_what_it_does_not_say(static: Run, rescaled_layer: RescaledLayer) -> None:
    with pytest.raises(InputError, match=r"^--layout modelopt: does not say --form two, as of model\.layers\.0\."):
        rescaled_layer(static, form=("two",))


def test_files_that_contradict_are_named(static: Run, tmp_path: Path) -> None:
    def copied(name: str) -> Path:
        return Path(shutil.copytree(static.model, tmp_path / name))

    def complaint(folder: Path) -> str:
        with pytest.raises(InputError) as refused:
            open_source(str(folder), recognize=recognize)
        return str(refused.value)

    either = "say the same in both, or take one away"
    folder = copied("algorithm")
    config, file = json.loads((folder / "config.json").read_text()), json.loads((folder / FILE).read_text())
    file["quantization"]["quant_algo"] = "FP8_PER_CHANNEL_PER_TOKEN"
    (folder / FILE).write_text(json.dumps(file))
    said = f"{folder / 'config.json'}: says quant_algo FP8, and {FILE} FP8_PER_CHANNEL_PER_TOKEN; {either}"
    assert complaint(folder) == said
    file["quantization"] |= {"quant_algo": "FP8", "kv_cache_quant_algo": None}
    (folder / FILE).write_text(json.dumps(file))
    assert complaint(folder) == f"{folder / 'config.json'}: says an FP8 cache, and {FILE} none; {either}"
    file["quantization"] |= {"kv_cache_quant_algo": "FP8", "exclude_modules": []}
    (folder / FILE).write_text(json.dumps(file))
    assert complaint(folder).startswith(
        f"{folder / 'config.json'}: says another list of what is left out than {FILE}, by lm_head"
    )
    folder = copied("groups")
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    weights["num_bits"] = [4, 3]  # E4M3
    (folder / "config.json").write_text(json.dumps(config))
    assert other_declaration(folder) is None
    weights["num_bits"] = 4
    (folder / "config.json").write_text(json.dumps(config))
    said = f"{folder / 'config.json'}: says weights of 4 bits, type float in config_groups.group_0, and quant_algo FP8"
    assert complaint(folder) == f"{said}; {either}"
    folder = copied("layouts")
    config["quantization_config"] = quantization_config(["lm_head"], None, {"a": Scheme("tensor")}, False)
    (folder / "config.json").write_text(json.dumps(config))
    said = f"{folder / 'config.json'}: says quant_method 'compressed-tensors', and {FILE} is beside it; {either}"
    assert complaint(folder) == said
    folder = copied("scales")
    (shard,) = folder.glob("*.safetensors")
    save_file(load_file(shard) | {"model.layers.1.self_attn.v_scale": torch.tensor(3.0)}, shard)
    source = open_source(str(folder), recognize=recognize)
    fp8 = fp8_source(source)
    assert fp8 is not None
    with pytest.raises(InputError) as refused:
        _ = fp8.cache_scales
    assert str(refused.value) == (
        "model.layers.1.self_attn.v_proj.v_scale: is another scale of the same keys or values than "
        "model.layers.1.self_attn.v_scale; take one of them out of the files"
    )


def test_the_layout_is_the_runs_until_another_is_given(static: Run) -> None:
    from fp8q.stages.quantize import rescaled

    assert rescaled(static, RescaleOptions()).layout == "modelopt"
    assert rescaled(static, RescaleOptions(layout="compressed-tensors")).layout == "compressed-tensors"


def test_gemms_are_checked_of_a_model_too(source: Any) -> None:
    with pytest.raises(InputError, match=r"^--layout modelopt: says --form one with one scale a tensor"):
        gemms_of(source, ScaleOptions(layout="modelopt"))
