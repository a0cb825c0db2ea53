"""`fp8q lint`: check an ONNX file, a Triton repository, a checkpoint, or everything in a run against the rules.

Needs no torch, no GPU and no server; of weights it reads a checkpoint's codes once, for NaN.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..calibrate.input.untrusted import exists
from ..core.errors import GateError, InputError
from ..core.files import disk_errors
from ..core.findings import Finding, Rule, places
from ..core.run import Run
from ..export.lint.check import FORM, lint_graph, run_expectation
from ..export.lint.check import RULES as GRAPH_RULES
from ..export.lint.rules import Expectation
from ..export.lint.rules_gemms import is_fp8
from ..export.onnx_file.loading import load_graph
from ..export.onnx_file.tensors import Array
from ..options import LintOptions
from ..quantize.lint.check import RULES as CHECKPOINT_RULES
from ..quantize.lint.check import SERVER_RULES, checkpoint_findings, open_served
from ..quantize.lint.servers import READ, TITLES
from ..quantize.reading.run_checkpoint import stored_scales
from ..quantize.scales.decisions import load_scales, read_scales
from ..quantize.scales.scheme import in_two_codes
from ..serve.lint.check import RULES as REPOSITORY_RULES
from ..serve.lint.check import lint_engines, lint_repository
from ..serve.lint.folder import is_repository
from ..validate.accuracy.document import load_accuracy
from .shared.model_files import fp8_graphs
from .shared.opening import open_run

#: Rules about files that are missing or cut short: these are faults of the input, not of the graph.
DAMAGE = ("F402", "F403")


@dataclass(frozen=True)
class Linted:
    """The findings in an ONNX file, a repository, or the engines of a run; `what` describes it in a line.

    `compared_with`: the scales.json that a graph was compared with (None: nothing is expected of it).
    """

    path: Path
    what: str
    findings: list[Finding]
    compared_with: Path | None = None

    @property
    def parts(self) -> "tuple[Linted, ...]":
        """Itself: `LintedRun` has several."""
        return (self,)


@dataclass(frozen=True)
class LintedRun:
    """The findings in all parts of a run."""

    path: Path
    parts: tuple[Linted, ...]

    @property
    def findings(self) -> list[Finding]:
        """The findings of all parts."""
        return [finding for part in self.parts for finding in part.findings]


@dataclass(frozen=True)
class RuleText:
    """A rule as `fp8q lint --explain` shows it; `why` is the docstring of its check, in one line."""

    rule: str
    name: str
    severity: str
    applies_to: str
    why: str

    def __str__(self) -> str:
        """Format severity, scope and reason in one paragraph."""
        return f"{self.severity.capitalize()}, for {self.applies_to}. {self.why}"


def explain_rules(code: str) -> list[RuleText]:
    """Explain the rule `code`, such as F101, or every rule whose code begins with it, such as F1 or S.

    Raises InputError where there is none.
    """
    rules: dict[str, Rule[Any]] = {**GRAPH_RULES, **CHECKPOINT_RULES, **REPOSITORY_RULES, **SERVER_RULES}
    explained = [
        RuleText(number, rule.name, rule.severity, rule.applies_to, " ".join(rule.why.split()))
        for number, rule in sorted(rules.items())
        if code and number.startswith(code.upper())
    ]
    if not explained:
        raise InputError(
            f"--explain {code}",
            "is no rule's code",
            "name one, such as F101, or its beginning: F (graphs), C (checkpoints), S (servers), R (repositories)",
        )
    return explained


def lint(path: Path, run: Run | None, options: LintOptions = LintOptions()) -> Linted | LintedRun:
    """Lint the file or directory `path`: an ONNX file, against what `run` expects, or else of the run whose `model/`
    it lies in; a Triton repository; an FP8 checkpoint; a run, with its graphs, engines and repository. With a server in
    `options`: any checkpoint, or that of a run, also against what this server does with it.

    Raises InputError for anything else, for a checkpoint in an unsupported form, and for a run whose scales.json does
    not read.
    """
    if options.server is None and options.version is not None:
        raise InputError(f"--version {options.version}", "is of a server, and none is named", "name it with --for")
    if options.server is not None:
        return lint_for(path, options)
    if not os.path.isdir(path):  # of a name that is too long, too
        return lint_onnx(path, run)
    if run is not None:
        raise InputError(f"--run {run.root}", f"is for an ONNX file, and {path} is a directory", "leave it out")
    with disk_errors(path):
        if not Run(path).exists() and exists(path / "config.json"):
            return lint_checkpoint(path)
        if not Run(path).exists() and is_repository(path):
            return lint_triton(path)
        return lint_run(path)


def lint_run(path: Path) -> LintedRun:
    """Lint all parts of a run; raise InputError for a directory without a run."""
    if not Run(path).exists():
        raise InputError(
            path,
            "is a directory that holds neither run.json nor config.json nor models of Triton (folders with "
            "config.pbtxt)",
            "name an ONNX file, a Triton repository, a checkpoint or a run",
        )
    run = open_run(path)
    run.refuse_without_graph()
    parts: list[Linted] = []
    for graph in fp8_graphs(run):
        linted = lint_onnx(graph, run)
        earlier = {finding for part in parts for finding in part.findings}  # of the same model in another compute type
        parts.append(replace(linted, findings=[finding for finding in linted.findings if finding not in earlier]))
    engines = [Path(name).stem for name in _outputs(run, "build-engine") if name.endswith(".plan")]
    parts.append(Linted(run.root, f"engines: {', '.join(engines) or 'none'}", lint_engines(run)))
    if run.triton.is_dir():
        parts.append(lint_triton(run.triton))
    if note := note_elsewhere(run):
        parts.append(Linted(run.model, note, []))
    return LintedRun(path, tuple(parts))


def note_elsewhere(run: Run) -> str | None:
    """Say what other servers make of a run's second terms, and what that costs this model; None where it has none."""
    forms = load_scales(run).forms
    in_two = in_two_codes(forms)
    if not in_two:
        return None
    words = " and ".join(sorted({forms[module].words for module in in_two}))
    note = (
        f"{len(in_two)} inputs in {words}, of which transformers, and vLLM without fp8q-vllm, run the first term alone"
    )
    cost = load_accuracy(run).one_term_cost if "validate" in run.record().stages else None
    return f"{note}: {cost or f'`fp8q validate {run.root}` measures what that costs'}"


