"""Every architecture of docs/architectures.md, all the way: statistics to engine, and each file read by others than the
code that wrote it.

Three implementations run the same codes: the exact reference in torch, ONNX Runtime, and ONNX's own reference evaluator
in NumPy. They agree to rounding until a value lies so near to a midpoint that it takes another code in one of them; so
logits are compared before that.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from onnx.reference import ReferenceEvaluator
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fp8q import api
from fp8q.core.run import Run
from fp8q.export.engine.info import load_engines
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.serve.loop.cache import BLOCK
from fp8q.serve.loop.host_batch import last_indices
from fp8q.stages.engine import check_views
from fp8q.validate.accuracy.document import load_accuracy

from .other_models import PROMPTS, SHARE, STEPS, Logits, least_distance, mean_kl, sequences

pytestmark = pytest.mark.slow

#: Two correct implementations differ by this much in a logit, before a code differs; after that see `SHARE`.
LIMIT = 1e-4


def prompt_inputs(
    rows: Sequence[np.ndarray], lengths: Sequence[int], capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, mask and positions of prompts of different lengths in one batch, padded on the right."""
    width = max(lengths)
    ids = np.stack([np.pad(row[:length], (0, width - length)) for row, length in zip(rows, lengths, strict=True)])
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(width), ids.shape))
    mask = np.concatenate(
        [np.zeros((len(rows), capacity), np.int64), (positions < np.array(lengths)[:, None]).astype(np.int64)], axis=1
    )
    return ids, mask, positions


@dataclass
class Decoded:
    """What the graph made of each row: logits float32 [positions, vocabulary], and codes uint8 [positions, …] by
    tensor.
    """

    logits: list[np.ndarray]
    codes: list[dict[str, np.ndarray]]


def decode(graph: Any, rows: Sequence[np.ndarray], lengths: Sequence[int], capacity: int) -> Decoded:
    """Prefill `rows` together up to `lengths`, then feed the rest token by token, each row at its own position, from
    buffers of `capacity`.
    """
    past = graph.buffers(len(rows), capacity)
    ids, mask, positions = prompt_inputs(rows, lengths, capacity)
    outcome, new = graph.step(ids, mask, positions, past)
    parts = [[outcome.logits[row, :length]] for row, length in enumerate(lengths)]
    codes = [
        {name: [values[row, :length]] for name, values in outcome.codes.items()} for row, length in enumerate(lengths)
    ]
    filled = np.array(lengths)
    for row, length in enumerate(lengths):
        for buffer, values in zip(past, new, strict=True):
            buffer[row, :, :length] = values[row, :, :length]
    for _ in range(STEPS):
        ids = np.array([[row[at]] for row, at in zip(rows, filled, strict=True)])
        mask = np.concatenate([np.arange(capacity) < filled[:, None], np.ones((len(rows), 1), bool)], axis=1).astype(
            np.int64
        )
        outcome, new = graph.step(ids, mask, filled[:, None].copy(), past)
        for row, at in enumerate(filled):
            parts[row].append(outcome.logits[row])
            for name, values in outcome.codes.items():
                codes[row][name].append(values[row])
            for buffer, values in zip(past, new, strict=True):
                buffer[row, :, at] = values[row, :, 0]
        filled = filled + 1
    return Decoded(
        [np.concatenate(part) for part in parts],
        [{name: np.concatenate(part) for name, part in row.items()} for row in codes],
    )


def assert_same_before_a_code_differs(two: ModuleType, decoded: Decoded, expected: Sequence[Any]) -> int:
    """Hold each row against the same row run alone at once; returns the number of positions before the first differing
    code.
    """
    compared = 0
    for logits, codes, alone in zip(decoded.logits, decoded.codes, expected, strict=True):
        first, _, _ = two.first_difference(
            {name: part[None] for name, part in codes.items()}, alone.codes, (1, len(logits))
        )
        compared += int(first[0])
        assert np.abs(logits[: first[0]] - alone.logits[0, : first[0]]).max(initial=0) < LIMIT
    return compared


