"""The FP8 model as a torch module: the reference that every other runtime is compared with.

It is built from the checkpoint's files, the same bytes that transformers, vLLM and the ONNX graph read, and not from
scales in memory. So it tests the files too.

The FP8 KV cache is quantized when it is written. Keys are quantized after the rotary embedding, where the cache is
written. Attention reads code × scale, for the tokens of the present step too, since later steps read nothing else. Keys
and values of a layer have one scale each, [1], or one for each head, [heads, 1, 1]. A part without a scale is not
quantized: FP8 values alone cost next to nothing, FP8 keys may cost more (docs/kv-cache.md).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ...calibrate.checkpoint.adapter import open_adapter
from ...calibrate.checkpoint.weights import TensorPart
from ...calibrate.input.untrusted import error_text, foreign
from ...calibrate.model.adapter_addition import attach_adapter
from ...calibrate.model.bf16_gemms import compute_gemms_in_fp32
from ...calibrate.model.caches import new_cache
from ...calibrate.model.expert_modules import Experts
from ...calibrate.model.expert_names import Conversions, views
from ...calibrate.model.gemms import attention_modules, output_channel_axis
from ...calibrate.model.load import decoder_lists, load_beside_layers, renamed_in
from ...calibrate.model.skeleton import skeleton
from ...core.errors import InputError
from ...core.files import RESTORE, reading
from ...options import BLOCK, ONE, Accumulator
from ..codes.encoding import RUN_TIME_SCALES, code_values
from ..reading.run_checkpoint import ADAPTERS, ATTENTION_SCALES, FP8Q_CONFIG, tensor_files, with_cache_scales
from ..scales.scheme import bf16_caches_in, forms_in
from .attention import attend_in_codes, sum_values_in
from .linear import BlockLinear, CallPositions, FP8Linear, Mode, Tail, replace_linears

#: What a run's checkpoint is to whoever reads it.
RUN_CHECKPOINT = "the checkpoint that `fp8q calibrate` writes"
#: Tells by its name whether a module is in a part of a model.
Part = Callable[[str], bool]


def every_module(name: str) -> bool:
    """Take the whole model."""
    return True


def round_to_codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantize x to E4M3 under `scale` and dequantize it in FP32, to x's type and shape.

    `x` [batch, heads, seq, head_size]; `scale` float32 [1] or [heads, 1, 1], on x's device.
    """
    return code_values(x, scale).mul_(scale).to(x.dtype)


class FP8Layer(DynamicLayer):
    """One layer of the cache, holding dequantized codes."""

    def __init__(self, key_scale: torch.Tensor | None, value_scale: torch.Tensor | None):
        """Take the scales of keys and values (real value = code × scale); None leaves that part unquantized."""
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        self.scales = (key_scale, value_scale)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize and append keys and values [batch, heads, seq, head_size]; return the whole cache."""
        new_keys, new_values = (
            x if scale is None else round_to_codes(x, scale)
            for x, scale in zip((key_states, value_states), self.scales, strict=True)
        )
        keys, values = super().update(new_keys, new_values, *args, **kwargs)
        return keys, values


def fp8_cache(scales: Mapping[str, torch.Tensor], model: PreTrainedModel) -> DynamicCache:
    """Make an empty cache whose layers with attention hold codes, by the `scales` of `<module>.k` and `<module>.v`."""
    modules = attention_modules(model)
    return new_cache(
        model, {n: FP8Layer(scales.get(f"{name}.k"), scales.get(f"{name}.v")) for n, name in modules.items()}
    )


@dataclass(frozen=True)
class Reference:
    """The FP8 model, the scales of its FP8 caches (`<module>.k`, `<module>.v`), and the call that it computes."""

    model: PreTrainedModel
    cache_scales: dict[str, torch.Tensor]
    call: CallPositions

    def new_cache(self) -> DynamicCache:
        """An empty KV cache in the type that the model is served with."""
        if self.cache_scales:
            return fp8_cache(self.cache_scales, self.model)
        return new_cache(self.model)

    @property
    def tail(self) -> int:
        """The longest tail of a layer; 0 where none has one."""
        layers = (layer for layer in self.model.modules() if isinstance(layer, FP8Linear))
        return max((layer.tail.length for layer in layers if layer.tail), default=0)

    @contextmanager
    def answering(self, positions: int) -> Iterator[None]:
        """In this block the last `positions` of every call stand for decoded tokens (`CallPositions`)."""
        self.call.decoded = positions
        try:
            yield
        finally:
            self.call.decoded = 0

    def take_first_terms(self) -> None:
        """Take one code for each activation from now on, as servers do that know no second ones."""
        for layer in self.model.modules():
            if isinstance(layer, FP8Linear):
                layer.terms = min(layer.terms, 1)
                layer.tail = None

    def leave_inputs(self) -> None:
        """Leave the inputs of layers in BF16 from now on, as servers do that multiply the weights' codes alone."""
        for layer in self.model.modules():
            if isinstance(layer, FP8Linear) and not isinstance(layer, BlockLinear):
                layer.terms = 0
                layer.tail = None
                layer.run_time_scales = None

    def sum_in(self, accumulator: Accumulator) -> None:
        """Sum products of codes as `accumulator` has it from now on: those of all layers that compute in the mode
        `exact`, and those of probabilities and values where attention is on codes.
        """
        for name, layer in self.model.named_modules():
            if isinstance(layer, BlockLinear):
                raise InputError(
                    f"--accumulator {accumulator}",
                    f"{name} has scales for blocks, whose sums are added in FP32 outside the tensor cores",
                    "leave it out",
                )
            if isinstance(layer, FP8Linear):
                layer.accumulator = accumulator
        sum_values_in(self.model, accumulator)

    def layer(self, module: str) -> FP8Linear:
        """The FP8 layer `module`.

        Raises InputError where the checkpoint has no codes of it, although scales.json has: one of the two was changed.
        """
        layer = dict(self.model.named_modules()).get(module)
        if not isinstance(layer, FP8Linear):
            raise InputError(module, "is in FP8 by scales.json, and the checkpoint has no codes of it", RESTORE)
        return layer


