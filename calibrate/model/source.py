"""Open the source checkpoint, and find everything that is wrong with it before any work.

`open_source` checks cheap things first: the directory, config.json, the headers of the weights, the tokenizer's files,
then the model itself on the meta device, where loading costs no memory and still finds missing, unexpected and
misshapen tensors. Last it reads every byte once, for the fingerprint that ties statistics, scales and engines to these
weights. transformers never chooses a file: it gets the tensors of the files found here, with codes dequantized
(`checkpoint.recognizer`).
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel, __version__

from ...core.errors import BackendError, InputError
from ...core.files import sha256_file
from ...core.reporter import SILENT, Reporter
from ...core.run_files import LOADED
from ...options import TokenizerChoice
from ..checkpoint.adapter import Adapter
from ..checkpoint.companions import TOKENIZER, check_companions, companion_files, tokenizer_digests
from ..checkpoint.config_fields import check_sizes
from ..checkpoint.mtp_layers import mtp_prefixes
from ..checkpoint.name_patterns import check_one_pattern
from ..checkpoint.recognizer import Recognizer, no_codes
from ..checkpoint.weights import (
    Coding,
    JoinedTensors,
    TensorPart,
    UnreadTensor,
    Weights,
    find_weights,
    read_headers,
)
from ..input.hub import fetch_model, is_hub_name
from ..input.silence import quiet_transformers
from ..input.untrusted import error_text, foreign, local_path
from .adapter_addition import attach_adapter
from .architecture import (
    load_config,
    max_positions,
    one_frequency,
    read_config,
    text_fields,
    unknown_rotary,
)
from .bf16_gemms import compute_gemms_in_fp32
from .expert_modules import experts_of, refuse_experts
from .expert_names import Conversions, views
from .gemms import gemm_modules
from .load import HEADER_TYPE, headers, load_tensors, renamed_tensors
from .skeleton import check_buffers, empty, fp32_tensors

#: Bytes that are hashed at a time, and the most such pieces at once: 64 MB of memory.
PIECE = 4 << 20
PIECES_AT_ONCE = 16
#: The types of weights, as safetensors spells them.
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
#: Names of directories that do not describe the model in them.
GENERIC_NAMES = ("checkpoint", "model", "final", "best", "latest", LOADED)


@dataclass(frozen=True)
class Source:
    """A checkpoint that was checked; `name`: as the user gave it; `revision`: the commit, of a hub model."""

    path: Path
    name: str
    revision: str | None
    trust_remote_code: bool
    config: PreTrainedConfig
    architecture: str
    weight_files: tuple[Path, ...]
    fingerprint: str
    # the model's name of a tensor -> its name in the files, where they differ
    renamed: Mapping[str, str] = field(default_factory=dict, compare=False)
    # how to dequantize the tensors, where some are codes
    coding: Coding | None = field(default=None, compare=False)
    # tensor -> the part of a stored tensor that it is, where some hold all experts of a layer
    parts: Mapping[str, TensorPart] = field(default_factory=dict, compare=False)
    # the weight of a GEMM that transformers makes of several tensors, gate and up for one -> these, or parts
    joined: Mapping[str, JoinedTensors] = field(default_factory=dict, compare=False)
    # how the names of the tensors of multi-token prediction begin, which transformers makes no modules of
    mtp: tuple[str, ...] = field(default=(), compare=False)
    # the tensors, by their names in the files, that transformers keeps in FP32 where the model is in BF16
    fp32: frozenset[str] = field(default=frozenset(), compare=False)
    # those and the ones that it keeps in FP32 where the model is in FP16: in files that are written, all stay FP32
    fp32_in_files: frozenset[str] = field(default=frozenset(), compare=False)
    # what tokenizes its texts
    tokenizer: TokenizerChoice = field(default="file", compare=False)
    # the adapter that is merged into the weights
    merged: Adapter | None = field(default=None, compare=False)
    # the adapters that are served beside the base, and the one that is on
    adapters: tuple[Adapter, ...] = field(default=(), compare=False)
    on: Adapter | None = field(default=None, compare=False)

    @property
    def title(self) -> str:
        """The model's name in reports: a hub name, or the last part of a directory's path that describes the model."""
        if not Path(self.name).expanduser().is_dir():
            return self.name
        return [part for part in self.path.resolve().parts if part not in GENERIC_NAMES][-1]

    @property
    def text_config(self) -> PreTrainedConfig:
        """The configuration of the language model: the whole configuration where nothing is nested."""
        return self.config.get_text_config()

    @property
    def max_positions(self) -> int | None:
        """The number of positions that the model can tell apart; None where nothing limits them."""
        return max_positions(self.text_config.to_dict())

    @property
    def served_positions(self) -> int | None:
        """The number of positions that a graph serves: those for which one set of rotary frequencies is right."""
        limits = [limit for limit in (self.max_positions, one_frequency(self.text_config)) if limit is not None]
        return min(limits, default=None)

    def stored(self, name: str) -> str:
        """The name under which the files hold the tensor that the model calls `name`."""
        return self.renamed.get(name, name)

    @property
    def variants(self) -> "tuple[Source, ...]":
        """The base alone, and the base with each of the adapters on."""
        return (self, *(replace(self, on=adapter) for adapter in self.adapters))

    @property
    def identity(self) -> str:
        """One fingerprint of the base and the adapters beside it; empty where the weights were not read."""
        if not self.adapters or not self.fingerprint:
            return self.fingerprint
        adapters = {f"adapter {adapter.name}": adapter.fingerprint for adapter in self.adapters}
        return combined_digest({"base": self.fingerprint, **adapters})

    @property
    def companions(self) -> dict[str, Path]:
        """Name -> file of what lies beside the weights: the base's, or a merged adapter's in its place."""
        return companion_files(self.path, self.merged.path if self.merged else None)

    def merged_with(self, adapter: Adapter, coding: Coding) -> "Source":
        """This source with `adapter` merged into its weights by `coding`, and the adapter's own tokenizer and chat
        template, if any.
        """
        merged = replace(self, merged=adapter, coding=coding)
        adapter_files = {name: file for name, file in merged.companions.items() if file.is_relative_to(adapter.path)}
        both = {"base": self.fingerprint, "adapter": adapter.fingerprint}
        both |= {f"adapter's {name}": sha256_file(file) for name, file in adapter_files.items()}
        return replace(merged, fingerprint=combined_digest(both) if self.fingerprint else "")

    def weights(self) -> Weights:
        """Open the tensors, dequantized."""
        return Weights(self.weight_files, self.coding, self.parts, self.joined)

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of tokenizer.json, or of the older vocabulary files where there is none; another
        where AutoTokenizer was chosen beside tokenizer.json.
        """
        digests = tokenizer_digests(self.companions)
        by_auto = self.tokenizer == "auto" and TOKENIZER in digests
        return combined_digest(digests | ({"by": "AutoTokenizer"} if by_auto else {}))


