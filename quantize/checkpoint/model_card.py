"""Write the model card of the FP8 checkpoint: its formats, how it was made, and how to load it."""

from ...calibrate.model.source import Source
from ...options import BF16, BLOCK, TWO, Form, Kind
from ..reading.inherited_scales import codes_summary
from ..reading.run_checkpoint import CACHE_FILE, EXPERT_FILE
from ..scales.decisions import INHERITED, Scales
from ..scales.policy import mixed_experts_warning
from ..scales.scheme import tails_of
from .card_additions import (
    ACCURACY,
    NOT_EVALUATED,
    NOT_MEASURED,
    ONE_TERM_COST,
    TASK_SCORES,
    markdown_code,
    markdown_message,
    markdown_text,
)
from .hf_layout import NO_EXPERT_WEIGHTS_ALONE, HfLayout

CARD = """\
---
{tags}
---

# {name}, FP8

{architecture} quantized by fp8q: E4M3 weights with one scale per {unit}, {activations}, {cache}.
{terms}{given}{adapters}{quantized}; embeddings, norms and {skipped} \
stay in BF16.

{loading} {graphs}

## Accuracy

{accuracy}

{scores}
"""
#: The paragraph on the graphs beside the checkpoint.
GRAPHS = """\
`model.onnx` (where it is not here, `fp8q export RUN` writes it) is the same model as plain ONNX with Q/DQ (standard
operators, opset 23), and `model.fp32.onnx` the same computing in FP32; both read their weights from the safetensors
files beside them.
ONNX Runtime runs the second on a CPU, with its fusion of Q/DQ off, which makes FP8 nodes that it then rejects itself:

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession("model.fp32.onnx", options)

The cache is [batch, heads, capacity, size] in memory, of whole blocks of 64 slots, and is given to the graph as
[batch · heads · blocks, 64, size]. A slot has the position that follows from `attention_mask`: the number of filled
slots before it. So a batch is padded on the left as elsewhere: padded tokens have the mask 0 and the position 0, and
their new keys and values are appended with the others; slots that fill the last block have the mask 0."""
#: The paragraph where there are no graphs.
NO_GRAPH = "There is no ONNX graph: {reason}. `fp8q generate RUN --runtime reference` runs it."
#: The paragraph on activations in two terms.
TERMS = """\
**In two terms**: where fp8q's graphs and engines read the input of {modules}, a value is two E4M3 codes,
scale × (a + b/16), which is exact for a BF16 number between a 64th of the scale and 476 times it. transformers
multiplies both with `fp8q.api.load`; vLLM with the plugin fp8q-vllm multiplies in 16 bits instead, by the same
weights, and loses no more. Without these one term runs here, with the loss of ordinary FP8 activations.

"""
#: The paragraph on activations with a tail.
TAIL = """\
**Exact answers**: where fp8q's graphs and engines read the input of {modules}, each decoded token and the
last {positions} positions of a prompt have two E4M3 codes a value, scale × (a + b/16), which is exact for a BF16
number between a 64th of the scale and 476 times it; the rest of a prompt has one. transformers does so too with
`fp8q.api.load`; vLLM with the plugin fp8q-vllm multiplies those tokens in 16 bits instead, by the same weights, and
loses no more. Without these one term runs throughout, with the loss of ordinary FP8 activations.

"""
#: The paragraph on modules of which the weight alone is FP8.
WEIGHTS_ALONE = """\
**Weights alone**: the input of {modules} stays in BF16, so that nothing but the rounding of weights is lost there.
config.json says so in compressed-tensors' form. vLLM multiplies it on NVIDIA GPUs from Turing on (its Marlin kernel),
and refuses it on CPUs.

"""
#: The paragraph on scales of queries.
QUERIES = """\
**Queries** have scales too, `q_scale`, for attention on FP8 codes in vLLM (with FlashAttention 3 or FlashInfer).
transformers reports them as unexpected keys, and computes without them.

"""
#: The paragraph on scales of heads that loaders read.
HEADS = """\
**Each head** of keys and values has a scale. vLLM attends by them on Hopper and data-centre Blackwell GPUs
(FlashAttention 3 and 4), and ends with an error on others; on a CPU it takes a layer's largest for all of its heads.
transformers reads all of them.

"""
#: The paragraph on activations in dynamic form.
IN_DYNAMIC = """\
**Per token**: the input of {modules} gets a scale for each token where it is served, amax / 448, and none is stored.
{said}

"""
#: Who reads scales of run time, by the form of the files.
READ_DYNAMIC = {
    "compressed-tensors": "config.json says so in compressed-tensors' form, which vLLM, SGLang, TensorRT-LLM and "
    "transformers read.",
    "modelopt": "That is ModelOpt's FP8_PER_CHANNEL_PER_TOKEN.",
}
#: The paragraph on GEMMs in block form.
BLOCKS = """\
**In blocks**: the weights of {modules} have a scale for each block of 128 x 128, and their inputs one for each
128 values of a token, amax / 448, which is computed where it is served. config.json says so in compressed-tensors'
form, which vLLM, SGLang and TensorRT-LLM read.

"""
#: Kind of a form with scales of run time -> the part of an input that has one, and the paragraph on it.
RUN_TIME_UNITS: dict[Kind, tuple[str, str]] = {
    "dynamic": ("token", IN_DYNAMIC),
    "block": ("128 values of a token", BLOCKS),
}
#: The activations, by what scales they have.
STATIC = "E4M3 activations with one static\nscale per tensor"
IN_BF16 = "activations in BF16"
#: The paragraph on an FP8 source checkpoint.
FP8_SOURCE = """\
**From FP8**: the checkpoint that this was made from holds FP8 codes already. {became}. Scales of
activations {activations}.

"""
#: The paragraph on a model of which the language model is a part.
TOWERS = """\
**The language model** is quantized, and was measured on {measured}; {towers} stay as they were, in BF16.
Graphs and engines are of the language model: they take text, and no images.

"""
#: The paragraph on one with more in FP8 than the language model.
VISION = """\
**Modules that text does not reach** are in FP8 too, by the inputs that they had of images: {modules}. What else is in
{towers} stays as it was, in BF16.

"""
#: The paragraph on multi-token prediction.
MTP = """\
**Multi-token prediction**: {modules} stay in BF16{dequantized}, as drafts for speculative decoding. They were not
measured: transformers makes no modules of them.

"""
#: The paragraph on a merged adapter.
MERGED = """\
**With an adapter**: the PEFT LoRA adapter {name} (SHA-256 {fingerprint}…) was merged into the weights before they were
quantized: W + s · B A, rounded to BF16.

"""
#: The paragraph on adapters beside the weights.
UNMERGED_ADAPTERS = """\
**With adapters beside it**: {names} in `adapters/`, as PEFT wrote them. The weights are the base's alone; the scales
of activations were measured on the base and with each adapter on, and serve all of them. A graph `model.NAME.onnx` is
the base with one adapter, in the compute type beside the FP8 GEMMs.
{vllm}
"""
HOSTED_ADAPTERS = """\
vLLM serves base and adapters together:

    vllm serve path/to/this/directory --enable-lora --max-lora-rank {rank} \\
        --lora-modules {first}=path/to/this/directory/adapters/{first}
"""
#: The description of the cache, by its parts that are codes.
CACHES = {
    "": "the KV cache in the compute type",
    "v": "the values of the KV cache in E4M3 with one scale per {per}, its keys in the compute type",
    "kv": "E4M3 keys and values with one scale each per {per}",
}
#: How other loaders serve the checkpoint, by the parts of the cache that are codes.
HOSTED = {
    "": "The layout is the one vLLM documents: `vllm serve path/to/this/directory`.",
    "v": "The layout is the one vLLM documents, but compressed-tensors has no form for such a cache: config.json "
    "names no scheme for it, the scales are in\n"
    "`kv_cache.safetensors`, and vLLM and transformers keep the cache in the compute type. fp8q's graphs and engines "
    "keep it as said.",
    "kv": "The layout is the one vLLM documents: `vllm serve path/to/this/directory --kv-cache-dtype fp8`.",
}
#: Used in place of `HOSTED` where the cache of some layers stays in BF16.
HOSTED_BF16_LAYERS = """\
The layout is the one vLLM documents, which has no field for layers whose cache stays wide. vLLM is told of them by
their numbers:

    vllm serve path/to/this/directory --kv-cache-dtype fp8 {skips}

Without that, and in transformers, the cache of these layers is FP8 too, by scales that were calibrated."""


