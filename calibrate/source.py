"""The source checkpoint: everything that can be wrong with it is found here, before any work.

`open_source` looks from the cheap to the dear: the directory, config.json, the headers of the weights, the tokenizer's files, then the
model itself on the meta device, where loading costs no memory and still tells of missing, unexpected and misshapen tensors. Last it
reads every byte once, for the fingerprint that ties statistics, scales and engines to just these weights.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..progress import SILENT, Reporter
from ..run import sha256_file
from .architecture import load_config, max_positions, one_line, refuse_experts
from .hub import fetch_model, is_hub_name
from .weights import Weights, check_finite, find_weights, read_headers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Source", "Weights", "check_finite", "load_model", "load_tokenizer", "meta_model", "open_source"]

#: Files that hold a vocabulary; the first is all of a tokenizer, the others are the older forms.
VOCABULARY = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")


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

    @property
    def text_config(self) -> "PreTrainedConfig":
        """The language model's part of the configuration: the configuration itself, where nothing is nested."""
        return self.config.get_text_config()

    @property
    def max_positions(self) -> int | None:
        """How many positions the model can tell apart; None where nothing limits them."""
        return max_positions(self.config)

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of tokenizer.json, or of the older vocabulary files where there is none."""
        files = tokenizer_files(self.path)
        return _combined({path.name: sha256_file(path) for path in files[: 1 if files[0].name == VOCABULARY[0] else None]})


def open_source(model: str, revision: str | None = None, trust_remote_code: bool = False, report: Reporter = SILENT) -> Source:
    """Look through the checkpoint `model`, a directory or a hub name.

    Raises InputError, one line with the remedy, for whatever keeps it from being calibrated.
    """
    path = _locate(model, revision, trust_remote_code)
    with quiet():
        config, architecture = load_config(path, model, trust_remote_code)
    files = find_weights(path, model)
    read_headers(files)
    if not tokenizer_files(path):
        raise InputError(f"{model}: has no tokenizer (none of {', '.join(VOCABULARY[:3])}, vocab.json); copy the files of the tokenizer it was trained with beside config.json")
    if Path(model).is_dir():
        revision = None
    elif path.parent.name == "snapshots":
        revision = path.name
    source = Source(path, model, revision, trust_remote_code, config, architecture, files, fingerprint="")
    refuse_experts(meta_model(source), model, architecture)
    _check_keys(source)
    return Source(path, model, revision, trust_remote_code, config, architecture, files, _fingerprint(path, files, report))


def _locate(model: str, revision: str | None, with_code: bool) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise InputError(f"--revision {revision}: is for hub names, and {model} is a directory; leave it out")
        return path
    if path.exists():
        raise InputError(f"{model}: is a file; MODEL is the directory that holds config.json and the weights, or a hub name")
    if not is_hub_name(model):
        raise InputError(f"{model}: there is no such directory, and it is no hub name either; check the path")
    return fetch_model(model, revision, with_code)


def tokenizer_files(path: Path) -> list[Path]:
    """The vocabulary files in a checkpoint's directory, tokenizer.json first."""
    return [path / name for name in VOCABULARY if (path / name).is_file()]


def _fingerprint(path: Path, weight_files: tuple[Path, ...], report: Reporter) -> str:
    files = [path / "config.json", *weight_files]
    digests: dict[str, str] = {}
    with report.track("Fingerprinting", sum(file.stat().st_size for file in files), "bytes") as advance, ThreadPoolExecutor(os.cpu_count()) as pool:
        pending = {pool.submit(sha256_file, file): file for file in files}
        for future in as_completed(pending):
            digests[pending[future].name] = future.result()
            advance(pending[future].stat().st_size)
    return _combined(digests)


def _combined(digests: dict[str, str]) -> str:
    """SHA-256 over `name digest` lines in name order."""
    return hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from logging and drawing bars; the settings before are restored."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_tokenizer(source: Source) -> "PreTrainedTokenizerBase":
    """The checkpoint's own tokenizer. Raises InputError when its files do not make one."""
    from transformers import AutoTokenizer

    try:
        with quiet():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.path, local_files_only=True, trust_remote_code=source.trust_remote_code)
    except Exception as error:  # noqa: BLE001  # tokenizers raises plain Exception for files it cannot read
        raise InputError(f"{source.name}: its tokenizer does not load: {one_line(error)}; copy the files of the tokenizer it was trained with beside config.json") from None
    return tokenizer


def meta_model(source: Source) -> "PreTrainedModel":
    """The model in BF16 on the meta device: all modules and shapes, no values, no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with quiet(), torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(source.config, dtype=torch.bfloat16, trust_remote_code=source.trust_remote_code)
    except Exception as error:  # noqa: BLE001  # whatever wrong sizes, or code of the checkpoint's own, raise
        raise InputError(f"{source.path / 'config.json'}: does not make a {source.architecture}: {one_line(error)}; copy or download it again") from None
    return model.eval()


def load_model(source: Source, dtype: "torch.dtype", device: str = "cpu") -> "PreTrainedModel":
    """The model in `dtype` on `device`, evaluating, its cache off. Raises InputError when files and model do not fit."""
    model, _ = _load(source, dtype, device)
    model.config.use_cache = False
    return model


def _load(source: Source, dtype: "torch.dtype", device: str) -> tuple["PreTrainedModel", dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    try:
        with quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                source.path, dtype=dtype, device_map=device, local_files_only=True, use_safetensors=True, trust_remote_code=source.trust_remote_code,
                ignore_mismatched_sizes=True, output_loading_info=True,
            )  # fmt: skip
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise InputError(f"{source.name}: does not load as {source.architecture}: {one_line(error)}; copy or download the checkpoint again") from None
    _check_loading(source, info)
    return model.eval(), info


def _check_keys(source: Source) -> None:
    """Load on the meta device, which reads headers only, for what it says of the keys."""
    import torch

    _load(source, torch.bfloat16, "meta")


def _check_loading(source: Source, info: dict[str, Any]) -> None:
    """Raise InputError for tensors that the model misses, does not know, or has in another shape. Tied weights count as one."""
    remedy = f"config.json and weights are not of one {source.architecture}; copy or download the checkpoint again"
    for name, found, wanted in sorted(info["mismatched_keys"], key=str):
        raise InputError(f"{source.name}: {name} has shape {list(found)} where the model has {list(wanted)}; {remedy}")
    for kind, keys in (("lacks", sorted(info["missing_keys"])), ("holds unknown", sorted(info["unexpected_keys"]))):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise InputError(f"{source.name}: {kind} {keys[0]}{more}; {remedy}")
