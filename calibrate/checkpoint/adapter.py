"""Read a PEFT LoRA adapter from the files that PEFT's `save_pretrained` writes, without PEFT.

A GEMM y = W x becomes y + s · B(A x), with A [rank, in], B [out, rank] and s = alpha / rank, or alpha / √rank with
`use_rslora`; `rank_pattern` and `alpha_pattern` set the values of single modules, matched as PEFT matches them. Other
kinds of adapters change the model in other ways and are refused by name, and so are unknown fields: an adapter without
one of its parts is another adapter, and nothing would show it.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, Field, PositiveInt, PrivateAttr, ValidationError

from ...core.errors import InputError
from ...core.files import plain_text, sha256_file
from ...core.headers import StoredTensor
from ..input.patterns import BoundedPattern, PatternFile
from ..input.untrusted import exists, local_path, read_json
from .weights import ADAPTER, PICKLED, read_headers

if TYPE_CHECKING:
    import torch

#: PEFT's file of an adapter's tensors, what their names begin with, and how those of a module end.
TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDS = (".lora_A.weight", ".lora_B.weight")
#: How the name of a whole weight ends, and what PEFT puts before the end where the module has an A and a B.
WEIGHT = ".weight"
UNDER = ".base_layer"
#: The supported types of tensors.
TYPES = ("F32", "F16", "BF16")
#: The supported initializations of an adapter; others change the base's weights too, also when they are loaded.
BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal", "mica")
#: Keys of adapter_config.json that say how it was trained, or where: nothing of them is in the sum.
#: `fan_in_fan_out` says how the base stores its weights, which the base itself says.
OF_TRAINING = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules", "task_type",
}  # fmt: skip
#: Keys that make it another sum, and what they ask for.
REFUSED = {
    "use_dora": "DoRA (use_dora), which divides by the norms of the merged weights' rows",
    "lora_bias": "a bias of B (lora_bias)",
    "modules_to_save": "whole modules of its own (modules_to_save)",
    "trainable_token_indices": "embeddings of single tokens (trainable_token_indices)",
    "target_parameters": "parameters that are no module's weight (target_parameters)",
    "layer_replication": "layers of the base taken several times (layer_replication)",
    "alora_invocation_tokens": "an activation by tokens (alora_invocation_tokens)",
    "use_qalora": "pooled inputs (use_qalora)",
    "use_bdlora": "block-diagonal matrices (use_bdlora)",
}
#: The remedy for refused adapters.
MERGE_YOURSELF = "merge it with PEFT's merge_and_unload, save the result with save_pretrained, and give that"
Value = TypeVar("Value")
Rank = Annotated[int, Field(ge=1, le=1 << 20)]
Alpha = Annotated[float, Field(allow_inf_nan=False)]


class LoraConfig(BaseModel):
    """The fields that fp8q reads of adapter_config.json."""

    r: Rank
    lora_alpha: Alpha
    peft_type: str = "LORA"
    bias: str = "none"
    init_lora_weights: bool | str = True
    use_rslora: bool = False
    rank_pattern: dict[str, PositiveInt] = {}
    alpha_pattern: dict[str, Alpha] = {}
    base_model_name_or_path: str | None = None
    _file: PatternFile = PrivateAttr(default_factory=lambda: PatternFile(Path(ADAPTER)))

    def read_from(self, file: Path) -> "LoraConfig":
        """Name the file that this was read from, for errors of its patterns."""
        self._file = PatternFile(file)
        return self

    @cached_property
    def _ranks(self) -> list[tuple[BoundedPattern, int]]:
        return self._compiled(self.rank_pattern)

    @cached_property
    def _alphas(self) -> list[tuple[BoundedPattern, float]]:
        return self._compiled(self.alpha_pattern)

    def _compiled(self, values: Mapping[str, Value]) -> list[tuple[BoundedPattern, Value]]:
        return [(BoundedPattern(key, self._file, r"(.*\.)?(", ")$"), value) for key, value in values.items()]

    def rank(self, module: str) -> int:
        """The rank of `module`; raises InputError where a pattern may take forever."""
        return first_match(self._ranks, module, self.r)

    def scale(self, module: str) -> float:
        """The factor s of `module`; raises InputError as `rank` does."""
        rank = self.rank(module)
        return first_match(self._alphas, module, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def first_match(patterns: Sequence[tuple[BoundedPattern, Value]], module: str, default: Value) -> Value:
    """Return the value of the first of `patterns` that matches the end of the name `module`, as PEFT matches them."""
    return next((value for pattern, value in patterns if pattern.matches(module)), default)


@dataclass(frozen=True)
class LoraPart:
    """The matrices that an adapter adds at one module: the names of A and B in its file, its rank, and s."""

    a: str
    b: str
    rank: int
    scale: float


@dataclass(frozen=True)
class Adapter:
    """A checked adapter; `parts` by module. `name`: the last part of its path.

    `copies`: module -> its whole weight in the file, which the base has too: PEFT saves those of embedding and output
    head.
    """

    path: Path
    name: str
    config: LoraConfig
    parts: Mapping[str, LoraPart]
    headers: Mapping[str, StoredTensor]
    fingerprint: str
    copies: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> tuple[Path, Path]:
        """The two files of the adapter."""
        return self.path / ADAPTER, self.path / TENSORS

    @property
    def patterned(self) -> bool:
        """Tell whether single modules have ranks or alphas of their own."""
        return bool(self.config.rank_pattern or self.config.alpha_pattern)

    def read(self, module: str) -> "tuple[torch.Tensor, torch.Tensor]":
        """Read A [rank, in] and B [out, rank] of `module`, in their stored type."""
        return self.tensor(self.parts[module].a), self.tensor(self.parts[module].b)

    def tensor(self, name: str) -> "torch.Tensor":
        """Read the tensor `name` of the adapter's file."""
        from safetensors import safe_open

        with safe_open(self.path / TENSORS, framework="pt") as opened:
            values: torch.Tensor = opened.get_tensor(name)
        return values

    def added(self, module: str) -> "torch.Tensor":
        """Compute s · B A of `module`, float32 [out, in]."""
        a, b = self.read(module)
        delta: torch.Tensor = self.parts[module].scale * (b.float() @ a.float())
        return delta


