"""`fp8q lint`: an ONNX file held against the rules, and against a run's promises where it is a run's graph.

No torch, no GPU, no weight read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from ..errors import GateError, InputError
from ..files import read_document
from ..run import Run

if TYPE_CHECKING:
    from ..export.lint.rules import Finding, Promise
    from ..export.lint.tensors import Array

#: Rules about files that are missing or cut short: wrong input, not a graph that was made wrong.
DAMAGE = ("F402", "F403")


@dataclass(frozen=True)
class Linted:
    """What the lint has to say of an ONNX file.

    `promised_by`: the scales.json it was held against (None: a graph of which nothing is promised).
    """

    path: Path
    opset: int
    products: int
    fp8_products: int
    promised_by: Path | None
    findings: "list[Finding]"


def lint(path: Path, run: Run | None) -> Linted:
    """Lint the ONNX file at `path`, against the promises of `run`, or else of the run whose `model/` it lies in.

    Raises InputError for what is no ONNX file, and for a run whose promises do not read.
    """
    from ..export.lint.check import FORM, lint_graph
    from ..export.lint.loading import load_graph
    from ..export.lint.rules_products import is_fp8

    graph = load_graph(path)
    around = run or run_around(path)
    findings = lint_graph(graph, promise(around) if around else None)
    products = [] if any(finding.rule == FORM for finding in findings) else graph.products
    fp8_products = sum(is_fp8(product) for product in products)
    return Linted(path, graph.opset, len(products), fp8_products, around.scales if around else None, findings)


def run_around(path: Path) -> Run | None:
    """The run in whose `model/` a file lies, told by the scales.json above; None where there is none."""
    around = Run(path.parent.parent) if path.parent.name else Run(path.absolute().parent.parent)
    return around if path.absolute().parent.name == around.model.name and around.scales.is_file() else None


def promise(run: Run) -> "Promise":
    """What is promised of a run's graphs, the weights' scales from its checkpoint where its files read; where not, the
    rules of F4xx say why.

    Raises InputError where it cannot be told what is promised.
    """
    from ..export.lint.check import promised_attention, promised_terms
    from ..export.lint.rules import Promise
    from ..quantize.scales import Scales, load_scales
    from ..quantize.stored import stored_scales

    scales = load_scales(run) if run.exists() else read_document(run.scales, Scales)
    weight_scales: Mapping[str, Array]
    try:
        weight_scales = stored_scales(run.model, scales.promised)
    except (OSError, SafetensorError):
        weight_scales = {}
    return Promise(
        {module: activation.scale for module, activation in scales.activations.items()},
        weight_scales,
        promised_attention(run),
        promised_terms(run, scales),
    )


def check_findings(linted: Linted) -> None:
    """Raise GateError when a rule is broken that is an error, InputError when that is for a file that is missing or cut
    short.
    """
    from ..export.lint.rules import places

    errors = [finding for finding in linted.findings if finding.severity == "error"]
    if not errors:
        return
    damage = [finding for finding in errors if finding.rule in DAMAGE]
    if damage:
        raise InputError(f"{linted.path}: {damage[0]}")
    what = f"{places(errors)} errors, first " if len(errors) > 1 else ""
    raise GateError(f"{linted.path}: {what}{errors[0]}")
