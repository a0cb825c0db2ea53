"""Find the tensors of a run's checkpoint by name; a serving host reads it too, so there is no torch here."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel
from safetensors import safe_open

from ...calibrate.checkpoint.weights import INDEX
from ...core.errors import InputError
from ...core.files import read_document
from ...core.headers import read_header
from ...core.run import Run

#: Cache scales that the Hugging Face layout has no place for.
CACHE_FILE = "kv_cache.safetensors"
#: Static scales of what experts read: where their weights have a scale for each channel, vLLM's experts take the scale
#: of each token, and would find these among the weights to be tensors that they do not know.
EXPERT_FILE = "experts.safetensors"
#: The scales of attention in codes, beside the index of the weights, which so has no key that transformers does not
#: expect.
ATTENTION_SCALES = "attention.safetensors"
#: The folder of the adapters that are served beside the base, each in one of its name, as PEFT wrote it.
ADAPTERS = "adapters"
#: What config.json calls what fp8q knows of the checkpoint and no other loader: `two_terms`, the modules whose input is
#: two codes a value, which loaders that do not know it take for one; `stored`, how the files name products that the
#: model calls otherwise, `{}` for each number.
OWN_CONFIG = "fp8q"
#: And there, how many positions a graph serves, where that is fewer than the model has.
OWN_POSITIONS = "positions"


def checkpoint_of(run: Run, precision: str) -> Path:
    """The folder of the weights of a precision, and of their graphs: `model/` for fp8."""
    return run.model if precision == "fp8" else run.baselines / precision


class Index(BaseModel):
    """The part of a checkpoint's index that is read: tensor name -> file name."""

    weight_map: dict[str, str]


def tensor_files(directory: Path) -> Mapping[str, str]:
    """Tensor name -> file name of the checkpoint in `directory`, from its index; and the cache scales that lie outside
    it.

    Raises InputError for an index that is not there, does not read, or names a file that is not beside it.
    """
    path = directory / INDEX
    index = read_document(path, Index).weight_map
    if outside := next((file for file in index.values() if Path(file).name != file), None):
        raise InputError(f"{path}: names {outside}, which is not a file beside it; copy the whole of model/ again")
    for beside in (CACHE_FILE, EXPERT_FILE):
        if (directory / beside).is_file():
            index |= dict.fromkeys(read_header(directory / beside), beside)
    return index


NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def patterns_of(stored: Mapping[str, str]) -> dict[str, str]:
    """The pattern of modules' names -> that of their names in files, of modules that are `stored` under another."""
    found = {NUMBER.sub("{}", module): NUMBER.sub("{}", under) for module, under in stored.items() if module != under}
    assert all(in_files(module, found) == under for module, under in stored.items()), "numbers go in the same order"
    return found


def in_files(module: str, patterns: Mapping[str, str]) -> str:
    """Return the name that the files have for `module`."""
    under = patterns.get(NUMBER.sub("{}", module))
    return under.format(*NUMBER.findall(module)) if under else module


def stored_patterns(directory: Path) -> dict[str, str]:
    """The patterns that config.json of the checkpoint in `directory` has. Raises InputError where it does not read."""
    path = directory / "config.json"
    return read_document(path, Configured).fp8q.stored if path.is_file() else {}


class Own(BaseModel):
    """The fields of config.json that fp8q wrote."""

    stored: dict[str, str] = {}


class Configured(BaseModel):
    """The fields of config.json that are read."""

    fp8q: Own = Own()


def stored_scales(directory: Path, modules: Collection[str]) -> dict[str, npt.NDArray[np.float32]]:
    """The weight scales of `modules` in the checkpoint in `directory`, float32 [output channels] each.

    Raises what `stored_arrays` raises.
    """
    found = stored_arrays(directory, [f"{module}.weight_scale" for module in modules])
    return {name.removesuffix(".weight_scale"): scale for name, scale in found.items()}


def stored_arrays(directory: Path, names: Collection[str]) -> dict[str, npt.NDArray[np.float32]]:
    """The scales called `names`, by the model's names of modules, in the checkpoint in `directory`, flat.

    Raises InputError where the index does not read or has no such scale, OSError or SafetensorError where a file is
    missing or damaged.
    """
    where, patterns = tensor_files(directory), stored_patterns(directory)
    under = dict[str, str]()
    for name in names:
        module, _, part = name.rpartition(".")
        under[name] = f"{in_files(module, patterns)}.{part}"
    if absent := next((name for name in under.values() if name not in where), None):
        raise InputError(f"{directory}: has no {absent}, which scales.json promises; copy the whole of model/ again")
    shards = {file: _open(directory / file) for file in {where[name] for name in under.values()}}
    return {name: shards[where[stored]].get_tensor(stored).reshape(-1) for name, stored in under.items()}


def _open(path: Path) -> Any:
    if not path.is_file():  # a pipe would be waited for
        raise FileNotFoundError(path)
    return safe_open(path, "np")
