"""The whole way on the demo checkpoint: what every stage left behind, read by others than the code that wrote it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from google.protobuf import text_format
from safetensors import safe_open
from transformers import AutoModelForCausalLM, DynamicCache
from tritonclient.grpc import model_config_pb2

from fp8q import api
from fp8q.calibrate.measure.statistics import load_statistics
from fp8q.calibrate.model.source import load_model
from fp8q.core.run import Run
from fp8q.export.engine.profiles import profiles
from fp8q.export.lint.check import lint_file
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.serve.triton.engine_model import describe, engine_config
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import source_of
from fp8q.validate.accuracy.document import load_accuracy
from fp8q.validate.accuracy.document import load_token_losses as load_nll

from ..graphs import products_of_the_demo
from .other_models import SHARE, Logits, mean_kl

pytestmark = pytest.mark.quick

PRODUCTS = 4 * 7
KINDS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@pytest.fixture(scope="module")
def windows(demo_run: Run) -> np.ndarray:
    return load_tokens(demo_run, demo_run.evaluation)[: 8 * 256].reshape(8, 256)


def test_every_product_is_quantized_or_has_a_reason(demo_run: Run) -> None:
    scales = load_scales(demo_run)
    assert (
        set(scales.weights)
        == set(scales.activations)
        == {f"model.layers.{layer}.{kind}" for layer in range(4) for kind in KINDS}
    )
    assert {name: kept.reason for name, kept in scales.skipped.items()} == {
        "lm_head": "output head: its error would go straight into the logits"
    }
    assert set(scales.kv_cache) == {f"model.layers.{layer}.self_attn.{part}" for layer in range(4) for part in "kv"}


def test_scales_are_amax_over_448_rounded_up_to_bf16_and_members_of_a_group_repeat_theirs(demo_run: Run) -> None:
    scales, statistics = load_scales(demo_run), load_statistics(demo_run)
    for first, members in statistics.record.groups.items():
        amax = statistics.tensors[f"{first}.input"].histogram.amax
        for module in members:
            scale = np.float32(scales.activations[module].scale)
            assert scale == scales.activations[module].scale
            assert scale.view(np.uint32) & 0xFFFF == 0
            assert np.float32(amax) / np.float32(448) <= scale < np.float32(amax) / np.float32(448) * np.float32(1.008)
            assert scales.activations[module].saturation == 0


def test_the_checkpoint_holds_the_codes_and_scales_of_the_source_weights(demo_run: Run, demo_checkpoint: Path) -> None:
    (shard,) = demo_run.model.glob("model-*.safetensors")
    name = "model.layers.2.mlp.down_proj"
    with safe_open(shard, "pt") as stored, safe_open(demo_checkpoint / "model.safetensors", "pt") as source:
        weight = source.get_tensor(f"{name}.weight").float().numpy()
        scale = stored.get_tensor(f"{name}.weight_scale")
        assert (scale.dtype, list(scale.shape)) == (torch.float32, [256, 1])
        codes = stored.get_tensor(f"{name}.weight")
        assert codes.dtype == torch.float8_e4m3fn
        np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), E4M3.encode(weight / scale.numpy()))
        assert stored.get_tensor("model.embed_tokens.weight").equal(source.get_tensor("model.embed_tokens.weight"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_the_checkpoint_as_it_is_and_loses_what_the_reference_loses(
    demo_run: Run, windows: np.ndarray, dtype: torch.dtype
) -> None:
    """compressed-tensors rounds keys and values to the cache's codes too. In FP32 both are one model but for sums whose
    order flips a code; in BF16 codes differ in every position, and what is compared is the KL of FP32 from each.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(demo_run.model, dtype=dtype, output_loading_info=True)
    model, info = loaded
    assert [kind for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]] == []
    reference = load_reference(demo_run.model, "exact" if dtype == torch.float32 else "fast", dtype)
    source, rows = source_of(demo_run), torch.from_numpy(windows[:4])

    def logits(model: Any, cache: DynamicCache | None = None) -> Logits:
        with torch.inference_mode():
            return [*model(input_ids=rows, past_key_values=cache, use_cache=cache is not None).logits.float().numpy()]

    ours, theirs = logits(reference.model, reference.new_cache()), logits(model)
    exact = logits(load_model(source, torch.float32, "cpu"))
    if dtype == torch.float32:
        assert mean_kl(ours, theirs) < SHARE * mean_kl(ours, exact)
    else:
        lost = mean_kl(exact, ours)
        assert mean_kl(exact, theirs) == pytest.approx(lost, rel=0.15)
        assert mean_kl(exact, logits(load_model(source, dtype, "cpu"))) < lost / 2


