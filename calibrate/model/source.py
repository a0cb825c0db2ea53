"""The source checkpoint: everything that can be wrong with it is found here, before any work.

`open_source` looks from the cheap to the dear: the directory, config.json, the headers of the weights, the tokenizer's
files, then the model itself on the meta device, where loading costs no memory and still tells of missing, unexpected
and misshapen tensors. Last it reads every byte once, for the fingerprint that ties statistics, scales and engines to
just these weights.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import BackendError, InputError
from ...files import sha256_file
from ...reporter import SILENT, Reporter
from ..hub import fetch_model, is_hub_name
from .architecture import load_config, max_positions, one_line, refuse_experts
from .silence import quiet
from .weights import find_weights, read_headers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

#: Bytes hashed at a time, and how many such pieces at once at most: 64 MB of memory.
PIECE, PIECES_AT_ONCE = 4 << 20, 16
#: Files that hold a vocabulary; the first is all of a tokenizer, the others are the older forms.
VOCABULARY = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
)


#: Names of directories that say nothing of the model in them.
GENERIC_NAMES = ("checkpoint", "model", "final", "best", "latest")


@dataclass(frozen=True)
class Source:
    """A checkpoint that has been looked through. `name` as the user gave it; `revision` the commit, of a hub model."""

    path: Path
    name: str
    revision: str | None
    trust_remote_code: bool
    config: "PreTrainedConfig"
    architecture: str
    weight_files: tuple[Path, ...]
    fingerprint: str
    # tensors that are stored under another name than the model's own
    renamed: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def title(self) -> str:
        """What to call the model in files: a hub name, or the last part of a directory's path that says something."""
        if not Path(self.name).expanduser().is_dir():
            return self.name
        return [part for part in self.path.resolve().parts if part not in GENERIC_NAMES][-1]

    @property
    def text_config(self) -> "PreTrainedConfig":
        """The language model's part of the configuration: the configuration itself, where nothing is nested."""
        return self.config.get_text_config()

    @property
    def max_positions(self) -> int | None:
        """How many positions the model can tell apart; None where nothing limits them."""
        return max_positions(self.text_config.to_dict())

    def stored(self, name: str) -> str:
        """The name under which the files hold the tensor that the model calls `name`."""
        return self.renamed.get(name, name)

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of tokenizer.json, or of the older vocabulary files where there is none."""
        files = tokenizer_files(self.path)
        return _combined(
            {path.name: sha256_file(path) for path in (files[:1] if files[0].name == "tokenizer.json" else files)}
        )


def open_source(
    model: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    report: Reporter = SILENT,
    fingerprinted: bool = True,
) -> Source:
    """Look through the checkpoint `model`, a directory or a hub name; `revision` (branch, tag or commit) is for hub
    names.

    `fingerprinted` False leaves the fingerprint empty, and the weights unread.
    Raises InputError, one line with the remedy, for whatever keeps it from being calibrated.
    """
    path, commit = _locate(model, revision, trust_remote_code, report)
    with quiet():
        config, architecture = load_config(path, model)
    files = find_weights(path, model)
    if not tokenizer_files(path):
        raise InputError(
            f"{model}: has no tokenizer (no {VOCABULARY[0]}, {VOCABULARY[1]} or vocab.json); copy the files of the "
            "one it was trained with beside config.json"
        )
    source = Source(path, model, commit, trust_remote_code, config, architecture, files, fingerprint="")
    skeleton = meta_model(source)
    refuse_experts(skeleton, model, architecture)
    source = replace(source, renamed=_check_names(source, skeleton))
    return (
        replace(source, fingerprint=_combined(_file_digests([path / "config.json", *files], report)))
        if fingerprinted
        else source
    )


def _locate(model: str, revision: str | None, with_code: bool, report: Reporter) -> tuple[Path, str | None]:
    """Directory of `model`, and the commit where it came from the hub."""
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise InputError(f"--revision {revision}: is for hub names, and {model} is a directory; leave it out")
        return path, None
    if path.exists():
        raise InputError(
            f"{model}: is a file; MODEL is the directory that holds config.json and the weights, or a hub name"
        )
    if not is_hub_name(model):
        raise InputError(f"{model}: there is no such directory, and it is no hub name either; check the path")
    snapshot = fetch_model(model, revision, with_code, report)
    return snapshot, snapshot.name


def tokenizer_files(path: Path) -> list[Path]:
    """The vocabulary files in a checkpoint's directory, tokenizer.json first."""
    return [path / name for name in VOCABULARY if (path / name).is_file()]