def open_source(
    model: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    report: Reporter = SILENT,
    fingerprinted: bool = True,
    recognize: Recognizer = no_codes,
) -> Source:
    """Open and check the checkpoint `model`, a directory or a hub name.

    `revision`: branch, tag or commit of a hub name. `fingerprinted` False leaves the fingerprint empty and the weights
    unread. `recognize` returns how to dequantize the tensors, where they are codes. Raises InputError for a checkpoint
    that cannot be calibrated.
    """
    path, commit = locate(model, revision, trust_remote_code, report)
    raw = read_config(path, model)
    files = find_weights(path, model, raw.get("transformers_weights"))
    coding = recognize(path, model, raw, read_headers(files))
    weights = Weights(files, coding)
    shapes = [weights.shape(tensor) for tensor in weights.names()]
    for fields in (raw, text_fields(raw)):
        check_sizes(path / "config.json", fields, shapes)
    with quiet_transformers():
        config, architecture = load_config(path, model, raw)
    check_companions(path, model, config.get_text_config().vocab_size)
    source = Source(path, model, commit, trust_remote_code, config, architecture, files, fingerprint="", coding=coding)
    source = _check_model(source)
    if not fingerprinted:
        return source
    configured = [path / "config.json", *(coding.other_files if coding else ())]
    return replace(source, fingerprint=combined_digest(file_digests([*configured, *files], report)))


