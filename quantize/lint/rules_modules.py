"""Rules C116 to C118, C121, C122 and C128 to C133: modules that belong together, the output head, modules and fields
of the configuration, and layers for multi-token prediction.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from ...calibrate.checkpoint.class_defaults import TIE, config_field, language_model, ties_embeddings
from ...calibrate.checkpoint.mtp_layers import mtp_layers, mtp_prefixes
from ...core.findings import Broken
from ..reading.codecs import other_declaration
from ..reading.fp8_tensors import Checkpoint
from ..reading.quantization_config import CONFIG, DeclaredQuantization
from .rules import AGAIN, checkpoint_rule
from .rules_scales import FLOAT_TYPES, readable
from .rules_values import EXPERT

#: The modules that loaders join into one GEMM, since they have one input.
JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
HEADS = ("lm_head", "embed_out", "output", "proj_out")
#: Where attention has a GEMM of such a name (BigBird-Pegasus, RWKV).
IN_A_LAYER = re.compile(r"\.\d+\.")
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "input_embedding", "shared")


def vocabulary_table(checkpoint: Checkpoint, module: str) -> Literal["head", "embedding"] | None:
    """Tell whether `module` is an output head or an embedding of tokens: a matrix outside of the numbered layers that
    is called so and has a row for each token. A projection in an image's encoder, which is called so too, has fewer.
    """
    last = module.rpartition(".")[2]
    if last not in HEADS + EMBEDDINGS or IN_A_LAYER.search(module):
        return None
    weight = checkpoint.tensors.get(f"{module}.weight")
    tokens = config_field(checkpoint.config, "vocab_size")
    if weight is None or len(weight.shape) != 2 or (type(tokens) is int and weight.shape[0] < tokens):
        return None
    return "head" if last in HEADS else "embedding"


def joined_modules(checkpoint: Checkpoint) -> Iterator[list[str]]:
    """The groups of modules that loaders join, if at least two of them exist and one is in codes."""
    joined = {name: group[0] for group in JOINED for name in group}
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(checkpoint.tensors):
        module, _, last = name.rpartition(".")
        parent, _, projection = module.rpartition(".")
        if last == "weight" and projection in joined:
            groups[parent, joined[projection]].append(module)
    yield from (group for group in groups.values() if len(group) > 1 and any(m in checkpoint.codes for m in group))


def _layers(checkpoint: Checkpoint) -> Iterator[list[str]]:
    """The GEMMs of all experts of each layer, if one of them is in codes."""
    layers: dict[str, list[str]] = defaultdict(list)
    for name in sorted(checkpoint.tensors):
        if (match := EXPERT.fullmatch(name)) and name.endswith(".weight"):
            layers[match[1]].append(name.removesuffix(".weight"))
    yield from (layer for layer in layers.values() if any(module in checkpoint.codes for module in layer))


@checkpoint_rule("C116", "split-projections")
def split_projections(checkpoint: Checkpoint) -> Broken:
    """Query, key and value projections are of one precision, and gate and up projections are: vLLM makes one GEMM of
    them, and refuses shards of which some are quantized and some are not, or in another way. So are all GEMMs of a
    layer's experts: vLLM takes them to be stored as those of expert 0 are, and reads others wrong in silence.
    """
    for group in joined_modules(checkpoint):
        kinds = {module: _kind(checkpoint, module) for module in group}
        first = kinds[group[0]]
        for module, kind in kinds.items():
            if kind != first and not EXPERT.fullmatch(module):
                yield f"{module}.weight", f"is {kind}, and {group[0]} is {first}; quantize both alike"
    for layer in _layers(checkpoint):
        kinds = {module: _kind(checkpoint, module) for module in layer}
        ((usual, _), *others) = Counter(kinds.values()).most_common()
        apart = [module for module, kind in kinds.items() if kind != usual]
        if others:
            kind = kinds[apart[0]]
            alike = sum(other == kind for other in kinds.values())
            more = f", as {alike - 1} more" if alike > 1 else ""
            rest = f"most {usual}" if len(apart) > alike else f"the rest {usual}"
            fault = f"is {kind}{more} of the {len(layer)} GEMMs of its layer's experts, and {rest}"
            yield f"{apart[0]}.weight", f"{fault}; quantize all of them alike"


def _kind(checkpoint: Checkpoint, module: str) -> str:
    codes = checkpoint.codes.get(module)
    if codes is None:
        return checkpoint.tensors[f"{module}.weight"].dtype
    if codes.granularity:
        return f"FP8 with one scale a {codes.granularity}"
    return "FP8"


@checkpoint_rule("C117", "shared-input-scale", "warning")
def shared_input_scale(checkpoint: Checkpoint) -> Broken:
    """Query, key and value projections have one input, and so one static scale of it, as gate and up projections have.
    Where they differ, vLLM takes the largest of them for all, and transformers each its own.
    """
    for group in joined_modules(checkpoint):
        named = [checkpoint.codes[module].input_scale for module in group if module in checkpoint.codes]
        values = {
            name: float(checkpoint.values(name).reshape(-1)[0])
            for name in named
            if name is not None and readable(checkpoint, name)
        }
        if values and not any(map(np.isnan, values.values())) and len(set(values.values())) > 1:
            largest = max(values, key=lambda name: values[name])
            listed = ", ".join(f"{name.split('.')[-2]} {value:.4g}" for name, value in values.items())
            yield largest, f"is not the scale of the same input elsewhere ({listed}); set all to {values[largest]:.9g}"


@checkpoint_rule("C118", "tied-head")
def tied_head(checkpoint: Checkpoint) -> Broken:
    """A head that is tied to the embedding is not quantized, and neither is that embedding: loaders let both share one
    tensor, in BF16, so that the codes of one are lost, or are read as values without their scale.
    """
    if not ties_embeddings(checkpoint.config):
        return
    for module, codes in checkpoint.codes.items():
        if (what := vocabulary_table(checkpoint, module)) is not None:
            yield codes.weight, f"is a {what} in FP8, and {_who_ties(checkpoint.config)}; leave it in BF16"


@checkpoint_rule("C129", "head-beside-tie")
def head_of_tied_embedding(checkpoint: Checkpoint) -> Broken:
    """A head that config.json ties to the embedding is left out, or has the embedding's values. transformers takes a
    head of other values as it is, and vLLM takes the embedding for both; of a head without an embedding transformers
    makes the embedding, and vLLM reads neither.
    """
    if not ties_embeddings(checkpoint.config):
        return
    in_float = [
        name.removesuffix(".weight")
        for name, tensor in checkpoint.tensors.items()
        if name.endswith(".weight") and tensor.dtype in FLOAT_TYPES
    ]
    head = _first_table(checkpoint, in_float, HEADS)
    embedding = _first_table(checkpoint, in_float, EMBEDDINGS)
    if head is None:
        return
    if embedding is None:
        yield head, f"is there without the embedding, and {_who_ties(checkpoint.config)}; store it as the embedding"
    elif not checkpoint.same_bytes(head, embedding):
        remedy = f"say {TIE} false, or leave one out"
        yield head, f"is not {embedding}, and {_who_ties(checkpoint.config)}; {remedy}"


def _first_table(checkpoint: Checkpoint, modules: list[str], names: tuple[str, ...]) -> str | None:
    """The weight of the head or embedding among `modules` whose name comes first in `names`, if there is one."""
    for last in names:
        for module in modules:
            if module.rpartition(".")[2] == last and vocabulary_table(checkpoint, module) is not None:
                return f"{module}.weight"
    return None


def _who_ties(config: Mapping[str, Any]) -> str:
    """Say who ties head and embedding: config.json, or the class where that says nothing."""
    if TIE in config or TIE in language_model(config):
        return f"{CONFIG} ties both"
    return f"{config.get('model_type')} ties both where {CONFIG} says nothing"


def _source(declared: DeclaredQuantization) -> str:
    return declared.source.name


@checkpoint_rule("C121", "ignored-codes")
def ignored_codes(checkpoint: Checkpoint) -> Broken:
    """A module that the configuration leaves out is not in codes: loaders make a module in BF16 of it, and read its
    codes as values, without the scale.
    """
    for module, codes in checkpoint.codes.items():
        if (entry := checkpoint.declared.ignored_by(module)) is not None:
            source = _source(checkpoint.declared)
            yield codes.weight, f"is in FP8, and {source} leaves out {entry!r}; take that out, or {AGAIN}"


@checkpoint_rule("C130", "unnamed-codes")
def unnamed_codes(checkpoint: Checkpoint) -> Broken:
    """Every module in codes is named by the configuration, by its name or its class: loaders make a module in BF16 of
    any other, and read its codes as values, without the scale. An embedding is no Linear, so that this target does not
    name it.
    """
    if checkpoint.declared.form != "compressed-tensors":  # the other forms name all
        return
    for module, codes in checkpoint.codes.items():
        target = checkpoint.declared.target_of(module)
        if checkpoint.declared.ignored_by(module) is not None:  # C121
            continue
        of_class = target is not None and target.is_class
        is_embedding = vocabulary_table(checkpoint, module) == "embedding"
        if target is None or (of_class and is_embedding and "Embedding" not in target.text):
            source = _source(checkpoint.declared)
            yield codes.weight, f"is in FP8, and no target of {source} names {module}; name it there, or {AGAIN}"


@checkpoint_rule("C131", "field-unknown", "note")
def field_unknown(checkpoint: Checkpoint) -> Broken:
    """Every field of the quantization configuration is one that the form's classes read. One in none of them is passed
    over by loaders, or refused, whatever it was meant to change.
    """
    for remark in checkpoint.declared.remarks:
        if remark.effect == "unknown":
            source = _source(checkpoint.declared)
            yield source, f"has {remark.place}, which no class that was read knows; take it out, or {AGAIN}"


@checkpoint_rule("C132", "field-beyond-codes", "warning")
def field_beyond_codes(checkpoint: Checkpoint) -> Broken:
    """A layer computes its codes times their scales. Rotations while the model runs (transform_config),
    sparsity, reordered columns, zero points and experts in another form are more than that: some loaders compute them,
    others leave them out in silence. `fp8q calibrate` and `compare` refuse what changes the values of the model.
    """
    for remark in checkpoint.declared.remarks:
        if remark.effect != "unknown":
            source = _source(checkpoint.declared)
            yield source, f"has {remark}, which not every loader computes; take one that does, or {AGAIN}"


@checkpoint_rule("C133", "contradiction")
def contradiction(checkpoint: Checkpoint) -> Broken:
    """Two places that say one thing say the same. vLLM and SGLang read config.json, TensorRT-LLM and TensorRT Edge-LLM
    hf_quant_config.json where it is there: by two that differ they serve two models. So they do by two scales of one
    part of a cache, and by a static scale of an input that the configuration has scaled where it is served.
    """
    if (other := other_declaration(checkpoint.root)) is not None:
        yield CONFIG, f"says {other}; say the same in both, or take one away"
    for one, name in checkpoint.twofold_cache_scales:
        yield one, f"is another scale of the same keys or values than {name}; take one of them out"
    for codes in checkpoint.codes.values() if checkpoint.declared.form == "modelopt" else ():
        if codes.input_scale is not None and codes.scheme.input.at_run_time:
            source = _source(checkpoint.declared)
            yield codes.input_scale, f"is static, and {source} says a scale for each token; take it out, or {AGAIN}"


@checkpoint_rule("C122", "wide-module")
def float_module(checkpoint: Checkpoint) -> Broken:
    """A module in BF16 is left out by the configuration where its like in other layers is in codes: loaders make an FP8
    module of it, and look for a scale that is not there.
    """
    in_codes = {module.rpartition(".")[2] for module in checkpoint.codes}
    for name, tensor in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        is_like = module != name and len(tensor.shape) == 2 and module.rpartition(".")[2] in in_codes
        if is_like and tensor.dtype in FLOAT_TYPES and checkpoint.declared.scheme(module).weights:
            source = _source(checkpoint.declared)
            yield name, f"is {tensor.dtype}, and {source} does not leave {module} out; name it there, or {AGAIN}"


@checkpoint_rule("C128", "no-drafts", "note")
def no_drafts(checkpoint: Checkpoint) -> Broken:
    """Layers for multi-token prediction that config.json counts are in the checkpoint, so that a server can draft by
    them. transformers makes no modules of them, so an exporter that loads the model there loses them; it also writes a
    count of 1 for DeepSeek-V3 and GLM-4.5 models that never had them. The checkpoint alone does not tell which.
    """
    count = mtp_layers(checkpoint.config)
    if count and not mtp_prefixes(checkpoint.config, checkpoint.tensors):
        fault = f"counts {count} layer{'s' * (count > 1)} for multi-token prediction, and no tensor is of one"
        remedy = "copy those of the source, if it has any, and leave them out of quantization"
        yield CONFIG, f"{fault}, so that no server can draft; {remedy}"
