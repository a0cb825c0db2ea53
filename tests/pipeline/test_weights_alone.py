"""A run whose weights alone are FP8, in all modules or in some: its files, reference, graph, engine and loaders."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.export.engine.info import load_engines
from fp8q.export.lint.check import lint_graph, run_expectation
from fp8q.export.onnx_file.loading import load_graph
from fp8q.options import BF16
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.serving_cost import cost_of
from fp8q.serve.loop.sessions import open_session
from fp8q.stages.corpus import load_tokens
from fp8q.validate.report.run_comparison import terms
from tests.noise import check_codes

from ..command_result import Result

pytestmark = pytest.mark.slow

SOME = ("*.up_proj", "*.layers.1.self_attn.o_proj")
NAMED = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
#: Logits in FP32 of two implementations of the same numbers, of which no code is rounded on the way.
CLOSE = 2e-3


def remade(demo_run: Run, folder: Path, keeping_graphs: Any, **options: Any) -> Run:
    """The demo's run with other scales, and its graphs."""
    made = Run(Path(shutil.copytree(demo_run.root, folder / "run")))
    with keeping_graphs():
        api.scales(made.root, api.RescaleOptions(**options))
        api.export(made.root)
    return made


@pytest.fixture(scope="module")
def run(demo_run: Run, tmp_path_factory: pytest.TempPathFactory, keeping_graphs: Any) -> Run:
    """The demo with weights alone everywhere, and its cache in the compute type."""
    return remade(demo_run, tmp_path_factory.mktemp("alone"), keeping_graphs, activation_terms="bf16", kv_cache="off")


@pytest.fixture(scope="module")
def mixed(demo_run: Run, tmp_path_factory: pytest.TempPathFactory, keeping_graphs: Any) -> Run:
    """The demo with weights alone in some modules, the others in one term."""
    return remade(demo_run, tmp_path_factory.mktemp("mixed"), keeping_graphs, bf16_input=SOME, kv_cache="off")


@pytest.fixture(scope="module")
def windows(demo_run: Run) -> np.ndarray:
    """Int64 [4, 64]."""
    return load_tokens(demo_run, demo_run.evaluation).ravel()[:256].reshape(4, 64)


