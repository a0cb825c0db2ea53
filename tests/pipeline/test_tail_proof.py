"""Lint and `fp8q engine` against graphs, and engines of them, whose expected tail is missing or elsewhere."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from fp8q import api
from fp8q.core.run import Run
from fp8q.export.engine.build import Job
from fp8q.export.engine.profiles import profiles
from fp8q.export.graph.weight_scale_form import in_form
from fp8q.export.lint.check import lint_graph
from fp8q.export.onnx_file.indexed import Indexed
from fp8q.options import ONE, TWO, Form
from fp8q.stages.lint import expectation

from ..graphs import changed_engine
from .test_engine_proof import behind, named, shown
from .test_two_terms_proof import AGAIN, DOWN, TARGETS, Q, constant, unchanged

pytestmark = pytest.mark.slow

TAIL = 16
FIRST, HALVES = f"{DOWN}.input.first", f"{DOWN}.halves"
Change = Callable[[ModelProto, Path], None]
Built = Callable[[Change, str], Path]
Fp8q = Callable[..., Any]


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, random_checkpoint: Callable[..., Path], demo_texts: Any,
    keeping_graphs: Any,
) -> Run:  # fmt: skip
    """A Llama of one layer whose every input has a tail of 16, and its engines."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'")
    folder = tmp_path_factory.mktemp("tail")
    model = random_checkpoint(folder / "model", "LlamaConfig", {"num_hidden_layers": 1, "num_key_value_heads": 2})
    text = folder / "calibration.txt"
    text.write_text(demo_texts.calibration.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    options = api.CalibrateOptions(samples=16, seq_len=64, activation_terms="tail", exact_tail=TAIL)
    with keeping_graphs():
        made = api.calibrate(str(model), str(text), folder / "run", None, options)
    engines = api.EngineOptions(runtime="tensorrt-rtx", targets=TARGETS, max_batch=2, max_seq_len=64)
    assert [engine.fp8_products for engine in api.build_engine(made.root, engines)] == [7, 7]
    return made


# Graphs that deceive.


def bounds(model: ModelProto, slice_: str, start: int | None = None, end: int | None = None) -> None:
    """Other bounds of a Slice; None leaves one as it is."""
    node = named(model)[slice_]
    for at, value in ((1, start), (2, end)):
        if value is not None:
            name = f"{slice_}.other_{at}"
            model.graph.initializer.append(numpy_helper.from_array(np.array([value], np.int64), name))
            node.input[at] = name


def without(model: ModelProto, gone: Sequence[str]) -> None:
    """The graph without nodes and the shapes that followed from them."""
    kept = [NodeProto.FromString(node.SerializeToString()) for node in model.graph.node if node.name not in gone]
    del model.graph.node[:]
    del model.graph.value_info[:]
    model.graph.node.extend(kept)


def half_as_much(model: ModelProto, directory: Path) -> None:
    """The second term is of eight times what the first leaves."""
    constant(model, f"{FIRST}.Mul_1", 8)


def an_eighth(model: ModelProto, directory: Path) -> None:
    """The second half counts twice."""
    constant(model, f"{HALVES}.Mul_1", 1 / 8)


def of_the_first_positions(model: ModelProto, directory: Path) -> None:
    """The second terms are of the first 16 positions, and are added to the last."""
    bounds(model, f"{FIRST}.Slice_1", 0, TAIL)


def added_to_the_first(model: ModelProto, directory: Path) -> None:
    """The second terms are of the last 16 positions, and are added to the first."""
    bounds(model, f"{HALVES}.Slice_3", 0, TAIL)
    bounds(model, f"{HALVES}.Slice_4", TAIL, 2**31 - 1)
    joined = named(model)[f"{HALVES}.Concat_1"]
    joined.input[:] = reversed(joined.input)


def a_shorter_tail(model: ModelProto, directory: Path) -> None:
    """The last 8 positions, throughout."""
    bounds(model, f"{FIRST}.Slice_1", -8)
    bounds(model, f"{HALVES}.Slice_3", -8)
    bounds(model, f"{HALVES}.Slice_4", None, -8)
    del model.graph.value_info[:]


def of_all(model: ModelProto, directory: Path) -> None:
    """The second terms are of all positions."""
    bounds(model, f"{FIRST}.Slice_1", -(2**31))
    node = named(model)[f"{FIRST}.Slice_1"]
    whole = node.input[0]
    for name in (f"{FIRST}.quantize", f"{FIRST}.Sub_1"):
        reader = named(model)[name]
        reader.input[:] = [whole if value == node.output[0] else value for value in reader.input]
    without(model, [node.name])


def second_dropped(model: ModelProto, directory: Path) -> None:
    """The GEMM takes one term."""
    nodes = named(model)
    nodes[f"{DOWN}.input.quantize"].input[0] = nodes[f"{FIRST}.Slice_1"].input[0]
    nodes[f"{DOWN}.narrow"].input[0] = nodes[f"{DOWN}.matmul"].output[0]
    without(model, [name for name in nodes if name.startswith((FIRST, HALVES)) or name == f"{DOWN}.terms_add"])


def two_products(model: ModelProto, directory: Path) -> None:
    """The second terms have a GEMM of their own, of the same weight."""
    nodes = named(model)
    nodes[f"{DOWN}.input.quantize"].input[0] = nodes[f"{FIRST}.Slice_1"].input[0]
    value, made = nodes[f"{FIRST}.Mul_1"].output[0], []
    for operator in ("quantize", "dequantize"):
        node = NodeProto.FromString(nodes[f"{DOWN}.input.{operator}"].SerializeToString())
        node.name, node.input[0], node.output[0] = f"{DOWN}.second.{operator}", value, f"{DOWN}.second.{operator}.out"
        value = node.output[0]
        made.append(node)
    weight, product = nodes[f"{DOWN}.matmul"].input[1], nodes[f"{DOWN}.matmul"].output[0]
    made.append(helper.make_node("MatMul", [value, weight], [f"{DOWN}.second"], f"{DOWN}.second.matmul"))
    share = nodes[f"{HALVES}.Mul_1"]
    share.input[:] = [f"{DOWN}.second" if each.endswith("Slice_2.output") else each for each in share.input]
    for name in ("Slice_3", "Slice_4"):
        nodes[f"{HALVES}.{name}"].input[0] = product
    after = [*model.graph.node].index(nodes[f"{DOWN}.matmul"]) + 1
    for offset, node in enumerate(made):
        model.graph.node.insert(after + offset, node)
    without(model, [f"{FIRST}.Concat_1", f"{HALVES}.Slice_1", f"{HALVES}.Slice_2"])


def added_in_bf16(model: ModelProto, directory: Path) -> None:
    """The GEMM answers in BF16."""
    for name in (f"{DOWN}.input.dequantize", f"{DOWN}.weight.dequantize"):
        (typed,) = (each for each in named(model)[name].attribute if each.name == "output_dtype")
        typed.i = TensorProto.BFLOAT16


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
        (half_as_much, "its second term is multiplied by 8 and not by 16"),
        (an_eighth, "the second half is added 0.125 times, and not 0.0625"),
        (of_the_first_positions, "its second term is not of what the codes leave of the first"),
        (added_to_the_first, "its second term is not added to its last positions"),
        (a_shorter_tail, "its second term is of the last 8 positions, and not of the last 16 positions"),
        (of_all, "its second term is of all positions, and not of the last 16 positions"),
        (second_dropped, None),
        (two_products, None),
    ],
)
def test_the_lint_names_a_product_without_its_tail(run: Run, form: Any, change: Change, expected: str | None) -> None:
    def changed(model: ModelProto, directory: Path) -> None:
        if form == "mul" and expected is not None:
            in_form(model, directory, "mul")
        change(model, directory)

    told = NO_CONCAT if expected is None else f"is expected in two terms: {expected}; {AGAIN}"
    assert linted(run, changed) == [told]


