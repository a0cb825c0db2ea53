"""The safetensors of a checkpoint: found, checked by their headers, read tensor by tensor.

A tensor is a view of the mapped file, and the file is unmapped when the tensor is let go of, so that memory holds what one tensor needs
however large the checkpoint is. Pickled weights can run code when they are read, so they are refused and never opened.
"""

import json
from collections.abc import KeysView
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from ..progress import SILENT, Reporter

if TYPE_CHECKING:
    import torch

    from .source import Source

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
#: safetensors' names of the float types that a checkpoint may be in, and their bytes a value.
FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
#: Values converted at a time when offending ones are counted.
CHUNK = 1 << 24


@dataclass(frozen=True)
class Header:
    """What a safetensors header says of one tensor: its file, its type in safetensors' words, its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def find_weights(directory: Path, name: str) -> tuple[Path, ...]:
    """The safetensors files of the checkpoint in `directory`, in name order; `name` is how the user calls it.

    Raises InputError when there are none (saying what there is instead), or when the index does not read or names files that are missing.
    """
    if (directory / SINGLE).is_file():
        return (directory / SINGLE,)
    if (directory / INDEX).is_file():
        shards = sorted({directory / shard for shard in read_index(directory / INDEX).values()})
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise InputError(f"{directory / INDEX}: names {missing[0]}, which is missing ({len(missing)} of {len(shards)} shards are); copy or download it again")
        return tuple(shards)
    raise InputError(f"{name}: {_instead(directory)}")


def _instead(directory: Path) -> str:
    if (directory / "adapter_config.json").is_file():
        return "is an adapter without its base model; merge them with PEFT's merge_and_unload, and save_pretrained the result with its tokenizer"
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLED)
    if pickled:
        code = f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({str(directory)!r}).save_pretrained('NEW')"
        return f"has only pickled weights ({pickled[0]}), which can run code when read and are refused; convert them where you trust them: python -c \"{code}\", copy the tokenizer to NEW, and give NEW"
    others = sorted(path.name for path in directory.iterdir() if path.suffix in (".safetensors", ".gguf", ".h5", ".msgpack"))
    found = f" (found {others[0]})" if others else ""
    return f"has no weights: there is neither {SINGLE} nor {INDEX}{found}; save the model with save_pretrained"


def read_index(path: Path) -> dict[str, str]:
    """`weight_map` of an index: tensor -> file name. Raises InputError when it does not read, or points out of the directory."""
    try:
        shards = json.loads(path.read_bytes())["weight_map"]
        if not shards or not all(isinstance(shard, str) for shard in shards.values()):
            raise TypeError("no file names")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path}: does not read as a safetensors index (an object with a weight_map); copy or download it again") from None
    outside = [shard for shard in shards.values() if Path(shard).name != shard]
    if outside:
        raise InputError(f"{path}: names {outside[0]}, which is not a file beside it; the checkpoint is damaged or not to be trusted")
    return dict(shards)


def read_headers(files: tuple[Path, ...]) -> dict[str, Header]:
    """Tensor name -> header, in the order the tensors lie in `files`.

    Raises InputError, naming the file, for damaged or truncated ones, for a tensor that is in two, for one that the index promises and no file
    holds, and for tensors that are FP8 or narrower already.
    """
    from safetensors import SafetensorError, safe_open

    headers: dict[str, Header] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.offset_keys():
                    if name in headers:
                        raise InputError(f"{file}: holds {name}, and so does {headers[name].file.name}; copy or download the checkpoint again")
                    view = opened.get_slice(name)
                    headers[name] = Header(file, view.get_dtype(), tuple(view.get_shape()))
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: is damaged or cut short ({error}); copy or download it again") from None
    if not headers:
        raise InputError(f"{files[0]}: holds no tensor; save the model with save_pretrained")
    _check_index(files[0].parent / INDEX, headers, len(files))
    for name, header in headers.items():
        if header.dtype.startswith(("F8", "F6", "F4")):
            raise InputError(f"{header.file}: {name} is {header.dtype}, so the checkpoint is quantized already; give the one it was made from, in BF16, FP16 or FP32")
    return headers


def _check_index(path: Path, headers: dict[str, Header], shards: int) -> None:
    if shards == 1 and not path.is_file():
        return
    for name, shard in read_index(path).items():
        if name not in headers or (shards > 1 and headers[name].file.name != shard):
            raise InputError(f"{path}: promises {name} in {shard}, which does not hold it; copy or download the checkpoint again")


class Weights:
    """The tensors of a source checkpoint, by the names they have in the files, in the order they lie there."""

    def __init__(self, source: "Source"):
        """Read the headers of `source`; no tensor yet. Raises InputError for files that have been damaged since."""
        self._headers = read_headers(source.weight_files)

    def names(self) -> KeysView[str]:
        """All names."""
        return self._headers.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._headers[name].shape

    def dtype(self, name: str) -> str:
        """Type of a tensor, in safetensors' words: `BF16`, `F16`, `F32` …."""
        return self._headers[name].dtype

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._headers[name].file

    def tensor(self, name: str) -> "torch.Tensor":
        """A tensor as it is stored, mapped from its file: read only, its pages are the file's."""
        from safetensors import safe_open

        with safe_open(self._headers[name].file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor


def check_finite(source: "Source", report: Reporter = SILENT) -> None:
    """Raise InputError for the first weight that holds NaN or Inf, or a finite value that becomes Inf in BF16, saying how many."""
    weights = Weights(source)
    total = sum(path.stat().st_size for path in source.weight_files)
    with report.track("Checking weights", total, "bytes") as advance:
        for name in weights.names():
            tensor = weights.tensor(name)
            if weights.dtype(name) in FLOATS and tensor.numel() and not _all_finite(tensor):
                found = _offenders(tensor)
                raise InputError(f"{name}: holds {found} among {tensor.numel():,} values ({weights.file(name)}); take an earlier checkpoint of the training, or download the file again")
            advance(tensor.nbytes)


def _all_finite(tensor: "torch.Tensor") -> bool:
    """`aminmax` runs at memory speed and passes NaN and Inf on; rounding to BF16 is monotone, so the extremes tell of all values."""
    import torch

    extremes = torch.stack(tuple(torch.aminmax(tensor)))
    return bool(torch.isfinite(extremes.to(torch.bfloat16)).all())


def _offenders(tensor: "torch.Tensor") -> str:
    import torch

    nan = infinite = beyond = 0
    for chunk in tensor.flatten().split(CHUNK):
        nan += int(chunk.isnan().sum())
        infinite += int(chunk.isinf().sum())
        beyond += int((chunk.to(torch.bfloat16).isinf() & chunk.isfinite()).sum())
    counts = {"NaN": nan, "Inf": infinite, "beyond BF16's largest (3.39e38)": beyond}
    return " and ".join(f"{count:,} {what}" for what, count in counts.items() if count)
