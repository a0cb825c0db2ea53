"""`fp8q engine --plan` against engines of the run's own graph with other numbers, another cache or another attention in
it: each runs the same GEMMs on the same types, and none may pass.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from fp8q import api
from fp8q.core.run import Run
from fp8q.export.engine.plan import read_plan
from fp8q.export.graph.weight_scale_form import UNIT, in_form
from fp8q.export.onnx_file.external import Places, read_tensor
from fp8q.export.onnx_file.loading import load_graph
from fp8q.quantize.scales.decisions import load_scales

pytestmark = pytest.mark.slow

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'")

TARGETS = ("sm89", "sm120")
LAYER = "model.layers.0"
GATE, UP, DOWN = (f"{LAYER}.mlp.{name}_proj" for name in ("gate", "up", "down"))
ATTENTION = f"{LAYER}.self_attn"
Change = Callable[[ModelProto, Path], None]
Built = Callable[[Change, str], Path]
Fp8q = Callable[..., Any]


@pytest.fixture(scope="module")
def run(attention_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A Llama of one layer with cache and attention in FP8, and its engines."""
    copied = Path(shutil.copytree(attention_run.root, tmp_path_factory.mktemp("proof") / "run"))
    options = api.EngineOptions(runtime="tensorrt-rtx", targets=TARGETS, max_batch=2, max_seq_len=64)
    assert [engine.fp8_products for engine in api.build_engine(copied, options)] == [7, 7]
    return Run(copied)


# Graphs that deceive.


def multiply(model: ModelProto, directory: Path, end: str, factor: float) -> None:
    """Every scale of the DequantizeLinears whose names end so, and of their QuantizeLinears, times `factor`."""
    ends = (f"{end}.dequantize", f"{end}.quantize")
    names = {node.input[1] for node in model.graph.node if node.name.endswith(ends)}
    assert names
    for tensor in model.graph.initializer:
        if tensor.name in names:
            values = read_tensor(tensor, Places(directory))
            assert values is not None
            tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32) * np.float32(factor), tensor.name))


def unchanged(model: ModelProto, directory: Path) -> None:
    """As fp8q exported it."""


def weight_scales_doubled(model: ModelProto, directory: Path) -> None:
    multiply(model, directory, ".weight", 2)


def activation_scales_divided(model: ModelProto, directory: Path) -> None:
    multiply(model, directory, ".input", 1 / 64)


def one_scale_moved_to_the_other_side(model: ModelProto, directory: Path) -> None:
    """The product of the two is what it was, and all that is beyond 1/64 of the clip saturates."""
    multiply(model, directory, f"{DOWN}.input", 1 / 64)
    multiply(model, directory, f"{DOWN}.weight", 64)


def weights_exchanged(model: ModelProto, directory: Path) -> None:
    """The codes of two modules, each under the scales of the other: every factor is as it should be."""
    first, second = (named(model)[f"{name}.weight.dequantize"] for name in (GATE, UP))
    first.input[0], second.input[0] = second.input[0], first.input[0]


def named(model: ModelProto) -> dict[str, NodeProto]:
    return {node.name: node for node in model.graph.node}


def become(node: NodeProto, operator: str, **attributes: Any) -> None:
    """The node, with the same first input and the same result, does something else."""
    made = helper.make_node(operator, node.input[:1], list(node.output), name=node.name, **attributes)
    node.CopyFrom(made)


def attention_wide(model: ModelProto, directory: Path) -> None:
    """Its GEMMs take BF16, as by default."""
    for node in model.graph.node:
        if node.name.endswith(".attention_quantize"):
            become(node, "Cast", to=TensorProto.BFLOAT16)
        elif node.name.endswith(".attention_dequantize"):
            become(node, "Identity")
    del model.graph.value_info[:]


def cache_in_bf16(model: ModelProto, directory: Path) -> None:
    """Keys and values go in and out as they are."""
    for name, node in named(model).items():
        if re.search(r"\.[kv]\.(de)?quantize(_past)?$", name):
            become(node, "Identity")
        if name.endswith(".k.dequantize_step"):  # for scores in FP32
            become(node, "Cast", to=TensorProto.FLOAT)
    for value in (*model.graph.input, *model.graph.output):
        if "key_values" in value.name:
            value.type.tensor_type.elem_type = TensorProto.BFLOAT16
    del model.graph.value_info[:]


def behind(change: Change) -> Change:
    """The same of the graph whose weights' scales are applied behind the GEMMs."""

    def changed(model: ModelProto, directory: Path) -> None:
        in_form(model, directory, "mul")
        change(model, directory)

    return changed


