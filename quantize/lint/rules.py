"""The registry of rules for a checkpoint, with numbers C1xx, as for graphs.

A rule is a function from a checkpoint to the places where it is broken, each a tensor or a file. Its docstring gives
the reason: the behaviour of transformers 5.23, compressed-tensors 0.20 and vLLM 0.32.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from ...core.findings import Broken, Ruleset, Severity
from ..reading.fp8_tensors import Checkpoint

Check = Callable[[Checkpoint], Broken]
#: The remedy for faults that only the exporter of the checkpoint can fix.
AGAIN = "export the checkpoint again"


class _Stored(Protocol):
    @property
    def tensors(self) -> Mapping[str, object]: ...


def module_of_tensor(tensor: str, checkpoint: _Stored) -> str | None:
    """Return the module that a tensor of `checkpoint` belongs to; None for another place."""
    if tensor in checkpoint.tensors:
        return tensor.rpartition(".")[0] or None
    return None


RULES: Ruleset[[Checkpoint]] = Ruleset(module_of_tensor)


def checkpoint_rule(number: str, name: str, severity: Severity = "error") -> Callable[[Check], Check]:
    """Register a rule."""
    return RULES.enter((number, name, severity), "any FP8 checkpoint", lambda check: check)
