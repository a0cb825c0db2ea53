"""Check an FP8 checkpoint for everything that is known to go wrong when other tools load it; without torch.

Any checkpoint of a supported form can be checked, whoever exported it. Headers and scales are read, and every code
once, for NaN.
"""

from pathlib import Path

from ...core.errors import InputError
from ...core.findings import Finding, enter_rules
from ..reading.fp8_tensors import Checkpoint, open_checkpoint
from .rules import RULES

enter_rules(__package__)
__all__ = ["RULES", "checkpoint_findings"]


def checkpoint_findings(path: Path) -> tuple[Checkpoint, list[Finding]]:
    """Read the checkpoint at `path` and return it with its findings, in the order of the rules' numbers.

    Raises InputError for a checkpoint that is not quantized, of an unsupported form, or without weights.
    """
    checkpoint = open_checkpoint(path)
    if checkpoint is None:
        raise InputError(
            path,
            "is a checkpoint that says nothing of quantization: config.json has no quantization_config",
            "name one in FP8, an ONNX file, a Triton repository or a run",
        )
    return checkpoint, [finding for number in sorted(RULES) for finding in RULES[number].findings(checkpoint)]
