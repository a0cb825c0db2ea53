"""Hold an FP8 checkpoint against everything that is known to go wrong when others load it; no torch needed.

Any checkpoint of a form that is read can be checked, whoever exported it. Headers and scales are read, and no weight.
"""

from pathlib import Path

from ...core.errors import InputError
from ...core.findings import Finding
from ..reading.fp8_tensors import Checkpoint, open_checkpoint
from . import rules_files, rules_modules, rules_scales, rules_values  # noqa: F401  # enter their rules
from .rules import RULES

__all__ = ["RULES", "checkpoint_findings"]


def checkpoint_findings(path: Path) -> tuple[Checkpoint, list[Finding]]:
    """The checkpoint at `path` and the rules that it breaks, in the order of their numbers.

    Raises InputError for one that is not quantized, of a form that is not read, or without weights.
    """
    checkpoint = open_checkpoint(path)
    if checkpoint is None:
        raise InputError(
            f"{path}: is a checkpoint that says nothing of quantization: config.json has no quantization_config; name "
            "one in FP8, an ONNX file, a Triton repository or a run"
        )
    return checkpoint, [finding for number in sorted(RULES) for finding in RULES[number].findings(checkpoint)]
