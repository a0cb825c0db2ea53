"""A mixture of experts goes the way of every model: by the names of its files, and with experts that saw nothing.

Its graph is in test_expert_graphs.py.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils import match_name
from packaging.version import Version
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.calibrate.measure.statistics import load_record, load_statistics
from fp8q.calibrate.model.expert_modules import experts_of
from fp8q.calibrate.model.source import load_model, open_source
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, RescaleOptions, ScaleOptions, ValidateOptions
from fp8q.quantize.checkpoint.card_additions import markdown_text
from fp8q.quantize.reading.run_checkpoint import stored_arrays
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.reference.linear import FP8Linear
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.sensitivity.document import AS_IT_IS
from fp8q.quantize.sensitivity.gradients import predict_sites
from fp8q.quantize.sensitivity.single_site import Float
from fp8q.quantize.sensitivity.site_quantizers import Quantizer, sites_of
from fp8q.stages import export as export_stage
from fp8q.stages import tune as tune_stage
from fp8q.stages.corpus import load_tokens
from fp8q.stages.pipeline.stage import Notes
from fp8q.validate.accuracy.document import load_accuracy
from fp8q.validate.report.report import render
from fp8q.validate.tuning.document import Chosen, Recipe, Tuning

from ..calibrate.model.damage import rewrite
from ..command_result import Result
from ..conftest import KeepingGraphs, Texts, WithoutGraphs
from ..mixtures import MIXTURES, random_mixture, starve

pytestmark = pytest.mark.slow

#: Four batches: fewer, and nothing is said of whether the text was enough.
OPTIONS = CalibrateOptions(samples=16, seq_len=64, batch_size=4)
EXPERT = "model.layers.1.mlp.experts.2"
STORED = "model.layers.1.block_sparse_moe.experts.2"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, demo_texts: Texts) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("text")
    for name, path in (("calibration.txt", demo_texts.calibration), ("evaluation.txt", demo_texts.evaluation)):
        (folder / name).write_text(path.read_text(encoding="utf-8")[:8_000], encoding="utf-8")
    return folder / "calibration.txt", folder / "evaluation.txt"


@pytest.fixture(scope="module", autouse=True)
def kept(keeping_graphs: KeepingGraphs) -> Iterator[None]:
    """Trace each graph once."""
    with keeping_graphs():
        yield


@pytest.fixture(scope="module")
def trained(
    shared_checkpoint: Callable[[str], Path], text: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """The trained Mixtral."""
    path = shared_checkpoint("mixtral")
    return api.calibrate(str(path), str(text[0]), tmp_path_factory.mktemp("trained") / "run", str(text[1]), OPTIONS)


@pytest.fixture(scope="module")
def starving(text: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A mixture one of whose experts no token reaches."""
    folder = tmp_path_factory.mktemp("starving")
    path = random_mixture(folder / "qwen3_moe", "qwen3_moe")
    rewrite(path, starve)
    return api.calibrate(str(path), str(text[0]), folder / "run", str(text[1]), OPTIONS)


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    (path,) = run.model.glob("model-*.safetensors")
    return load_file(path)


def test_a_trained_mixtral_keeps_its_perplexity(trained: Run) -> None:
    api.validate(trained.root, options=ValidateOptions(runtimes=("bf16", "reference")))
    found = load_accuracy(trained).runtimes
    assert abs(found["reference"].perplexity / found["bf16"].perplexity - 1) < 0.01
    assert found["reference"].kl_mean_nats is not None
    assert 0 < found["reference"].kl_mean_nats < 0.003