def _outputs(run: Run, stage: str) -> list[str]:
    stages = run.record().stages
    if stage in stages:
        return [*stages[stage].outputs]
    return []


def lint_triton(path: Path) -> Linted:
    """Lint a Triton repository."""
    repository, findings = lint_repository(path)
    names = ", ".join(model.folder.name for model in repository.models)
    return Linted(path, f"a Triton repository of {names or 'no model'}", findings)


def lint_checkpoint(path: Path) -> Linted:
    """Lint an FP8 checkpoint of any exporter."""
    checkpoint, findings = checkpoint_findings(path)
    form = checkpoint.declared.form
    count = len(checkpoint.codes)
    per = sorted({codes.granularity or "unknown" for codes in checkpoint.codes.values()})
    what = f"an FP8 checkpoint in the form {form}, {count} weights in codes, one scale a {' or '.join(per) or 'weight'}"
    return Linted(path, what, findings)


def lint_for(path: Path, options: LintOptions) -> Linted:
    """Lint a checkpoint of any exporter, or that of a run, also against what a server does with it.

    Raises InputError for what is no checkpoint of safetensors.
    """
    assert options.server is not None, "the caller looked"
    with disk_errors(path):
        path = Run(path).model if Run(path).exists() else path
        if not exists(path / "config.json"):
            raise InputError(
                f"--for {options.server}",
                f"is for checkpoints, and {path} has no config.json",
                "name a checkpoint or a run",
            )
        served = open_served(path, options.server, options.version)
        findings = [*(CHECKPOINT_RULES.findings(served.fp8) if served.fp8 else []), *SERVER_RULES.findings(served)]
    form = (
        f"in the form {served.fp8.declared.form}" if served.fp8 else "of another form" if served.said else "in no FP8"
    )
    named = served.architecture or "no class that config.json names"
    version = options.version or READ[options.server][1]
    return Linted(path, f"a checkpoint {form}, as {TITLES[options.server]} {version} loads it ({named})", findings)


def lint_onnx(path: Path, run: Run | None) -> Linted:
    """Lint the ONNX file at `path`, against what `run` expects, or else of the run whose `model/` it lies in."""
    graph = load_graph(path)
    around = run or run_around(path)
    findings = lint_graph(graph, expectation(around) if around else None)
    gemms = [] if any(finding.rule == FORM for finding in findings) else graph.gemms
    fp8_gemms = sum(is_fp8(gemm) for gemm in gemms)
    against = f"held against {around.scales}" if around else "nothing expected of it"
    what = f"opset {graph.opset}, {len(gemms)} GEMMs, {fp8_gemms} on FP8 codes on both sides; {against}"
    return Linted(path, what, findings, around.scales if around else None)


def run_around(path: Path) -> Run | None:
    """The run in whose `model/` a file lies, recognized by its scales.json; None where there is none."""
    around = Run(path.parent.parent) if path.parent.name else Run(path.absolute().parent.parent)
    if path.absolute().parent.name == around.model.name and around.scales.is_file():
        return around
    return None


def expectation(run: Run) -> Expectation:
    """Collect what a run expects of its graphs, with the weights' scales where the checkpoint reads; where it does not,
    the rules of F4xx report it.

    Raises InputError where scales.json does not read.
    """
    scales = load_scales(run) if run.exists() else read_scales(run.scales)
    weight_scales: Mapping[str, Array]
    try:
        weight_scales = stored_scales(run.model, scales.fp8_gemms)
    except (OSError, SafetensorError):
        weight_scales = {}
    return run_expectation(run, scales, weight_scales)


def check_findings(linted: Linted | LintedRun) -> None:
    """Raise GateError for a finding of severity error; InputError where it is a missing or shortened file of a
    graph.
    """
    errors = [(part, finding) for part in linted.parts for finding in part.findings if finding.severity == "error"]
    if not errors:
        return
    for part, finding in errors:
        if finding.rule in DAMAGE:
            raise InputError(part.path, str(finding))
    first, finding = errors[0]
    count = places(finding for _, finding in errors)
    what = f"{count} errors, first " if len(errors) > 1 else ""
    of = "" if first.path == linted.path else f"{first.path}: "
    raise GateError(linted.path, f"{what}{of}{finding}")
