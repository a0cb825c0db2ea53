"""What TensorRT-RTX makes of both forms of the graph: weights' scales in DequantizeLinear (`dq`), or behind the product
(`mul`).

    python benchmarks/forms.py

The demo, activations in one term and in two, two profiles, both targets: products and their types, kernels, bytes, and
how many of the promised products the proof finds in FP8 on the run's own codes and factors; and of one layer the
program itself, statement by statement.
Prints one JSON line.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, get_args

from models import DEMO
from result import arguments, described, publish

from fp8q.api import (  # fmt: skip
    CalibrateOptions,
    EngineOptions,
    ExportOptions,
    RescaleOptions,
    build_engine,
    calibrate,
    engine,
    export,
    scales,
)
from fp8q.core.run import Run
from fp8q.export.engine.plan import modules_by_types, read_plan
from fp8q.export.engine.program import Program, Statement
from fp8q.export.onnx_file import names
from fp8q.options import Terms, WeightScale
from fp8q.stages.engine import EngineView

TARGETS = ("sm89", "sm120")
LAYER = "model.layers.1."
NUMBERS = ("fp8", "bf16", "fp32")


def measure(run: Run, form: WeightScale) -> dict[str, Any]:
    """Target -> what the engine of a form runs."""
    export(run.root, ExportOptions(weight_scale=form))
    build_engine(run.root, EngineOptions(runtime="tensorrt-rtx", targets=TARGETS))
    return {view.target: figures(view) for view in engine(run.root)}


def figures(view: EngineView) -> dict[str, Any]:
    """What one engine runs, and of its first profile one layer's statements."""
    plan = read_plan(Path(view.file).read_bytes())
    assert plan is not None, "this version's plans read"
    return {
        "bytes": view.bytes,
        "promised": view.promised_products,
        "found": {"fp8": view.fp8_products, "codes": view.codes_found, "factors": view.factors_found},
        "inputs": view.inputs_found,
        "terms": view.terms_found,
        "modules": modules_by_types(plan),
        "products": dict(Counter(str(product) for product in plan.profiles[0])),
        "kernels": len(plan.kernels[0]),
        "program": [
            told(plan.programs[0], statement)
            for statement in plan.programs[0].statements
            if any(layer.startswith(LAYER) for layer in statement.layers)
        ],
    }


def told(program: Program, statement: Statement) -> str:
    """A statement, as `q_proj + k_proj: fp8, fp8 -> fp32`; sizes, which are numbers too, left out."""
    ends = [
        [kind for kind in map(program.type, tensors) if kind in NUMBERS]
        for tensors in (statement.inputs[:2] if statement.nodes else statement.inputs, statement.outputs)
    ]
    made = " + ".join(names.gemm_name(node).rpartition(".")[2] for node in sorted(statement.nodes))
    return f"{made or statement.name}: {', '.join(ends[0])} -> {', '.join(ends[1])}"


def main() -> int:
    """Measure and print."""
    given = arguments(__doc__).parse_args()
    head = described("forms")
    with tempfile.TemporaryDirectory() as directory:
        run = calibrate(
            str(DEMO / "checkpoint"), str(DEMO / "calibration.txt"), Path(directory) / "run",
            str(DEMO / "evaluation.txt"), CalibrateOptions(samples=16, seq_len=256),
        )  # fmt: skip
        results = {}
        for terms in get_args(Terms):
            scales(run.root, RescaleOptions(activation_terms=terms))
            results[f"{terms}"] = {form: measure(run, form) for form in get_args(WeightScale)}
    return publish(head, {"results": results}, given.save)


if __name__ == "__main__":
    sys.exit(main())