def _file_digests(files: Sequence[Path], report: Reporter) -> dict[str, str]:
    """File name -> SHA-256 of the SHA-256s of its pieces: in pieces, all processors hash one large file together."""
    pieces = [(file, start) for file in files for start in range(0, file.stat().st_size, PIECE)]
    digests = {file.name: hashlib.sha256() for file in files}

    def digest(piece: tuple[Path, int]) -> tuple[bytes, int]:
        file, start = piece
        with open(file, "rb") as handle:
            handle.seek(start)
            content = handle.read(PIECE)
        return hashlib.sha256(content).digest(), len(content)

    total = sum(file.stat().st_size for file in files)
    with (
        report.track("Fingerprinting the weights", total, "bytes") as advance,
        ThreadPoolExecutor(min(os.cpu_count() or 1, PIECES_AT_ONCE)) as pool,
    ):
        for (file, _), (found, size) in zip(pieces, pool.map(digest, pieces), strict=True):
            digests[file.name].update(found)
            advance(size)
    return {name: digest.hexdigest() for name, digest in digests.items()}


def _combined(digests: dict[str, str]) -> str:
    """SHA-256, in hexadecimal, over the lines `name digest` in name order."""
    return hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def load_tokenizer(source: Source) -> "PreTrainedTokenizerBase":
    """The checkpoint's own tokenizer. Raises InputError when its files do not make one."""
    from transformers import AutoTokenizer

    try:
        with quiet():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                source.path, local_files_only=True, trust_remote_code=source.trust_remote_code
            )
    except Exception as error:  # noqa: BLE001  # tokenizers raises plain Exception for files it cannot read
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{source.name}: its tokenizer wants code of its own; read it, and if you trust it, run it with "
                "--trust-remote-code"
            ) from None
        raise InputError(
            f"{source.name}: its tokenizer does not load: {one_line(error)}; copy the files of the tokenizer it was "
            "trained with beside config.json"
        ) from None
    return tokenizer


def meta_model(source: Source) -> "PreTrainedModel":
    """The model in BF16 on the meta device, evaluating: all modules and shapes, no values, no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with quiet(), torch.device("meta"):
            config = deepcopy(source.config)  # from_config writes the type into it
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # noqa: BLE001  # whatever wrong sizes raise
        raise InputError(
            f"{source.path / 'config.json'}: does not make a {source.architecture}: {one_line(error)}; copy or "
            "download it again"
        ) from None
    model.eval()
    return model


def load_model(source: Source, dtype: "torch.dtype", device: str = "cpu") -> "PreTrainedModel":
    """The model in `dtype` on `device`, evaluating, its cache off.

    Raises InputError when files and model do not fit, BackendError when the device's memory does not hold it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model = _load(
            source, AutoModelForCausalLM, source.path, dtype=dtype, device_map=device,
            local_files_only=True, use_safetensors=True,
        )  # fmt: skip
    except torch.OutOfMemoryError:
        raise BackendError(
            f"{source.name}: does not fit into the memory of {device}; free some, or hide the GPU with "
            "CUDA_VISIBLE_DEVICES= and use the CPU"
        ) from None
    model.config.use_cache = False
    return model


def _check_names(source: Source, skeleton: "PreTrainedModel") -> dict[str, str]:
    """Load the headers alone, on the meta device: that tells of missing, unexpected and misshapen tensors, and reads no
    weights. Returns `renamed`.
    """
    from .tensor_names import HEADER_TYPE, headers, renamed_tensors

    stored = headers({name: header.shape for name, header in read_headers(source.weight_files).items()})
    return renamed_tensors(
        _load(source, type(skeleton), None, state_dict=dict(stored), dtype=HEADER_TYPE, device_map="meta"), stored
    )


def _load(source: Source, model_class: Any, path: Path | None, **options: Any) -> "PreTrainedModel":
    """`model_class.from_pretrained`, with an InputError for tensors that the model lacks, does not know, or has in
    another shape. Tied weights count as one.
    """
    import torch

    try:
        with quiet():
            loaded = model_class.from_pretrained(
                path, config=deepcopy(source.config), ignore_mismatched_sizes=True, output_loading_info=True, **options
            )
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError, KeyError, OSError, ImportError) as error:
        raise InputError(
            f"{source.name}: does not load as {source.architecture}: {one_line(error)}; copy or download the "
            "checkpoint again"
        ) from None
    model: PreTrainedModel = loaded[0]
    misfits = [
        f"{name} has shape {list(found)} where the model has {list(wanted)}"
        for name, found, wanted in sorted(loaded[1]["mismatched_keys"])
    ]
    misfits += [f"{name} is missing" for name in sorted(loaded[1]["missing_keys"])]
    misfits += [f"{name} is unknown to the model" for name in sorted(loaded[1]["unexpected_keys"])]
    if misfits:
        more = f" (and {len(misfits) - 1} more do not fit)" if len(misfits) > 1 else ""
        raise InputError(
            f"{source.name}: the weights are not those of this {source.architecture}: {misfits[0]}{more}; copy or "
            "download the checkpoint again"
        )
    return model