LOADABLE = """\
    from transformers import {auto}, AutoTokenizer
    model = {auto}.from_pretrained("path/to/this/directory"{attention})

{hosted}"""

#: Used in place of `LOADABLE` for ModelOpt's layout, and who reads it.
MODELOPT = """\
The layout is NVIDIA ModelOpt's (`hf_quant_config.json`), which {readers} read:

    vllm serve path/to/this/directory{skips}

transformers does not know it, and would take codes for values; `fp8q.api.load` reads it."""
MODELOPT_READERS = {
    "tensor": "vLLM, SGLang, TensorRT-LLM and TensorRT Edge-LLM",
    "channel": "vLLM and TensorRT-LLM",
}

#: Used in place of `LOADABLE` where the model has experts.
MIXTURE = """\
**transformers 5.14 cannot load its experts**: it holds all experts of a layer in one tensor, and makes none of FP8
ones: `from_pretrained` reports missing keys, and ends with an error. Version 5.23 loads them, and multiplies them in
BF16. {vllm}"""
HOSTED_EXPERTS = """\
vLLM
documents the layout: `vllm serve path/to/this/directory`; it gives what experts read a scale for each token{static}."""
STATIC_EXPERTS = """. The static
scales that fp8q runs them with are in `{file}`"""
#: Used in place of `LOADABLE` where other loaders know the experts in stacks alone.
UNREAD_MIXTURE = """\
**transformers does not run its experts in FP8**: {reason}. {remedy}."""
#: Used where only some of a layer's experts are FP8.
PARTED_EXPERTS = """\
**Nor can
vLLM**: {remark}."""