@pytest.fixture(scope="package")
def graph(finished: Any, two_implementations: ModuleType) -> Any:
    """The FP32 graph on ONNX Runtime, its codes visible."""
    return two_implementations.OnnxWithCodes(finished.run.model)


@pytest.fixture(scope="package")
def alone(finished: Any, two_implementations: ModuleType) -> list[Any]:
    """Each of the three rows alone, all of its tokens at once, in the exact reference."""
    loaded = load_reference(finished.run.model, "exact", torch.float32)
    return [two_implementations.run_reference(loaded, row[None]) for row in sequences(finished.run)]


def test_every_product_is_promised_or_skipped_with_a_reason(finished: Any) -> None:
    scales = load_scales(finished.run)
    config = AutoConfig.from_pretrained(finished.run.model)
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    products = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}
    (head,) = scales.skipped
    assert products[head] is model.get_output_embeddings()
    assert set(scales.weights) == set(scales.activations) == products.keys() - {head}
    for name, weight in scales.weights.items():
        assert (weight.axis, weight.channels) == (
            (1, products[name].weight.shape[1])
            if isinstance(products[name], Conv1D)
            else (0, products[name].weight.shape[0])
        )
    assert len(scales.kv_cache) == (2 * config.num_hidden_layers if finished.architecture.kv_cache == "fp8" else 0)


def test_a_prompt_says_on_onnx_runtime_what_the_reference_says(
    finished: Any, graph: Any, alone: list[Any], others: dict[str, Logits], two_implementations: ModuleType
) -> None:
    rows = sequences(finished.run)
    shortest = min(map(len, rows))
    outcome = graph(np.stack([row[:shortest] for row in rows]))
    decoded = Decoded(
        [*outcome.logits], [{name: codes[row] for name, codes in outcome.codes.items()} for row in range(len(rows))]
    )
    cut = [
        two_implementations.Outcome(
            each.logits[:, :shortest], {name: codes[:, :shortest] for name, codes in each.codes.items()}
        )
        for each in alone
    ]
    terms = finished.architecture.terms
    assert assert_same_before_a_code_differs(two_implementations, decoded, cut) > 0 or terms == 2
    assert mean_kl([each.logits[0] for each in cut], [*outcome.logits]) < SHARE * least_distance(others)


@pytest.mark.parametrize("batch", [1, 3])
def test_ten_decode_steps_say_what_prefilling_at_once_says(
    batch: int, finished: Any, graph: Any, alone: list[Any], others: dict[str, Logits], two_implementations: ModuleType
) -> None:
    rows = sequences(finished.run)[:batch]
    decoded = decode(graph, rows, PROMPTS[:batch], capacity=BLOCK)
    assert [len(logits) for logits in decoded.logits] == [length + STEPS for length in PROMPTS[:batch]]
    terms = finished.architecture.terms
    assert assert_same_before_a_code_differs(two_implementations, decoded, alone[:batch]) > 0 or terms == 2
    steps = [each.logits[0, length:] for each, length in zip(alone, PROMPTS[:batch], strict=False)]
    decode_steps = [logits[length:] for logits, length in zip(decoded.logits, PROMPTS, strict=False)]
    assert mean_kl(steps, decode_steps) < SHARE * least_distance(others)


