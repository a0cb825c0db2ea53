"""What each tensor costs alone: measured as an independent program measures it, predicted in nearly the same order."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from fp8q import api
from fp8q.api import SensitivityOptions
from fp8q.calibrate.measure.statistics import load_record
from fp8q.calibrate.model.source import load_model
from fp8q.core.run import Run
from fp8q.quantize.codes.encoding import CODE
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.sensitivity.document import AS_IT_IS, BY_TOKEN, TWO_TERMS, Sensitivity, Site
from fp8q.quantize.sensitivity.gradients import predict_sites, summed
from fp8q.quantize.sensitivity.single_site import Float, Prefix
from fp8q.quantize.sensitivity.site_quantizers import Quantizer, sites_of
from fp8q.stages import sensitivity as sensitivity_stage
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import source_of

WINDOWS = 4
MODULE, LAYER = "model.layers.2.mlp.down_proj", 2


@pytest.fixture(scope="module")
def run(demo_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo's run, to write into."""
    return Run(shutil.copytree(demo_run.root, tmp_path_factory.mktemp("sensitivity") / "run"))


@pytest.fixture(scope="module")
def full(run: Run) -> Sensitivity:
    """Every tensor measured."""
    return api.sensitivity(run.root, SensitivityOptions(windows=WINDOWS, measure=10_000))


@pytest.fixture(scope="module")
def quantizer(run: Run) -> Quantizer:
    model = load_model(source_of(run), torch.float32, "cpu").requires_grad_(False)
    return Quantizer(model, load_reference(run.model, "exact", torch.float32), load_scales(run))


@pytest.fixture(scope="module")
def sites(run: Run) -> list[Site]:
    return sites_of(load_scales(run), load_record(run).groups)


@pytest.fixture(scope="module")
def ids(run: Run) -> torch.Tensor:
    return torch.from_numpy(load_tokens(run, run.calibration)[:2])


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x on E4M3's grid, by ml_dtypes."""
    codes = np.clip(x.numpy() / np.float32(scale), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return torch.from_numpy(codes.astype(np.float32) * np.float32(scale))


def divergence(model: PreTrainedModel, ids: torch.Tensor, change: Callable[[], Any]) -> float:
    """KL in nats, summed, that `change` of the model makes, by transformers alone."""
    with torch.inference_mode():
        before = torch.log_softmax(model(input_ids=ids).logits[:, :-1], -1)
        change()
        after = torch.log_softmax(model(input_ids=ids).logits[:, :-1], -1)
    return float((before.exp() * (before - after)).sum(dtype=torch.float64))


def stored(run: Run, name: str) -> torch.Tensor:
    shard = json.loads((run.model / "model.safetensors.index.json").read_text())["weight_map"][name]
    with safe_open(run.model / shard, "pt") as opened:
        found: torch.Tensor = opened.get_tensor(name)
    return found


def test_a_weight_alone_costs_what_transformers_makes_of_its_codes(
    run: Run, quantizer: Quantizer, ids: torch.Tensor, demo_checkpoint: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32)
    numbers = stored(run, f"{MODULE}.weight").float() * stored(run, f"{MODULE}.weight_scale").float()
    weight = model.get_parameter(f"{MODULE}.weight")
    expected = divergence(model, ids, lambda: weight.data.copy_(numbers))
    measured = Float(quantizer, ids, None, ()).divergence(Site(MODULE, "weight", (MODULE,)))
    assert measured == pytest.approx(expected, rel=1e-3)


def test_an_activation_alone_costs_what_rounding_it_for_all_its_readers_makes(
    run: Run, quantizer: Quantizer, ids: torch.Tensor, demo_checkpoint: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32)
    members = tuple(f"model.layers.{LAYER}.mlp.{name}" for name in ("gate_proj", "up_proj"))
    scale = json.loads(run.scales.read_text())["activations"][members[0]]["scale"]

    def change() -> None:
        norm = model.get_submodule(f"model.layers.{LAYER}.post_attention_layernorm")
        norm.register_forward_hook(lambda module, given, y: rounded(y, scale))

    expected = divergence(model, ids, change)
    measured = Float(quantizer, ids, None, ()).divergence(Site(members[0], "activation", members))
    assert measured == pytest.approx(expected, rel=1e-3)


def test_in_a_run_with_tails_a_prompt_has_one_term_before_them(
    run: Run, ids: torch.Tensor, demo_checkpoint: Path, tmp_path: Path
) -> None:
    """By hand: half a window is the prompt, its last 16 positions and all behind it have two terms, 16 times apart."""
    copied, tail, prompt = Run(shutil.copytree(run.root, tmp_path / "run")), 16, ids.shape[1] // 2
    api.scales(copied.root, api.RescaleOptions(activation_terms="tail", exact_tail=tail))
    members = tuple(f"model.layers.{LAYER}.mlp.{name}" for name in ("gate_proj", "up_proj"))
    scale = json.loads(copied.scales.read_text())["activations"][members[0]]["scale"]
    model = AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32)

    def by_phase(module: object, given: object, y: torch.Tensor) -> torch.Tensor:
        one = rounded(y, scale)
        two = one + rounded(y - one, scale / 16)
        return torch.cat([one[:, : prompt - tail], two[:, prompt - tail :]], 1)

    with torch.inference_mode():
        before = torch.log_softmax(model(input_ids=ids).logits[:, prompt - 1 : -1], -1)
        model.get_submodule(f"model.layers.{LAYER}.post_attention_layernorm").register_forward_hook(by_phase)
        after = torch.log_softmax(model(input_ids=ids).logits[:, prompt - 1 : -1], -1)
    expected = float((before.exp() * (before - after)).sum(dtype=torch.float64))
    quantizer = Quantizer(
        load_model(source_of(copied), torch.float32, "cpu").requires_grad_(False),
        load_reference(copied.model, "exact", torch.float32),
        load_scales(copied),
    )
    measured = Float(quantizer, ids, None, ()).divergence(Site(members[0], "activation", members))
    assert measured == pytest.approx(expected, rel=1e-3)
    found = api.sensitivity(copied.root, SensitivityOptions(windows=1))
    assert (found.prompt, found.tokens) == (prompt, ids.shape[1] - prompt)


