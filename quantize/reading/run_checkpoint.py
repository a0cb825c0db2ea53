"""Find the tensors of a run's checkpoint by name; without torch, since serving hosts do so too."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel
from pydantic_core import PydanticCustomError
from safetensors import safe_open

from ...calibrate.checkpoint.class_defaults import config_field
from ...calibrate.checkpoint.name_patterns import NUMBER, name_pattern
from ...calibrate.checkpoint.weights import INDEX
from ...core.errors import InputError
from ...core.files import PLAIN, read_document, reading
from ...core.headers import read_header
from ...core.run import Run

#: Cache scales that the Hugging Face layout has no place for.
CACHE_FILE = "kv_cache.safetensors"
#: Static scales of the inputs of experts: where weights have a scale for each channel, vLLM's experts scale each token,
#: and would refuse static scales among the weights as unknown tensors.
EXPERT_FILE = "experts.safetensors"
#: The scales of attention in FP8, in a file that the index does not name: transformers would not expect their keys.
ATTENTION_SCALES = "attention.safetensors"
#: The folder of the adapters that are served beside the base: a folder for each, under its name, as PEFT wrote it.
ADAPTERS = "adapters"
#: The name of the adapter that `fp8q distill --train adapter` learned on the checkpoint, beside which it lies.
LEARNED = "learned"
#: The end of the name of a scale of a cache beside its projection.
OF_PROJECTION = re.compile(r"\.([kv])_proj\.\1_scale$")
#: The key of config.json for fields that only fp8q reads: the forms of inputs and the layers whose cache stays in BF16
#: (`quantize.scales.scheme`); `stored`, patterns of the GEMMs' names in the files where the model calls them otherwise,
#: with `{}` for each number.
FP8Q_CONFIG = "fp8q"
#: The field under that key for the number of positions that a graph serves, where that is fewer than the model's.
FP8Q_POSITIONS = "positions"


def checkpoint_of(run: Run, precision: str) -> Path:
    """The folder of the weights in `precision`, and of the graphs that read them: `model/` for fp8."""
    if precision == "fp8":
        return run.model
    return run.baselines / precision


def adapter_directory(run: Run, name: str) -> Path:
    """The directory of the adapter called `name`: the one that was learned on the checkpoint, or one within it."""
    if name == LEARNED:
        return run.adapter
    return run.model / ADAPTERS / name


class Index(BaseModel):
    """The field that is read of a checkpoint's index: tensor name -> file name."""

    weight_map: dict[str, str]


def tensor_files(directory: Path) -> Mapping[str, str]:
    """Map tensor name to file name for the checkpoint in `directory`: by its index, and for scales in files beside it.

    Raises InputError for an index that is not there, does not read, or names a file that is not beside it.
    """
    path = directory / INDEX
    index = read_document(path, Index).weight_map
    if outside := next((file for file in index.values() if Path(file).name != file), None):
        raise InputError(path, f"names {outside}, which is not a file beside it", "copy the whole of model/ again")
    for file in (CACHE_FILE, EXPERT_FILE):
        if (directory / file).is_file():
            index |= dict.fromkeys(read_header(directory / file), file)
    return index


def with_cache_scales(renamed: Mapping[str, str], stored: Iterable[str]) -> dict[str, str]:
    """Add to `renamed`, model's name -> stored name, those of `stored` that are scales of a cache beside a projection,
    as ModelOpt calls them.
    """
    model_names = {under: name for name, under in renamed.items()}
    of_caches = [name for name in stored if OF_PROJECTION.search(name)]
    return {**renamed, **{OF_PROJECTION.sub(r".\1_scale", model_names.get(name, name)): name for name in of_caches}}


def patterns_of(stored: Mapping[str, str]) -> dict[str, str]:
    """Patterns of module names -> patterns of their names in files, from `stored` (module -> name in the files).

    Modules that the files call as the model does are left out.
    """
    patterns = {name_pattern(module): name_pattern(under) for module, under in stored.items() if module != under}
    assert all(in_files(module, patterns) == under for module, under in stored.items()), "open_source checks the names"
    return patterns


def in_files(module: str, patterns: Mapping[str, str]) -> str:
    """The name of `module` in the files, by `patterns` of `patterns_of`."""
    under = patterns.get(name_pattern(module))
    numbers = iter(NUMBER.findall(module))
    if under:
        return re.sub(r"\{\}", lambda _: next(numbers), under)
    return module


def stored_patterns(directory: Path) -> dict[str, str]:
    """Read the name patterns in config.json of the checkpoint in `directory`; InputError where it does not parse."""
    path = directory / "config.json"
    if path.is_file():
        return read_document(path, Configured).fp8q.stored
    return {}


def _as_many_numbers(patterns: dict[str, str]) -> dict[str, str]:
    """Check that each pattern of names in files has as many numbers as that of its module."""
    if any(under.count("{}") != module.count("{}") for module, under in patterns.items()):
        raise PydanticCustomError(PLAIN, "must have as many numbers ({}) in a name in files as in the module's")
    return patterns


class FP8QFields(BaseModel):
    """The fields of config.json that fp8q wrote."""

    stored: Annotated[dict[str, str], AfterValidator(_as_many_numbers)] = {}


class Configured(BaseModel):
    """The fields of config.json that are read."""

    fp8q: FP8QFields = FP8QFields()


def stored_scales(directory: Path, modules: Collection[str]) -> dict[str, npt.NDArray[np.float32]]:
    """The weight scales of `modules` in the checkpoint in `directory`, float32 [output channels] each.

    Raises what `stored_arrays` raises.
    """
    scales = stored_arrays(directory, [f"{module}.weight_scale" for module in modules])
    return {name.removesuffix(".weight_scale"): scale for name, scale in scales.items()}


def stored_arrays(directory: Path, names: Collection[str]) -> dict[str, npt.NDArray[np.float32]]:
    """Read the scales `names`, with the model's names of modules, from the checkpoint in `directory`, float32 [values].

    Raises InputError where the index does not read or has no such scale, OSError or SafetensorError where a file is
    missing or damaged.
    """
    files = tensor_files(directory)
    patterns = stored_patterns(directory)
    renamed = with_cache_scales({}, files)
    stored: dict[str, str] = {}
    for name in names:
        module, _, part = name.rpartition(".")
        under = f"{in_files(module, patterns)}.{part}"
        stored[name] = renamed.get(under, under)
    if absent := next((name for name in stored.values() if name not in files), None):
        raise InputError(directory, f"has no {absent}, which scales.json expects", "copy the whole of model/ again")
    shards = {file: _open(directory / file) for file in {files[name] for name in stored.values()}}
    return {name: shards[files[under]].get_tensor(under).reshape(-1) for name, under in stored.items()}


def _open(path: Path) -> Any:
    if not path.is_file():  # opening a pipe would block
        raise FileNotFoundError(path)
    return safe_open(path, "np")


def vocabulary_size(run: Run) -> int:
    """The number of logits, by the checkpoint's config.json; 0 where that does not say."""
    path = run.model / "config.json"
    with reading(path, "a configuration"):
        fields = json.loads(path.read_bytes())
        return int(config_field(fields, "vocab_size") or 0)
