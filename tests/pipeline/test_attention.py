"""`--attention fp8`: both GEMMs of attention on codes, from the queries' statistics to the engine."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from fp8q import api
from fp8q.calibrate.measure.statistics import load_arrays, load_statistics
from fp8q.core.errors import InputError
from fp8q.core.files import read_document
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.export.engine.build import build_engines
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.reference.attention import attention_on_codes
from fp8q.quantize.scales.decisions import AttentionScales, load_scales
from fp8q.serve.loop.cache import BLOCK
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.stages.corpus import load_tokens
from tests.noise import check_codes

pytestmark = pytest.mark.slow

ATTENTION = "model.layers.0.self_attn"


@pytest.fixture
def run(attention_run: Run) -> Run:
    """A Llama of one layer with cache and attention in FP8; read only."""
    return attention_run


@pytest.fixture
def copied(run: Run, tmp_path: Path) -> Run:
    """A copy of the run that a test may change."""
    return Run(Path(shutil.copytree(run.root, tmp_path / "run")))


@pytest.mark.parametrize("softcap", [None, 0.25])
def test_the_reference_multiplies_codes(softcap: float | None) -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(1, heads, 3, 8)).astype(np.float32) for heads in (2, 1, 1))
    scales = {"q": 0.0078125, "k": 0.015625, "v": 0.00390625, "p": 0.00225830078125}
    module = torch.nn.Module()
    object.__setattr__(module, "fp8q_scales", {part: torch.tensor(scale) for part, scale in scales.items()})
    object.__setattr__(module, "fp8q_two_terms", False)
    mask = np.triu(np.full((3, 3), np.finfo(np.float32).min), 1)[None, None]
    query, key, value, added = map(torch.from_numpy, (q, k, v, mask))
    found, _ = attention_on_codes(module, query, key, value, added, softcap=softcap)

    def rounded(x: np.ndarray, part: str) -> np.ndarray:
        return E4M3.decode(E4M3.encode(x / np.float32(scales[part]))).astype(np.float64) * scales[part]

    scores = rounded(q, "q") @ rounded(k, "k").transpose(0, 1, 3, 2) / np.sqrt(8)
    scores = (scores if softcap is None else np.tanh(scores / softcap) * softcap) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = rounded((weights / weights.sum(-1, keepdims=True)).astype(np.float32), "p")
    np.testing.assert_allclose(found.numpy(), (weights @ rounded(v, "v")).transpose(0, 2, 1, 3), atol=1e-6)


def test_queries_are_measured_after_the_rotary_embedding(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, _ = load_arrays(run.queries)
    assert measured.keys() == {f"{ATTENTION}.q"}
    windows, largest = load_tokens(run, run.calibration), []
    rotate = modeling_llama.apply_rotary_pos_emb

    def noting(*arguments: Any, **options: Any) -> Any:
        query, key = rotate(*arguments, **options)
        largest.append(float(query.abs().max()))
        return query, key

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", noting)
    model = AutoModelForCausalLM.from_pretrained(run.record().model["path"], dtype=torch.bfloat16)
    with torch.inference_mode():
        for start in range(0, len(windows), 8):
            model(input_ids=torch.from_numpy(windows[start : start + 8]))
    assert measured[f"{ATTENTION}.q"].amax_batches.tolist() == largest
    assert measured[f"{ATTENTION}.q"].histogram.samples == windows.size * 4 * 32


def test_scales_follow_from_the_statistics_and_a_cache_in_fp8_keeps_its_own(run: Run) -> None:
    scales = read_document(run.attention, AttentionScales)
    cache, statistics = load_scales(run).kv_cache, load_statistics(run)
    assert scales.tensors.keys() == {f"{ATTENTION}.{part}" for part in "qkv"}
    assert scales.tensors[f"{ATTENTION}.k"] == cache[f"{ATTENTION}.k"]
    assert scales.tensors[f"{ATTENTION}.v"].amax == statistics.tensors[f"{ATTENTION}.v"].histogram.amax
    assert 1 / 448 <= scales.probabilities < 1 / 448 * 1.008
    stored = load_file(run.model / "attention.safetensors")
    expected = {part: scales.tensors[f"{ATTENTION}.{part}"].scale for part in "qkv"} | {"p": scales.probabilities}
    assert {name: float(scale[0]) for name, scale in stored.items()} == {
        f"{ATTENTION}.attention.{part}_scale": scale for part, scale in expected.items()
    }


def test_transformers_still_finds_every_key_it_knows(run: Run) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(run.model, output_loading_info=True)
    assert not any(loaded[1][kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_both_runtimes_say_what_the_reference_says_at_once_and_without_codes_step_by_step(
    copied: Run, exact_logits: Callable[[Run, np.ndarray], np.ndarray]
) -> None:
    """A call of one token multiplies queries and probabilities as they are, and so says what attention in BF16 says."""
    run = copied
    ids = load_tokens(run, run.evaluation)[:24].reshape(2, 12)
    expected = exact_logits(run, ids)
    session = OnnxRuntimeSession(run.onnx_fp32)
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(12), ids.shape))
    at_once, _ = session.forward(ids, np.ones_like(ids), positions)
    past = {
        f"past_key_values.0.{part}": np.zeros(
            (0, BLOCK, 32), onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.FLOAT8E4M3FN)
        )
        for part in ("key", "value")
    }
    inputs = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": positions,
        "logits_indices": positions,
        **past,
    }
    (by_onnx,) = ReferenceEvaluator(onnx.load(run.onnx_fp32)).run(["logits"], inputs)
    cache, steps = session.new_cache(2, BLOCK), []
    for at in range(12):
        filled = (np.arange(BLOCK + 1) < at) | (np.arange(BLOCK + 1) == BLOCK)
        logits, new = session.forward(
            ids[:, at : at + 1],
            np.tile(filled, (2, 1)).astype(np.int64),
            positions[:, at : at + 1].copy(),
            cache.past(0, 2),
        )
        cache.write(0, positions[:, at : at + 1], new)
        steps.append(logits[:, 0])
    api.export(run.root)  # attention as wide as the graph, over the same cache
    wide = exact_logits(run, ids)
    for logits, reference in ((at_once, expected), (np.asarray(by_onnx), expected), (np.stack(steps, 1), wide)):
        check_codes(run, ids, logits, reference)


def test_the_lint_holds_the_graph_to_attention_on_codes(copied: Run) -> None:
    assert api.lint(copied.onnx).findings == api.lint(copied.onnx_fp32).findings == []
    model = onnx.load(copied.onnx, load_external_data=False)
    nodes = {node.name: node for node in model.graph.node}
    nodes[f"{ATTENTION}.attention_scores"].input[0] = nodes[f"{ATTENTION}.q.attention_quantize"].input[0]
    nodes[f"{ATTENTION}.attention_values"].name = "values"
    copied.onnx.write_bytes(model.SerializeToString())
    expected = [
        (
            f"F212 promised-attention: {ATTENTION}.attention_scores: is expected on FP8: its first input does not come "
            "from FP8 codes; run `fp8q export` again"
        ),
        (
            f"F212 promised-attention: {ATTENTION}.attention_values: is expected on FP8, and there is no such GEMM; "
            "run `fp8q export` again"
        ),
    ]
    assert [str(finding) for finding in api.lint(copied.onnx).findings] == expected
    with pytest.raises(InputError) as error:
        build_engines(
            copied, load_scales(copied).forms, api.EngineOptions(runtime="tensorrt-rtx", targets=("sm89",)), SILENT
        )
    assert str(error.value) == f"{copied.onnx}: {expected[0]} (1 more)"


def test_the_lint_holds_the_scales_of_attention_to_attention_json(copied: Run) -> None:
    stored = json.loads(copied.attention.read_text())
    before = stored["probabilities"]
    copied.attention.write_text(json.dumps(stored | {"probabilities": 0.25}))
    assert [str(finding) for finding in api.lint(copied.onnx).findings] == [
        (
            f"F206 input-scale: {ATTENTION}.p.{node}: scale is {before:.9g}, and attention.json has 0.25; run `fp8q "
            "export` again"
        )
        for node in ("attention_quantize", "attention_dequantize")
    ]
    del stored["tensors"][f"{ATTENTION}.k"]
    copied.attention.write_text(json.dumps(stored))
    with pytest.raises(InputError) as error:
        api.lint(copied.onnx)
    assert (
        str(error.value)
        == f"{copied.attention}: has no scale of {ATTENTION}.k; run `fp8q export --attention fp8` again"
    )


def test_in_two_terms_it_loses_what_keys_and_values_lose(
    copied: Run, keeping_graphs: Any, exact_logits: Callable[[Run, np.ndarray], np.ndarray]
) -> None:
    ids = load_tokens(copied, copied.evaluation)[:48].reshape(4, 12)
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(12), ids.shape))
    with keeping_graphs():
        api.scales(copied.root, api.RescaleOptions(activation_terms=2))
    stored = read_document(copied.attention, AttentionScales)
    assert (stored.terms, stored.probabilities) == (2, 2.0**-8)
    assert {name[-1]: scale.terms for name, scale in stored.tensors.items()} == {"q": 2, "k": 1, "v": 1}
    found, _ = OnnxRuntimeSession(copied.onnx_fp32).forward(ids, np.ones_like(ids), positions)
    in_codes = exact_logits(copied, ids)
    assert np.abs(found - in_codes).max() < 2e-2
    assert np.abs(found - in_codes).mean() < 1e-3
    stored_scales = copied.model / "attention.safetensors"
    save_file(load_file(stored_scales), stored_scales, metadata={"terms": "1"})
    in_one = exact_logits(copied, ids)
    api.export(copied.root)  # the same with attention as wide as the graph, over the same cache
    wide = exact_logits(copied, ids)
    assert np.abs(in_codes - wide).mean() < np.abs(wide).mean() * 2e-3
    assert np.abs(in_codes - wide).mean() < np.abs(in_one - wide).mean() / 4


def test_the_lint_sees_both_terms_of_attention(copied: Run, keeping_graphs: Any) -> None:
    """The engine's are seen in `test_two_terms_proof`."""
    with keeping_graphs():
        api.scales(copied.root, api.RescaleOptions(activation_terms=2))
    assert api.lint(copied.onnx).findings == []
    model = onnx.load(copied.onnx, load_external_data=False)
    nodes = {node.name: node for node in model.graph.node}
    quantize = nodes[f"{ATTENTION}.q.attention_quantize"]
    joined = next(node for node in model.graph.node if quantize.input[0] in node.output)
    joined.input[1] = joined.input[0]
    copied.onnx.write_bytes(model.SerializeToString())
    assert [str(finding) for finding in api.lint(copied.onnx).findings if finding.severity == "error"] == [
        (
            f"F214 two-terms: {ATTENTION}.attention_scores: is expected in two terms: its second term is multiplied by "
            "1 and not by 16; run `fp8q export` again"
        )
    ]