def locate(model: str, revision: str | None, with_code: bool, report: Reporter) -> tuple[Path, str | None]:
    """Find the directory of `model`, and its commit where it is a hub model."""
    path = local_path(model)
    if path.is_dir():
        if revision is not None:
            raise InputError(f"--revision {revision}", f"is for hub names, and {model} is a directory", "leave it out")
        return path, None
    if path.suffix == ".gguf":
        raise InputError(
            model, "is a GGUF file, whose weights are quantized already", "give the checkpoint that it was made from"
        )
    if path.exists():
        raise InputError(
            model, "is a file", "MODEL is the directory that holds config.json and the weights, or a hub name"
        )
    if not is_hub_name(model):
        raise InputError(model, "there is no such directory, and it is no hub name either", "check the path")
    snapshot = fetch_model(model, revision, with_code, report)
    return snapshot, snapshot.name


def file_digests(files: Sequence[Path], report: Reporter) -> dict[str, str]:
    """File name -> SHA-256 of the SHA-256s of its pieces, so that all processors can hash one large file together."""
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
        for (file, _), (of_piece, size) in zip(pieces, pool.map(digest, pieces), strict=True):
            digests[file.name].update(of_piece)
            advance(size)
    return {name: digest.hexdigest() for name, digest in digests.items()}


def combined_digest(digests: dict[str, str]) -> str:
    """SHA-256, in hexadecimal, over the lines `name digest` in name order."""
    return hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def meta_model(source: Source) -> PreTrainedModel:
    """Make the model in BF16 on the meta device, in evaluation mode: all modules and shapes, without values."""
    with foreign(partial(no_model, source)), quiet_transformers():
        return empty(deepcopy(source.config), torch.bfloat16)  # from_config writes the type into it


def no_model(source: Source, error: BaseException) -> InputError:
    """Turn an exception of transformers, raised while it makes a model of config.json, into an InputError."""
    if (kind := unknown_rotary(source.config)) is not None:
        return InputError(
            source.path / "config.json",
            f"its rope_type {kind[:60]} is unknown to transformers {__version__}",
            "a newer transformers may know it",
        )
    return InputError(
        source.path / "config.json",
        f"does not make a {source.architecture}: {error_text(error)}",
        "copy or download it again",
    )


