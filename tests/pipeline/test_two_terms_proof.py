"""Lint and `fp8q engine` against graphs, and engines of them, that are promised in two terms and do not have both."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from fp8q import api
from fp8q.export.forms import in_form
from fp8q.export.lint.check import lint_graph
from fp8q.export.lint.indexed import Indexed
from fp8q.quantize.scales import load_scales
from fp8q.run import Run
from fp8q.stages.linting import promise

from .test_engine_proof import behind, named, shown

TARGETS = ("sm89", "sm120")
LAYER = "model.layers.0"
Q, GATE, DOWN = (f"{LAYER}.{name}" for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"))
Change = Callable[[ModelProto, Path], None]
Built = Callable[[Change, str], Path]
Fp8q = Callable[..., Any]
AGAIN = "run `fp8q export` again"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, random_checkpoint: Callable[..., Path], demo_texts: Any) -> Run:
    """A Llama of one layer whose every input is promised in two terms, and its engines."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'")
    folder = tmp_path_factory.mktemp("terms")
    model = random_checkpoint(folder / "model", "LlamaConfig", {"num_hidden_layers": 1, "num_key_value_heads": 2})
    text = folder / "calibration.txt"
    text.write_text(demo_texts.calibration.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    options = api.CalibrateOptions(samples=16, seq_len=64, activation_terms=2)
    made = api.calibrate(str(model), str(text), folder / "run", None, options)
    engines = api.EngineOptions(runtime="tensorrt-rtx", targets=TARGETS, max_batch=2, max_seq_len=64)
    assert [engine.fp8_products for engine in api.build_engine(made.root, engines)] == [7, 7]
    return made


# Graphs that deceive.


def unchanged(model: ModelProto, directory: Path) -> None:
    """As fp8q exported it."""


def constant(model: ModelProto, reader: str, number: float) -> None:
    """Another number in the place of the one that a Mul takes."""
    node = named(model)[reader]
    (old,) = (tensor for tensor in model.graph.initializer if tensor.name in node.input)
    made = numpy_helper.from_array(np.array(number, numpy_helper.to_array(old).dtype), f"{reader}.other")
    model.graph.initializer.append(made)
    node.input[list(node.input).index(old.name)] = made.name


def half_as_much(model: ModelProto, directory: Path) -> None:
    """The second term is of eight times what the first leaves."""
    constant(model, f"{DOWN}.input.first.Mul_1", 8)


def an_eighth(model: ModelProto, directory: Path) -> None:
    """The second half counts twice."""
    constant(model, f"{DOWN}.halves.Mul_1", 1 / 8)


def of_all(model: ModelProto, directory: Path) -> None:
    """The second term is of all of x, not of what the first leaves."""
    nodes = named(model)
    nodes[f"{DOWN}.input.first.Mul_1"].input[0] = nodes[f"{DOWN}.input.first.quantize"].input[0]
    for name in ("quantize", "dequantize", "Sub_1"):
        model.graph.node.remove(named(model)[f"{DOWN}.input.first.{name}"])


def second_dropped(model: ModelProto, directory: Path) -> None:
    """DOWN takes one term."""
    nodes = named(model)
    nodes[f"{DOWN}.input.quantize"].input[0] = nodes[f"{DOWN}.input.first.quantize"].input[0]
    result, made = nodes[f"{DOWN}.terms_add"].output[0], nodes[f"{DOWN}.halves"].input[0]
    for node in model.graph.node:
        node.input[:] = [made if name == result else name for name in node.input]
    gone = [f"{DOWN}.{name}" for name in ("halves", "halves.Mul_1", "terms_add")]
    gone += [f"{DOWN}.input.first.{name}" for name in ("quantize", "dequantize", "Sub_1", "Mul_1", "Concat_1")]
    for name in gone:
        model.graph.node.remove(nodes[name])
    del model.graph.value_info[:]


def two_products(model: ModelProto, directory: Path, wide: bool = False) -> None:
    """Each term has a product of its own, of one weight; the second `wide`, without Q/DQ."""
    second_of = named(model)[f"{DOWN}.input.first.Mul_1"].output[0]
    nodes, copies = named(model), []
    product, add = nodes[f"{DOWN}.matmul"], nodes[f"{DOWN}.terms_add"]
    share = nodes[f"{DOWN}.halves.Mul_1"]
    nodes[f"{DOWN}.input.quantize"].input[0] = nodes[f"{DOWN}.input.first.quantize"].input[0]
    value = second_of
    for name in ("quantize", "dequantize"):
        node = NodeProto.FromString(nodes[f"{DOWN}.input.{name}"].SerializeToString())
        node.name, node.input[0], node.output[0] = f"{DOWN}.second.{name}", value, f"{DOWN}.second.{name}.output"
        value = node.output[0]
        copies.append(node)
    if wide:
        value = f"{DOWN}.second.cast"
        copies = [helper.make_node("Cast", [second_of], [value], value, to=TensorProto.FLOAT)]
    second = helper.make_node("MatMul", [value, product.input[1]], [f"{DOWN}.second"], f"{DOWN}.second.matmul")
    share.input[list(share.input).index(nodes[f"{DOWN}.halves"].output[1])] = second.output[0]
    add.input[list(add.input).index(nodes[f"{DOWN}.halves"].output[0])] = product.output[0]
    kept = []
    for node in model.graph.node:
        if node.name in (f"{DOWN}.halves", f"{DOWN}.input.first.Concat_1"):
            continue
        kept += [node, *([*copies, second] if node.name == product.name else [])]
    written = [NodeProto.FromString(node.SerializeToString()) for node in kept]
    del model.graph.node[:]
    del model.graph.value_info[:]
    model.graph.node.extend(written)


def second_wide(model: ModelProto, directory: Path) -> None:
    two_products(model, directory, wide=True)


def linted(run: Run, change: Change, **promised: Any) -> list[str]:
    model = onnx.load_model(run.onnx, load_external_data=False)
    change(model, run.model)
    found = lint_graph(Indexed(model, run.model), replace(promise(run), **promised))
    return [str(each).removeprefix(f"F214 two-terms: {DOWN}.matmul: ") for each in found if each.rule == "F214"]


NO_CONCAT = f"is promised in two terms, and {DOWN}.input.quantize reads no Concat of both; {AGAIN}"


@pytest.mark.parametrize("form", ["dq", "mul"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (half_as_much, f"is promised in two terms: its second term is multiplied by 8 and not by 16; {AGAIN}"),
        (an_eighth, f"is promised in two terms: the second half is added 0.125 times, and not 0.0625; {AGAIN}"),
        (of_all, f"is promised in two terms: its second term is not of what the codes leave of the first; {AGAIN}"),
        (second_dropped, NO_CONCAT),
        (two_products, NO_CONCAT),
        (second_wide, NO_CONCAT),
    ],
)
def test_the_lint_names_a_product_without_both_terms(run: Run, form: Any, change: Change, expected: str) -> None:
    def changed(model: ModelProto, directory: Path) -> None:
        if form == "mul" and change not in (two_products, second_wide, second_dropped):
            in_form(model, directory, "mul")
        change(model, directory)

    assert linted(run, changed) == [expected]


def test_the_lint_is_content_with_both_terms_and_names_those_that_nobody_promised(run: Run) -> None:
    for change in (unchanged, behind(unchanged)):
        assert linted(run, change) == []
        kept = [module for module in load_scales(run).promised if module != DOWN]
        assert linted(run, change, two_terms=kept) == [f"takes two terms, and scales.json promises one; {AGAIN}"]


@pytest.mark.parametrize("target", TARGETS)
def test_an_engine_of_both_terms_passes(fp8q: Fp8q, run: Run, built: Built, target: str) -> None:
    for plan in (run.engines / f"{target}.plan", built(behind(unchanged), target)):
        code, view, error = shown(fp8q, run, target, plan)
        assert (code, error, view["differences"], view["narrow"]) == (0, "", [], [])
        assert [view[f"{what}_found"] for what in ("codes", "factors", "inputs", "terms")] == [7, 7, 7, 7]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (half_as_much, r"__myl_\w+ makes its codes without a 16, and the run has 16 times what the first term leaves"),
        (of_all, r"__myl_\w+ makes its codes without the scale of the first, and the run has 16 times .*"),
        (
            an_eighth,
            r"__myl_\w+ reads 1 products of two terms and takes 0 times 1/16, and the run has the second half .*",
        ),
        (second_dropped, "its codes have the rows of one term, and the run has both of them"),
        (two_products, "its codes have the rows of one term, and the run has both of them"),
        (second_wide, "its codes have the rows of one term, and the run has both of them"),
    ],
)
def test_an_engine_without_both_terms_of_one_product_is_named(
    fp8q: Fp8q, run: Run, built: Built, target: str, change: Change, found: str
) -> None:
    code, view, error = shown(fp8q, run, target, built(change, target))
    told = Counter(each["module"] for each in view["differences"] if each["what"] == "two terms" and each["told"])
    assert (code, view["fp8_products"], view["terms_found"], set(told)) == (3, 7, 6, {DOWN}), error
    assert re.match(rf"{re.escape(DOWN)}: {found}", error), error
