"""The registry of rules for a checkpoint, with numbers C1xx, as for graphs.

A rule is a function from a checkpoint to the places where it is broken, each a tensor or a file. Its docstring gives
the reason: the behaviour of transformers 5.23, compressed-tensors 0.20 and vLLM 0.32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...core.findings import Broken, Finding, Severity, first_places
from ..reading.fp8_tensors import Checkpoint

Check = Callable[[Checkpoint], Broken]
#: The remedy for faults that only the exporter of the checkpoint can fix.
AGAIN = "export the checkpoint again"


@dataclass(frozen=True)
class CheckpointRule:
    """A rule with its number, name and severity."""

    number: str
    name: str
    severity: Severity
    check: Check

    @property
    def why(self) -> str:
        """The reason for the rule: its function's docstring."""
        return self.check.__doc__ or ""

    @property
    def applies_to(self) -> str:
        """The files that the rule is for."""
        return "any FP8 checkpoint"

    def findings(self, checkpoint: Checkpoint) -> Iterator[Finding]:
        """Yield a finding for each place where a checkpoint breaks the rule."""

        def module(node: str) -> str | None:
            return (node.rpartition(".")[0] or None) if node in checkpoint.tensors else None

        yield from first_places((self.number, self.name, self.severity), self.check(checkpoint), module)


#: Number -> rule, once all rules are imported (`check` does so).
RULES: dict[str, CheckpointRule] = {}


def checkpoint_rule(number: str, name: str, severity: Severity = "error") -> Callable[[Check], Check]:
    """Register a rule."""

    def enter(check: Check) -> Check:
        assert number not in RULES, f"rule {number} is entered twice"
        RULES[number] = CheckpointRule(number, name, severity, check)
        return check

    return enter
