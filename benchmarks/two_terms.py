"""What TensorRT-RTX makes of the forms in which a product of two terms can be written.

    python benchmarks/two_terms.py [--target sm89]

Forms that are equal in exact arithmetic (docs/two-terms.md), of every product of the demo, built and read from the
plan: FP8 products and kernels of each profile, and the size. The floor is the graph with one term. Prints one JSON
line; exit status 1 where the form that fp8q writes has more kernels than another with as many FP8 products, or fewer of
these than are promised.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx_ir as ir
import torch
from models import small_models
from result import arguments, described, publish

from fp8q.api import CalibrateOptions, calibrate
from fp8q.calibrate.measure.statistics import load_record
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.export.engine.build import Job, build
from fp8q.export.engine.plan import read_plan
from fp8q.export.engine.profiles import profiles
from fp8q.export.graph import trace
from fp8q.export.modules import operators
from fp8q.export.modules.graph_model import GraphLinear, GraphPlan, QuantizedInput, rounded
from fp8q.options import TWO
from fp8q.quantize.codes.formats import TWO_TERMS
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.scheme import Scheme

Form = Callable[[GraphLinear, torch.Tensor], torch.Tensor]
WRITTEN = "product and sum in FP32"
SIXTEENTH = 1 / TWO_TERMS.divisor


def terms(layer: GraphLinear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x`, and sixteen times what its codes leave of it."""
    (quantized,) = layer.quantized
    assert isinstance(quantized, QuantizedInput), "its input is codes"
    return x, (x - rounded(x, quantized.scale, quantized.code, x.dtype)) * TWO_TERMS.divisor


def coded(layer: GraphLinear, x: torch.Tensor) -> torch.Tensor:
    """`x` quantized and dequantized in the compute type."""
    (quantized,) = layer.quantized
    assert isinstance(quantized, QuantizedInput), "its input is codes"
    return rounded(x, quantized.scale, quantized.code, layer.dtype)


def product(layer: GraphLinear, x: torch.Tensor) -> torch.Tensor:
    """`x` by the weight, dequantized in the compute type."""
    weight = operators.dequantize(layer.weight, layer.weight_scale, layer.dtype, layer.axis)
    return torch.matmul(x, weight if layer.axis else weight.t())


def halves(product: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second half of the rows."""
    first, second = operators.halves(product, 0)
    return first, second


def in_the_compute_type(layer: GraphLinear, x: torch.Tensor) -> torch.Tensor:
    """One product, its halves added as they come."""
    first, second = halves(product(layer, coded(layer, torch.cat(terms(layer, x)))))
    return first + second * SIXTEENTH


def halves_widened(layer: GraphLinear, x: torch.Tensor) -> torch.Tensor:
    """One product, its halves added in FP32."""
    first, second = halves(product(layer, coded(layer, torch.cat(terms(layer, x)))))
    return (first.float() + second.float() * SIXTEENTH).to(layer.dtype)


def two_products(layer: GraphLinear, x: torch.Tensor) -> torch.Tensor:
    """A product of each term."""
    first, second = (product(layer, coded(layer, term)) for term in terms(layer, x))
    return first + second * SIXTEENTH


def joined_codes(layer: GraphLinear, x: torch.Tensor) -> torch.Tensor:
    """One product of both terms, which are put together when they are codes already."""
    first, second = halves(product(layer, torch.cat([coded(layer, term) for term in terms(layer, x)])))
    return first + second * SIXTEENTH


FORMS: dict[str, Form] = {
    "product and sum in BF16": in_the_compute_type,
    "halves widened to FP32, then added": halves_widened,
    WRITTEN: GraphLinear.forward,
    "two products, one a term": two_products,
    "Concat behind DequantizeLinear": joined_codes,
}


def built(run: Run, form: Form | None, target: str) -> dict[str, Any]:
    """The products and kernels of an engine of `run`, in a form, or with one term."""
    scales = load_scales(run)
    plan = GraphPlan(
        trace.fp8_groups(load_record(run).groups, scales),
        frozenset(scales.kv_cache),
        torch.bfloat16,
        schemes={name: Scheme(input=TWO) for name in scales.fp8_gemms} if form else {},
    )
    path = run.model / "form.onnx"
    with patch.object(GraphLinear, "forward", form or GraphLinear.forward):
        ir.save(trace.trace(run.model, plan), path)
    engine = build(path, Job("tensorrt-rtx", target, profiles(8, 128)), SILENT)
    read = read_plan(engine)
    assert read is not None, "the plan reads"
    return {
        "fp8_products": [sum(product.fp8 for product in products) for products in read.profiles.values()],
        "kernels": [len(kernels) for kernels in read.kernels.values()],
        "bytes": len(engine),
    }


def main() -> int:
    """Build and print."""
    parser = arguments(__doc__)
    parser.add_argument("--target", default="sm89")
    given = parser.parse_args()
    head = described("two_terms")
    (demo,) = small_models("demo")
    with tempfile.TemporaryDirectory() as directory:
        options = CalibrateOptions(samples=32, seq_len=128, activation_terms=2)
        run = calibrate(demo.directory, demo.data, Path(directory) / "run", demo.eval_data, options)
        found = {"one term": built(run, None, given.target)}
        found |= {name: built(run, form, given.target) for name, form in FORMS.items()}
    ours, one = found[WRITTEN], found["one term"]
    peers = [each for each in found.values() if each is not one and each["fp8_products"] == ours["fp8_products"]]
    passed = ours["fp8_products"] == one["fp8_products"] and ours["kernels"] == min(each["kernels"] for each in peers)
    return publish(head, {"target": given.target, "forms": found, "passed": passed}, given.save)


if __name__ == "__main__":
    sys.exit(main())