def test_a_triton_repository_takes_the_scales_along(copied: Run) -> None:
    (written,) = [path for path in api.triton(copied.root) if path.name == "attention.safetensors"]
    assert written.read_bytes() == (copied.model / "attention.safetensors").read_bytes()


def test_scales_chosen_again_keep_it_and_a_wide_export_takes_it_away(copied: Run, keeping_graphs: Any) -> None:
    before = copied.queries.stat().st_mtime_ns
    with keeping_graphs():
        api.scales(copied.root, api.RescaleOptions(clip=api.Clipping("percentile", 99.0)))
    assert {scale.method for scale in read_document(copied.attention, AttentionScales).tensors.values()} == {
        "percentile"
    }
    assert copied.queries.stat().st_mtime_ns == before
    api.export(copied.root)
    assert not copied.attention.exists()
    assert not (copied.model / "attention.safetensors").exists()
    assert "Attention" in {node.op_type for node in onnx.load(copied.onnx, load_external_data=False).graph.node}


def test_what_cannot_be_is_said_before_any_work(
    copied: Run, tmp_path: Path, move_source: Callable[[Run, Path], None]
) -> None:
    with pytest.raises(InputError) as error:
        api.ExportOptions(precision="int8", attention="fp8")
    assert str(error.value) == "--attention fp8: is for the FP8 graph, not for --precision int8; leave one of them out"
    copied.queries.unlink()
    move_source(copied, tmp_path / "gone")
    with pytest.raises(InputError) as error:
        api.export(copied.root, api.ExportOptions(attention="fp8"))
    assert str(error.value) == (
        f"{tmp_path}/gone: the model that {copied.root} was made of is no longer there; put it back, or calibrate again"
    )
    assert copied.onnx.is_file()