def test_a_batch_padded_on_the_left_says_what_its_rows_say_alone(
    finished: Any, graph: Any, alone: list[Any], others: dict[str, Logits]
) -> None:
    """By the usual loop: positions from the mask, and all new keys and values appended, those of padded tokens too; the
    slots that fill the last block are masked.
    """
    rows, width = sequences(finished.run), max(PROMPTS)
    ids = np.stack([np.pad(row[:n], (width - n, 0)) for row, n in zip(rows, PROMPTS, strict=True)])
    mask = np.stack([np.pad(np.ones(n, np.int64), (width - n, 0)) for n in PROMPTS])
    past, steps = graph.buffers(len(rows), 0), []
    for step in range(STEPS):
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :]
        appended = past[0].shape[2]
        free = -appended % BLOCK
        in_blocks = [np.pad(each, ((0, 0), (0, 0), (0, free), (0, 0))) for each in past]
        masked = np.insert(mask, [appended] * free, 0, axis=1)
        outcome, new = graph.step(ids, masked, np.ascontiguousarray(positions), in_blocks)
        steps.append(outcome.logits[:, -1])
        past = [np.concatenate([old, values], axis=2) for old, values in zip(past, new, strict=True)]
        ids = np.array([[row[n + step]] for row, n in zip(rows, PROMPTS, strict=True)])
        mask = np.pad(mask, ((0, 0), (0, 1)), constant_values=1)
    expected = [each.logits[0, n - 1 : n - 1 + STEPS] for each, n in zip(alone, PROMPTS, strict=True)]
    assert mean_kl(expected, [*np.stack(steps, axis=1)]) < SHARE * least_distance(others)


def test_onnxs_own_evaluator_says_what_onnx_runtime_says(
    finished: Any, graph: Any, others: dict[str, Logits], two_implementations: ModuleType
) -> None:
    """A prompt of three rows with an empty block, then a step behind it: NumPy, written by ONNX's authors, knows
    nothing of fp8q.
    """
    model = onnx.load(finished.run.onnx_fp32)
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT8E4M3FN, None)
        for name in graph.codes.values()
        if not name.startswith("new_")
    )
    evaluator, rows, lengths, capacity = ReferenceEvaluator(model), sequences(finished.run), (3, 3, 2), BLOCK
    past = graph.buffers(len(rows), capacity)
    for ids, mask, positions in (
        prompt_inputs(rows, lengths, capacity),
        (
            np.stack([row[3:4] for row in rows]),
            np.tile(np.r_[np.arange(capacity) < 3, True].astype(np.int64), (3, 1)),
            np.full((3, 1), 3),
        ),
    ):
        outcome, new = graph.step(ids, mask, positions, past)
        typed = {
            name: array.view(ml_dtypes.float8_e4m3fn) if array.dtype == np.uint8 else array
            for name, array in graph.past_inputs(past).items()
        }
        tokens = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        tokens["logits_indices"] = last_indices(ids.shape, ids.shape[1])
        results = dict(zip(evaluator.output_names, evaluator.run(None, tokens | typed), strict=True))
        codes = {
            name: two_implementations.by_position(results[output].view(np.uint8), ids.shape)
            for name, output in graph.codes.items()
        }
        first, _, _ = two_implementations.first_difference(outcome.codes, codes, ids.shape)
        terms = finished.architecture.terms
        assert first.sum() > 0 or terms == 2
        assert mean_kl([*outcome.logits], [*results["logits"]]) < SHARE * least_distance(others)
        for row, until in enumerate(first):
            until = min(until, lengths[row])
            assert np.abs(results["logits"][row, :until] - outcome.logits[row, :until]).max(initial=0) < LIMIT
        for buffer, values in zip(past, new, strict=True):
            buffer[:, :, : ids.shape[1]] = values


def test_tensorrt_rtx_builds_it_with_every_promised_product_in_fp8(finished: Any) -> None:
    api.build_engine(
        finished.run.root, api.EngineOptions(runtime="tensorrt-rtx", targets=("sm89",), max_batch=4, max_seq_len=64)
    )
    (engine,) = load_engines(finished.run)
    assert (engine.promised_products, engine.fp8_products, engine.wide_products, engine.evidence) == (
        len(load_scales(finished.run).weights), len(load_scales(finished.run).weights), [], "plan"
    )  # fmt: skip
    (view,) = api.engine(finished.run.root)
    check_views([view], 1.0)
    assert (view.codes_found, view.factors_found) == (engine.promised_products, engine.promised_products)
    assert view.differences == ()
    assert view.cache is not None
    assert view.cache.written == 0, "a decode step writes no copy of the cache"