def test_the_lint_wants_the_terms_added_in_fp32(run: Run) -> None:
    told = f"{DOWN}.input.dequantize answers in BFLOAT16, and the halves are added in FLOAT"
    assert linted(run, added_in_bf16) == [f"is expected in two terms: {told}; {AGAIN}"]


def test_the_lint_is_content_with_a_tail_and_names_one_that_is_promised_otherwise(run: Run) -> None:
    forms = dict(expectation(run).forms)
    is_promised = "is expected in two terms: its second term is of the last 16 positions, and not of"
    for change in (unchanged, behind(unchanged)):
        assert linted(run, change) == []
        assert linted(run, change, forms=forms | {DOWN: TWO}) == [f"{is_promised} all positions; {AGAIN}"]
        assert linted(run, change, forms=forms | {DOWN: Form("tail", 32)}) == [
            f"{is_promised} the last 32 positions; {AGAIN}"
        ]
        assert linted(run, change, forms=forms | {DOWN: ONE}) == [
            f"takes two terms, and scales.json expects one; {AGAIN}"
        ]


@pytest.mark.parametrize("target", TARGETS)
def test_an_engine_with_its_tail_passes(fp8q: Fp8q, run: Run, built: Built, target: str) -> None:
    for plan in (run.engines / f"{target}.plan", built(behind(unchanged), target)):
        code, view, error = shown(fp8q, run, target, plan)
        assert (code, error, view["differences"], view["narrow"]) == (0, "", [], [])
        assert [view[f"{what}_found"] for what in ("codes", "factors", "inputs", "terms")] == [7, 7, 7, 7]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (half_as_much, r"__myl_\w+ makes its codes without a 16, and the run has 16 times what the first term leaves"),
        (
            an_eighth,
            r"__myl_\w+ reads 1 GEMMs of two terms and takes 0 times 1/16, and the run has the second half .*",
        ),
        (a_shorter_tail, "its codes have 24 positions for a call of 16, and the run has 32, with its tail"),
        (second_dropped, "its codes have 1 positions for a call of 1, and the run has 2, with its tail"),
        (two_products, "its codes have 1 positions for a call of 1, and the run has 2, with its tail"),
    ],
)
def test_an_engine_without_the_tail_of_one_product_is_named(
    fp8q: Fp8q, run: Run, built: Built, target: str, change: Change, found: str
) -> None:
    code, view, error = shown(fp8q, run, target, built(change, target))
    told = Counter(each["module"] for each in view["differences"] if each["what"] == "two terms" and each["told"])
    assert (code, view["terms_found"], set(told)) == (3, 6, {DOWN}), error
    assert re.match(rf"{re.escape(DOWN)}: {found}", error), error