def test_the_error_of_a_weight_is_that_of_codes_as_a_gpu_holds_them(quantizer: Quantizer) -> None:
    """FP32 is not multiplied by float8 without a conversion."""
    name = f"model.layers.{LAYER}.mlp.down_proj"
    layer, x = quantizer.coded.layer(name), torch.ones(2, 704)
    weight, output, held = quantizer.weight_error(name), quantizer.output_error(name, x), layer.codes
    layer.codes = held.to(CODE)
    try:
        assert torch.equal(quantizer.weight_error(name), weight)
        assert torch.equal(quantizer.output_error(name, x), output)
    finally:
        layer.codes = held
    assert weight.abs().max() > 0


def test_a_cache_tensor_alone_costs_what_rounding_the_values_makes(
    run: Run, quantizer: Quantizer, ids: torch.Tensor, demo_checkpoint: Path
) -> None:
    """Values are what v_proj gives; the demo changes nothing of them before the cache."""
    model = AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32)
    attention = f"model.layers.{LAYER}.self_attn"
    scale = json.loads(run.scales.read_text())["kv_cache"][f"{attention}.v"]["scale"]

    def change() -> None:
        projection = model.get_submodule(f"{attention}.v_proj")
        projection.register_forward_hook(lambda module, given, y: rounded(y, scale))

    expected = divergence(model, ids, change)
    measured = Float(quantizer, ids, None, ()).divergence(Site(f"{attention}.v", "kv_cache", (f"{attention}.v",)))
    assert measured == pytest.approx(expected, rel=1e-3)


