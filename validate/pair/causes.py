"""Name what makes a candidate another model than its original, or a server answer otherwise: a registry of rules.

A rule reads the facts of a comparison and yields its causes; `cause_rule` enters it. Rules of what `fp8q lint` finds in
the candidate's own files come with them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...calibrate.checkpoint.companions import GENERATION
from ...calibrate.checkpoint.mtp_layers import mtp_prefixes
from ...calibrate.text.template_files import templates_in
from ...core.errors import InputError
from ...quantize.lint.check import checkpoint_findings
from ...serve.loop.text import ModelFileError, Vocabulary
from .document import Cause, ModuleError, TableError
from .models import coded_modules, quantization_of, tokenizer_of, weight_headers
from .module_errors import UNRELATED, origin_of
from .module_outliers import JudgedModules
from .outliers import outlier_limit, usual_error

#: Any text: only the special tokens that a tokenizer puts around it matter.
SAMPLE = "Hello"
#: Gains outside of this are no rounding: rounding to nearest keeps the mean output within some percent.
GAINS = (0.9, 1.1)
#: The most modules, or experts, that are named one by one.
NAMED = 5


@dataclass(frozen=True)
class Facts:
    """The facts that rules read: both directories with their config.json, the differences of the files beside the
    weights, the errors of modules (worst first), the weights of both models by module [out, in], the errors of experts
    by parameter, and the embeddings with other rows.
    """

    original: Path
    candidate: Path
    configs: tuple[Mapping[str, Any], Mapping[str, Any]]
    file_causes: Sequence[Cause]
    modules: Sequence[ModuleError] = ()
    weights: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] = ({}, {})
    experts: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    tables: Sequence[TableError] = ()

    @cached_property
    def judged(self) -> JudgedModules:
        """The modules, and what stands out among them."""
        return JudgedModules(self.modules, coded_modules(self.candidate, self.configs[1]))


Rule = Callable[[Facts], Iterator[Cause]]
RULES: list[Rule] = []


def cause_rule(rule: Rule) -> Rule:
    """Enter a rule; causes come in the order of the rules."""
    RULES.append(rule)
    return rule


def causes_of(facts: Facts) -> list[Cause]:
    """All causes, errors first."""
    causes = [cause for rule in RULES for cause in rule(facts)]
    return sorted(causes, key=lambda cause: cause.severity)


def check_files(original: Path, candidate: Path, configs: tuple[Mapping[str, Any], Mapping[str, Any]]) -> None:
    """Read the files that rules read once all models have run; raises InputError for one that is damaged."""
    for path, config in zip((original, candidate), configs, strict=True):
        templates_in(path)
        try:
            Vocabulary.read(path)
        except ModelFileError as error:
            raise InputError(error.subject, error.fault, error.remedy) from None
        mtp_prefixes(config, weight_headers(path, config))


def _error(rule: str, subject: str, fault: str, remedy: str) -> Cause:
    return Cause(rule=rule, severity="error", subject=subject, fault=fault, remedy=remedy)


@cause_rule
def other_model(facts: Facts) -> Iterator[Cause]:
    """Most modules have weights that have nothing to do with the original's: another seed, or another model."""
    known = [module for module in facts.modules if module.correlation is not None]
    unrelated = [
        module
        for module in known
        if module.correlation is not None and abs(module.correlation) < UNRELATED and not facts.judged.is_undone(module)
    ]
    if known and len(unrelated) > len(known) / 2:
        yield _error(
            "other-model",
            facts.candidate.name,
            f"{len(unrelated):,} of {len(known):,} modules compute something else than the original's for the same "
            f"input (correlation below {UNRELATED})",
            "it was made from another model or another training run; compare it with that one",
        )


@cause_rule
def broken_modules(facts: Facts) -> Iterator[Cause]:
    """Single modules whose outputs are not finite, zero, of another size, or of another module."""
    if any(other_model(facts)):
        return
    outside = facts.judged.faults
    for module in outside[:NAMED]:
        fault, remedy = _fault(module, facts)
        yield _error("module", module.module, fault, remedy)
    if len(outside) > NAMED:
        yield _error(
            "module",
            f"{len(outside) - NAMED:,} more modules",
            "have an output error that rounding does not explain",
            "the table of modules lists them",
        )


def _fault(module: ModuleError, facts: Facts) -> tuple[str, str]:
    """Name the fault of a module that stands out, and the remedy."""
    again = "quantize it again"
    if module.error is None:
        return (
            "its output is not finite, or has another shape",
            f"look for NaN codes and scales by `fp8q lint`, and {again}",
        )
    if module.gain is None or module.correlation is None:
        return "its output is not zero, and the original's is", again
    if module.correlation == 0 and module.gain == 0:
        return "its output is zero: its weight, or its scale, is", again
    if abs(module.correlation) < UNRELATED:
        origin = _origin(module.module, facts)
        if origin and origin != module.module:
            return f"it has the weight of {origin}", "write each weight under its own name"
        return "its output has nothing to do with the original's for the same input", again
    if not GAINS[0] <= module.gain <= GAINS[1]:
        return (
            f"its outputs are {module.gain:.2g} times the original's: a scale is wrong by that factor",
            f"see which of its scales is the reciprocal, of another module, or clipped, and {again}",
        )
    usual = f"where modules that are stored like it have {facts.judged.usual_of(module.module):.2g}"
    if not facts.judged.is_coded(module.module):
        return (
            f"its output error is {module.error:.2g}, {usual}, and it is stored unquantized: it is another weight",
            "copy the original's",
        )
    return (
        f"its output error is {module.error:.2g}, {usual}",
        "its inputs or weights lose more than others' by rounding: keep it in BF16, or choose its scale by other text",
    )