UNLOADABLE = """\
**transformers and vLLM cannot load it**: {architecture} keeps its weights in Conv1D modules, [in, out], for which
compressed-tensors has no FP8 form. `from_pretrained` stops with an error about `quant_method`. fp8q's reference and
ONNX run it."""

#: Used in place of `HOSTED` where compressed-tensors takes no cache scales for the architecture.
CACHE_SCALES_APART = f"""\
The layout is the one vLLM documents, but compressed-tensors does not know this architecture's attention:
config.json names no scheme for the cache, the scales are in `{CACHE_FILE}`, and vLLM and transformers keep the cache
in the compute type. fp8q's graphs and engines keep it as said."""


def model_card(source: Source, scales: Scales, form: HfLayout, from_fp8: bool = False) -> str:
    """The model card of the checkpoint made of `source`, in Markdown; `from_fp8`: the source is an FP8 checkpoint."""
    name = source.title
    architecture = source.architecture
    by_reason: dict[str, list[str]] = {}
    for module, decision in scales.skipped.items():
        by_reason.setdefault(decision.reason, []).append(markdown_code(module))
    skipped = ", ".join(f"{', '.join(modules)} ({markdown_message(reason)})" for reason, modules in by_reason.items())
    return CARD.format(
        name=markdown_text(name),
        architecture=markdown_text(architecture),
        cache=CACHES[scales.cache_parts].format(per=scales.cache_unit) + _bf16_cache_layers(form),
        terms=_terms(scales, form)
        + (HEADS if scales.per_head and form.cache else "")
        + (QUERIES if scales.queries and form.cache else ""),
        given=(_fp8_source(scales) if from_fp8 else "") + _towers(scales, form) + _mtp(form),
        adapters=_adapters(source, form),
        unit=_unit(scales),
        activations=_activations(scales),
        quantized=_gemm_counts(scales),
        skipped=skipped or "nothing else",
        tags=_tags(form),
        loading=_loading(markdown_text(architecture), scales, form),
        graphs=_graphs(form),
        accuracy=ACCURACY,
        scores=TASK_SCORES.format(scores=NOT_EVALUATED),
    )