def reference_logits(run: Run, windows: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        model = load_reference(run.model, "exact", torch.float32).model
        found: np.ndarray = model(input_ids=torch.from_numpy(windows)).logits.numpy()
    return found


def tensors_of(run: Run) -> dict[str, torch.Tensor]:
    (shard,) = run.model.glob("*.safetensors")
    with safe_open(shard, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it has no other iterator


def dequantized_logits(run: Run, source: Path, windows: np.ndarray) -> np.ndarray:
    """The source model in FP32 with codes × scales for its weights, by transformers alone."""
    tensors = tensors_of(run)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    wide = {
        f"{module}.weight": tensors[f"{module}.weight"].float() * tensors[f"{module}.weight_scale"]
        for module in load_scales(run).in_form(BF16)
    }
    model.load_state_dict(wide, strict=False)
    with torch.inference_mode():
        found: np.ndarray = model(input_ids=torch.from_numpy(windows)).logits.numpy()
    return found


def test_the_files_say_that_no_input_is_codes(run: Run) -> None:
    scales, tensors = load_scales(run), tensors_of(run)
    assert scales.in_form(BF16) == [*scales.weights]
    assert scales.activations == {}
    assert scales.fp8_gemms == []
    assert terms(scales) == "weights alone in FP8"
    assert [name for name in tensors if name.endswith("input_scale")] == []
    config = json.loads((run.model / "config.json").read_text(encoding="utf-8"))
    assert config["fp8q"]["bf16_inputs"] == scales.in_form(BF16)
    (group,) = config["quantization_config"]["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert "input_activations" not in group
    card = (run.model / "README.md").read_text(encoding="utf-8")
    assert "**Weights alone**: the input of every FP8 GEMM stays in BF16" in card
    assert "28 GEMMs have FP8 weights alone; embeddings" in card


def test_a_pattern_takes_whole_groups_and_says_so(mixed: Run) -> None:
    scales = load_scales(mixed)
    assert scales.in_form(BF16)[:2] == NAMED
    assert len(scales.in_form(BF16)) == 2 * 4 + 1
    assert set(scales.activations).isdisjoint(scales.in_form(BF16))
    assert len(scales.activations) + len(scales.in_form(BF16)) == len(scales.weights) == 28
    assert mixed.record().stages["quantize"].notes[-1] == (
        "--bf16-input: model.layers.0.mlp.gate_proj and 3 more read the same tensor as a module that it names, and "
        "take weights alone in FP8 with it"
    )
    config = json.loads((mixed.model / "config.json").read_text(encoding="utf-8"))
    groups = config["quantization_config"]["config_groups"]
    assert groups["weights_alone"]["targets"] == sorted(scales.in_form(BF16))
    assert groups["group_0"]["input_activations"]["strategy"] == "tensor"


def test_weights_are_those_of_two_terms_and_nothing_else_is_lost(
    run: Run, demo_run: Run, demo_checkpoint: Path, windows: np.ndarray
) -> None:
    ours, other = tensors_of(run), tensors_of(demo_run)
    for module in load_scales(run).in_form(BF16):
        assert torch.equal(ours[f"{module}.weight"].view(torch.uint8), other[f"{module}.weight"].view(torch.uint8))
    np.testing.assert_allclose(
        reference_logits(run, windows), dequantized_logits(run, demo_checkpoint, windows), atol=CLOSE
    )


@pytest.mark.parametrize("form", ["run", "mixed"])
def test_onnx_runtime_computes_what_the_reference_computes(
    form: str, request: pytest.FixtureRequest, windows: np.ndarray
) -> None:
    run: Run = request.getfixturevalue(form)
    session = open_session(run.model, "onnxruntime", run.onnx_fp32.name)
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(windows.shape[1]), windows.shape))
    found, _ = session.forward(windows, np.ones_like(windows), positions)
    right = reference_logits(run, windows)
    probabilities = torch.from_numpy(right).log_softmax(-1)
    kl = (probabilities.exp() * (probabilities - torch.from_numpy(found).log_softmax(-1))).sum(-1).mean()
    if form == "run":
        assert float(kl) < 1e-7
    else:  # of one term codes may flip
        check_codes(run, windows, found, right)


@pytest.mark.parametrize("form", ["run", "mixed"])
def test_transformers_loads_it_and_leaves_those_inputs_alone(
    form: str, request: pytest.FixtureRequest, windows: np.ndarray
) -> None:
    run: Run = request.getfixturevalue(form)
    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    schemes = {
        name: module.quantization_scheme.input_activations is None
        for name, module in model.named_modules()
        if hasattr(module, "quantization_scheme") and name in load_scales(run).weights
    }
    alone = set(load_scales(run).in_form(BF16))
    assert {name for name, bf16 in schemes.items() if bf16} == alone
    assert len(schemes) == 28
    if form == "run":
        with torch.inference_mode():
            logits = model(input_ids=torch.from_numpy(windows)).logits.float().numpy()
        np.testing.assert_allclose(logits, reference_logits(run, windows), atol=0.1)  # its weights are in BF16


def test_the_lint_holds_which_inputs_are_codes(run: Run, mixed: Run, demo_run: Run) -> None:
    assert lint_graph(load_graph(mixed.onnx), run_expectation(mixed, load_scales(mixed))) == []
    other = lint_graph(load_graph(demo_run.onnx), run_expectation(run, load_scales(run)))
    assert [each.rule for each in other if each.severity == "error"][:1] == ["F215"]
    assert "is expected with its weight alone in FP8, and its input is quantized" in str(other)
    widened = lint_graph(load_graph(run.onnx), run_expectation(demo_run, load_scales(demo_run)))
    assert "F203" in [each.rule for each in widened]


def test_a_graph_without_the_weights_codes_is_named(run: Run, tmp_path: Path) -> None:
    model = onnx.load(run.onnx, load_external_data=False)
    for node in model.graph.node:
        if node.name == "model.layers.0.self_attn.o_proj.matmul":
            node.name = "renamed"
    path = tmp_path / "model.onnx"
    for file in run.model.glob("*.safetensors"):
        shutil.copyfile(file, tmp_path / file.name)
    onnx.save(model, path)
    found = lint_graph(load_graph(path), run_expectation(run, load_scales(run)))
    assert "is expected with its weight in FP8: there is no such GEMM" in str(found)


def test_an_engine_multiplies_bf16_by_dequantized_weights_and_holds_codes(
    fp8q: Callable[..., Result], run: Run
) -> None:
    fp8q("build-engine", str(run.root), "--runtime", "tensorrt-rtx", "--target", "sm89")
    (info,) = load_engines(run)
    assert (info.promised_products, info.evidence) == (0, "plan")
    assert info.ran is not None
    assert all(kind.startswith("bf16 × bf16") for kind in info.ran)
    plan, tensors = (run.engines / "sm89.plan").read_bytes(), tensors_of(run)
    for module in load_scales(run).in_form(BF16):
        codes, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
        assert any(first_bytes(each) in plan for each in (codes, codes.t()))
        wide = (codes.float() * scale).to(torch.bfloat16)
        assert not any(first_bytes(each) in plan for each in (wide, wide.t()))
    fp8q("engine", str(run.root))


def first_bytes(matrix: torch.Tensor) -> bytes:
    """The first of the bytes of a matrix, row by row."""
    return matrix.contiguous().view(torch.uint8).numpy().tobytes()[:256]


def test_it_costs_the_bytes_of_codes_and_the_operations_of_bf16(run: Run) -> None:
    shapes = {"a": (16, 32)}
    scales = load_scales(run).model_copy(
        update={"bf16_inputs": ["a"], "weights": {"a": next(iter(load_scales(run).weights.values()))}}
    )
    channels = scales.weights["a"].channels
    cost = cost_of(shapes, {}, scales)
    assert cost.weight_bytes == 16 * 32 + 4 * channels
    assert cost.prefill_operations == 2 * 16 * 32 == cost_of(shapes, {}).prefill_operations


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InputError) as refused:
        api.CalibrateOptions(activation_terms="bf16", bf16_input=("*.o_proj",))
    assert str(refused.value) == (
        "--bf16-input *.o_proj: --activation-terms bf16 leaves every input in BF16; leave one of them out, or give "
        "--activation-terms 1"
    )
    with pytest.raises(InputError) as refused:
        api.CalibrateOptions(bf16_input=("*.o_proj",), inherit=True)
    assert str(refused.value) == (
        "--inherit: takes codes and scales as they were given, and --bf16-input *.o_proj chooses others; leave one of "
        "them out (--no-inherit)"
    )


def test_a_pattern_that_matches_nothing_is_refused(run: Run) -> None:
    with pytest.raises(InputError, match=r"--bf16-input \*\.nothing: matches no module; names are like "):
        api.scales(run.root, api.RescaleOptions(activation_terms=1, bf16_input=("*.nothing",)))


def test_tune_offers_them_where_the_server_runs_no_second_terms(run: Run) -> None:
    found = api.tune(run.root, api.TuneOptions(windows=1, max_kl=1.0, server="vllm"))
    assert found.run.weights_alone == 28
    assert {step.two_terms + step.tail for step in found.frontier} == {0}
    assert max(step.weights_alone for step in found.frontier) > 0
    assert found.chosen is not None
    assert found.chosen.recipe.two_terms == found.chosen.recipe.tail == []