def test_an_engine_for_a_batch_of_1_is_held_to_its_tail_too(fp8q: Fp8q, run: Run, tmp_path: Path) -> None:
    job = Job("tensorrt-rtx", "sm89", profiles(1, 64))
    for change, expected in (
        (unchanged, ""),
        (a_shorter_tail, "its codes have 24 positions for a call of 16, and the run has 32, with its tail"),
        (second_dropped, "its codes have 1 positions for a call of 1, and the run has 2, with its tail"),
    ):
        folder = tmp_path / change.__name__
        folder.mkdir()
        code, view, error = shown(fp8q, run, "sm89", changed_engine(run, change, job, folder))
        assert (code, view["terms_found"]) == ((3, 6) if expected else (0, 7)), error
        assert expected in error


@pytest.mark.parametrize("target", TARGETS)
def test_an_engine_with_second_terms_of_other_positions_is_named(
    fp8q: Fp8q, run: Run, built: Built, target: str
) -> None:
    """In front of q, k and v stands a kernel of their own; down_proj's also reads gate and up, which have tails."""

    def changed(model: ModelProto, directory: Path) -> None:
        bounds(model, f"{Q}.input.first.Slice_1", 0, TAIL)

    code, view, error = shown(fp8q, run, target, built(changed, target))
    told = {each["module"] for each in view["differences"] if each["what"] == "two terms" and each["told"]}
    assert (code, view["terms_found"], told) == (
        3,
        4,
        {Q, Q.replace("q_proj", "k_proj"), Q.replace("q_proj", "v_proj")},
    )
    expected = r"__myl_\w+ does not take where the tail begins, and the run has the last 16 positions"
    assert re.match(rf"{re.escape(Q)}: {expected}", error), error


def test_which_rows_a_kernel_adds_to_an_engine_does_not_tell_and_the_lint_does(
    fp8q: Fp8q, run: Run, built: Built
) -> None:
    """The first 16 positions and the others have the sizes that the last 16 and the others have."""
    code, view, _ = shown(fp8q, run, "sm89", built(added_to_the_first, "sm89"))
    assert (code, view["terms_found"]) == (0, 7)
    assert len(linted(run, added_to_the_first)) == 1
