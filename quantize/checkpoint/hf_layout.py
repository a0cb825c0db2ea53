"""Decide how an FP8 model is laid out for Hugging Face's loaders, and which parts of it they cannot load.

Parts that they cannot load are written for fp8q and ONNX, so that no loader reads them wrong in silence.

compressed-tensors quantizes linear layers; a Conv1D with FP8 codes would load as a matrix of codes without its scales,
and without an error. It puts the scales of a cache into attention modules, which it knows by the names of their
projections; in other modules these keys would be unexpected. A cache of which only the values are codes it cannot
describe.
"""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from ...calibrate.checkpoint.mtp_layers import mtp_prefixes, vllm_name
from ...calibrate.checkpoint.weights import TensorPart
from ...calibrate.model.classes import auto_class, needed_attention, non_text_modules
from ...calibrate.model.expert_modules import experts_of
from ...calibrate.model.expert_names import Conversions
from ...calibrate.model.gemms import attention_modules, output_channel_axis
from ...calibrate.model.source import Source, meta_model
from ...options import BF16
from ..reading.compressed_tensors import COMPRESSED_TENSORS
from ..reading.quantization_config import FP8Q_FORM, CacheUnit, Codec
from ..reading.run_checkpoint import CACHE_FILE
from ..scales.decisions import Scales
from ..scales.policy import mixed_experts_warning
from .ties import Ties, ties_of

#: The `quantization_config` of a checkpoint that Hugging Face's loaders cannot load: it names no `quant_method`, at
#: which transformers stops with a ValueError.
UNLOADABLE = {
    "format": FP8Q_FORM,
    "reason": (
        "FP8 codes in Conv1D modules, for which compressed-tensors has no form; fp8q and the graphs that it exports "
        "serve this checkpoint, transformers and vLLM cannot"
    ),
}
#: The `quantization_config` of the INT8 weights that FP8 is compared with.
INTEGERS = {
    "format": FP8Q_FORM,
    "reason": (
        "INT8 codes for the ONNX graphs beside them; transformers and vLLM cannot load this, `model/` in the "
        "run is for them"
    ),
}
#: The projections by which compressed-tensors knows an attention module with a cache (`_KV_CACHE_PROJECTION_NAMES`).
PROJECTIONS = ("k_proj", "v_proj", "qkv_proj", "kv_b_proj")
#: The arguments by one of which it knows such a module too.
CACHES = frozenset({"past_key_value", "past_key_values"})


#: The option of `vllm serve` for the layers whose cache stays in the compute type, by index (0.32).
SKIP_LAYERS = "--kv-cache-dtype-skip-layers"

#: Who reads experts that transformers loads from stacks alone, and what helps.
UNREAD_EXPERTS = (
    "transformers reads the experts of {architecture} from tensors that hold all of a layer, and no codes of single "
    "ones; {servers}"
)
#: The architectures of these whose class in vLLM reads such codes (tried with 0.32).
READ_BY_VLLM = frozenset({"GraniteMoeHybridForCausalLM"})
STACKED_EXPERTS = "with `--skip '*.experts.*'` they stay in BF16 in the source's tensors, which loaders read"
#: The same of experts of two modules that files have in one list.
DIVIDED_EXPERTS = (
    "transformers loads no FP8 checkpoint of {architecture}, whatever is quantized: it makes the experts of two "
    "modules of one list, and its quantizers take no such conversion, and no server is known to read this one"
)
CONVERTED_EXPERTS = "`fp8q convert` writes the source's own names, for servers with a class of their own"
#: What vLLM makes of experts whose inputs stay in BF16.
NO_EXPERT_WEIGHTS_ALONE = "vLLM has no GEMM for experts with FP8 weights alone"


