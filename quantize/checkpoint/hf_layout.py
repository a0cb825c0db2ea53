"""Tell which parts of an FP8 model have a form that Hugging Face's loader knows.

The rest is written for fp8q and ONNX, and must not be loaded wrong in silence.

compressed-tensors quantizes linear layers; a Conv1D with FP8 codes would load as a matrix of codes without its scales,
and no error. And it puts the scales of a cache into attention modules that it knows by the names of their projections;
in others it would find keys that it does not expect. For a cache of which only the values are codes it has no words.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from ...calibrate.model.classes import non_text_modules, own_attention
from ...calibrate.model.expert_modules import experts_of
from ...calibrate.model.products import attention_modules, output_channel_axis
from ...calibrate.model.source import Source, meta_model
from ..reading.run_checkpoint import CACHE_FILE
from ..scales.decisions import Scales
from ..scales.policy import mixed_experts_warning

#: The `quantization_config` of a checkpoint that Hugging Face has no form for. It names no `quant_method`, at which
#: transformers stops with a ValueError.
UNLOADABLE = {
    "format": "fp8q",
    "reason": (
        "FP8 codes in Conv1D modules, for which compressed-tensors has no form; fp8q and the graphs that it exports "
        "serve this checkpoint, transformers and vLLM cannot"
    ),
}
#: The same for the INT8 weights that FP8 is compared with.
INTEGERS = {
    "format": "fp8q",
    "reason": (
        "INT8 codes for the ONNX graphs beside them; transformers and vLLM cannot load this, `model/` in the "
        "run is for them"
    ),
}
#: What compressed-tensors knows an attention module with a cache by (its `_KV_CACHE_PROJECTION_NAMES`).
PROJECTIONS = ("k_proj", "v_proj", "qkv_proj", "kv_b_proj")
#: And by an argument of one of these names.
CACHES = frozenset({"past_key_value", "past_key_values"})


@dataclass(frozen=True)
class HfLayout:
    """`modules`: those that are quantized; `loadable`: whether transformers and vLLM can load them; `cache`: whether
    there are scales of a cache that they would read; `no_graph`: why no ONNX graph can be made of the model;
    `attention`: the one that transformers must be told to take, where its default computes something else; `non_text`:
    the modules that text does not reach, which stay as they are; `positions`: how many a graph serves, where those are
    fewer than the model's; `stored`: the names in the files of modules beside and among experts, which are those that
    vLLM reads; `experts`: the products of experts, and `layers` the modules that hold those of a layer.
    """

    modules: Mapping[str, nn.Module]
    loadable: bool
    cache: bool
    no_graph: str | None = None
    attention: str | None = None
    non_text: Mapping[str, nn.Module] = field(default_factory=dict)
    positions: int | None = None
    stored: Mapping[str, str] = field(default_factory=dict)
    experts: frozenset[str] = frozenset()
    layers: tuple[str, ...] = ()

    def in_files(self, module: str) -> str:
        """Return the name that the files have for a module."""
        return self.stored.get(module, module)

    def axis(self, module: str) -> Literal[0, 1]:
        """The axis of the output channels of a module's weight."""
        return output_channel_axis(self.modules[module])

    @property
    def ignored(self) -> list[str]:
        """The linear layers among what text does not reach."""
        return [name for name, module in self.non_text.items() if isinstance(module, nn.Linear)]

    @property
    def towers(self) -> list[str]:
        """The outermost of what text does not reach."""
        return [name for name in self.non_text if name.rpartition(".")[0] not in self.non_text]

    @property
    def limit(self) -> str | None:
        """Describe the limit of the graph's positions; None where they are the model's."""
        if self.positions is None:
            return None
        return (
            f"graph and engine serve texts of up to {self.positions:,} positions, whose rotary frequencies they hold "
            "(`longrope` has others for longer ones)"
        )

    def remark(self, architecture: str, scales: Scales) -> str | None:
        """Describe the limits of serving the checkpoint elsewhere; None where there is nothing."""
        if not self.loadable:
            return (
                f"{architecture} keeps its weights in Conv1D modules, for which Hugging Face has no FP8 form: fp8q "
                "and ONNX run `model/`, transformers and vLLM cannot load it"
            )
        if self.experts:
            vllm = ", and vLLM documents this layout, with a scale for each token of what experts read"
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
        return None


def has_place(attention: nn.Module) -> bool:
    """Tell whether compressed-tensors knows an attention module as one with a cache, and the cache is of heads' keys
    and values: by a projection, and by what it is called with (GPT-J's cache is `layer_past`). Into the cache of latent
    attention vLLM, and transformers 5.23, write latents, which the scales of heads would ruin.
    """
    if hasattr(attention, "kv_b_proj"):
        return False
    called_with = inspect.signature(attention.forward).parameters.keys()
    return not CACHES.isdisjoint(called_with) and any(hasattr(attention, projection) for projection in PROJECTIONS)


def hf_layout_of(source: Source, scales: Scales, no_graph: str | None) -> HfLayout:
    """The form of the model in `source` when the modules in `scales.activations` are quantized, with the reason why it
    has no graph.
    """
    model = meta_model(source)
    modules = {name: model.get_submodule(name) for name in scales.activations}
    loadable = all(isinstance(module, nn.Linear) for module in modules.values())
    known = all(has_place(model.get_submodule(name)) for name in attention_modules(model).values())
    fewer = no_graph is None and source.served_positions != source.max_positions
    places = experts_of(model)
    blocks = tuple(f"{place.rpartition('.')[0]}." for place in places)
    stored = {
        name: source.stored(f"{name}.weight").removesuffix(".weight")
        for name in (*scales.activations, *scales.skipped)
        if name.startswith(blocks)
    }
    return HfLayout(
        modules,
        loadable,
        cache=loadable and known and scales.cache_parts == "kv",
        no_graph=no_graph,
        attention=own_attention(source.config),
        non_text=non_text_modules(model),
        positions=source.served_positions if fewer else None,
        stored=stored,
        experts=frozenset(name for name in modules if name.startswith(tuple(f"{place}." for place in places))),
        layers=tuple(places),
    )