class StoredCodes:
    """The FP8 layers of a checkpoint that fp8q wrote, read one at a time."""

    def __init__(self, directory: Path, config: PreTrainedConfig, model: PreTrainedModel, mode: Mode, device: str):
        """Open the checkpoint in `directory`, whose `config` makes `model`; layers compute on `device` in `mode`."""
        self.model = model
        self.config = config
        self.mode = mode
        self.device = device
        fields = getattr(config, FP8Q_CONFIG, {})
        self.forms = forms_in(fields)
        self.bf16_cache = frozenset(bf16_caches_in(fields))
        self.call = CallPositions()
        files = tensor_files(directory)
        self._shards = {file: safe_open(directory / file, "pt") for file in set(files.values())}
        stored = {name: tuple(self._shards[file].get_slice(name).get_shape()) for name, file in files.items()}
        stacks = views(model, stored) if any(len(shape) == 3 for shape in stored.values()) else {}
        self._parts = stacks or {name: TensorPart(name) for name in files}
        self.where = {name: files[part.tensor] for name, part in self._parts.items()}
        shapes = {name: part.shape(stored[part.tensor]) for name, part in self._parts.items()}
        self._renamed = with_cache_scales(renamed_in(config, shapes), self.where)
        self._model_names = {under: name for name, under in self._renamed.items()}

    @property
    def modules(self) -> list[str]:
        """The names of the GEMMs whose weights are codes."""
        return [
            self._model_names.get(name, name).removesuffix(".weight_scale")
            for name in self.where
            if name.endswith(".weight_scale")
        ]

    @property
    def cache_scales(self) -> dict[str, torch.Tensor]:
        """The scales of the FP8 caches, float32 [1] or [heads, 1, 1] each, by `<module>.k` and `<module>.v`, without
        the layers that stay in BF16.
        """
        names = [self._model_names.get(name, name) for name in self.where if name.endswith((".k_scale", ".v_scale"))]
        return {
            name.removesuffix("_scale"): torch.atleast_1d(self.read(name))
            for name in names
            if name.rpartition(".")[0] not in self.bf16_cache
        }

    def has(self, name: str) -> bool:
        """Tell whether the checkpoint has the tensor that the model calls `name`."""
        return self._renamed.get(name, name) in self.where

    def read(self, name: str) -> torch.Tensor:
        """Read the tensor that the model calls `name`, onto the device."""
        under = self._renamed.get(name, name)
        part = self._parts[under]
        return part.cut(self._shards[self.where[under]].get_tensor(part.tensor)).to(self.device)

    def converted(self, names: Sequence[str], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Those of the model's tensors `names` that transformers makes of stored ones, on the device: several in a row
        as `dtype`, others of the layers as the model has them.
        """
        conversions = Conversions(self.model, dense=True)
        merged = conversions.merged(self.where)
        rows = {name: merged[name].joined(self.read).to(dtype) for name in names if name in merged}
        lists = tuple(f"{name}." for name in decoder_lists(self.model))
        others = [name for name in names if name not in rows and name.startswith(lists)]
        converted = conversions.converted(self.where) if others else {}
        types = {name: self.model.get_parameter(name).dtype for name in others if name in converted}
        return rows | {name: converted[name].computed(self.read).to(kind) for name, kind in types.items()}

    def beside_layers(self, names: Sequence[str], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Those of the model's tensors `names` that transformers makes of others beside the decoder layers, as `dtype`:
        the queries, keys and values of a vision tower that are stored as one.
        """
        lists = tuple(f"{name}." for name in decoder_lists(self.model))
        conversions = Conversions(self.model, dense=True)
        outside = [name for name in self.where if not conversions.model_name(name)[0].startswith(lists)]
        made = load_beside_layers(
            self.config, type(self.model), {name: self.read(name).cpu() for name in outside}, dtype
        )
        return {name: made[name].to(self.device) for name in names if name in made}

    def weight(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the codes float8_e4m3fn [out, in] of the GEMM `module` and the scales float32 [out] of its output
        channels, which are equal where the files have one for all.
        """
        axis = output_channel_axis(self.model.get_submodule(module))
        codes = self.read(f"{module}.weight").movedim(axis, 0).contiguous()
        scale = self.read(f"{module}.weight_scale")
        return codes, scale.flatten().expand(len(codes)).contiguous()

    def layer(self, module: str) -> FP8Linear:
        """Make the FP8 layer for the GEMM `module`."""
        form = self.forms.get(module, ONE)
        if form == BLOCK:
            return self.block_layer(module)
        codes, scale = self.weight(module)
        bias = self.read(f"{module}.bias") if self.has(f"{module}.bias") else None
        input_scale = self.read(f"{module}.input_scale").reshape(()) if form.static else None
        layer = FP8Linear(codes, scale, input_scale, bias, self.mode, form.terms or 1)
        layer.run_time_scales = RUN_TIME_SCALES.get(form.kind)
        if form.tail is not None:
            layer.tail = Tail(form.tail, self.call, experts_around(self.model, module))
        return layer

    def block_layer(self, module: str) -> BlockLinear:
        """Make the layer of the GEMM `module`, whose weight has a scale for each block."""
        bias = self.read(f"{module}.bias") if self.has(f"{module}.bias") else None
        return BlockLinear(self.read(f"{module}.weight"), self.read(f"{module}.weight_scale"), bias, self.mode)


def experts_around(model: torch.nn.Module, module: str) -> Experts | None:
    """The experts of `model` of which `module` is a layer; None for other layers."""
    parents = (model.get_submodule(module.rsplit(".", parts)[0]) for parts in (1, 2) if module.count(".") >= parts)
    return next((parent for parent in parents if isinstance(parent, Experts)), None)


def written_config(directory: Path) -> PreTrainedConfig:
    """Read config.json of a checkpoint that fp8q wrote; raises InputError where transformers refuses it."""

    def refusal(error: BaseException) -> InputError:
        return InputError(directory, f"does not read as {RUN_CHECKPOINT} ({error_text(error)})", RESTORE)

    with foreign(refusal):
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
    return config


def open_codes(directory: Path, mode: Mode, dtype: torch.dtype, device: str = "cpu") -> StoredCodes:
    """Open the FP8 layers of the checkpoint in `directory`, with a model in `dtype` that has no weights yet.

    Raises InputError for files that are damaged.
    """
    with reading(directory, RUN_CHECKPOINT):
        config = written_config(directory)
        del config.quantization_config
        return StoredCodes(directory, config, skeleton(config, dtype), mode, device)


def load_reference(
    directory: Path, mode: Mode, dtype: torch.dtype, device: str = "cpu", adapter: str | Path | None = None,
    part: Part = every_module,
) -> Reference:  # fmt: skip
    """Load the checkpoint in `directory` as a torch module, with an `adapter` on: that of a name, or in a directory of
    its own.

    FP8 GEMMs compute in `mode` (see `linear`), all else in `dtype`, or in FP32 where transformers keeps it so. `part`:
    the names of the modules that get their weights; the others have none.
    Raises InputError for files that are damaged.
    """
    with reading(directory, RUN_CHECKPOINT):
        codes = open_codes(directory, mode, dtype, device)
        model = codes.model
        replace_linears(model, {module: codes.layer(module) for module in codes.modules if part(module)})
        stored = {
            name: codes.read(name).to(held.dtype)
            for name, held in model.state_dict().items()
            if part(name.rpartition(".")[0]) and codes.has(name)
        }
        model.load_state_dict(stored, strict=False, assign=True)
        model.tie_weights()
        for make in (codes.converted, codes.beside_layers):
            if unset := unset_parameters(model, part):
                model.load_state_dict(make(unset, dtype), strict=False, assign=True)
        if unset := unset_parameters(model, part):
            raise InputError(directory, f"holds no {unset[0]}, which {type(model).__name__} has", RESTORE)
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        compute_gemms_in_fp32(model, dtype, device)
        model.register_forward_pre_hook(partial(begin_call, codes.call), with_kwargs=True)
        if (directory / ATTENTION_SCALES).is_file():
            attend_in_codes(model, directory / ATTENTION_SCALES, device)
        if adapter is not None:
            where = directory / ADAPTERS / adapter if isinstance(adapter, str) else adapter
            attach_adapter(model, open_adapter(where), dtype, device)
        return Reference(model, codes.cache_scales, codes.call)


def unset_parameters(model: torch.nn.Module, part: Part = every_module) -> list[str]:
    """The names of the parameters of `model`, in the modules of `part`, that have no values yet."""
    return [name for name, parameter in model.named_parameters() if parameter.is_meta and part(name.rpartition(".")[0])]


def begin_call(call: CallPositions, model: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Note the positions of the call of a model that begins."""
    tokens = next(iter(arguments), None)
    for name in ("input_ids", "inputs_embeds"):
        tokens = named.get(name) if tokens is None else tokens
    assert tokens is not None, "a model is called with tokens or their embeddings"
    call.positions = tokens.shape[1]