def test_experts_are_written_under_the_names_that_vllm_reads(trained: Run) -> None:
    index = json.loads((trained.model / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    tensors = {name for name in index if name.startswith("model.layers.1.block_sparse_moe.")}
    assert tensors == {
        f"model.layers.1.block_sparse_moe.experts.{expert}.{part}.{tensor}"
        for expert in range(4)
        for part in ("w1", "w2", "w3")
        for tensor in ("weight", "weight_scale")
    } | {"model.layers.1.block_sparse_moe.gate.weight"}
    assert not any("mlp" in name for name in index)
    beside = load_file(trained.model / "experts.safetensors")
    assert beside.keys() == {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.input_scale"
        for layer in range(4)
        for expert in range(4)
        for part in ("w1", "w2", "w3")
    }
    scales = load_scales(trained).activations
    assert beside[f"{STORED}.w2.input_scale"].tolist() == [scales[f"{EXPERT}.down_proj"].scale]
    assert stored_arrays(trained.model, [f"{EXPERT}.down_proj.input_scale"])[
        f"{EXPERT}.down_proj.input_scale"
    ].tolist() == [scales[f"{EXPERT}.down_proj"].scale]


def test_config_says_of_experts_what_vllm_has_a_product_for(trained: Run) -> None:
    config = json.loads((trained.model / "config.json").read_text(encoding="utf-8"))
    found = QuantizationConfig.model_validate(config["quantization_config"])
    linear, experts = found.config_groups["group_0"], found.config_groups["group_1"]
    assert (linear.input_activations.strategy, linear.input_activations.dynamic) == ("tensor", False)
    assert (experts.input_activations.strategy, experts.input_activations.dynamic) == ("token", True)
    assert experts.weights.strategy == "channel"
    assert match_name(f"{STORED}.w1", experts.targets[0])
    assert not match_name("model.layers.1.self_attn.q_proj", experts.targets[0])
    assert "model.layers.1.block_sparse_moe.gate" in found.ignore


def test_the_card_says_that_not_every_transformers_can_hold_the_experts(trained: Run) -> None:
    card = (trained.model / "README.md").read_text(encoding="utf-8")
    assert "transformers 5.14 cannot load its experts" in card
    assert "model.onnx" in card


def shared_error(exact: torch.Tensor, reference: torch.Tensor, found: torch.Tensor) -> float:
    """The share of the error of `reference` that `found` has too, both logits seen from the `exact` ones: KL is half a
    squared length, to third order. It is next to 0 for the exact ones themselves.
    """

    def kl(one: torch.Tensor, other: torch.Tensor) -> float:
        p, q = (logits.double().log_softmax(-1) for logits in (one, other))
        return float((p.exp() * (p - q)).sum(-1).mean())

    whole = kl(exact, reference)
    return (whole + kl(exact, found) - kl(reference, found)) / (2 * whole)


def test_transformers_loads_the_experts_as_they_are_or_ends_with_an_error(
    trained: Run, shared_checkpoint: Callable[[str], Path]
) -> None:
    """5.23 does the first, 5.14 the second. A load in BF16, as if there were no scales, has no share of FP8's error."""
    if Version(transformers.__version__) < Version("5.15"):
        with pytest.raises(RuntimeError, match="during automatic conversion of the weights"):
            AutoModelForCausalLM.from_pretrained(trained.model, dtype=torch.bfloat16)
        return
    ids = torch.from_numpy(load_tokens(trained, trained.evaluation)[:1024]).reshape(8, 128)
    with torch.inference_mode():
        exact, reference, found = (
            model(input_ids=ids).logits
            for model in (
                load_model(open_source(str(shared_checkpoint("mixtral"))), torch.bfloat16),
                load_reference(trained.model, "fast", torch.bfloat16).model,
                AutoModelForCausalLM.from_pretrained(trained.model, dtype=torch.bfloat16),
            )
        )
    assert shared_error(exact, reference, exact) == pytest.approx(0, abs=0.01)
    assert shared_error(exact, reference, found) > 0.5


def test_the_reference_holds_the_codes_of_each_expert(trained: Run, shared_checkpoint: Callable[[str], Path]) -> None:
    reference = load_reference(trained.model, "exact", torch.bfloat16).model
    scales, weights = load_scales(trained), weights_of(trained)
    products = {name for name, module in reference.named_modules() if isinstance(module, FP8Linear)}
    assert products == scales.weights.keys()
    assert len(products) == 4 * (4 + 4 * 3)
    layer = reference.get_submodule(f"{EXPERT}.up_proj")
    assert isinstance(layer, FP8Linear)
    assert torch.equal(layer.weight_scale, weights[f"{STORED}.w3.weight_scale"][:, 0])
    router = reference.get_submodule("model.layers.1.mlp.gate")
    assert isinstance(router, nn.Module)
    source = load_model(open_source(str(shared_checkpoint("mixtral"))), torch.bfloat16)
    assert torch.equal(router.get_parameter("weight"), source.get_parameter("model.layers.1.mlp.gate.weight"))
    reasons = {module: each.reason for module, each in scales.skipped.items()}
    assert reasons["model.layers.1.mlp.gate"] == "router: another choice of experts costs more than its product"


@pytest.mark.parametrize("name", MIXTURES)
def test_fused_files_give_the_checkpoint_of_files_of_an_expert_a_tensor(
    name: str, text: tuple[Path, Path], tmp_path: Path, without_graphs: WithoutGraphs
) -> None:
    written, traced = [], name == "olmoe"  # graphs of the others are in test_expert_graphs.py
    for kept in (True, False):
        path = random_mixture(tmp_path / f"{name}-{kept}", name, save_original_format=kept)
        with nullcontext() if traced else without_graphs():
            run = api.calibrate(str(path), str(text[0]), tmp_path / f"run-{kept}", str(text[1]), OPTIONS)
        assert run.onnx.is_file() == traced
        written.append((weights_of(run), load_file(run.model / "experts.safetensors"), run.scales.read_bytes()))
    for one, other in zip(written[0][:2], written[1][:2], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key].view(torch.uint8), other[key].view(torch.uint8)) for key in one)
    assert written[0][2] == written[1][2]
    if name == "qwen2_moe":
        assert "model.layers.0.mlp.shared_expert.gate_proj.weight_scale" in written[0][0]
        reason = json.loads(written[0][2])["skipped"]["model.layers.0.mlp.shared_expert_gate"]["reason"]
        assert reason.startswith("router")