def open_adapter(directory: str | Path) -> Adapter:
    """Read the adapter in `directory`.

    Raises InputError, naming the fault, for a path without an adapter, for another kind than plain LoRA, and for
    tensors that do not belong to it, are missing, are pickled, or hold NaN or Inf.
    """
    path = local_path(directory)
    if not path.is_dir():
        what = "is no directory" if path.exists() else "there is no such directory"
        raise InputError(f"--adapter {directory}", what, "give the one that PEFT's save_pretrained wrote")
    config = read_lora(path)
    if not exists(path / TENSORS):
        pickled = next((file.name for file in sorted(path.iterdir()) if file.suffix in PICKLED), None)
        pickled_note = f" but {pickled}, which can run code when read" if pickled else ""
        raise InputError(
            f"--adapter {directory}",
            f"has no {TENSORS}{pickled_note}",
            "load it with PEFT where you trust it, and save_pretrained",
        )
    headers = read_headers((path / TENSORS,))
    copies = _copies(headers)
    parts = _parts(path, config, {name: headers[name] for name in headers if name not in copies.values()})
    adapter = Adapter(path, path.resolve().name, config, parts, headers, _fingerprint(path), copies)
    _check_values(adapter)
    return adapter


def read_lora(path: Path) -> LoraConfig:
    """Read adapter_config.json in the directory `path`; raises InputError as `open_adapter` does."""
    file = path / ADAPTER
    if not exists(file):
        raise InputError(
            f"--adapter {path}", f"has no {ADAPTER}", "give the directory that PEFT's save_pretrained wrote"
        )
    raw = read_json(file)
    if not isinstance(raw, dict):
        raise InputError(file, "is no JSON object", "copy or download it again")
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise InputError(file, f"peft_type is {kind}, and LORA alone is read", MERGE_YOURSELF)
    try:
        config = LoraConfig.model_validate(raw).read_from(file)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(file, f"{place} {one_line_of(first)}", "copy or download it again") from None
    _refuse_kinds(file, raw, config)
    return config


def one_line_of(error: Mapping[str, Any]) -> str:
    """Say in one line what a value must be, and what it is."""
    return f"{plain_text(error)}, not {str(error['input'])[:60]!r}"