def load_model(source: Source, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """Load the model in `dtype` on `device`, in evaluation mode, without a cache, with the adapter that is on.

    Raises InputError when files and model do not match, BackendError when the device's memory does not hold it.
    """
    weights = source.weights()
    tensors = {
        name: _tensor(source, weights, name, dtype) for name in weights.names() if not name.startswith(source.mtp)
    }
    try:
        model = _load(source, meta_model(source), tensors, dtype, device)
    except torch.OutOfMemoryError:
        raise BackendError(
            source.name,
            f"does not fit into the memory of {device}",
            "free some, or hide the GPU with CUDA_VISIBLE_DEVICES= and use the CPU",
        ) from None
    model.config.use_cache = False
    compute_gemms_in_fp32(model, dtype, device)
    if source.on:
        attach_adapter(model, source.on, dtype, device)
    return model


def _tensor(source: Source, weights: Weights, name: str, dtype: torch.dtype) -> torch.Tensor | UnreadTensor:
    """The tensor `name` of a model in `dtype`. Codes are dequantized now, which may find them damaged, and cast at once
    so that both types are not held; the others are read when they are cast.
    """
    if not weights.coded(name):
        return UnreadTensor(weights, name)
    if name in source.fp32:
        return weights.tensor(name)
    return weights.tensor(name).to(dtype)


def _check_model(source: Source) -> Source:
    """Make the model on the meta device and load the headers into it, without reading weights.

    This finds experts in an unknown form, buffers without finite values, missing, unexpected and misshapen tensors, and
    weights of other types or names than their loaders take.
    Returns the source with the names of its tensors and the parts of stored tensors that they are.
    """
    skeleton = meta_model(source)
    refuse_experts(skeleton, source.name, source.architecture)
    weights = source.weights()
    source = replace(source, parts=views(skeleton, {name: weights.shape(name) for name in weights.names()}))
    source = replace(source, joined=_joined_gemms(skeleton, source.weights()))
    weights = source.weights()
    # a prefix under which transformers has a module is the model's own
    model_names = tuple(skeleton.state_dict())
    drafting = mtp_prefixes(source.config.to_dict(), weights.names())
    source = replace(
        source, mtp=tuple(start for start in drafting if not any(name.startswith(start) for name in model_names))
    )
    shapes = {name: weights.shape(name) for name in weights.names() if not name.startswith(source.mtp)}
    stored = headers(shapes)
    loaded = _load(source, skeleton, stored, HEADER_TYPE, "meta")
    with foreign(partial(no_model, source)), quiet_transformers():
        wrong = check_buffers(skeleton, sum(map(prod, shapes.values())))
    if wrong:
        raise InputError(source.path / "config.json", wrong, "copy or download it again")
    renamed = renamed_tensors(loaded, stored)
    fp32_names = (fp32_tensors(skeleton, weights.names(), renamed, dtype) for dtype in (torch.bfloat16, torch.float16))
    in_bf16, in_fp16 = fp32_names
    source = replace(source, renamed=renamed, fp32=in_bf16, fp32_in_files=in_bf16 | in_fp16)
    _check_types(source, loaded)
    behind = Conversions(loaded).numbered_behind_others()
    blocks = tuple(f"{experts.rpartition('.')[0]}." for experts in experts_of(loaded) if experts not in behind)
    gemms = [name for name in gemm_modules(loaded) if name.startswith(blocks)]
    check_one_pattern({name: source.stored(f"{name}.weight").removesuffix(".weight") for name in gemms}, source.name)
    return source


def _joined_gemms(model: PreTrainedModel, weights: Weights) -> dict[str, JoinedTensors]:
    """The weights of GEMMs of `model` whose rows are several matrices of one type in the files, by the name of each."""
    conversions = Conversions(model, dense=True)
    gemms = {f"{name}.weight" for name in gemm_modules(model)}

    def fits(row: JoinedTensors) -> bool:
        shapes = [weights.shape(tensor) for tensor in row.tensors]
        kinds = {(weights.dtype(tensor), *shape[1:]) for tensor, shape in zip(row.tensors, shapes, strict=True)}
        return row.axis == 0 and len(kinds) == 1 and len(shapes[0]) == 2

    merged = conversions.merged(weights.names())
    return {conversions.original(name): row for name, row in merged.items() if name in gemms and fits(row)}


def _check_types(source: Source, model: PreTrainedModel) -> None:
    """Raise InputError for a parameter of `model` that is stored as no float: transformers would cast it."""
    weights = source.weights()
    names = set(weights.names())
    for name, _ in model.named_parameters():
        under = source.stored(name)
        if under in names and weights.dtype(under) not in FLOAT_TYPES:
            raise InputError(
                source.name,
                f"{under} is stored as {weights.dtype(under)}, and weights are of {', '.join(FLOAT_TYPES)}",
                "copy or download the checkpoint again",
            )


def _load(
    source: Source,
    skeleton: PreTrainedModel,
    tensors: Mapping[str, torch.Tensor | UnreadTensor],
    dtype: torch.dtype,
    device: str,
) -> PreTrainedModel:
    """Load `tensors` into a model like `skeleton`, which is on the meta device.

    Raises InputError for tensors that are missing, unknown, or of another shape. Tied weights count as one.
    """

    def refusal(error: BaseException) -> InputError:
        return InputError(
            source.name,
            f"does not load as {source.architecture}: {error_text(error)}",
            "copy or download the checkpoint again",
        )

    with foreign(refusal, torch.OutOfMemoryError), quiet_transformers():
        model, misfits = load_tensors(skeleton, source.config, tensors, dtype, device)
    if misfits:
        more = f" (and {len(misfits) - 1} more do not fit)" if len(misfits) > 1 else ""
        raise InputError(
            source.name,
            f"the weights are not those of this {source.architecture}: {misfits[0]}{more}",
            "copy or download the checkpoint again",
        )
    return model
