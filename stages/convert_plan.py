"""Refuse before anything is written what `fp8q convert` would otherwise refuse after all weights.

The lint of the finished checkpoint can say nothing that headers, config.json and a few bytes of the source do not show:
so its rules run on the plan, whose tensors are those of the source and codes that are not made yet.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..calibrate.checkpoint.weights import INDEX, SINGLE, WEIGHTS_END
from ..calibrate.input.untrusted import JSON_BYTES
from ..core.errors import InputError
from ..core.findings import Finding
from ..core.headers import LONGEST, StoredTensor
from ..quantize.conversion.config import converted_config, index_of, quantization_fields
from ..quantize.conversion.name_tensors import WEIGHT
from ..quantize.conversion.plan import CheckpointPlan, Matrix
from ..quantize.conversion.shards import check_small_tensors
from ..quantize.lint.check import RULES
from ..quantize.lint.rules_values import EXPERT
from ..quantize.reading.codecs import declared_in
from ..quantize.reading.fp8_tensors import Checkpoint, Float32s
from ..quantize.reading.quantization_config import CONFIG

#: The rule of the lint that reads every code: no NaN is within half a step of a number, as the proof finds.
NAN_CODES = "C123"
#: Rules on sizes of scales, by which other exporters' mistakes are recognized: a scale that is proven is none.
PROVEN = ("C112", "C113")
#: Rules that the choice of modules breaks, and not the source.
OF_THE_CHOICE = ("C116", "C121", "C122")
#: A value for scales that are not made yet.
SOUND = 0.5
#: The types that hold codes of eight bits.
INTEGER_CODES = ("I8", "U8")
GIVE = "give the one it was made from, in BF16, FP16 or FP32"


@dataclass(frozen=True)
class PlannedCheckpoint(Checkpoint):
    """A checkpoint that is not written yet: tensors that are copied are read from the source, and the scales in `made`
    have a value that no rule finds wrong.
    """

    made: frozenset[str]

    def values(self, name: str) -> Float32s:
        """Read a scale that is copied as float32, in its shape; others have one value."""
        if name in self.made:
            return np.full(self.tensors[name].shape, SOUND, np.float32)
        return super().values(name)


def check_integer_weights(headers: Mapping[str, StoredTensor]) -> None:
    """Raise InputError for integers of eight bits in the place of a weight, which are the codes of another form."""
    for name, header in headers.items():
        if name.endswith(WEIGHT) and header.dtype in INTEGER_CODES:
            raise InputError(header.file, f"{name} is {header.dtype}, so the checkpoint is quantized already", GIVE)


def check_plan(plan: CheckpointPlan, name: str, path: Path, config: Mapping[str, Any]) -> None:
    """Raise InputError where the checkpoint `name` in the directory `path`, with its `config`, cannot be written as
    planned, or would break a rule of the lint.
    """
    if not plan.quantized:
        reason = next(iter(plan.unquantized.values()))
        raise InputError(name, f"has nothing that can be quantized in this form ({reason})", "try --form block")
    expert = next((name for shard in plan.shards for name in shard.tensors if EXPERT.fullmatch(name)), None)
    if plan.layout == "modelopt" and expert is not None:
        raise InputError(
            "--layout modelopt",
            f"has no reader that takes scales of channels for experts, as {expert.rpartition('.')[0]}",
            "leave it out",
        )
    _check_files(plan)
    _check_names(plan)
    _check_sizes(plan, config, path)
    for finding in _findings(_planned(plan, path, config)):
        if finding.severity == "error" and finding.rule not in PROVEN:
            raise _refusal(finding, name)
    check_small_tensors(plan)


def _check_files(plan: CheckpointPlan) -> None:
    """Refuse names of files that no loader would look into."""
    for shard in plan.shards:
        if not shard.name.endswith(WEIGHTS_END) or shard.name.startswith(".") or not shard.name.isprintable():
            raise InputError(
                shard.source,
                "holds weights, and loaders take files called *.safetensors for them",
                "rename it, there and in the index",
            )
        if shard.name == SINGLE and len(plan.shards) > 1:
            raise InputError(
                shard.source,
                f"is one of {len(plan.shards)} files of weights, and loaders take a file of this name for all of them",
                "rename it, there and in the index",
            )


def _check_names(plan: CheckpointPlan) -> None:
    """Refuse tensors of the source that are called as codes or scales will be."""
    sources = {name: matrix.name for shard in plan.shards for matrix in shard.matrices for name in _names_of(matrix)}
    for shard in plan.shards:
        for copied in shard.copies:
            if copied.name in sources:
                raise InputError(
                    shard.source,
                    f"holds {copied.name}, which is the name of what {sources[copied.name]} becomes",
                    "take it out, or keep that module as it is with --skip",
                )
    written = Counter(name for shard in plan.shards for matrix in shard.matrices for name in _names_of(matrix))
    for name, count in written.items():
        if count > 1:
            raise InputError(sources[name], f"becomes {name}, and so does another tensor", "take out one of them")


def _names_of(matrix: Matrix) -> tuple[str, str]:
    """The tensors that a matrix becomes."""
    return matrix.codes, matrix.scales


def _check_sizes(plan: CheckpointPlan, config: Mapping[str, Any], path: Path) -> None:
    """Refuse headers, an index or a configuration that would be larger than what loaders, or fp8q, read."""
    for shard in plan.shards:
        if (size := len(shard.head)) > LONGEST:
            raise InputError(
                shard.source, f"would have a header of {size:,} bytes in FP8, and {LONGEST:,} are the most", "split it"
            )
    for name, text in ((CONFIG, converted_config(plan, config)), (INDEX, index_of(plan) or b"")):
        if len(text) > JSON_BYTES:
            raise InputError(
                path / name,
                f"would have {len(text):,} bytes in FP8, and {JSON_BYTES:,} are the most that are read of such a file",
                "it is damaged, or not to be trusted",
            )


def _planned(plan: CheckpointPlan, path: Path, config: Mapping[str, Any]) -> PlannedCheckpoint:
    """The checkpoint as the lint would open it."""
    tensors: dict[str, StoredTensor] = {}
    made: set[str] = set()
    for shard in plan.shards:
        copied = {copy.name: copy.stored for copy in shard.copies}
        tensors |= {**shard.tensors, **copied}
        made |= shard.tensors.keys() - copied.keys()
    fields = {**config, "quantization_config": quantization_fields(plan, config)}
    declared = declared_in(fields, path / CONFIG)
    assert declared is not None, "the configuration says how it is quantized"
    return PlannedCheckpoint(path, fields, declared, tensors, (), frozenset(made))


def _findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Everything that the lint finds but for codes of NaN, in the order of the rules."""
    for number in sorted(RULES):
        if number != NAN_CODES:
            yield from RULES[number].findings(checkpoint)


def _refusal(finding: Finding, name: str) -> InputError:
    """Make the error for a rule that the plan breaks: by the choice of modules, or as the source is."""
    if finding.rule in OF_THE_CHOICE:
        return InputError(
            finding.node, f"would break rule {finding.rule}: {finding.message}", "change --skip or --rules accordingly"
        )
    fault, _, remedy = finding.message.rpartition("; ")
    return InputError(f"{name}: {finding.node}", f"{fault} (rule {finding.rule})", remedy)


def lint_written(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Lint the checkpoint that was written, and return what is no error of fp8q's.

    Raises InputError for the first error, which no source can cause.
    """
    findings = [*_findings(checkpoint)]
    for finding in findings:
        if finding.severity == "error" and finding.rule not in PROVEN:
            raise InputError(checkpoint.root, str(finding), "report it, with the checkpoint's name")
    return tuple(map(str, findings))
