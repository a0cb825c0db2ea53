"""What the checkpoint in a run holds, by tensor name; a serving host reads it too, so there is no torch here."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from ..run import Run

#: Cache scales that the Hugging Face layout has no place for.
CACHE_FILE = "kv_cache.safetensors"


def checkpoint_of(run: Run, precision: str) -> Path:
    """The folder of the weights of a precision, and of their graphs: `model/` for fp8."""
    return run.model if precision == "fp8" else run.baselines / precision


def stored_tensors(directory: Path) -> Mapping[str, str]:
    """Tensor name -> file name of the checkpoint in `directory`, from its index; and the cache scales that lie outside
    it.
    """
    index: dict[str, str] = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))[
        "weight_map"
    ]
    if (directory / CACHE_FILE).is_file():
        with safe_open(directory / CACHE_FILE, "np") as opened:
            index |= dict.fromkeys(opened.keys(), CACHE_FILE)
    return index


def stored_scales(directory: Path, modules: Iterable[str]) -> dict[str, npt.NDArray[np.float32]]:
    """The weight scales of `modules` in the checkpoint in `directory`, float32 [output channels] each."""
    where = stored_tensors(directory)
    shards = {file: safe_open(directory / file, "np") for file in set(where.values())}
    return {
        module: shards[where[f"{module}.weight_scale"]].get_tensor(f"{module}.weight_scale").reshape(-1)
        for module in modules
    }
