"""FP8 checkpoints, quantized: codes kept byte for byte, blocks expressed per channel, scales inherited or measured."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.calibrate.model.source import Source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, Clipping, RescaleOptions
from fp8q.quantize.scales.decisions import Scales, Skipped, load_scales
from fp8q.stages import corpus as corpus_stage
from fp8q.stages import measure as measure_stage
from fp8q.stages import quantize as quantize_stage
from fp8q.stages.lint import LintedRun
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared import sources
from fp8q.stages.shared.sources import opened
from fp8q.validate.report.rows import fact_rows

from ...calibrate.model.damage import rewrite
from ...mixtures import random_mixture, starve
from . import fp8_checkpoints

if TYPE_CHECKING:
    from tests.conftest import KeepingGraphs, Texts

MODULE = "model.layers.1.mlp.down_proj"


@pytest.fixture
def calibrate(tmp_path: Path, data: Path) -> Callable[..., tuple[Run, list[str]]]:
    """`calibrate(folder, inherit=True)`: a run of it on a few windows, without graphs, and what was noted."""

    def run_of(folder: Path, name: str = "run", **options: Any) -> tuple[Run, list[str]]:
        run, source, notes = Run(tmp_path / name), opened(str(folder)), Notes(SILENT)
        chosen = CalibrateOptions(samples=4, seq_len=64, batch_size=2, **options)
        products = sources.gemms_of(source, chosen)
        collected = corpus_stage.collect(source, load_tokenizer(source), str(data), None, chosen, notes)
        corpus_stage.write_corpus(run, source, collected, notes)
        measure_stage.measure(run, source, chosen, notes, moments=chosen.needs_moments)
        quantize_stage.quantize(run, source, products, chosen, notes)
        return run, run.record().stages["quantize"].notes

    return run_of


@pytest.fixture
def channel(demo_checkpoint: Path, tmp_path: Path) -> Path:
    """The demo with a scale a channel, dynamic activations."""
    return fp8_checkpoints.compressed(demo_checkpoint, tmp_path / "channel", "channel")


@pytest.fixture
def tensor(demo_checkpoint: Path, tmp_path: Path) -> Path:
    """The demo with a scale a tensor, and static activations."""
    return fp8_checkpoints.compressed(demo_checkpoint, tmp_path / "tensor", "tensor")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("model*.safetensors") for name, tensor in load_file(file).items()}


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    held = {name: tensor.clone() for name, tensor in load_file(folder / fp8_checkpoints.SINGLE).items()}
    change(held)
    save_file(held, folder / fp8_checkpoints.SINGLE, {"format": "pt"})
    return folder


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_what_fp8q_writes_comes_back_byte_for_byte(
    demo_run: Run, calibrate: Callable[..., tuple[Run, list[str]]]
) -> None:
    run, notes = calibrate(demo_run.model, inherit=True, kv_cache="fp8")
    before, after = stored(demo_run.model), stored(run.model)
    assert before.keys() == after.keys()
    assert all(same_bytes(before[name], after[name]) for name in before)
    first, again = load_scales(demo_run), load_scales(run)
    assert {name: found.scale for name, found in again.activations.items()} == {
        name: found.scale for name, found in first.activations.items()
    }
    assert {name: found.scale for name, found in again.kv_cache.items()} == {
        name: found.scale for name, found in first.kv_cache.items()
    }
    kinds = (again.activations, again.kv_cache, again.weights)
    assert {found.method for kind in kinds for found in kind.values()} == {"inherited"}
    assert notes == [
        "left beside the source: model.fp32.onnx, model.onnx: weights in another form",
        "28 of 28 GEMMs keep their FP8 codes and scales as they were given",
    ]


@pytest.mark.slow
def test_all_that_follows_works_as_ever(
    demo_run: Run, demo_texts: "Texts", keeping_graphs: "KeepingGraphs", tmp_path: Path
) -> None:
    """The graph is the same to the last byte, since the checkpoint is; its loss against the model as it was given is
    less than against the BF16 original, by that of the weights.
    """
    options = CalibrateOptions(samples=24, seq_len=256, inherit=True, kv_cache="fp8")
    held_out = tmp_path / "evaluation.txt"
    held_out.write_text(demo_texts.evaluation.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    with keeping_graphs():
        run = api.calibrate(str(demo_run.model), str(demo_texts.calibration), tmp_path / "run", str(held_out), options)
    assert run.onnx.read_bytes() == demo_run.onnx.read_bytes()
    linted = api.lint(run.root)
    assert isinstance(linted, LintedRun)
    assert not linted.findings
    wanted, short = api.ValidateOptions(runtimes=("bf16", "reference")), tmp_path / "short.txt"
    short.write_text(held_out.read_text(encoding="utf-8")[:6_000], encoding="utf-8")
    loss = {
        each.root: api.validate(each.root, str(short), wanted).runtimes["reference"].kl_mean_nats
        for each in (run, Run(Path(shutil.copytree(demo_run.root, tmp_path / "demo"))))
    }
    assert 0 < (loss[run.root] or 0) < (loss[tmp_path / "demo"] or 0)
    assert "inherited" in {row.what: row.value for row in fact_rows(run)}["weights"]


def test_a_scale_a_tensor_becomes_one_a_channel_of_the_same_number(
    tensor: Path, calibrate: Callable[..., tuple[Run, list[str]]]
) -> None:
    run, _ = calibrate(tensor, inherit=True)
    before, after = stored(tensor), stored(run.model)
    for module, found in load_scales(run).weights.items():
        assert same_bytes(before[f"{module}.weight"], after[f"{module}.weight"])
        scale = float(before[f"{module}.weight_scale"])
        assert after[f"{module}.weight_scale"].flatten().tolist() == [scale] * found.channels
        assert (found.method, found.scale_min, found.scale_max, found.sqnr_db) == ("inherited", scale, scale, None)
    assert {found.scale for found in load_scales(run).activations.values()} == {0.02001953125}  # 0.02 in BF16
    card = (run.model / "README.md").read_text(encoding="utf-8")
    assert (
        "**From FP8**: the checkpoint that this was made from holds FP8 codes already. 28 of 28 GEMMs keep their "
        "FP8 codes and scales as they were given. Scales of\nactivations are its own."
    ) in card


def test_scales_off_the_bf16_grid_stay_as_they_are(
    channel: Path, calibrate: Callable[..., tuple[Run, list[str]]]
) -> None:
    """What transformers makes of them: in FP32 the same numbers, in BF16 their roundings."""
    odd = torch.full((256, 1), 0.00123456789)
    assert odd[0, 0].bfloat16().float() != odd[0, 0]
    run, _ = calibrate(rewritten(channel, lambda held: held.update({f"{MODULE}.weight_scale": odd})))
    name = f"{MODULE}.weight_scale"
    assert same_bytes(stored(run.model)[name], odd)
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(run.model, dtype=dtype).get_parameter(name)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(exact, odd)
    assert torch.equal(rounded, odd.bfloat16())


@pytest.mark.parametrize("block", [(128, 128), (96, 160)])
def test_blocks_are_expressed_per_channel_and_say_what_that_costs(
    demo_checkpoint: Path, tmp_path: Path, calibrate: Callable[..., tuple[Run, list[str]]], block: tuple[int, int]
) -> None:
    folder = fp8_checkpoints.fine_grained(demo_checkpoint, tmp_path / "given", block)
    run, notes = calibrate(folder)
    source, after, scales = opened(str(folder)), stored(run.model), load_scales(run)
    assert {found.method for found in scales.weights.values()} == {f"mse of {block[0]}x{block[1]} blocks"}
    wanted = source.weights().tensor(f"{MODULE}.weight").bfloat16().double()
    error = wanted - after[f"{MODULE}.weight"].double() * after[f"{MODULE}.weight_scale"].double()
    lost = 10 * math.log10(float(wanted.square().sum() / error.square().sum()))
    assert scales.weights[MODULE].sqnr_db == pytest.approx(lost, abs=1e-6)
    least = min(found.sqnr_db or math.inf for found in scales.weights.values())
    assert notes == [
        (
            "0 of 28 GEMMs keep their FP8 codes and scales as they were given; 28 had a scale for each block, and "
            f"have one for each channel, which leaves {least:.1f} dB at the least"
        )
    ]


@pytest.mark.slow
def test_streaming_measures_the_same(channel: Path, calibrate: Callable[..., tuple[Run, list[str]]]) -> None:
    whole, _ = calibrate(channel, "whole", stream=False)
    streamed, _ = calibrate(channel, "streamed", stream=True)
    assert streamed.statistics.read_bytes() == whole.statistics.read_bytes()
    assert json.loads(streamed.statistics_json.read_text()) == json.loads(whole.statistics_json.read_text())


def wide(source: Source, held: dict[str, torch.Tensor]) -> None:
    """Keep `MODULE` as the numbers it stands for."""
    held[f"{MODULE}.weight"] = source.weights().tensor(f"{MODULE}.weight").bfloat16()
    del held[f"{MODULE}.weight_scale"]


@pytest.mark.slow
def test_what_is_given_wide_stays_so_unless_it_is_named(
    channel: Path, calibrate: Callable[..., tuple[Run, list[str]]]
) -> None:
    source = opened(str(channel))
    rewritten(channel, lambda held: wide(source, held))
    given, _ = calibrate(channel, "given")
    assert load_scales(given).skipped[MODULE] == Skipped(
        reason="as it was given: no FP8 codes in the source checkpoint"
    )
    assert stored(given.model)[f"{MODULE}.weight"].dtype == torch.bfloat16
    named, notes = calibrate(channel, "named", only=("*",))
    assert load_scales(named).weights[MODULE].method == "mse"
    assert notes == [
        "27 of 28 GEMMs keep their FP8 codes and scales as they were given; 1 is quantized anew",
        f"--only: {MODULE} had no FP8 codes in {channel}, and has now",
    ]


@pytest.mark.parametrize(
    ("strategy", "options", "method", "rounding"),
    [
        ("channel", {"weight_method": "amax"}, "amax", "nearest"),
        pytest.param("channel", {"weight_rounding": "sequential"}, "mse", "sequential", marks=pytest.mark.slow),
        pytest.param("block", {"weight_rounding": "gptq"}, "mse of 128x128 blocks", "gptq", marks=pytest.mark.slow),
    ],
)
def test_a_method_of_ones_own_quantizes_weights_anew(
    demo_checkpoint: Path, tmp_path: Path, calibrate: Callable[..., tuple[Run, list[str]]],
    strategy: str, options: dict[str, Any], method: str, rounding: str,
) -> None:  # fmt: skip
    run, notes = calibrate(fp8_checkpoints.compressed(demo_checkpoint, tmp_path / "given", strategy), **options)
    assert {(found.method, found.rounding) for found in load_scales(run).weights.values()} == {(method, rounding)}
    assert notes[0].startswith("0 of 28 GEMMs keep their FP8 codes and scales as they were given; 28 ")


def test_the_largest_of_several_scales_of_one_tensor_is_taken(
    tensor: Path, calibrate: Callable[..., tuple[Run, list[str]]]
) -> None:
    siblings = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    given = {f"{module}.input_scale": torch.tensor([2.0**-at]) for at, module in enumerate(siblings, 4)}
    run, notes = calibrate(rewritten(tensor, lambda held: held.update(given)), inherit=True)
    assert [load_scales(run).activations[module].scale for module in siblings] == [2.0**-4] * 3
    assert notes[1:] == [
        f"--inherit: {', '.join(siblings)} read one tensor under different scales; the largest is taken"
    ]


@pytest.mark.filterwarnings("default")  # its export takes a warning that is an error for its own failure
def test_modelopts_own_export(
    demo_checkpoint: Path, tmp_path: Path, calibrate: Callable[..., tuple[Run, list[str]]]
) -> None:
    folder = fp8_checkpoints.modelopt(demo_checkpoint, tmp_path / "given", cache=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo_checkpoint / name).read_bytes())
    run, _ = calibrate(folder, inherit=True, kv_cache="fp8")
    before, after, scales = stored(folder), stored(run.model), load_scales(run)
    attention = "model.layers.0.self_attn"
    assert len(scales.weights) == 28
    assert all(same_bytes(before[f"{name}.weight"], after[f"{name}.weight"]) for name in scales.weights)
    assert scales.activations[MODULE].scale == float(before[f"{MODULE}.input_scale"])
    assert scales.kv_cache[f"{attention}.k"].scale == float(before[f"{attention}.k_proj.k_scale"])


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(InputError) as refused:
        sources.gemms_of(opened(str(folder)), CalibrateOptions(**options))
    return str(refused.value)


def test_there_must_be_scales_to_inherit(demo_checkpoint: Path, channel: Path, tensor: Path) -> None:
    assert refusal(demo_checkpoint, inherit=True) == (
        f"--inherit: {demo_checkpoint} is no FP8 checkpoint, so it has no scales to inherit; leave it out"
    )
    assert refusal(channel, inherit=True) == (
        f"--inherit: {channel} has no static scale of the input of model.layers.0.self_attn.q_proj; leave --inherit "
        "out, and it is measured"
    )
    assert refusal(tensor, inherit=True, kv_cache="v") == (
        f"--inherit: {tensor} has no scale of the cache of model.layers.0.self_attn.v; leave --kv-cache out, or "
        "--inherit, and it is measured"
    )


def test_a_scale_of_activations_that_is_none(tensor: Path) -> None:
    name = f"{MODULE}.input_scale"
    rewritten(tensor, lambda held: held.update({name: torch.tensor([0.0])}))
    assert refusal(tensor, inherit=True) == (
        f"{name}: holds the scale 0, and a tensor of activations has one, positive and finite; leave out --inherit"
    )
    rewritten(tensor, lambda held: held.update({name: torch.ones(4)}))
    assert refusal(tensor, inherit=True) == (
        f"{name}: holds 4 scales, and a tensor of activations has one, positive and finite; leave out --inherit"
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"activation_terms": 2}, "--activation-terms 2"),
        ({"two_terms": ("*.mlp.*",)}, "--two-terms *.mlp.*"),
        ({"weight_method": "amax"}, "--weight-method amax"),
        ({"weight_rounding": "gptq"}, "--weight-rounding gptq"),
        ({"clip": Clipping(method="mse")}, "--method mse"),
        ({"clip": Clipping(margin=1)}, "--margin 1"),
    ],
)
def test_what_is_inherited_is_not_chosen(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as refused:
        CalibrateOptions(inherit=True, **options)
    assert str(refused.value) == (
        f"--inherit: takes codes and scales as they were given, and {named} chooses others; leave one of them out "
        "(--no-inherit)"
    )


@pytest.mark.slow
def test_scales_are_chosen_again_from_the_given_codes(
    tensor: Path, calibrate: Callable[..., tuple[Run, list[str]]]
) -> None:
    run, _ = calibrate(tensor, inherit=True)
    given: Scales = load_scales(run)
    chosen = quantize_stage.rescaled(run, RescaleOptions())
    assert chosen.inherit
    chosen = quantize_stage.rescaled(run, RescaleOptions(inherit=False))
    source = sources.source_of(run)
    quantize_stage.quantize(run, source, sources.gemms_of(source, chosen), chosen, Notes(SILENT))
    again = load_scales(run)
    assert again.weights == given.weights
    assert {found.method for found in again.activations.values()} == {"amax"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_mixture_that_fp8q_wrote_comes_back_byte_for_byte(
    name: str, calibrate: Callable[..., tuple[Run, list[str]]], tmp_path: Path
) -> None:
    """Its experts' static scales lie beside the weights; one of Qwen's experts saw no token, in both runs."""
    path = random_mixture(tmp_path / name, name)
    if name == "qwen3_moe":
        rewrite(path, starve)
    first, _ = calibrate(path, "first", min_expert_tokens=1)
    again, notes = calibrate(first.model, "again", inherit=True)
    for file in ("model-00001-of-00001.safetensors", "experts.safetensors"):
        before, after = load_file(first.model / file), load_file(again.model / file)
        assert before.keys() == after.keys()
        assert all(same_bytes(before[tensor], after[tensor]) for tensor in before)
    of_first, of_again = load_scales(first), load_scales(again)
    few = "model.layers.0.mlp.experts.2.down_proj"
    assert of_first.activations[few].method == ("amax of other experts (0 tokens)" if name == "qwen3_moe" else "amax")
    assert {module: found.scale for module, found in of_again.activations.items()} == {
        module: found.scale for module, found in of_first.activations.items()
    }
    assert {found.method for found in of_again.activations.values()} == {"inherited"}
    assert of_again.skipped.keys() == of_first.skipped.keys()
    kept = {"mixtral": 32, "qwen3_moe": 31}[name]  # `starve` leaves an o_proj of zeros, which has no scale
    assert notes[-1] == f"{kept} of {kept} GEMMs keep their FP8 codes and scales as they were given"


def test_scales_beside_the_weights_belong_to_the_model(
    calibrate: Callable[..., tuple[Run, list[str]]], tmp_path: Path
) -> None:
    """They change its fingerprint, and it is refused where they are damaged, or left behind."""
    run, _ = calibrate(random_mixture(tmp_path / "mixtral", "mixtral"), "first")
    file, before = run.model / "experts.safetensors", opened(str(run.model)).fingerprint
    held = load_file(file)
    doubled = "model.layers.1.block_sparse_moe.experts.2.w2.input_scale"
    save_file(held | {doubled: 2 * held[doubled]}, file, {"format": "pt"})
    assert opened(str(run.model)).fingerprint != before
    again, _ = calibrate(run.model, "again", inherit=True)
    module = "model.layers.1.mlp.experts.2.down_proj"
    assert load_scales(again).activations[module].scale == 2 * load_scales(run).activations[module].scale
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(InputError) as refused:
        opened(str(run.model))
    whole = "does not hold the whole of model.layers.1.block_sparse_moe.experts.3.w3.input_scale"
    assert str(refused.value) == f"{file}: {whole}; copy or download it again"
    file.unlink()
    with pytest.raises(InputError) as refused:
        calibrate(run.model, "third", inherit=True)
    assert str(refused.value) == (
        f"--inherit: {run.model} has no static scale of the input of model.layers.0.mlp.experts.0.gate_proj; leave "
        "--inherit out, and it is measured"
    )


@pytest.mark.slow
def test_scales_of_a_cache_of_values_are_inherited_from_beside_the_weights(
    demo_checkpoint: Path, calibrate: Callable[..., tuple[Run, list[str]]]
) -> None:
    first, _ = calibrate(demo_checkpoint, "first", kv_cache="v")
    again, _ = calibrate(first.model, "again", inherit=True, kv_cache="v")
    before, after = load_file(first.model / "kv_cache.safetensors"), load_file(again.model / "kv_cache.safetensors")
    assert before.keys() == after.keys()
    assert all(same_bytes(before[name], after[name]) for name in before)
    assert {found.method for found in load_scales(again).kv_cache.values()} == {"inherited"}
    _, notes = calibrate(first.model, "third", inherit=True)
    assert notes[-1] == f"--inherit: {first.model} has scales of an FP8 cache, which --kv-cache v takes too"