@dataclass(frozen=True)
class HfLayout:
    """The content of an FP8 model in the layout of Hugging Face's loaders.

    - `codec`: the form of the files.
    - `image_rows`: the chats with images that the model was measured on.
    - `axes`: quantized module -> the axis of the output channels in its weight.
    - `loadable`: whether transformers and vLLM can load them.
    - `cache`: whether the checkpoint has scales of a cache that they read.
    - `bf16_cache`: layer index -> attention module, of the layers that stay in BF16 where the cache is in FP8.
    - `no_graph`: why no ONNX graph can be made of the model.
    - `auto`: the auto class of transformers that loads them.
    - `attention`: the implementation that transformers must be told to use, where its default computes another result.
    - `non_text`: the modules that text does not reach, of which those in `axes` alone are quantized.
    - `bf16_in_files`: the names in the files of linear layers among these, and of experts in `behind`, which files call
      otherwise than the model does.
    - `positions`: the number of positions that a graph serves, where that is fewer than the model's.
    - `stored`: module -> its name in the files, for modules in a block of experts; vLLM reads those names.
    - `experts`: the GEMMs of experts.
    - `layers`: the modules that each hold the experts of one layer; `unread`: those of them whose experts no loader
      reads one by one; `behind`: those that files number behind the experts of another module.
    - `parts`: tensor -> the part of a stored tensor that it is, where some of these are cut up.
    - `ties`: what is changed of tied tensors.
    - `mtp`: how the names of the tensors of multi-token prediction begin; they are not quantized. `vllm_mtp`: how they
      begin in vLLM, where that differs. `mtp_from_codes`: whether the source has codes of them.
    """

    axes: Mapping[str, Literal[0, 1]]
    loadable: bool
    cache: bool
    no_graph: str | None = None
    auto: str = "AutoModelForCausalLM"
    attention: str | None = None
    non_text: Mapping[str, nn.Module] = field(default_factory=dict)
    bf16_in_files: tuple[str, ...] = ()
    positions: int | None = None
    stored: Mapping[str, str] = field(default_factory=dict)
    experts: frozenset[str] = frozenset()
    layers: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()
    behind: frozenset[str] = frozenset()
    parts: Mapping[str, TensorPart] = field(default_factory=dict)
    bf16_cache: Mapping[int, str] = field(default_factory=dict)
    mtp: tuple[str, ...] = ()
    vllm_mtp: tuple[str, ...] = ()
    mtp_from_codes: bool = False
    ties: Ties = Ties()
    codec: Codec = COMPRESSED_TENSORS
    image_rows: int = 0

    def in_files(self, module: str) -> str:
        """The name of `module` in the files."""
        return self.stored.get(module, module)

    def axis(self, module: str) -> Literal[0, 1]:
        """The axis of the output channels in the weight of `module`."""
        return self.axes[module]

    @property
    def loads_in_transformers(self) -> bool:
        """Tell whether transformers knows the form of the files; ModelOpt's it takes for values without scales."""
        return self.loadable and self.codec == COMPRESSED_TENSORS

    @property
    def ignored(self) -> list[str]:
        """The linear layers that text does not reach and that stay in BF16, and a pattern for each module of
        multi-token prediction.
        """
        linear = [
            name for name, module in self.non_text.items() if isinstance(module, nn.Linear) and name not in self.axes
        ]
        return [*linear, *self.bf16_in_files, *map(self.codec.below, (*self.mtp, *self.vllm_mtp))]

    @property
    def towers(self) -> list[str]:
        """The outermost modules that text does not reach."""
        return [name for name in self.non_text if name.rpartition(".")[0] not in self.non_text]

    def query_remark(self, scales: Scales) -> str | None:
        """Describe who reads the scales of queries; None where there are none."""
        if not scales.queries:
            return None
        if not self.cache:
            return "--q-scale: loaders have no place for scales of this architecture's cache, and none are written"
        return "--q-scale: is for vLLM; transformers reports q_scale as unexpected keys, and computes without them"

    @property
    def mtp_remark(self) -> str | None:
        """Describe how the layers of multi-token prediction are written; None where there are none."""
        if not self.mtp:
            return None
        dequantized = ", dequantized from the source's FP8" if self.mtp_from_codes else ""
        names = ", ".join(start.removesuffix(".") for start in self.mtp)
        return (
            f"{names}: multi-token prediction, which calibration does not run; it stays in BF16{dequantized}, for "
            "servers that draft by it"
        )

    def heads_remark(self, scales: Scales) -> str | None:
        """Describe who reads the scales of heads; None where loaders are told of none."""
        if self.cache_strategy(scales) != "attn_head":
            return None
        return (
            "--kv-scale head: vLLM attends by these scales on Hopper and data-centre Blackwell GPUs; on others it ends "
            "with an error, and on a CPU it takes the largest of a layer"
        )

    def cache_strategy(self, scales: Scales) -> CacheUnit | None:
        """The strategy of the cache's scheme in config.json; None where loaders are told of no scales."""
        if not self.cache:
            return None
        return "attn_head" if scales.per_head else "tensor"

    @property
    def vllm_skips(self) -> str:
        """The arguments by which vLLM leaves the same layers in BF16; empty where there are none."""
        if self.cache and self.bf16_cache:
            return f"{SKIP_LAYERS} {' '.join(map(str, self.bf16_cache))}"
        return ""

    @property
    def limit(self) -> str | None:
        """Describe the limit of positions of the graph; None where it serves all of the model's."""
        if self.positions is None:
            return None
        return (
            f"graph and engine serve texts of up to {self.positions:,} positions, whose rotary frequencies they hold "
            "(`longrope` has others for longer ones)"
        )

    def unread_experts(self, architecture: str) -> tuple[str, str] | None:
        """Say which loaders do not read the experts, and what helps; None where all do."""
        if self.behind:
            return DIVIDED_EXPERTS.format(architecture=architecture), CONVERTED_EXPERTS
        if self.experts and self.unread:
            servers = "vLLM reads them" if architecture in READ_BY_VLLM else "no server is known to read them"
            return UNREAD_EXPERTS.format(architecture=architecture, servers=servers), STACKED_EXPERTS
        return None

    def remark(self, architecture: str, scales: Scales) -> str | None:
        """Describe the limits of serving the checkpoint with transformers and vLLM; None where there are none."""
        if not self.loadable:
            return (
                f"{architecture} keeps its weights in Conv1D modules, for which Hugging Face has no FP8 form: fp8q "
                "and ONNX run `model/`, transformers and vLLM cannot load it"
            )
        if self.codec != COMPRESSED_TENSORS:
            return (
                f"--layout {self.codec.form}: NVIDIA's runtimes and vLLM read model/; transformers takes its codes for "
                "values without scales, so load it by `fp8q.api.load`"
            )
        if unread := self.unread_experts(architecture):
            return f"{unread[0]}: fp8q runs `model/`; {unread[1]}"
        if self.experts:
            vllm = ", and vLLM documents this layout, with a scale for each token of what experts read"
            if not self.experts.isdisjoint(scales.in_form(BF16)):
                vllm = f"; {NO_EXPERT_WEIGHTS_ALONE}"
            return (
                f"transformers 5.14 has no FP8 form for the experts of {architecture}, and ends with an error when it "
                "loads `model/`; 5.23 loads them, and multiplies them in BF16. fp8q reads it"
                f"{'' if mixed_experts_warning(self.layers, scales) else vllm}"
            )
        if scales.cache_parts == "kv" and not self.cache:
            return (
                f"transformers and vLLM have no place for the scales of {architecture}'s cache, and keep it in the "
                f"compute type: model/{CACHE_FILE} has them, for fp8q and ONNX"
            )
        if self.vllm_skips:
            return (
                f"config.json has no field for layers whose cache stays in BF16: vLLM takes `{self.vllm_skips}`; "
                "without it, and in transformers, these layers are in FP8 too, by their calibrated scales"
            )
        return None