def test_layers_before_a_tensor_are_not_run_again_and_nothing_changes(
    run: Run, quantizer: Quantizer, sites: list[Site], ids: torch.Tensor
) -> None:
    prefix = Prefix.from_model(quantizer, source_of(run), "cpu")
    assert prefix is not None
    late = [site for site in sites if prefix.layers.index(site.module) == 3]
    assert {site.kind for site in late} == {"weight", "activation", "kv_cache"}
    assert {prefix.share(site) for site in late} == {0.25}
    whole, short = Float(quantizer, ids, None, ()), Float(quantizer, ids, prefix, late)
    calls: list[None] = []
    first = quantizer.model.get_submodule(f"{prefix.layers.prefix}.0.mlp.gate_proj")
    handle = first.register_forward_hook(lambda module, given, y: calls.append(None))
    found = [short.divergence(site) for site in late]
    handle.remove()
    assert calls == []
    assert found == [whole.divergence(site) for site in late]


def test_nothing_of_the_model_stays_changed(quantizer: Quantizer, sites: list[Site], ids: torch.Tensor) -> None:
    def logits() -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = quantizer.model(input_ids=ids, past_key_values=DynamicCache()).logits
        return found

    before = logits()
    predict_sites(quantizer, sites, ids, torch.Generator().manual_seed(0))
    Float(quantizer, ids, None, ()).divergence(sites[0])
    assert torch.equal(logits(), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in quantizer.model.modules())


def test_the_prediction_ranks_as_the_full_measurement_does(full: Sensitivity, run: Run, quantizer: Quantizer) -> None:
    """28 weights, 16 activations, 8 cache tensors; by prediction alone."""
    assert all(loss.measured for loss in full.modules)
    found = api.sensitivity(run.root, SensitivityOptions(windows=WINDOWS, measure=0))
    assert not any(loss.measured for loss in found.modules)
    assert len(found.modules) == len(full.modules) == 28 + 16 + 8
    exact = {(loss.module, loss.kind): loss.kl_nats for loss in full.modules}
    pairs = np.array([(loss.kl_nats, exact[loss.module, loss.kind]) for loss in found.modules])
    ranks = pairs.argsort(0).argsort(0)
    assert np.asarray(np.corrcoef(ranks.T))[0, 1] > 0.9
    assert 0.7 < float(np.median(pairs[:, 0] / pairs[:, 1])) < 1.3


def test_two_terms_leave_next_to_nothing_of_an_activation_s_loss(full: Sensitivity) -> None:
    for loss in full.modules:
        assert loss.kl_after.bf16 == 0.0
        if loss.kind == "activation":
            assert loss.kl_after.two_terms is not None
            assert loss.kl_after.two_terms < 0.01 * loss.kl_nats
        else:
            assert loss.kl_after.two_terms is None


def test_gptq_would_leave_a_part_of_what_a_weight_costs_and_nothing_is_said_of_the_rest(full: Sensitivity) -> None:
    shares = [loss.kl_after.gptq / loss.kl_nats for loss in full.modules if loss.kl_after.gptq is not None]
    assert len(shares) == sum(loss.kind == "weight" for loss in full.modules) == 28
    assert 0.01 < min(shares) < 0.3
    assert 0.4 < max(shares) <= 1


def test_the_worst_are_first_and_those_are_measured_that_a_pass_pays_for(run: Run) -> None:
    found = api.sensitivity(run.root, SensitivityOptions(windows=WINDOWS))
    assert [loss.kl_nats for loss in found.modules] == sorted((loss.kl_nats for loss in found.modules), reverse=True)
    assert sum(loss.measured for loss in found.modules) == 2  # the worst two, which take a pass together


def test_what_is_measured_on_the_first_batches_grows_as_its_prediction_does() -> None:
    progress = sensitivity_stage.SensitivityProgress(Path("progress.json"))
    progress.predicted = [
        {"weight:a": {AS_IT_IS: 2.0, "b": 9.0}, "weight:b": {AS_IT_IS: 0.0}},
        {"weight:a": {AS_IT_IS: 4.0}, "weight:b": {AS_IT_IS: 0.0}},
        {"weight:a": {AS_IT_IS: 3.0}, "weight:b": {AS_IT_IS: 0.0}},
    ]
    assert sensitivity_stage._over_all(progress) == {}
    progress.measured = [{"weight:a": 2.5, "weight:b": 1.0}]
    assert sensitivity_stage._over_all(progress) == {"weight:a": 2.5 * 9 / 2, "weight:b": 3.0}
    progress.measured = [{"weight:a": 2.5}, {"weight:a": 4.5}, {"weight:a": 3.0}]
    assert sensitivity_stage._over_all(progress) == {"weight:a": 10.0}