@pytest.mark.parametrize(
    "how", [{"activation_terms": 2}, {"weight_rounding": "gptq"}, {"weight_rounding": "sequential"}]
)
def test_a_starved_expert_is_named_and_rounded_to_nearest_whatever_the_others(
    how: dict[str, object], starving: Run, text: tuple[Path, Path], tmp_path: Path, without_graphs: WithoutGraphs
) -> None:
    path = starving.record().model["path"]
    options = CalibrateOptions(samples=16, seq_len=64, min_expert_tokens=100, **how)  # type: ignore[arg-type]
    with without_graphs():
        run = api.calibrate(path, str(text[0]), tmp_path / "run", str(text[1]), options)
    scales = load_scales(run)
    few = "model.layers.0.mlp.experts.2.down_proj"
    others = [scales.activations[few.replace("experts.2", f"experts.{n}")] for n in (0, 1, 3)]
    assert scales.activations[few].method == "amax of other experts (0 tokens)"
    assert scales.activations[few].scale == max(other.scale for other in others if other.method == "amax")
    assert scales.weights[few].rounding == "nearest"
    gates = [scales.weights[f"model.layers.0.mlp.experts.{n}.gate_proj"] for n in range(4)]
    assert gates[2].rounding == "nearest", "it has the H of all experts' input, but no token that was held out"
    if "weight_rounding" in how:
        assert gates[2].held_out is not None
        assert gates[2].held_out.tokens == 0
        assert how["weight_rounding"] in {gate.rounding for gate in gates}
    assert any(
        line.startswith("model.layers.0.mlp.experts: 1 of 4 experts saw fewer than 100 tokens (expert 2 (0))")
        for line in run.record().stages["quantize"].notes
    )


def test_what_reads_a_run_reads_one_with_an_expert_that_saw_nothing(starving: Run, fp8q: Callable[..., Result]) -> None:
    found = api.inspect(starving.root)
    assert (found.experts[0].tokens[2], found.experts[0].least[:5]) == (0, "2 (0)")
    assert 2 in found.experts[0].borrowed
    assert found.certificate.verdict != "unknown"
    assert "model.layers.0.mlp.experts.2.down_proj.input" not in {each.tensor for each in found.certificate.records}
    assert "Tokens each expert saw" in fp8q("inspect", starving.root).out
    sensitivity = api.sensitivity(starving.root)
    alone = {(loss.module, loss.kind): loss.kl_nats for loss in sensitivity.modules}
    assert alone["model.layers.0.mlp.experts.2.down_proj", "weight"] == 0
    assert alone["model.layers.0.mlp.experts.0.gate_proj", "activation"] > 0
    page = render(starving)
    assert "What the experts saw" in page
    assert "amax of other experts (0 tokens)" in starving.scales.read_text(encoding="utf-8")
    assert fp8q("doctor", starving.root).code in {0, 3}


def test_the_shared_input_alone_costs_what_rounding_it_before_transformers_own_experts_makes(
    trained: Run, shared_checkpoint: Callable[[str], Path]
) -> None:
    path, scales = shared_checkpoint("mixtral"), load_scales(trained)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")
    ids = torch.from_numpy(load_tokens(trained, trained.calibration)[:8])
    place = "model.layers.1.mlp.experts"
    scale = torch.tensor(scales.activations[f"{place}.0.gate_proj"].scale)
    with torch.inference_mode():
        before = torch.log_softmax(theirs(input_ids=ids).logits[:, :-1], -1)
        theirs.get_submodule(place).register_forward_pre_hook(
            lambda _, given: ((given[0] / scale).to(torch.float8_e4m3fn).float() * scale, *given[1:])
        )
        after = torch.log_softmax(theirs(input_ids=ids).logits[:, :-1], -1)
    expected = float((before.exp() * (before - after)).sum(dtype=torch.float64))

    model = load_model(open_source(str(path)), torch.float32).requires_grad_(False)
    quantizer = Quantizer(model, load_reference(trained.model, "exact", torch.float32), scales)
    sites = sites_of(scales, load_record(trained).groups)
    (site,) = (site for site in sites if site.module == f"{place}.0.gate_proj" and site.kind == "activation")
    assert len(site.members) == 8
    assert Float(quantizer, ids, None, ()).divergence(site) == pytest.approx(expected, rel=1e-3)
    predicted = predict_sites(quantizer, sites, ids, torch.Generator().manual_seed(0))
    assert predicted[site.key][AS_IT_IS] == pytest.approx(expected, rel=0.5)


