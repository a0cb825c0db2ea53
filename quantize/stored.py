"""What the checkpoint in a run holds, by tensor name; a serving host reads it too, so there is no torch here."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel
from safetensors import safe_open

from ..errors import InputError
from ..files import read_document
from ..headers import read_header
from ..run import Run

#: Cache scales that the Hugging Face layout has no place for.
CACHE_FILE = "kv_cache.safetensors"
#: The scales of attention in codes, beside the index of the weights, which so has no key that transformers does not
#: expect.
ATTENTION_SCALES = "attention.safetensors"
#: The folder of the adapters that are served beside the base, each in one of its name, as PEFT wrote it.
ADAPTERS = "adapters"
#: What config.json calls what fp8q knows of the checkpoint and no other loader: `two_terms`, the modules whose input is
#: two codes a value, which loaders that do not know it take for one.
OWN_CONFIG = "fp8q"


def checkpoint_of(run: Run, precision: str) -> Path:
    """The folder of the weights of a precision, and of their graphs: `model/` for fp8."""
    return run.model if precision == "fp8" else run.baselines / precision


class Index(BaseModel):
    """What is read of a checkpoint's index: tensor name -> file name."""

    weight_map: dict[str, str]


def stored_tensors(directory: Path) -> Mapping[str, str]:
    """Tensor name -> file name of the checkpoint in `directory`, from its index; and the cache scales that lie outside
    it.

    Raises InputError for an index that is not there, does not read, or names a file that is not beside it.
    """
    path = directory / "model.safetensors.index.json"
    index = read_document(path, Index).weight_map
    if outside := next((file for file in index.values() if Path(file).name != file), None):
        raise InputError(f"{path}: names {outside}, which is not a file beside it; copy the whole of model/ again")
    if (directory / CACHE_FILE).is_file():
        index |= dict.fromkeys(read_header(directory / CACHE_FILE), CACHE_FILE)
    return index


def stored_scales(directory: Path, modules: Collection[str]) -> dict[str, npt.NDArray[np.float32]]:
    """The weight scales of `modules` in the checkpoint in `directory`, float32 [output channels] each.

    Raises what `stored_arrays` raises.
    """
    found = stored_arrays(directory, [f"{module}.weight_scale" for module in modules])
    return {name.removesuffix(".weight_scale"): scale for name, scale in found.items()}


def stored_arrays(directory: Path, names: Collection[str]) -> dict[str, npt.NDArray[np.float32]]:
    """The scales called `names` in the checkpoint in `directory`, flat.

    Raises InputError where the index does not read or has no such scale, OSError or SafetensorError where a file is
    missing or damaged.
    """
    where = stored_tensors(directory)
    if absent := next((name for name in names if name not in where), None):
        raise InputError(f"{directory}: has no {absent}, which scales.json promises; copy the whole of model/ again")
    shards = {file: _open(directory / file) for file in {where[name] for name in names}}
    return {name: shards[where[name]].get_tensor(name).reshape(-1) for name in names}


def _open(path: Path) -> Any:
    if not path.is_file():  # a pipe would be waited for
        raise FileNotFoundError(path)
    return safe_open(path, "np")
