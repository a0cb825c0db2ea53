"""Lint and `fp8q engine` against graphs, and engines of them, that are expected in two terms and do not have both."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from fp8q import api
from fp8q.core.run import Run
from fp8q.export.engine.plan import read_plan
from fp8q.export.engine.proof import broken, prove
from fp8q.export.engine.second_codes import TERMS
from fp8q.export.graph.weight_scale_form import in_form
from fp8q.export.lint.check import lint_graph, run_expectation
from fp8q.export.onnx_file.indexed import Indexed
from fp8q.export.onnx_file.loading import load_graph
from fp8q.options import ONE
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages.lint import expectation

from .test_engine_proof import behind, named, shown

pytestmark = pytest.mark.slow

TARGETS = ("sm89", "sm120")
LAYER = "model.layers.0"
Q, GATE, DOWN = (f"{LAYER}.{name}" for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"))
ATTENTION = f"{LAYER}.self_attn"
SCORES, VALUES = (f"{ATTENTION}.attention_{product}" for product in ("scores", "values"))
Change = Callable[[ModelProto, Path], None]
Built = Callable[[Change, str], Path]
Fp8q = Callable[..., Any]
AGAIN = "run `fp8q export` again"


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, random_checkpoint: Callable[..., Path], demo_texts: Any,
    keeping_graphs: Any,
) -> Run:  # fmt: skip
    """A Llama of one layer whose every input is expected in two terms, those of attention too, and its engines."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'")
    folder = tmp_path_factory.mktemp("terms")
    model = random_checkpoint(folder / "model", "LlamaConfig", {"num_hidden_layers": 1, "num_key_value_heads": 2})
    text = folder / "calibration.txt"
    text.write_text(demo_texts.calibration.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    options = api.CalibrateOptions(samples=16, seq_len=64, kv_cache="fp8", activation_terms=2)
    in_codes = api.ExportOptions(attention="fp8")
    with keeping_graphs():
        made = api.calibrate(str(model), str(text), folder / "run", None, options, in_codes)
    engines = api.EngineOptions(runtime="tensorrt-rtx", targets=TARGETS, max_batch=2, max_seq_len=64)
    assert [engine.fp8_products for engine in api.build_engine(made.root, engines)] == [7, 7]
    return made


@dataclass(frozen=True)
class Nodes:
    """What a GEMM of two terms is made of: the `product`, what its second term (`input`…) and its halves are."""

    product: str
    quantize: str
    dequantize: str
    first: str
    input: str
    halves: str
    share: str
    add: str


def of_module(name: str) -> Nodes:
    """Those of a module's GEMM."""
    ends = ("matmul", "input.quantize", "input.dequantize", "input.first", "input.first")
    return Nodes(*(f"{name}.{end}" for end in (*ends, "halves", "halves.Mul_1", "terms_add")))


def of_attention(product: str, part: str) -> Nodes:
    """Those of a GEMM of attention, whose first input is called `part`."""
    ends = (f"attention_{product}", f"{part}.attention_quantize", f"{part}.attention_dequantize")
    first = (f"{part}.attention_first", f"fp8q_attention.{part}.first")
    halves = (f"attention_{product}_halves", f"fp8q_attention.{product}_halves.Mul_1", f"attention_{product}_terms_add")
    return Nodes(*(f"{ATTENTION}.{end}" for end in (*ends, *first, *halves)))


OF_DOWN, OF_SCORES, OF_VALUES = of_module(DOWN), of_attention("scores", "q"), of_attention("values", "p")

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


def half_as_much(model: ModelProto, directory: Path, at: Nodes = OF_DOWN) -> None:
    """The second term is of eight times what the first leaves."""
    constant(model, f"{at.input}.Mul_1", 8)


def an_eighth(model: ModelProto, directory: Path, at: Nodes = OF_DOWN) -> None:
    """The second half counts twice."""
    constant(model, at.share, 1 / 8)


def first_of(nodes: dict[str, NodeProto], at: Nodes, operator: str) -> NodeProto:
    """The node that quantizes, or dequantizes, the first term alone."""
    return nodes[f"{at.first}.{operator}" if at is OF_DOWN else f"{at.first}_{operator}"]


def of_all(model: ModelProto, directory: Path, at: Nodes = OF_DOWN) -> None:
    """The second term is of all of x, not of what the first leaves."""
    nodes = named(model)
    alone = [first_of(nodes, at, operator) for operator in ("quantize", "dequantize")]
    nodes[f"{at.input}.Mul_1"].input[0] = alone[0].input[0]
    for node in (*alone, nodes[f"{at.input}.Sub_1"]):
        model.graph.node.remove(node)


def second_dropped(model: ModelProto, directory: Path, at: Nodes = OF_DOWN) -> None:
    """The GEMM takes one term."""
    nodes = named(model)
    alone = [first_of(nodes, at, operator) for operator in ("quantize", "dequantize")]
    nodes[at.quantize].input[0] = alone[0].input[0]
    result, made = nodes[at.add].output[0], nodes[at.halves].input[0]
    for node in model.graph.node:
        node.input[:] = [made if name == result else name for name in node.input]
    gone = [nodes[name] for name in (at.halves, at.share, at.add)]
    gone += [*alone, *(nodes[f"{at.input}.{name}"] for name in ("Sub_1", "Mul_1", "Concat_1"))]
    for node in gone:
        model.graph.node.remove(node)
    del model.graph.value_info[:]


def two_products(model: ModelProto, directory: Path, at: Nodes = OF_DOWN, wide: bool = False) -> None:
    """Each term has a GEMM of its own, of one weight; the second `wide`, without Q/DQ."""
    second_of = named(model)[f"{at.input}.Mul_1"].output[0]
    nodes, copies = named(model), []
    product, add = nodes[at.product], nodes[at.add]
    share = nodes[at.share]
    nodes[at.quantize].input[0] = first_of(nodes, at, "quantize").input[0]
    value, beside = second_of, at.product.removesuffix(".matmul")
    for name in ("quantize", "dequantize"):
        node = NodeProto.FromString(nodes[getattr(at, name)].SerializeToString())
        node.name, node.input[0], node.output[0] = f"{beside}.second.{name}", value, f"{beside}.second.{name}.output"
        value = node.output[0]
        copies.append(node)
    if wide:
        value = f"{beside}.second.cast"
        copies = [helper.make_node("Cast", [second_of], [value], value, to=TensorProto.FLOAT)]
    second = helper.make_node("MatMul", [value, product.input[1]], [f"{beside}.second"], f"{beside}.second.matmul")
    share.input[list(share.input).index(nodes[at.halves].output[1])] = second.output[0]
    add.input[list(add.input).index(nodes[at.halves].output[0])] = product.output[0]
    kept = []
    for node in model.graph.node:
        if node.name in (at.halves, f"{at.input}.Concat_1"):
            continue
        kept += [node, *([*copies, second] if node.name == product.name else [])]
    written = [NodeProto.FromString(node.SerializeToString()) for node in kept]
    del model.graph.node[:]
    del model.graph.value_info[:]
    model.graph.node.extend(written)


def second_wide(model: ModelProto, directory: Path, at: Nodes = OF_DOWN) -> None:
    two_products(model, directory, at, wide=True)


def linted(run: Run, change: Change, **promised: Any) -> list[str]:
    model = onnx.load_model(run.onnx, load_external_data=False)
    change(model, run.model)
    found = lint_graph(Indexed(model, run.model), replace(expectation(run), **promised))
    return [str(each).removeprefix(f"F214 two-terms: {DOWN}.matmul: ") for each in found if each.rule == "F214"]


NO_CONCAT = f"is expected in two terms, and {DOWN}.input.quantize reads no Concat of both; {AGAIN}"


@pytest.mark.parametrize("form", ["dq", "mul"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (half_as_much, f"is expected in two terms: its second term is multiplied by 8 and not by 16; {AGAIN}"),
        (an_eighth, f"is expected in two terms: the second half is added 0.125 times, and not 0.0625; {AGAIN}"),
        (of_all, f"is expected in two terms: its second term is not of what the codes leave of the first; {AGAIN}"),
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
        forms = {**expectation(run).forms, DOWN: ONE}
        assert linted(run, change, forms=forms) == [f"takes two terms, and scales.json expects one; {AGAIN}"]


def test_products_of_one_tensor_share_both_terms_and_each_is_one(run: Run) -> None:
    made = [node.name for node in onnx.load_model(run.onnx, load_external_data=False).graph.node]
    second = sorted(name.removesuffix(".first.Concat_1") for name in made if name.endswith(".first.Concat_1"))
    shared = [f"{name}.input" for name in (DOWN, GATE, f"{ATTENTION}.o_proj", Q)]
    assert second == [*shared[:2], *(f"{ATTENTION}.fp8q_attention.{part}" for part in "pq"), *shared[2:]]
    products = [name.removesuffix(".matmul") for name in made if name.endswith("_proj.matmul")]
    assert sorted(products) == sorted(name.removesuffix(".halves") for name in made if name.endswith("_proj.halves"))
    assert len(products) == 7


@pytest.mark.parametrize("target", TARGETS)
def test_an_engine_of_both_terms_passes(fp8q: Fp8q, run: Run, built: Built, target: str) -> None:
    for plan in (run.engines / f"{target}.plan", built(behind(unchanged), target)):
        code, view, error = shown(fp8q, run, target, plan)
        assert (code, error, view["differences"], view["narrow"]) == (0, "", [], [])
        assert [view[f"{what}_found"] for what in ("codes", "factors", "inputs", "terms")] == [7, 7, 7, 7]
        types = {tuple(row["operands"]) for row in view["products"] if row["node"] in (SCORES, VALUES)}
        assert types == {("fp8", "fp8")}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (half_as_much, r"__myl_\w+ makes its codes without a 16, and the run has 16 times what the first term leaves"),
        (of_all, r"__myl_\w+ makes its codes without the scale of the first, and the run has 16 times .*"),
        (
            an_eighth,
            r"__myl_\w+ reads 1 GEMMs of two terms and takes 0 times 1/16, and the run has the second half .*",
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


TWO_ROWS = "its codes have 2 rows a token, and the run has 4, those of both terms"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("of_queries", "of_probabilities", "found"),
    [
        (
            an_eighth,
            half_as_much,
            (
                r"__myl_\w+ takes 0.125 beside its GEMM, and the run has 0.0625, for the second half",
                r"__myl_\w+ makes its codes without a 16, and the run has 16 times what the first term leaves",
            ),
        ),
        (of_all, second_dropped, (r"__myl_\w+ makes its codes without the scale of the first, and the .*", TWO_ROWS)),
        (two_products, second_wide, (TWO_ROWS, TWO_ROWS)),
    ],
)
def test_an_engine_whose_attention_is_not_of_both_terms_is_named(
    fp8q: Fp8q, run: Run, built: Built, target: str, of_queries: Any, of_probabilities: Any, found: tuple[str, str]
) -> None:
    """The scores are multiplied by 1/16 besides, as those of heads of 256 are."""

    def changed(model: ModelProto, directory: Path) -> None:
        constant(model, f"{ATTENTION}.fp8q_attention.Mul_3", 1 / 16)
        of_queries(model, directory, OF_SCORES)
        of_probabilities(model, directory, OF_VALUES)

    code, view, error = shown(fp8q, run, target, built(changed, target))
    told = {(each["module"], each["profile"]) for each in view["differences"] if each["what"] == "two terms"}
    assert (code, view["fp8_products"], view["terms_found"]) == (3, 7, 7), error
    assert told == {(product, "prefill") for product in (SCORES, VALUES)}
    for product, expected in zip((SCORES, VALUES), found, strict=True):
        shows = [
            f"{each['found']}, and the run has {each['expected']}"
            for each in view["differences"]
            if each["module"] == product
        ]
        assert all(re.fullmatch(expected, each) for each in shows), shows
    assert re.fullmatch(rf"{re.escape(SCORES)}: {found[0]} \(1 more, --json has all\)", error), error


def test_rows_that_the_graph_does_not_say_cannot_be_told(run: Run) -> None:
    graph, data = load_graph(run.onnx), (run.engines / "sm89.plan").read_bytes()
    del graph.model.graph.value_info[:]
    proof = prove(data, read_plan(data), graph, run_expectation(run, load_scales(run)), ("prefill", "decode"))
    found = [each for each in proof.differences if each.what == TERMS]
    assert {each.module for each in broken(found)} == {SCORES, VALUES}
    assert str(broken(found)[0]) == f"{SCORES}: its two terms cannot be told, the rows of its codes do not read"