def _tags(form: HfLayout) -> str:
    """The fields of the card by which a hub sorts it."""
    if not form.loadable:
        return "tags: [fp8]"
    library = "library_name: transformers\n" if form.loads_in_transformers else ""
    return f"{library}tags: [fp8, {form.codec.form}]"


def _activations(scales: Scales) -> str:
    """Name the scales of inputs that are codes."""
    if scales.static_inputs or not scales.activations:
        return STATIC if scales.static_inputs else IN_BF16
    unit = next(unit for kind, (unit, _) in RUN_TIME_UNITS.items() if scales.in_form(Form(kind)))
    return f"E4M3 activations with one\nscale per {unit}"


def _unit(scales: Scales) -> str:
    """Name the part of a weight that has one scale, and who shares it."""
    if len(scales.in_form(BLOCK)) == len(scales.weights) > 0:
        return "block of 128 x 128"
    if not scales.tensor_weights:
        return "output channel"
    some = "" if len(scales.tensor_weights) == len(scales.weights) else " (of experts one per output channel)"
    return f"tensor{some}, the same for those that servers join"


def _bf16_cache_layers(form: HfLayout) -> str:
    """Name the layers whose cache stays in BF16 beside others in FP8; empty where there are none."""
    if not form.bf16_cache:
        return ""
    several = len(form.bf16_cache) > 1
    return f" (but not in layer{'s' if several else ''} {', '.join(map(str, form.bf16_cache))})"


def _graphs(form: HfLayout) -> str:
    if form.no_graph is not None:
        return NO_GRAPH.format(reason=markdown_message(form.no_graph))
    if form.limit:
        return f"{GRAPHS}\n\n{form.limit[0].upper()}{form.limit[1:]}."
    return GRAPHS


def _terms(scales: Scales, form: HfLayout) -> str:
    """Describe the modules in two terms, with a tail, in dynamic form, and with FP8 weights alone; empty without."""
    lengths = tails_of(scales.forms)
    throughout = scales.in_form(TWO)
    text = TERMS.format(modules=_some(throughout, scales)) if throughout else ""
    for positions in sorted(set(lengths.values())):
        modules = [module for module, tail in lengths.items() if tail == positions]
        text += TAIL.format(modules=_some(modules, scales), positions=positions)
    text += ONE_TERM_COST.format(cost=NOT_MEASURED) if text else ""
    paragraphs = {kind: paragraph for kind, (_, paragraph) in RUN_TIME_UNITS.items()} | {BF16.kind: WEIGHTS_ALONE}
    for kind, paragraph in paragraphs.items():
        if modules := scales.in_form(Form(kind)):
            text += paragraph.format(modules=_some(modules, scales), said=READ_DYNAMIC[form.codec.form])
    return text


def _gemm_counts(scales: Scales) -> str:
    """Count the GEMMs by the sides that are codes."""
    both = len(scales.fp8_gemms)
    alone = len(scales.in_form(BF16))
    parts = [f"{both} GEMMs run on FP8 codes on both sides"] if both else []
    parts += [f"{alone} {'others' if both else 'GEMMs'} have FP8 weights alone"] if alone else []
    return ", ".join(parts)