def test_both_graphs_are_standard_onnx_and_point_into_the_safetensors(demo_run: Run) -> None:
    scales = load_scales(demo_run)
    promised = {module: activation.scale for module, activation in scales.activations.items()}
    for path in (demo_run.onnx, demo_run.onnx_fp32):
        model = onnx.load(path, load_external_data=False)
        assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 23)]
        external = [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
        assert {entry.value for tensor in external for entry in tensor.external_data if entry.key == "location"} == {
            "model-00001-of-00001.safetensors"
        }
        assert sum(tensor.data_type == onnx.TensorProto.FLOAT8E4M3FN for tensor in external) == PRODUCTS
        assert [finding for finding in lint_file(path, promised) if finding.severity == "error"] == []
        assert path.stat().st_size < 500_000


def test_the_graph_says_nothing_of_the_machine_that_exported_it(demo_run: Run) -> None:
    text = demo_run.onnx.read_bytes()
    assert b"site-packages" not in text
    assert str(Path.home()).encode() + b"/" not in text


def test_every_promised_product_is_fp8_in_every_engine(demo_run: Run) -> None:
    for target in ("sm89", "sm120"):
        info = json.loads((demo_run.engines / f"{target}.json").read_text())
        assert (info["promised_products"], info["fp8_products"], info["wide_products"], info["evidence"]) == (
            PRODUCTS,
            PRODUCTS,
            [],
            "plan",
        )
        assert (demo_run.engines / f"{target}.plan").stat().st_size == info["bytes"]


def test_accuracy_has_the_documented_fields_and_fp8_stays_near_bf16(demo_run: Run) -> None:
    document = json.loads(demo_run.accuracy.read_text())
    assert set(document) == {"schema", "protocol", "runtimes", "verdict", "positions"}
    assert set(document["protocol"]) == {"dataset", "sha256", "tokens", "context", "stride", "bos", "prefix"}
    assert set(document["runtimes"]) == {"bf16", "reference", "onnxruntime"}
    for name in ("reference", "onnxruntime"):
        runtime = document["runtimes"][name]
        assert set(runtime) == {
            "perplexity",
            "nll_nats",
            "perplexity_increase",
            "kl_mean_nats",
            "kl_p99_nats",
            "top1_agreement",
            "top5_agreement",
            "by_frequency",
            "by_position",
            "divergences",
            "increase_halves",
        }
        assert set(runtime["divergences"]) == {"bf16||this", "this||bf16"}
        assert sum(bucket["tokens"] for bucket in runtime["by_position"]) == document["protocol"]["tokens"]
        low, high = sorted(runtime["increase_halves"])
        assert low <= runtime["perplexity_increase"] <= high
        assert sum(bucket["tokens"] for bucket in runtime["by_frequency"]) == document["protocol"]["tokens"]
        assert abs(runtime["perplexity_increase"]) < 0.02
        assert 0 < runtime["kl_mean_nats"] < runtime["kl_p99_nats"]
    verdict = document["verdict"]
    assert (verdict["kind"], verdict["limit"], verdict["limit_is_default"]) == ("acceptable", 0.01, True)
    assert verdict["sentence"] in demo_run.report_html.read_text(encoding="utf-8").replace("\u00a0", " ").replace(
        "</strong>", ""
    )
    nll = load_nll(demo_run)
    for name, runtime in load_accuracy(demo_run).runtimes.items():
        assert np.exp(np.nanmean(nll[name].astype(np.float64))) == pytest.approx(runtime.perplexity)


def test_the_triton_configuration_parses_with_tritons_own_schema(demo_run: Run) -> None:
    (file,) = demo_run.triton.glob("*/config.pbtxt")
    config = text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())
    assert config.backend == "python"
    assert "text_input" in [entry.name for entry in config.input]
    assert (file.parent / "1" / "model.py").is_file()