def has_place(attention: nn.Module) -> bool:
    """Tell whether compressed-tensors takes scales of a cache for an attention module.

    It knows such a module by a projection and by the name of an argument (GPT-J's cache is `layer_past`, which it does
    not know). Latent attention is excluded: vLLM and transformers 5.23 write latents to the cache, which the scales of
    heads do not fit.
    """
    if hasattr(attention, "kv_b_proj"):
        return False
    called_with = inspect.signature(attention.forward).parameters.keys()
    return not CACHES.isdisjoint(called_with) and any(hasattr(attention, projection) for projection in PROJECTIONS)


def hf_layout_of(
    source: Source, scales: Scales, no_graph: str | None = None, codec: Codec = COMPRESSED_TENSORS,
    image_rows: int = 0,
) -> HfLayout:  # fmt: skip
    """Decide the layout of the model in `source`, of which `scales.modules` are quantized, in the form of `codec`.

    `no_graph`: why no ONNX graph can be made of the model; `image_rows`: the chats with images that it was measured on.
    """
    model = meta_model(source)
    weights = source.weights()
    modules = {name: model.get_submodule(name) for name in scales.modules}
    loadable = all(isinstance(module, nn.Linear) for module in modules.values())
    attentions = attention_modules(model)
    known = all(has_place(model.get_submodule(name)) for name in attentions.values())
    coded = {name.rpartition(".")[0] for name in scales.kv_cache}
    fewer = no_graph is None and source.served_positions != source.max_positions
    layers = experts_of(model)
    conversions = Conversions(model)
    unread = conversions.unread(source.stored)
    behind = conversions.numbered_behind_others()
    experts = frozenset(name for name in modules if name.startswith(tuple(f"{layer}." for layer in layers)))
    others = non_text_modules(model)
    of_behind = tuple(f"{layer}." for layer in behind)
    in_bf16 = [name for name, module in others.items() if isinstance(module, nn.Linear) and name not in modules]
    in_bf16 += [name for name in scales.skipped if name.startswith(of_behind)]
    weight_names = [f"{name}.weight" for name in in_bf16]
    blocks = tuple(f"{layer.rpartition('.')[0]}." for layer in layers if layer not in behind)
    stored = {
        name: source.stored(f"{name}.weight").removesuffix(".weight")
        for name in (*scales.modules, *scales.skipped)
        if name.startswith(blocks)
    }
    return HfLayout(
        {name: output_channel_axis(module) for name, module in modules.items()},
        loadable,
        cache=loadable and known and scales.cache_parts == "kv",
        no_graph=no_graph,
        auto=auto_class(source.config).__name__,
        attention=needed_attention(source.config),
        non_text=others,
        bf16_in_files=tuple(under.removesuffix(".weight") for under in map(source.renamed.get, weight_names) if under),
        positions=source.served_positions if fewer else None,
        stored=stored,
        experts=experts,
        layers=tuple(layers),
        unread=unread,
        behind=behind,
        parts=_parts(source, {layer for layer in unread if not any(name.startswith(f"{layer}.") for name in experts)}),
        mtp=source.mtp,
        vllm_mtp=_vllm_mtp(source),
        mtp_from_codes=any(weights.coded(name) for name in weights.names() if name.startswith(source.mtp)),
        ties=ties_of(source),
        codec=codec,
        image_rows=image_rows,
        bf16_cache={
            index: attentions[index] for index in sorted(attentions) if coded and attentions[index] not in coded
        },
    )


def _parts(source: Source, stacked: Collection[str]) -> dict[str, TensorPart]:
    """The parts that stored tensors of `source` are cut into, but for the experts `stacked`, which stay whole."""
    starts = tuple(f"{layer}." for layer in stacked)
    model_names = {under: name for name, under in source.renamed.items()}
    parts: dict[str, TensorPart] = {}
    for name, part in source.parts.items():
        if part.index is not None and model_names.get(name, name).startswith(starts):
            parts[part.tensor] = TensorPart(part.tensor)
        else:
            parts[name] = part
    return parts


def _vllm_mtp(source: Source) -> tuple[str, ...]:
    """The beginnings of the names that vLLM has for tensors of multi-token prediction, where the files have others."""
    config = source.config.to_dict()
    names = [name for name in source.weights().names() if name.startswith(source.mtp or ("\0",))]
    others = {other for name in names if (other := vllm_name(config, name)) != name}
    starts = mtp_prefixes(config, others)
    modules = {name.rpartition(".")[0] for name in others if not name.startswith(starts or ("\0",))}
    return tuple(start for start in (*starts, *sorted(modules)) if start not in source.mtp)