def _some(modules: list[str], scales: Scales) -> str:
    """Name the first four of `modules`, or all of the FP8 GEMMs at once."""
    more = f" and {len(modules) - 4} more" if len(modules) > 4 else ""
    few = ", ".join(map(markdown_code, modules[:4])) + more
    if len(modules) == len(scales.weights):
        return "every FP8 GEMM"
    return few


def _fp8_source(scales: Scales) -> str:
    inherited = any(scale.method == INHERITED for scale in scales.activations.values())
    return FP8_SOURCE.format(
        became=codes_summary(scales),
        activations="are its own" if inherited else "were measured, and are not its own",
    )


def _towers(scales: Scales, form: HfLayout) -> str:
    """Describe the parts besides the language model; empty where there are none."""
    towers = ", ".join(map(markdown_code, form.towers))
    blind = [module for module in scales.vision or () if module in scales.weights]
    if blind:
        return VISION.format(modules=_some(blind, scales), towers=towers)
    chats = "a chat" if form.image_rows == 1 else f"{form.image_rows} chats"
    measured = f"text and {chats} with images" if form.image_rows else "text alone"
    return TOWERS.format(towers=towers, measured=measured) if towers else ""


def _mtp(form: HfLayout) -> str:
    if not form.mtp:
        return ""
    names = ", ".join(markdown_code(start.removesuffix(".")) for start in form.mtp)
    return MTP.format(modules=names, dequantized=", dequantized from FP8" if form.mtp_from_codes else "")


def _adapters(source: Source, form: HfLayout) -> str:
    """Describe the merged adapter, or the adapters beside the weights."""
    if source.merged:
        return MERGED.format(name=markdown_code(source.merged.name), fingerprint=source.merged.fingerprint[:12])
    if not source.adapters:
        return ""
    names = [adapter.name for adapter in source.adapters]
    rank = max(part.rank for adapter in source.adapters for part in adapter.parts.values())
    hosted = HOSTED_ADAPTERS.format(first=names[0], rank=rank) if form.loadable else ""
    return UNMERGED_ADAPTERS.format(names=", ".join(map(markdown_code, names)), vllm=hosted)


def _loading(architecture: str, scales: Scales, form: HfLayout) -> str:
    """Explain how to load the checkpoint, or why it cannot be loaded."""
    cache_parts = scales.cache_parts
    if not form.loadable:
        return UNLOADABLE.format(architecture=architecture)
    if not form.loads_in_transformers:
        readers = MODELOPT_READERS["tensor" if scales.tensor_weights else "channel"]
        return MODELOPT.format(readers=readers, skips=f" {form.vllm_skips}" if form.vllm_skips else "")
    if unread := form.unread_experts(architecture):
        reason, remedy = unread
        return UNREAD_MIXTURE.format(reason=reason, remedy=f"{remedy[0].upper()}{remedy[1:]}")
    if form.experts:
        remark = mixed_experts_warning(form.layers, scales)
        dynamic = form.experts.isdisjoint(scales.static_inputs) and form.experts.isdisjoint(scales.in_form(BF16))
        static = "" if dynamic else STATIC_EXPERTS.format(file=EXPERT_FILE)
        vllm = PARTED_EXPERTS.format(remark=markdown_text(remark)) if remark else HOSTED_EXPERTS.format(static=static)
        alone = not remark and not form.experts.isdisjoint(scales.in_form(BF16))
        return MIXTURE.format(vllm=f"{NO_EXPERT_WEIGHTS_ALONE}." if alone else vllm)
    hosted = CACHE_SCALES_APART if cache_parts == "kv" and not form.cache else HOSTED[cache_parts]
    return LOADABLE.format(
        auto=form.auto,
        attention=f', attn_implementation="{form.attention}"' if form.attention else "",
        hosted=HOSTED_BF16_LAYERS.format(skips=form.vllm_skips) if form.vllm_skips else hosted,
    )
