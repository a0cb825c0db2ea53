"""Check an FP8 checkpoint for everything that is known to go wrong when other tools load it, and any checkpoint for
what one server does with it; without torch.

Headers and scales are read, and every code once, for NaN.
"""

from pathlib import Path

from ...calibrate.input.untrusted import exists, read_json
from ...core.errors import InputError
from ...core.findings import Finding, enter_rules
from ...options import CheckpointServer
from ..reading.fp8_tensors import Checkpoint, located_tensors, open_checkpoint
from ..reading.quantization_config import CONFIG, MODELOPT_CONFIG, stated_quantization
from .rules import RULES
from .servers import SERVER_RULES, Served, parse_version

enter_rules(__package__)
__all__ = ["RULES", "SERVER_RULES", "checkpoint_findings", "open_served"]


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
    return checkpoint, RULES.findings(checkpoint)


def open_served(path: Path, server: CheckpointServer, version: str | None) -> Served:
    """Read the checkpoint at `path` as `version` of `server` (None: the newest that was read) gets it.

    Any Hugging Face checkpoint of safetensors is taken, quantized or not. Raises InputError for a config.json that does
    not parse, a folder without safetensors, and a text that is no version.
    """
    if version is not None:
        parse_version(version)
    config = read_json(path / CONFIG)
    if not isinstance(config, dict):
        raise InputError(path / CONFIG, "does not hold an object", "copy or download it again")
    said = stated_quantization(config, path / CONFIG)
    if exists(path / MODELOPT_CONFIG) and (said is None or str(said.get("quant_method")).startswith("modelopt")):
        held = read_json(path / MODELOPT_CONFIG)
        inner = held.get("quantization") if isinstance(held, dict) else None
        said = {"quant_method": "modelopt"} | (inner if isinstance(inner, dict) else {})
    try:
        fp8 = open_checkpoint(path)
    except InputError:
        fp8 = None  # another form, of which S102 tells, or damage, which the next line raises
    tensors, problems = (fp8.tensors, fp8.problems) if fp8 else located_tensors(path)
    return Served(path, config, said or {}, tensors, problems, fp8, server, version)
