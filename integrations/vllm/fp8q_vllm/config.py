"""How vLLM loads a checkpoint of fp8q: as compressed-tensors, but for the GEMMs of modules in two terms.

config.json says `quant_method: compressed-tensors`, so that everything loads it without this plugin. vLLM asks custom
formats first whether a checkpoint is theirs; `Config` answers for those whose `fp8q` has modules in two terms.

A module that is listed and gets no GEMM of ours would run in one term, so that is an error: while layers are made
where vLLM multiplies it in another way, and once they are loaded where none has its name. A process may have a part of
the layers (pipeline stages, drafts), so names are expected of those numbers that it has quantized layers of.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.model_executor.layers.quantization.utils.w8a8_utils import cutlass_fp8_supported
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper

from . import gemm
from .rows import FREE_ROWS, keep_starts

NAME = "fp8q"
#: The fields of `fp8q` in config.json that this version obeys, or need not: names in files, positions of graphs, and
#: layers whose cache stays in BF16, which vLLM is told with `--kv-cache-dtype-skip-layers`.
KNOWN = {
    "two_terms", "tails", "dynamic_inputs", "block_inputs", "bf16_inputs", "stored", "positions", "wide_cache",
}  # fmt: skip
#: Layers whose rows are not the batch's, so that no tail can be found among them: latent attention expands cached
#: positions and parts of a batch, and the output head gets the positions that are sampled from.
OTHER_ROWS = ("kv_b_proj", "lm_head")
#: What vLLM puts before the names of a model that drafts for another.
DRAFT = "draft_model."

log = logging.getLogger("vllm.fp8q")
#: The type for which this process lacks vLLM's GEMM of codes, once it was warned of.
ONE_CODE_MISSING: list[str] = []


class TwoTerms(CompressedTensorsW8A8Fp8):
    """The GEMM of one layer whose input has two terms, or a tail of them.

    Rows that have two terms in the checkpoint are exact here (`terms`); `quantize` gives the codes of the others, and
    is None where there are none.
    """

    def __init__(self, like: CompressedTensorsW8A8Fp8, tail: int):
        """Take the place of the scheme `like`; `tail`: 0 for two terms throughout."""
        super().__init__(like.weight_quant, like.is_static_input_scheme)
        self.tail = tail
        self.quantize = None
        if tail and multiplies_one_code():
            self.quantize = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR)
        captured = get_current_vllm_config().compilation_config.max_cudagraph_capture_size
        self.free_rows = max(FREE_ROWS, captured or 0)

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Create what compressed-tensors creates; the input comes as it is, not as codes of a fused norm."""
        layer.requires_unquantized_input = True
        super().create_weights(layer, *args, **kwargs)
        del self.fp8_linear  # it may lay out weights for a kernel that is not used

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check what was loaded, and make the constant that the GEMM would make in each call."""
        super().process_weights_after_loading(layer)
        set_one(layer, layer.input_scale.device)
        mantissa, _ = torch.frexp(layer.input_scale.float())
        if float(mantissa) != 0.5:  # a power of two
            raise ValueError(
                f"{NAME}: an input in two terms has the scale {float(layer.input_scale)}, which is no power of two; "
                "the checkpoint is damaged: write it again with `fp8q scales RUN`"
            )

    def apply_weights(self, layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [..., in] to [..., out] in its type, or in the model's where latent attention has cast `x` to FP8."""
        x = x if x.dtype.itemsize > 1 else x.to(layer.orig_dtype)
        codes = None
        if self.quantize is not None:
            codes, _ = self.quantize(x.flatten(0, -2), layer.input_scale)
        y: torch.Tensor = torch.ops.vllm.fp8q_linear(
            x, codes, layer.weight.t(), layer.weight_scale, layer.input_scale, bias, layer.one, self.tail,
            self.free_rows,
        )  # fmt: skip
        return y


def multiplies_one_code() -> bool:
    """Tell whether vLLM's GEMM of FP8 codes answers in the model's type on this device; on a CPU the plugin does."""
    if not torch.cuda.is_available():
        return True
    if torch.get_default_dtype().itemsize == 2 and cutlass_fp8_supported():
        return True
    if not ONE_CODE_MISSING:
        ONE_CODE_MISSING.append(str(torch.get_default_dtype()))
        log.warning(
            "vLLM has no GEMM of FP8 codes to %s on this GPU, so all rows are exact, not the tails of prompts alone: "
            "prompts take the time of 16 bits",
            ONE_CODE_MISSING[0],
        )
    return False