def test_the_written_checkpoint_is_one_to_start_from(trained: Run, text: tuple[Path, Path], tmp_path: Path) -> None:
    again = api.calibrate(str(trained.model), str(text[0]), tmp_path / "run", str(text[1]), OPTIONS)
    mine, theirs = weights_of(again), weights_of(trained)
    assert mine.keys() == theirs.keys()
    codes = [name for name in mine if not name.endswith(".input_scale")]
    assert all(torch.equal(mine[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in codes)


def test_all_experts_is_for_mixtures(demo_checkpoint: Path, text: tuple[Path, Path], tmp_path: Path) -> None:
    options = CalibrateOptions(samples=16, seq_len=64, all_experts=True)
    with pytest.raises(api.InputError) as refused:
        api.calibrate(str(demo_checkpoint), str(text[0]), tmp_path / "run", str(text[1]), options)
    assert str(refused.value) == (f"--all-experts: {demo_checkpoint} (LlamaForCausalLM) has no experts; leave it out")


def test_tuning_measures_moments_by_the_options_that_the_run_was_measured_by(
    text: tuple[Path, Path], tmp_path: Path, without_graphs: WithoutGraphs
) -> None:
    path = random_mixture(tmp_path / "mixtral", "mixtral")
    recipe = Recipe(two_terms=[], skip=[], kv_cache="off", weight_rounding="gptq")
    found = Tuning.model_construct(met=True, changes=[], chosen=Chosen.model_construct(recipe=recipe))
    with without_graphs():
        run = api.calibrate(str(path), str(text[0]), tmp_path / "run", str(text[1]), replace(OPTIONS, all_experts=True))
        before = load_statistics(run)
        tune_stage.apply_mix(run, found, Notes(SILENT))
    after = load_statistics(run)
    assert (before.record.all_experts, after.record.all_experts) == (True, True)
    assert before.tensors.keys() == after.tensors.keys()
    assert all(
        (before.tensors[name].amax_channels == after.tensors[name].amax_channels).all() for name in before.tensors
    )
    assert run.record().stages["quantize"].options["weight_rounding"] == "gptq"


def test_scales_are_chosen_again_with_another_least_number_of_tokens(
    starving: Run, tmp_path: Path, without_graphs: WithoutGraphs
) -> None:
    run = Run(Path(shutil.copytree(starving.root, tmp_path / "run")))
    with without_graphs():
        api.scales(run.root, RescaleOptions(min_expert_tokens=0))
    skipped = load_scales(run).skipped["model.layers.0.mlp.experts.2.down_proj"]
    assert skipped.reason == "never observed: no token of the calibration text reached it"
    assert ScaleOptions().min_expert_tokens == 512
    assert experts_of(load_reference(run.model, "fast", torch.bfloat16).model)


def test_a_layer_some_of_whose_experts_stay_in_bf16_is_told_of_wherever_somebody_looks(
    starving: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_stage, "export", lambda *given: None)  # nothing here reads one
    run = Run(Path(shutil.copytree(starving.root, tmp_path / "run")))
    told = (
        "3 of 12 GEMMs of its experts in BF16 (3.gate_proj, 3.up_proj, 3.down_proj) beside others in FP8, and so in "
        "1 more layer: vLLM takes all experts of a layer to be stored as expert 0 is, and refuses such a checkpoint or "
        "reads it wrong in silence; keep all experts of a layer in BF16, or none, if vLLM is to serve it"
    )
    before = " ".join(run.record().stages["quantize"].notes)
    assert "vLLM documents" in before
    assert "experts in BF16" not in before
    assert "vllm serve" in (run.model / "README.md").read_text(encoding="utf-8")
    assert api.lint(run.model).findings == []
    api.scales(run.root, RescaleOptions(skip=("*.experts.3.*",)))
    assert f"model.layers.0.mlp.experts: {told}" in run.record().stages["quantize"].notes
    assert "vLLM documents" not in " ".join(run.record().stages["quantize"].notes)
    card = " ".join((run.model / "README.md").read_text(encoding="utf-8").split())
    assert f"**Nor can vLLM**: model.layers.0.mlp.experts: {markdown_text(told)}." in card
    assert "vllm serve" not in card
    assert [str(finding) for finding in api.lint(run.model).findings] == [
        f"C116 split-projections: model.layers.{layer}.mlp.experts.3.down_proj.weight: is BF16, as 2 more of the 12 "
        "GEMMs of its layer's experts, and the rest FP8 with one scale a channel; quantize all of them alike"
        for layer in range(2)
    ]