def test_the_plain_engine_of_a_whole_model_has_triton_types_but_for_its_fp8_cache(demo_run: Run) -> None:
    described = describe(demo_run.onnx, profiles(8, 256), None)
    kinds = ("past_key_values", "new_key_values")
    caches = [f"{kind}.{layer}.{part}" for kind in kinds for layer in range(4) for part in ("key", "value")]
    assert described.untyped == caches
    wide = {name: binding.model_copy(update={"type": "BFLOAT16"}) for name, binding in described.inputs.items()}
    text = engine_config("demo_engine", described.model_copy(update={"inputs": wide, "outputs": {}}))
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert [tuple(entry.dims) for entry in config.input if entry.name == caches[0]] == [(-1, 64, 64)]


def test_the_lint_of_a_whole_run_has_no_findings_and_looks_at_all_of_it(
    demo_run: Run, fp8q: Callable[..., Any]
) -> None:
    found = fp8q("lint", demo_run.root)
    assert (found.code, found.err) == (0, "")
    products = products_of_the_demo(demo_run.onnx)
    graph = f"opset 23, {products} GEMMs, 28 on FP8 codes on both sides; held against {demo_run.scales}"
    assert found.out.splitlines() == [
        f"{demo_run.onnx}: {graph}",
        "no findings",
        f"{demo_run.onnx_fp32}: {graph}",
        "no findings",
        f"{demo_run.root}: engines: sm89, sm120",
        "no findings",
        f"{demo_run.triton}: a Triton repository of demo",
        "no findings",
    ]


def test_onnx_itself_takes_every_graph_though_a_repository_was_written(demo_run: Run) -> None:
    graphs = [demo_run.onnx, demo_run.onnx_fp32, *demo_run.triton.rglob("*.onnx")]
    assert len(graphs) == 3
    for path in graphs:
        onnx.checker.check_model(path)
        assert onnx.load(path).graph.initializer[0].raw_data


def test_the_models_card_says_how_onnx_runtime_runs_it(demo_run: Run) -> None:
    card = (demo_run.model / "README.md").read_text(encoding="utf-8")
    code = "\n".join(
        line.strip()
        for line in card.splitlines()
        if line.startswith("    ") and not line.startswith("    fp8q ")
        if "transformers" not in line and "AutoModel" not in line
    )
    made = subprocess.run(
        [sys.executable, "-c", f"import onnxruntime\n{code}\nprint(session.get_outputs()[0].name)"],
        cwd=demo_run.model,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (made.returncode, made.stdout) == (0, "logits\n"), made.stderr


def test_the_report_and_its_notebook_are_there(demo_run: Run) -> None:
    page = demo_run.report_html.read_text(encoding="utf-8")
    assert "model.layers.3.mlp.down_proj" in page
    assert page.count("<svg") >= 3
    notebook = json.loads(demo_run.report_ipynb.read_text(encoding="utf-8"))
    assert any(cell.get("outputs") for cell in notebook["cells"])


def test_inspect_lists_every_module_with_its_scale(demo_run: Run) -> None:
    rows = {row.module: row for row in api.inspect(demo_run.root).modules}
    assert len(rows) == PRODUCTS + 1 + 8
    assert rows["lm_head"].reason == "output head: its error would go straight into the logits"
    assert (
        rows["model.layers.0.mlp.down_proj"].scale
        == load_scales(demo_run).activations["model.layers.0.mlp.down_proj"].scale
    )