def _refuse_kinds(file: Path, raw: Mapping[str, Any], config: LoraConfig) -> None:
    """Raise InputError for options that change the sum y + s · B(A x)."""
    for key, value in raw.items():
        if key in OF_TRAINING or key in LoraConfig.model_fields or not value:
            continue
        what = REFUSED.get(key, f"{key}, which is not known here")
        raise InputError(file, f"asks for {what}, and plain LoRA alone is read", MERGE_YOURSELF)
    if config.bias != "none":
        raise InputError(
            file, f"asks for biases of its own (bias is {config.bias!r}), and plain LoRA alone is read", MERGE_YOURSELF
        )
    if config.init_lora_weights not in BEGINNINGS:
        raise InputError(
            file,
            f"was begun from the base's weights (init_lora_weights is {config.init_lora_weights!r}), which changes "
            "them too",
            f"convert it with PEFT's path_initial_model_for_weight_conversion, or {MERGE_YOURSELF}",
        )


def _copies(headers: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Map modules to their whole weights among the adapter's tensors."""
    full_weights = [
        name for name in headers if name.startswith(PREFIX) and name.endswith(WEIGHT) and "lora_" not in name
    ]
    return {name.removeprefix(PREFIX).removesuffix(WEIGHT).removesuffix(UNDER): name for name in full_weights}


def _parts(path: Path, config: LoraConfig, headers: Mapping[str, StoredTensor]) -> dict[str, LoraPart]:
    """Find the modules of the adapter's tensors; raise InputError for other tensors, and for an A without its B."""
    file = path / TENSORS
    for name, header in headers.items():
        if not (name.startswith(PREFIX) and name.endswith(ENDS)):
            what = "an embedding's" if "lora_embedding" in name else "none of a linear layer's A and B"
            raise InputError(file, f"{name} is {what}, and plain LoRA alone is read", MERGE_YOURSELF)
        if header.dtype not in TYPES or len(header.shape) != 2:
            raise InputError(
                file,
                f"{name} is {header.dtype} {list(header.shape)}, and what is read are matrices in {', '.join(TYPES)}",
                "save the adapter again",
            )
    modules = dict.fromkeys(name.removeprefix(PREFIX).rsplit(".", 2)[0] for name in headers)
    if not modules:
        raise InputError(file, "holds no tensor", "save the adapter again")
    return {module: _part(file, config, headers, module) for module in modules}


def _part(file: Path, config: LoraConfig, headers: Mapping[str, StoredTensor], module: str) -> LoraPart:
    a, b = (f"{PREFIX}{module}{end}" for end in ENDS)
    if missing := next((name for name in (a, b) if name not in headers), None):
        raise InputError(file, f"has no {missing}, whose other half is there", "copy or download it again")
    rank = config.rank(module)
    ranks = (headers[a].shape[0], headers[b].shape[1])
    if ranks != (rank, rank):
        raise InputError(
            file,
            f"{module} has A {list(headers[a].shape)} and B {list(headers[b].shape)}, and {ADAPTER} gives it the rank "
            f"{rank}",
            "copy or download both files again",
        )
    return LoraPart(a, b, rank, config.scale(module))


def _check_values(adapter: Adapter) -> None:
    """Raise InputError for NaN or Inf, and for values that become Inf in BF16."""
    import torch

    for module, part in adapter.parts.items():
        for name, tensor in zip((part.a, part.b), adapter.read(module), strict=True):
            bad = int((~torch.isfinite(tensor.to(torch.bfloat16))).sum())
            if bad:
                raise InputError(
                    adapter.path / TENSORS,
                    f"{name} holds {bad:,} values of {tensor.numel():,} that are not finite in BF16",
                    "take an earlier checkpoint of its training",
                )


def _fingerprint(path: Path) -> str:
    """SHA-256, in hexadecimal, over both files."""
    digests = (sha256_file(path / name) for name in (ADAPTER, TENSORS))
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def check_names(adapters: Iterable[Adapter]) -> None:
    """Raise InputError for a name that no graph's file can have, and for two adapters of one name."""
    seen: dict[str, Adapter] = {}
    for adapter in adapters:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", adapter.name) or adapter.name.endswith("fp32"):
            raise InputError(
                f"--adapter {adapter.path}",
                f"its graph is called after the directory, and {adapter.name!r} is no name for one",
                "rename it, with up to 100 letters, digits, '.', '_' and '-', and no fp32 at its end",
            )
        if (other := seen.setdefault(adapter.name, adapter)) is not adapter:
            raise InputError(
                f"--adapter {adapter.path}",
                f"is called {adapter.name}, as {other.path} is",
                "rename one of the directories",
            )