def test_a_killed_call_goes_on_at_the_batch_it_was_in(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SensitivityOptions(windows=8, measure=1)
    seen: list[int] = []

    def interrupted(quantizer: Quantizer, sites: list[Site], ids: torch.Tensor, *further: Any) -> Any:
        seen.append(len(ids))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return predict_sites(quantizer, sites, ids, *further)

    monkeypatch.setattr("fp8q.stages.sensitivity.predict_sites", interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.sensitivity(run.root, options)
    resumed = api.sensitivity(run.root, options)
    assert seen == [4, 4, 4]  # two batches of four windows, the second one twice
    monkeypatch.undo()
    run.sensitivity.unlink()
    assert api.sensitivity(run.root, options) == resumed


def test_the_command_shows_the_worst_last_and_says_before_what_it_takes(
    full: Sensitivity, run: Run, fp8q: Callable[..., Any]
) -> None:
    shown = fp8q("sensitivity", run.root, "--windows", WINDOWS, "--measure", 2)
    assert shown.code == 0
    assert shown.err.startswith("sensitivity: 52 tensors on 1,024 tokens; about 7.2 forward passes, some ")
    worst = full.modules[0]
    assert shown.out.rstrip().splitlines()[-1].split()[:2] == [worst.module, worst.kind]
    found = json.loads(fp8q("sensitivity", run.root, "--windows", WINDOWS, "--measure", 2, "--json").out)
    assert list(found) == ["schema", "windows", "tokens", "prompt", "modules"]
    assert list(found["modules"][0]) == [
        "module", "kind", "kl_nats", "sqnr_db", "measured", "kl_after", "shared_by",
    ]  # fmt: skip
    assert found["modules"][0]["measured"] is True


def test_a_scale_a_tenth_as_large_is_the_worst_of_all(run: Run, quantizer: Quantizer, ids: torch.Tensor) -> None:
    """One activation clips at a tenth of its amax: it comes first, and its readers are named."""
    scales, culprit = load_scales(run), "model.layers.1.self_attn.q_proj"
    readers = tuple(f"model.layers.1.self_attn.{name}_proj" for name in "qkv")
    clipped = {
        reader: activation.model_copy(update={"scale": activation.scale / 10})
        for reader, activation in scales.activations.items()
        if reader in readers
    }
    scales = scales.model_copy(update={"activations": scales.activations | clipped})
    damaged = Quantizer(quantizer.model, load_reference(run.model, "exact", torch.float32), scales)
    all_sites = sites_of(scales, load_record(run).groups)
    found = predict_sites(damaged, all_sites, ids, torch.Generator().manual_seed(0))
    worst = max(found, key=lambda key: found[key][AS_IT_IS])
    assert worst == f"activation:{culprit}"
    assert found[worst][AS_IT_IS] > 3 * sorted(variants[AS_IT_IS] for variants in found.values())[-2]
    assert set(found[worst]) == {AS_IT_IS, TWO_TERMS, BY_TOKEN}


def test_what_is_kept_of_a_killed_call_is_read_as_it_was_written(tmp_path: Path) -> None:
    progress = sensitivity_stage.SensitivityProgress.of(tmp_path / "progress.json")
    assert (progress.predicted, progress.chosen, progress.measured) == ([], None, [])
    progress.predicted.append({"weight:a": {AS_IT_IS: 1.0}})
    progress.predicted.append({"weight:a": {AS_IT_IS: 2.0}})
    progress.measured.append({"weight:a": 2.5})
    progress.save()
    again = sensitivity_stage.SensitivityProgress.of(tmp_path / "progress.json")
    assert again == progress
    assert summed(again.predicted) == {"weight:a": {AS_IT_IS: 3.0}}
