"""A mixture of experts as a graph: an expert a branch, in FP8 inside, that says what the reference says.

What a branch quantizes is no value of the graph, so codes are not compared here as for dense models
(`test_architectures`): most positions have no code that differs and agree to rounding, and the others by their KL.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from fp8q import api
from fp8q.calibrate.measure.statistics import load_record
from fp8q.core.run import Run
from fp8q.export.engine.info import load_engines
from fp8q.export.graph.trace import graph_plan, trace_all
from fp8q.export.lint.check import lint_file
from fp8q.export.onnx_file.indexed import branches, nodes_of
from fp8q.options import CalibrateOptions, GenerateOptions, Terms
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.serve.loop.cache import BLOCK
from fp8q.stages.engine import check_views

from ..conftest import KeepingGraphs, MadeOnce, Texts
from ..mixtures import random_mixture
from .other_models import PROMPTS, SHARE, STEPS, least_distance, mean_kl, other_models, sequences
from .test_architectures import LIMIT, decode

pytestmark = pytest.mark.slow

#: The trained Mixtral, and random ones: with a shared expert and its gate, with norms of queries and keys.
CASES = ("mixtral", "qwen2_moe", "qwen3_moe")
EXPERTS = 4
#: Products of the trained one: 4 layers of 4 and 4 × 3.
TRAINED = 64


@pytest.fixture(scope="module", params=CASES)
def run(
    request: pytest.FixtureRequest, made_once: MadeOnce, keeping_graphs: KeepingGraphs, demo_texts: Texts,
    shared_checkpoint: Callable[[str], Path],
) -> Run:  # fmt: skip
    """One of them, calibrated and exported; one expert's last GEMM of the second stays in BF16, the third has its
    activations in two terms.
    """
    name: str = request.param

    def make(folder: Path) -> None:
        model = shared_checkpoint(name) if name == "mixtral" else random_mixture(folder / "model", name)
        text = folder / "text.txt"
        text.write_text(demo_texts.calibration.read_text(encoding="utf-8")[:16_000], encoding="utf-8")
        terms: Terms = 2 if name == "qwen3_moe" else 1
        skip = ("*.0.mlp.experts.2.down_proj",) if name == "qwen2_moe" else ()
        with keeping_graphs():
            api.calibrate(
                str(model),
                str(text),
                folder / "run",
                None,
                CalibrateOptions(samples=16, seq_len=64, skip=skip, activation_terms=terms),
            )

    return Run(made_once(f"expert-graph-{name}", make) / "run")


@pytest.fixture(scope="module")
def alone(run: Run) -> list[np.ndarray]:
    """Logits of each of three rows alone, all of its tokens at once, in the exact reference."""
    model = load_reference(run.model, "exact", torch.float32).model
    with torch.inference_mode():
        return [model(input_ids=torch.from_numpy(row[None])).logits.float().numpy()[0] for row in sequences(run)]


def test_each_expert_is_a_branch_that_holds_its_products(run: Run) -> None:
    model, scales = onnx.load_model(run.onnx, load_external_data=False), load_scales(run)
    choices = [node for node in model.graph.node if node.op_type == "If"]
    layers = {name.split(".")[2] for name in scales.weights}
    assert [node.name for node in choices] == [
        f"model.layers.{layer}.mlp.experts.{number}.If" for layer in sorted(layers) for number in range(EXPERTS)
    ]
    for node in choices:
        then, otherwise = branches(node)
        products = [each.name for each in then.node if each.op_type in ("MatMul", "Gemm")]
        expert = node.name.removesuffix(".If")
        assert products == [f"{expert}.{name}.matmul" for name in ("gate_proj", "up_proj", "down_proj")]
        assert [each.op_type for each in otherwise.node] == ["Identity"]
    wide = [node for node in nodes_of(model.graph) if node.name.endswith("experts.2.down_proj.weight.dequantize")]
    assert len(wide) == sum(name.endswith("experts.2.down_proj") for name in scales.weights)


def test_the_graph_is_clean_and_a_product_that_is_missing_in_a_branch_is_found(run: Run, tmp_path: Path) -> None:
    scales = load_scales(run)
    promised = {name: scales.activations[name].scale for name in scales.weights}
    assert [*lint_file(run.onnx, promised), *lint_file(run.onnx_fp32, promised)] == []
    model = onnx.load_model(run.onnx, load_external_data=False)
    down = "model.layers.1.mlp.experts.3.down_proj"
    (node,) = (node for node in nodes_of(model.graph) if node.name == f"{down}.matmul")
    (quantize,) = (node for node in nodes_of(model.graph) if node.name == f"{down}.input.quantize")
    node.input[0] = quantize.input[0]
    changed = run.model / "changed.onnx"
    changed.write_bytes(model.SerializeToString())
    found = [finding for finding in lint_file(changed, promised) if finding.severity == "error"]
    changed.unlink()
    assert [(each.rule, each.module) for each in found] == [("F203", down)]


def test_prompts_and_decode_steps_say_on_onnx_runtime_what_the_reference_says(
    run: Run, alone: list[np.ndarray], two_implementations: ModuleType
) -> None:
    rows = sequences(run)
    decoded = decode(two_implementations.OnnxWithCodes(run.model), rows, PROMPTS, capacity=BLOCK)
    assert [len(logits) for logits in decoded.logits] == [length + STEPS for length in PROMPTS]
    differences = np.concatenate(
        [np.abs(logits - each).max(-1) for logits, each in zip(decoded.logits, alone, strict=True)]
    )
    assert np.median(differences) < LIMIT / 10
    assert differences[0] < LIMIT
    assert mean_kl(alone, decoded.logits) < SHARE * least_distance(other_models(run))


def test_tensorrt_rtx_builds_it_with_every_promised_product_in_fp8(run: Run) -> None:
    api.build_engine(
        run.root, api.EngineOptions(runtime="tensorrt-rtx", targets=("sm89",), max_batch=4, max_seq_len=64)
    )
    (engine,) = load_engines(run)
    assert engine.branches is True
    number = len(load_scales(run).weights)
    assert (engine.promised_products, engine.fp8_products, engine.wide_products, engine.evidence) == (
        number, number, [], "plan",
    )  # fmt: skip
    (view,) = api.engine(run.root)
    check_views([view], 1.0)
    # of a shared expert that is quantized with the scale of the others, the compiler keeps no quantization of its own
    untold = [each.module for each in view.differences]
    assert all(".shared_expert." in module for module in untold), untold
    assert (view.codes_found, view.factors_found) == (number, number)
    assert view.cache is not None
    assert view.cache.written == 0, "a decode step writes no copy of the cache"


def test_generated_text_is_the_references_greedy_text(run: Run) -> None:
    if len(load_scales(run).weights) < TRAINED:
        pytest.skip("the logits of random weights are too near to each other")
    texts = [
        api.generate(run.root, "def main(", GenerateOptions(max_tokens=12, runtime=runtime)).text
        for runtime in ("onnxruntime", "reference")
    ]
    assert texts[0] == texts[1]


def test_layers_made_from_others_are_what_tracing_each_gives(run: Run, tmp_path: Path) -> None:
    if len(load_scales(run).weights) < TRAINED:
        pytest.skip("of two layers both are traced")
    ir.save(trace_all(run.model, graph_plan(load_record(run), load_scales(run), "bf16")), tmp_path / "traced.onnx")
    assert (tmp_path / "traced.onnx").read_bytes() == run.onnx.read_bytes()