def unit_doubled(model: ModelProto, directory: Path) -> None:
    """The one scale of every weight."""
    (unit,) = (tensor for tensor in model.graph.initializer if tensor.name == UNIT)
    unit.CopyFrom(numpy_helper.from_array(np.array(2, np.float32), UNIT))


def one_channel_doubled(model: ModelProto, directory: Path) -> None:
    """One number of one Mul."""
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == f"{DOWN}.weight_scale")
    values = read_tensor(tensor, Places(directory))
    assert values is not None
    factors = np.where(np.arange(values.size) == 5, 2, 1).astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32) * factors, tensor.name))


def behind_another_product(model: ModelProto, directory: Path) -> None:
    """The Muls of two modules, exchanged."""
    first, second = (named(model)[f"{name}.matmul.rescale"] for name in (GATE, UP))
    first.input[1], second.input[1] = second.input[1], first.input[1]


def no_mul_behind(model: ModelProto, directory: Path) -> None:
    """What read it reads the sum."""
    nodes = named(model)
    nodes[f"{DOWN}.matmul.rescale_cast"].input[0] = f"{DOWN}.matmul.sum"
    model.graph.node.remove(nodes[f"{DOWN}.matmul.rescale"])


def summed_in_bf16(model: ModelProto, directory: Path) -> None:
    """The GEMM in the compute type, widened for the Mul."""
    nodes = []
    for node in model.graph.node:
        if node.name.endswith((".weight.dequantize", ".input.dequantize")):
            next(entry for entry in node.attribute if entry.name == "output_dtype").i = TensorProto.BFLOAT16
        if node.name.endswith(".matmul.rescale"):
            wide = f"{node.name}.wide"
            nodes.append(helper.make_node("Cast", node.input[:1], [wide], name=wide, to=TensorProto.FLOAT))
            node.input[0] = wide
        nodes.append(node)
    del model.graph.value_info[:]
    copied = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copied)


def shown(fp8q: Fp8q, run: Run, target: str, plan: Path) -> tuple[int, dict[str, Any], str]:
    """Exit code, the engine shown, and the line on standard error after its fixed parts."""
    result = fp8q("engine", run.root, "--target", target, "--plan", plan, "--json")
    (view,) = json.loads(result.out)["engines"]
    start, end = (
        f"fp8q: {target}: {plan} is not the engine of this run: ",
        "; build it again with `fp8q build-engine`\n",
    )
    assert not result.err or (result.err.startswith(start) and result.err.endswith(end)), result.err
    return result.code, view, result.err.removeprefix(start).removesuffix(end)


@pytest.mark.parametrize("target", TARGETS)
def test_an_engine_built_elsewhere_from_the_same_graph_passes(fp8q: Fp8q, run: Run, built: Built, target: str) -> None:
    for plan in (run.engines / f"{target}.plan", built(unchanged, target), built(behind(unchanged), target)):
        code, view, error = shown(fp8q, run, target, plan)
        assert (code, error, view["differences"], view["narrow"]) == (0, "", [], [])
        assert [view[f"{what}_found"] for what in ("codes", "factors", "inputs")] == [7, 7, 7]


# Each that deceives: what is told of it first (with what factor), of how many modules what differs.


def first_factor(run: Run, factor: float) -> str:
    """What is said of the first GEMM of a run whose factors are multiplied."""
    module = load_scales(run).fp8_gemms[0]
    weight = load_graph(run.onnx).constant(f"{module}.weight_scale")
    assert weight is not None
    own = np.float32(load_scales(run).activations[module].scale) * weight.ravel()[0]
    scaled = f"its GEMM is scaled by {own * np.float32(factor):.9g} in channel 0"
    return f"{module}: {scaled}, and the run has s_x · s_w = {own:.9g}"


def first_input(run: Run) -> str:
    scale = load_scales(run).activations[DOWN].scale
    return f"{DOWN}: its input is quantized with the scale {scale / 64:.6g}, and the run has {scale:.6g}"


def factor_of(run: Run, module: str, channel: int) -> np.float32:
    weight = load_graph(run.onnx).constant(f"{module}.weight_scale")
    assert weight is not None
    return np.float32(np.float32(load_scales(run).activations[module].scale) * weight.ravel()[channel])


def factor(run: Run, module: str, channel: int, found: np.float32) -> str:
    """What is said of a GEMM whose first wrong factor is `found`."""
    own = factor_of(run, module, channel)
    return f"{module}: its GEMM is scaled by {found:.9g} in channel {channel}, and the run has s_x · s_w = {own:.9g}"