def _origin(name: str, facts: Facts) -> str | None:
    ours, theirs = facts.weights
    if name in theirs:
        return origin_of(theirs[name], ours)
    return None


@cause_rule
def broken_experts(facts: Facts) -> Iterator[Cause]:
    """Single experts of a mixture whose weights are far from the original's."""
    every = [error for errors in facts.experts.values() for error in errors]
    limit = outlier_limit(every)
    usual = usual_error(every)
    for parameter, errors in facts.experts.items():
        outside = [number for number, error in enumerate(errors) if error is None or error > limit]
        if outside:
            numbers = ", ".join(map(str, outside[:NAMED])) + (" …" if len(outside) > NAMED else "")
            worst = errors[outside[0]]
            how = "is zero or another weight" if worst is not None and worst >= 0.99 else "is far from the original's"
            yield _error(
                "expert",
                parameter,
                f"the weight of expert {numbers} {how} (relative error "
                f"{'not finite' if worst is None else f'{worst:.2g}'}, usual is {usual:.2g})",
                "quantize the checkpoint again",
            )


@cause_rule
def broken_tables(facts: Facts) -> Iterator[Cause]:
    """Embeddings of which rows are not the original's: of tokens or positions that the windows may lack."""
    for table in facts.tables:
        rows = (
            f"row {table.first:,}"
            if table.outside == 1
            else f"{table.outside:,} rows, {table.first:,} to {table.last:,},"
        )
        how = "not finite" if table.worst is None else f"not the original's (relative error {table.worst:.2g})"
        yield _error(
            "embedding",
            table.module,
            f"{rows} of {table.rows:,} {'is' if table.outside == 1 else 'are'} {how}: so are the tokens or positions "
            "that read them",
            "copy the original's",
        )


@cause_rule
def text_begins(facts: Facts) -> Iterator[Cause]:
    """The tokenizers put other special tokens around a text."""
    ours, theirs = (tokenizer_of(path).encode(SAMPLE).tokens for path in (facts.original, facts.candidate))
    if ours != theirs:
        yield _error(
            "special-tokens",
            "tokenizer.json",
            f"reads {SAMPLE!r} as {' '.join(theirs)}, and the original's as {' '.join(ours)}: every prompt differs",
            "copy the original's tokenizer files beside the weights",
        )


@cause_rule
def other_chat_template(facts: Facts) -> Iterator[Cause]:
    """The chat templates differ."""
    ours, theirs = (
        {name: text.removesuffix("\n") for name, text in templates_in(path).items()}  # as Jinja reads them
        for path in (facts.original, facts.candidate)
    )
    if ours != theirs:
        names = sorted({name for name in ours | theirs if ours.get(name) != theirs.get(name)})
        what = "is missing" if names[0] not in theirs else "is new" if names[0] not in ours else "is another"
        yield _error(
            "chat-template",
            "chat template" if names == ["default"] else f"chat template {names[0]}",
            f"{what} than the original's: every chat is another prompt" if what == "is another" else f"{what}",
            "copy the original's chat_template.jinja or tokenizer_config.json beside the weights",
        )


@cause_rule
def end_tokens(facts: Facts) -> Iterator[Cause]:
    """The tokens that end an answer differ."""
    ours, theirs = (Vocabulary.read(path).end for path in (facts.original, facts.candidate))
    if ours != theirs:
        yield _error(
            "end-of-text",
            GENERATION,
            f"answers end at tokens {sorted(theirs) or 'none'}, and the original's at {sorted(ours) or 'none'}",
            f"copy the original's {GENERATION}",
        )


@cause_rule
def files_beside(facts: Facts) -> Iterator[Cause]:
    """Differences of the configurations and tokenizers."""
    yield from facts.file_causes


@cause_rule
def drafting_layers(facts: Facts) -> Iterator[Cause]:
    """The candidate lacks layers for multi-token prediction that the original has."""
    ours, theirs = (
        mtp_prefixes(config, weight_headers(path, config))
        for path, config in zip((facts.original, facts.candidate), facts.configs, strict=True)
    )
    if missing := sorted({*ours} - {*theirs}):
        yield _error(
            "drafting-layers",
            f"{missing[0]}*",
            "the layers for multi-token prediction are missing: a server that drafts with them accepts nothing, or all",
            "copy their tensors from the original, or take num_nextn_predict_layers out of config.json",
        )


@cause_rule
def lint_findings(facts: Facts) -> Iterator[Cause]:
    """Faults that `fp8q lint` finds in the files of the candidate."""
    if quantization_of(facts.candidate, facts.configs[1]) is None:
        return
    try:
        _, findings = checkpoint_findings(facts.candidate)
    except InputError:  # a form that lint does not read
        return
    for finding in findings:
        fault, _, remedy = finding.message.partition("; ")
        yield Cause(
            rule=f"{finding.rule} {finding.name}",
            severity="error" if finding.severity == "error" else "warning",
            subject=finding.node or finding.module or facts.candidate.name,
            fault=fault,
            remedy=remedy or f"see `fp8q lint --explain {finding.rule}`",
        )