def test_perplexity_stays_near_bf16_and_the_runtimes_agree(finished: Any) -> None:
    api.validate(finished.run.root, options=api.ValidateOptions(context=64))
    runtimes = load_accuracy(finished.run).runtimes
    reference, onnxruntime = runtimes["reference"], runtimes["onnxruntime"]
    lost, found = reference.kl_mean_nats, onnxruntime.kl_mean_nats
    assert lost is not None
    assert found is not None
    assert lost / 2 < found < 2 * lost, "BF16 has 0, and one term where there are two has four times as much"
    if finished.architecture.trained:
        assert reference.perplexity_increase is not None
        assert abs(reference.perplexity_increase) < (0.15 if finished.architecture.name == "stories260k" else 0.02)


def tensors(run: Run) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> type and shape of all that the index of the checkpoint names."""
    index: dict[str, str] = json.loads((run.model / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for shard in set(index.values()):
        with safe_open(run.model / shard, "np") as opened:
            found |= {
                name: (opened.get_slice(name).get_dtype(), tuple(opened.get_slice(name).get_shape()))
                for name in opened.keys()  # noqa: SIM118  # safetensors opens no dict
            }
    assert found.keys() == index.keys()
    return found


TYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.bfloat16: "BF16"}


def test_the_checkpoint_is_laid_out_as_compressed_tensors_says(finished: Any) -> None:
    """compressed-tensors makes an empty model of config.json; its parameters are our tensors, name for name, in shape
    and type.
    """
    config = AutoConfig.from_pretrained(finished.run.model)
    document = config.quantization_config
    del config.quantization_config
    if finished.architecture.name == "gpt2":
        assert "quant_method" not in document
        return
    schema = QuantizationConfig.model_validate(document)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    apply_quantization_config(model, schema)
    ModelCompressor.from_pretrained_model(model).compress_model(model)
    expected = {name: (TYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    found = {
        {"embed_out.weight": "lm_head.weight"}.get(name, name): kind for name, kind in tensors(finished.run).items()
    }
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert expected.keys() - tied == found.keys()
    assert {name: shape for name, (_, shape) in found.items()} == {name: expected[name][1] for name in found}
    assert {name for name, (kind, _) in expected.items() if kind == "F8_E4M3"} == {
        name for name, (kind, _) in found.items() if kind == "F8_E4M3"
    }


def test_transformers_loads_it_with_no_key_too_many_or_too_few_and_multiplies_one_term(
    finished: Any, others: dict[str, Logits]
) -> None:
    """GPT-2's Conv1D has no form there, and must not load without its scales; of GPT-NeoX it reads no scales of a
    cache. BF16, and two terms where the run has them, are further than is let pass.
    """
    if finished.architecture.name == "gpt2":
        with pytest.raises(ValueError, match=r"has no `quant_method` attribute"):
            AutoModelForCausalLM.from_pretrained(finished.run.model)
        return
    # as the model card says: its default attention does not cap
    attention = "eager" if finished.architecture.name == "gemma2" else None
    assert (f'attn_implementation="{attention}"' in (finished.run.model / "README.md").read_text()) == bool(attention)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        finished.run.model,
        dtype=torch.float32,
        attn_implementation=attention,
        output_loading_info=True,
    )
    model: PreTrainedModel = loaded[0]
    assert [
        kind for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs") if loaded[1][kind]
    ] == []
    rows = sequences(finished.run)
    with torch.inference_mode():
        logits = [
            model(input_ids=torch.from_numpy(row[None]), use_cache=True).logits.float().numpy()[0] for row in rows
        ]
    if finished.architecture.name == "gpt_neox":  # its attention reads the cache in the compute type there
        return
    theirs = others["one term"]
    assert min(np.abs(x - y).max(-1)[0] for x, y in zip(theirs, logits, strict=True)) < LIMIT
    assert mean_kl(theirs, logits) < SHARE * least_distance(others, "one term")