CODES = f"{GATE}: its GEMM multiplies the codes of {UP}, and the run has its own in model.onnx"
CACHE = "past_key_values.0.key: it is bf16, and the run has fp8"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("change", "first", "differs"),
    [
        (weight_scales_doubled, lambda run: first_factor(run, 2), {"factors": 7}),
        (activation_scales_divided, lambda run: first_factor(run, 1 / 64), {"factors": 7, "input scale": 7}),
        (one_scale_moved_to_the_other_side, first_input, {"input scale": 1}),
        (weights_exchanged, lambda _: CODES, {"codes": 2}),
        (cache_in_bf16, lambda _: CACHE, {"type": 4}),
        (behind(unit_doubled), lambda run: first_factor(run, 2), {"factors": 7}),
        (
            behind(one_channel_doubled),
            lambda run: factor(run, DOWN, 5, 2 * factor_of(run, DOWN, 5)),
            {"factors": 1},
        ),
        (
            behind(behind_another_product),
            lambda run: factor(run, GATE, 0, factor_of(run, UP, 0)),
            {"factors": 2},
        ),
        (behind(weights_exchanged), lambda _: CODES, {"codes": 2}),
    ],
)
def test_an_engine_with_other_numbers_or_types_does_not_pass(
    fp8q: Fp8q,
    run: Run,
    built: Built,
    target: str,
    change: Change,
    first: Callable[[Run], str],
    differs: dict[str, int],
) -> None:
    code, view, error = shown(fp8q, run, target, built(change, target))
    assert (code, view["evidence"], view["fp8_products"], view["narrow"]) == (3, "plan", 7, [])
    found = {(each["module"], each["what"], each["told"]) for each in view["differences"]}
    assert {(what, True): number for what, number in differs.items()} == Counter(key[1:] for key in found)
    more = sum(differs.values()) - 1
    assert error == first(run) + (f" ({more} more, --json has all)" if more else "")


@pytest.mark.parametrize("target", TARGETS)
def test_an_engine_without_a_mul_behind_one_product_does_not_pass(
    fp8q: Fp8q, run: Run, built: Built, target: str
) -> None:
    code, view, error = shown(fp8q, run, target, built(behind(no_mul_behind), target))
    assert (code, view["fp8_products"], view["codes_found"], view["factors_found"]) == (3, 7, 7, 6)
    kernel = r"__myl_\w+ reads its GEMM and takes none of them"
    assert re.fullmatch(rf"{re.escape(DOWN)}: its factors cannot be told, {kernel}", error)


@pytest.mark.parametrize("target", TARGETS)
def test_an_engine_that_rounds_the_sum_before_it_is_scaled_does_not_pass(
    fp8q: Fp8q, run: Run, built: Built, target: str
) -> None:
    plan = built(behind(summed_in_bf16), target)
    result = fp8q("engine", run.root, "--target", target, "--plan", plan, "--json")
    (view,) = json.loads(result.out)["engines"]
    assert (result.code, view["fp8_products"], len(view["narrow"])) == (3, 7, 7)
    assert result.err.startswith(
        f"fp8q: {target}: 7 of 7 expected GEMMs take FP8 on both sides and 7 of them answer in less than FP32"
    )


@pytest.mark.parametrize("target", TARGETS)
def test_an_engine_without_the_attention_in_fp8_that_is_promised_does_not_pass(
    fp8q: Fp8q, run: Run, built: Built, target: str
) -> None:
    code, view, error = shown(fp8q, run, target, built(attention_wide, target))
    assert (code, view["fp8_products"], view["codes_found"], view["factors_found"]) == (3, 7, 7, 7)
    products = [f"{ATTENTION}.attention_{product}" for product in ("scores", "values")]
    told = {(each["module"], each["what"]) for each in view["differences"] if each["told"]}
    assert told == {(product, "types") for product in products}
    assert error == (
        f"{products[0]}: the GEMM is bf16 × bf16 -> bf16, and the run has FP8 on both sides (1 more, --json has all)"
    )


def test_attention_multiplies_codes_in_two_products_of_a_prompt_and_reads_codes_in_those_of_a_step(
    fp8q: Fp8q, run: Run
) -> None:
    for target in TARGETS:
        plan = read_plan((run.engines / f"{target}.plan").read_bytes())
        assert plan is not None
        for product in ("scores", "values"):
            (found,) = plan.gemms(f"{ATTENTION}.attention_{product}", 0)
            assert found.fp8
            assert plan.gemms(f"{ATTENTION}.attention_{product}", 1) == []
            assert plan.gemms(f"{ATTENTION}.step_{product}", 0) == []
    shown = fp8q("engine", run.root).out
    for product in ("scores", "values"):
        row = rf"^{ATTENTION}\.attention_{product} +prefill +fp8 × fp8 -> "
        assert len(re.findall(row, shown, re.MULTILINE)) == 2
    # a step reads the cache where it lies, each code once
    assert len(re.findall(r", 1\.00 a value, and copies nothing", shown)) == 2
