"""The check of what other servers make of an FP8 cache: the rules of the checkpoint's lint that are about its scales.

A server that finds no scale takes 1.0, and one that has no place for a scale leaves it unread; both go on without a
word (`quantize/lint/rules_cache.py`).
"""

from pathlib import Path

from ...core.findings import Finding
from ...quantize.lint.check import RULES
from ...quantize.reading.fp8_tensors import open_checkpoint
from ...quantize.reading.quantization_config import read_by_fp8q_alone
from . import criteria
from .checkup import Check, unknown

#: Scales of 1.0, missing ones, those that nothing reads, and those that some servers read.
OF_THE_CACHE = ("C119", "C120", "C126", "C127")


def served_cache(model: Path) -> list[Check]:
    """Return an entry for each place at which a server's cache differs from the run's, or one that is good.

    `model`: the folder of the checkpoint. One that other servers cannot load at all is unknown.
    """
    criterion = criteria.CACHE_SERVED
    checkpoint = None if read_by_fp8q_alone(model) else open_checkpoint(model)
    if checkpoint is None:
        return [unknown(criterion, "other servers do not load this checkpoint, and fp8q's own read every scale")]
    found = [finding for number in OF_THE_CACHE for finding in RULES[number].findings(checkpoint)]
    if found:
        return [_entry(finding) for finding in found]
    return [Check(check=criterion.check, verdict="good", value=0, what=criterion.what, said="none")]


def _entry(finding: Finding) -> Check:
    """The entry of a broken rule, whose message ends in the remedy."""
    criterion = criteria.CACHE_SERVED
    said, _, remedy = finding.message.rpartition("; ")
    return Check(
        check=criterion.check,
        verdict="watch",
        module=finding.node or None,
        value=finding.places,
        what=criterion.what,
        said=f"{finding.rule}: {said}",
        remedy=remedy,
    )
