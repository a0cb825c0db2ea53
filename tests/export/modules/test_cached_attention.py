"""Attention of one token over a cache in blocks: the ONNX form says what the formula says, and what several tokens get
is left as it is.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from fp8q.export.graph.trace import quiet
from fp8q.export.modules import operators
from fp8q.export.modules.cached_attention import StepForm, StepTensors, attend, split_scale
from fp8q.export.onnx_file import names
from fp8q.quantize.codes.encoding import CODE
from fp8q.serve.loop import cache

HEADS, KV_HEADS, SIZE, VALUE_SIZE, BLOCK = 4, 2, 8, 6, names.BLOCK


class OneAttention(nn.Module):
    """The operator alone."""

    def __init__(self, scale: float, softcap: float | None, codes: bool):
        super().__init__()
        self.scale, self.softcap, self.codes = scale, softcap, codes

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        prompt, *always, bias, key_scale, value_scale = tensors
        scales = (key_scale, value_scale) if self.codes else (None, None)
        form = StepForm(HEADS, KV_HEADS, SIZE, VALUE_SIZE, self.scale, self.softcap, torch.float32)
        step: tuple[Any, ...] = (*always, bias, *scales)
        return attend(prompt, StepTensors(*step), form)


def arguments(batch: int, seq: int, blocks: int, codes: bool, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """The tensors of a call, with slots that are filled at random."""
    torch.manual_seed(seed)
    capacity = blocks * BLOCK
    past = [torch.randn(batch * KV_HEADS * blocks, BLOCK, size) for size in (SIZE, VALUE_SIZE)]
    return (
        torch.randn(batch, HEADS, seq, VALUE_SIZE),
        torch.randn(batch, HEADS, seq, SIZE),
        torch.randn(batch, KV_HEADS, seq, SIZE),
        torch.randn(batch, KV_HEADS, seq, VALUE_SIZE),
        *(part.to(CODE) if codes else part for part in past),
        torch.rand(batch, capacity) < 0.5,
        torch.ones(batch, capacity + seq, dtype=torch.int64),
        torch.zeros(batch, seq, dtype=torch.int64),
        torch.randn(batch, HEADS, 1, capacity + seq),
        torch.rand(KV_HEADS) + 0.5,
        torch.rand(KV_HEADS) + 0.5,
    )


def traced(module: OneAttention) -> Any:
    """A session of ONNX Runtime on the traced operator."""
    example, dynamic = arguments(2, 3, 5, module.codes), torch.export.Dim.DYNAMIC
    batched, rows = {0: dynamic, 2: dynamic}, {0: dynamic, 1: dynamic}
    shapes = (*[batched] * 4, *[{0: dynamic}] * 2, *[rows] * 3, {0: dynamic, 3: dynamic}, {}, {})
    with quiet():
        program = torch.export.export(module, example, dynamic_shapes=(shapes,), strict=False)
        made = torch.onnx.export(
            program, (), custom_translation_table=operators.translations(), opset_version=23, optimize=False,
            dynamo=True, verbose=False,
        )  # fmt: skip
    assert made is not None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return onnxruntime.InferenceSession(made.model_proto.SerializeToString(), options)


def run(session: Any, tensors: tuple[torch.Tensor, ...]) -> np.ndarray:
    """What ONNX Runtime says to these tensors, of which it has only those that the graph reads."""

    def value(tensor: torch.Tensor) -> Any:
        if tensor.dtype != CODE:
            return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(tensor.numpy()))
        codes = tensor.view(torch.uint8).numpy()
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(codes, onnx.TensorProto.FLOAT8E4M3FN)

    values = [value(tensor) for tensor in tensors]
    feeds = {node.name: values[int(node.name.rpartition("_")[2])] for node in session.get_inputs()}
    found: np.ndarray = session.run_with_ort_values(None, feeds)[0].numpy()
    return found


def expected(module: OneAttention, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Softmax attention of a token, a slot at a time."""
    _, query, key, value, past_key, past_value, allowed, _, _, bias, key_scale, value_scale = tensors
    batch, capacity = allowed.shape
    output = torch.zeros(batch, HEADS, 1, VALUE_SIZE, dtype=torch.float64)
    pasts = [past.double().reshape(batch, KV_HEADS, capacity, past.shape[-1]) for past in (past_key, past_value)]
    if module.codes:
        pasts = [past * scale[:, None, None] for past, scale in zip(pasts, (key_scale, value_scale), strict=True)]
    for row in range(batch):
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            keys = torch.cat([pasts[0][row, kv][allowed[row]], key[row, kv].double()])
            values = torch.cat([pasts[1][row, kv][allowed[row]], value[row, kv].double()])
            seen = torch.cat([allowed[row], torch.tensor([True])])
            scores = keys @ query[row, head, 0].double() * module.scale + bias[row, head, 0][seen].double()
            if module.softcap is not None:
                scores = (scores / module.softcap).tanh() * module.softcap
            output[row, head, 0] = scores.softmax(0) @ values
    return output


@pytest.mark.parametrize(
    ("scale", "softcap", "codes"),
    [(8**-0.5, None, False), (1.0, 2.0, False), (0.25, None, True)],
    ids=["scale of no power of two", "capped, scale 1", "codes with scales of heads"],
)
def test_a_step_attends_to_the_slots_that_it_sees_and_a_prompt_is_left_alone(
    scale: float, softcap: float | None, codes: bool
) -> None:
    module = OneAttention(scale, softcap, codes)
    session = traced(module)
    for batch, blocks in ((1, 1), (3, 2), (2, 0)):
        step = arguments(batch, 1, blocks, codes, seed=batch)
        by_formula = expected(module, step).numpy()
        np.testing.assert_allclose(module(*step).numpy(), by_formula, atol=2e-6)
        np.testing.assert_allclose(run(session, step), by_formula, atol=2e-6)
        prompt = arguments(batch, 5, blocks, codes)
        np.testing.assert_array_equal(run(session, prompt), prompt[0].numpy())


@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0, 1 / 16, 128**-0.5, 0.0078125, 3.7])
def test_a_scale_is_a_power_of_two_other_than_1_and_a_rest(scale: float) -> None:
    power, rest = split_scale(scale)
    assert power * rest == scale
    assert power != 1
    assert math.frexp(power)[0] == 0.5
    assert 1 <= rest < 4


def test_blocks_are_the_same_on_both_sides() -> None:
    assert names.BLOCK == cache.BLOCK == BLOCK
