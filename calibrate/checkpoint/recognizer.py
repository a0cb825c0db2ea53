"""Recognize checkpoints whose tensors are codes, and refuse them without a decoder.

Nothing in this folder knows a code format. `open_source` receives a `Recognizer`, which returns how to dequantize the
tensors of a checkpoint; the default one here knows no format.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...core.errors import InputError
from ...core.headers import StoredTensor
from .weights import Coding

#: The keys of config.json that describe a quantization, and ModelOpt's file of it.
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
MODELOPT_FILE = "hf_quant_config.json"
#: The prefixes of safetensors' types of codes.
CODES = ("F8_", "F6_", "F4")

#: Directory, what the user calls it, config.json, headers -> what the tensors stand for; None where they are numbers.
#: Raises InputError for codes that it does not know.
Recognizer = Callable[[Path, str, Mapping[str, Any], Mapping[str, StoredTensor]], Coding | None]


def no_codes(path: Path, name: str, config: Mapping[str, Any], headers: Mapping[str, StoredTensor]) -> None:
    """Raise InputError for a checkpoint that declares a quantization, or has tensors in FP8 or narrower types."""
    text_config = config.get("text_config")
    parts = [config, text_config] if isinstance(text_config, dict) else [config]
    quantization = next((part[key] for part in parts for key in QUANTIZATION_KEYS if part.get(key)), None)
    if quantization or (path / MODELOPT_FILE).is_file():
        method = (
            f" ({quantization['quant_method']})"
            if isinstance(quantization, dict) and "quant_method" in quantization
            else ""
        )
        raise InputError(
            name, f"is quantized already{method}", "give the checkpoint it was made from, in BF16, FP16 or FP32"
        )
    for tensor, header in headers.items():
        if header.dtype.startswith(CODES):
            raise InputError(
                header.file,
                f"{tensor} is {header.dtype}, so the checkpoint is quantized already",
                "give the one it was made from, in BF16, FP16 or FP32",
            )