def set_one(layer: Any, device: torch.device) -> None:
    """Let `layer` have the constant 1 that its GEMM reads, as a buffer: sleep at level 2 saves buffers alone, and a
    reload copies into parameters and buffers alone, at the addresses that captured graphs read.

    It is not persistent, since no checkpoint has it.
    """
    one = torch.ones((), dtype=torch.float32, device=device)
    before = layer._buffers.get("one")
    if before is not None and before.device == device:
        before.copy_(one)
    else:
        layer.register_buffer("one", one, persistent=False)


class Config(CompressedTensorsConfig):
    """The format of a checkpoint with modules in two terms."""

    #: Module -> its tail; 0: two terms throughout. By its names in transformers and in files, and then by vLLM's.
    tails: dict[str, int]
    #: The names that `tails` has -> the module's name in transformers.
    modules: dict[str, str]
    #: Modules that have a layer in this process, and the numbers of its decoder layers in FP8; None: a layer of none.
    taken: set[str]
    numbers: set[int | None]
    #: Whether layers were counted, once all are made.
    counted = False

    def get_name(self) -> str:
        """The name of the format."""
        return NAME

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Answer for checkpoints with modules in two terms, unless the user asks for another format."""
        ours = user_quant in (None, NAME) and hf_quant_cfg.get("quant_method") == "compressed-tensors"
        if ours and fp8q_fields(hf_config).get("two_terms"):
            return NAME
        return None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read which modules have two terms.

        Raises ValueError for a checkpoint of a later form, and for an edited one whose fields are of other types.
        """
        fields = fp8q_fields(hf_config)
        if unknown := sorted(fields.keys() - KNOWN):
            raise ValueError(
                f"{model_name}: config.json has fp8q.{unknown[0]}, which this fp8q-vllm does not know; install the "
                "version that came with the fp8q that wrote it"
            )
        if field := next(misshapen(fields), None):
            raise ValueError(
                f"{model_name}: config.json has fp8q.{field} of another type than fp8q writes; write the checkpoint "
                "again with `fp8q scales RUN`"
            )
        tails = dict.fromkeys(fields.get("two_terms", ()), 0) | fields.get("tails", {})
        stored = {in_files(name, fields.get("stored", {})): name for name in tails}
        self.modules = {name: name for name in tails} | stored
        self.tails = {name: tails[module] for name, module in self.modules.items()}
        self.taken = set()
        self.numbers = set()

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Give modules vLLM's names."""
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        mapped = {old: new for old in self.tails if (new := hf_to_vllm_mapper._map_name(old))}
        self.tails = {new: self.tails[old] for old, new in mapped.items()}
        self.modules = {new: self.modules[old] for old, new in mapped.items()}

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of compressed-tensors, with our GEMM where the layer's input has two terms.

        Raises ValueError for a layer of which a part has two terms, for experts in two terms, and for a layer in two
        terms that vLLM multiplies in another form than FP8 codes by FP8 codes.
        """
        if isinstance(layer, RoutedExperts) and (experts := self._of_experts(prefix)):
            raise ValueError(
                f"{experts}: experts in two terms are not computed by vLLM; give them one term with `fp8q scales RUN "
                "--activation-terms 1 --tail '*self_attn*'`"
            )
        method = super().get_quant_method(layer, prefix)
        prefix = prefix.removeprefix(DRAFT)
        tail = self._tail_of(prefix)
        scheme = getattr(layer, "scheme", None)
        codes = isinstance(layer, LinearBase | ParallelLMHead) and isinstance(scheme, CompressedTensorsW8A8Fp8)
        if tail is not None and not (codes and getattr(scheme, "is_static_input_scheme", False)):
            by = (
                "no scheme"
                if scheme is None
                else type(scheme).__name__ + (" without the input's scale" if codes else "")
            )
            raise ValueError(
                f"{prefix}: its input has two terms, and this vLLM multiplies it by {by}, not FP8 codes by FP8 codes; "
                "serve it on a GPU of compute capability 8.9 or newer, or without the plugin (VLLM_PLUGINS=none), "
                "which runs what vLLM makes of it"
            )
        if codes:
            self.numbers.add(number_of(prefix))
            method.process_weights_after_loading = self._counting(method.process_weights_after_loading)
        if tail is not None:
            self.taken.update(self.modules[part] for part in parts_of(prefix, self.packed_modules_mapping))
            layer.scheme = TwoTerms(scheme, 0 if prefix.rpartition(".")[2] in OTHER_ROWS else tail)
        return method

    def _counting(self, process: Callable[[Any], None]) -> Callable[[Any], None]:
        """Make `process`, which vLLM calls for each layer once all are made, count the layers first."""

        def counted(layer: Any) -> None:
            if not self.counted:
                self.counted = True
                self.check_all_taken()
            process(layer)

        return counted

    def check_all_taken(self) -> None:
        """Log how many modules have two terms in this process.

        Raises ValueError where a module has no layer, though there are layers of its number.
        """
        due = {module: name for name, module in self.modules.items() if number_of(name) in self.numbers}
        if missing := sorted(due.keys() - self.taken):
            raise ValueError(
                f"{NAME}: {len(missing)} of {len(due)} modules whose inputs have two terms are no layers of this "
                f"vLLM's and would run in one term, the first {missing[0]} ({due[missing[0]]} by vLLM's names); serve "
                "it with a vLLM that was tried, or without the plugin (VLLM_PLUGINS=none), in one term"
            )
        log.info("%d of %d modules in two terms", len(self.taken), len(set(self.modules.values())))

    def _of_experts(self, prefix: str) -> str | None:
        """A module in two terms among the experts `prefix`."""
        return next((name for name in self.tails if name.startswith(f"{prefix}.")), None)

    def _tail_of(self, prefix: str) -> int | None:
        """The tail of the layer `prefix`, all of whose parts must have the same; None: one term."""
        tails = {self.tails.get(part) for part in parts_of(prefix, self.packed_modules_mapping)}
        if len(tails) > 1:
            raise ValueError(
                f"{prefix}: vLLM multiplies {', '.join(parts_of(prefix, self.packed_modules_mapping))} as one, and "
                "they have different forms; write the checkpoint again with `fp8q scales RUN`"
            )
        return tails.pop()


def fp8q_fields(hf_config: Any) -> Mapping[str, Any]:
    """What config.json has under `fp8q`."""
    fields = getattr(hf_config, NAME, None)
    return fields if isinstance(fields, dict) else {}


def misshapen(fields: Mapping[str, Any]) -> Iterator[str]:
    """Name those of `two_terms` (names), `tails` (name -> positions) and `stored` (name -> name) of another type."""
    names = fields.get("two_terms", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        yield "two_terms"
    for field, kind in {"tails": int, "stored": str}.items():
        values = fields.get(field, {})
        if not isinstance(values, dict) or not all(type(value) is kind for value in values.values()):
            yield field


def in_files(name: str, stored: Mapping[str, str]) -> str:
    """The name that the module has in files; `stored`: patterns of both, in which `{}` is a number."""
    for module, file in stored.items():
        if match := re.fullmatch(re.escape(module).replace(r"\{\}", r"(\d+)"), name):
            return filled(file, match.groups())
    return name


def filled(pattern: str, numbers: Iterable[str]) -> str:
    """Put `numbers` in the places of `{}` in a name; those that are left over stay, and name no module."""
    remaining = iter(numbers)
    return re.sub(r"\{\}", lambda _: next(remaining, "{}"), pattern)


def number_of(name: str) -> int | None:
    """The number of a module's decoder layer: the first in its name; None where it has none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def parts_of(prefix: str, fused: Mapping[str, Iterable[str]]) -> list[str]:
    """The modules of the checkpoint that make up the layer `prefix`, `fused` by vLLM's names for the last part."""
    parent, _, last = prefix.rpartition(".")
    return [f"{parent}.{part}" if parent else part for part in fused.get(last, (last,))]


def register_config() -> None:
    """Make the format known to vLLM, and let metadata of attention say where sequences begin.

    Where this vLLM has its builders elsewhere, a batch that says nothing of sequences is warned of when it comes.
    """
    register_quantization_config(NAME)(Config)
    with suppress(ImportError):
        from vllm.v1.attention.backend import AttentionMetadataBuilder

        keep_starts(AttentionMetadataBuilder)


__all__ = ["Config", "gemm", "register_config"]
