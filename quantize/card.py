"""The model card of the FP8 checkpoint: what it is, how it was made, and how to load it."""

import re

from .form import Form, transformers_version
from .inherit import became
from .scales import INHERITED, Scales
from .stored import CACHE_FILE, EXPERT_FILE

CARD = """\
---
{tags}
---

# {name}, FP8

{architecture} quantized by fp8q: E4M3 weights with one scale per output channel, E4M3 activations with one static
scale per tensor, {cache}.
{terms}{given}{quantized} matrix products run on FP8 codes on both sides; embeddings, norms and {skipped} stay in BF16.

{loading} {graphs}
"""
#: What is said of the graphs beside it.
GRAPHS = """\
`model.onnx` is the same model as plain ONNX with Q/DQ (standard operators, opset 23)
and `model.fp32.onnx` the same computing in FP32; both read their weights from the safetensors files beside them.
ONNX Runtime runs the second on a CPU, with its fusion of Q/DQ off, which makes FP8 nodes that it then rejects itself:

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession("model.fp32.onnx", options)"""
#: Where there are none.
NO_GRAPH = "There is no ONNX graph: {reason}. `fp8q generate RUN --runtime reference` runs it."
#: What is said where some activations take two codes.
TERMS = """\
**In two terms**: where fp8q's graphs and engines read the input of {modules}, a value is two E4M3 codes,
scale × (a + b/16), which is exact for a BF16 number between a 64th of the scale and 476 times it. transformers and
vLLM do not know this: they run one term here, with the loss of ordinary FP8 activations.

"""
#: What is said where the source was an FP8 checkpoint.
GIVEN = """\
**From FP8**: the checkpoint that this was made from holds FP8 codes already. {became}. Scales of
activations {activations}.

"""
#: What the cache is, by the parts of it that are codes.
CACHES = {
    "": "the KV cache in the compute type",
    "v": "the values of the KV cache in E4M3 with one scale per layer, its keys in the compute type",
    "kv": "E4M3 keys and values with one scale each per layer",
}
#: What other loaders make of it.
HOSTED = {
    "": "The layout is the one vLLM documents: `vllm serve path/to/this/directory`.",
    "v": "The layout is the one vLLM documents, but compressed-tensors has no form for such a cache: config.json "
    "names no scheme for it, the scales are in\n"
    "`kv_cache.safetensors`, and vLLM and transformers keep the cache in the compute type. fp8q's graphs and engines "
    "keep it as said.",
    "kv": "The layout is the one vLLM documents: `vllm serve path/to/this/directory --kv-cache-dtype fp8`.",
}


LOADABLE = """\
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")

{hosted}"""

#: In place of `LOADABLE` where there are experts.
MIXTURE = """\
**transformers cannot load its experts**: it holds all experts of a layer in one tensor, and version {version}
makes none of FP8 ones: `from_pretrained` reports missing keys, and goes on with experts of random numbers. vLLM
documents the layout: `vllm serve path/to/this/directory`; it gives what experts read a scale for each token. The static
scales that fp8q runs them with are in `{file}`."""

UNLOADABLE = """\
**transformers and vLLM cannot load it**: {architecture} keeps its weights in Conv1D modules, [in, out], for which
compressed-tensors has no FP8 form. `from_pretrained` stops with an error about `quant_method`. fp8q's reference and
ONNX run it."""

#: In place of `HOSTED` where the architecture's cache has no place for scales.
CACHE_BESIDE = f"""\
The layout is the one vLLM documents, but compressed-tensors does not know this architecture's attention:
config.json names no scheme for the cache, the scales are in `{CACHE_FILE}`, and vLLM and transformers keep the cache
in the compute type. fp8q's graphs and engines keep it as said."""


def model_card(name: str, architecture: str, scales: Scales, form: Form, from_fp8: bool = False) -> str:
    """The README.md of `model/`, Markdown; `from_fp8`: it was made of an FP8 checkpoint."""
    kept = ", ".join(f"{code(module)} ({plain(decision.reason)})" for module, decision in scales.skipped.items())
    return CARD.format(
        name=plain(name),
        architecture=plain(architecture),
        cache=CACHES[scales.cache_parts],
        terms=_terms(scales),
        given=_given(scales) if from_fp8 else "",
        quantized=len(scales.weights),
        skipped=kept or "nothing else",
        tags="library_name: transformers\ntags: [fp8, compressed-tensors]" if form.loadable else "tags: [fp8]",
        loading=_loading(plain(architecture), scales.cache_parts, form),
        graphs=GRAPHS if form.no_graph is None else NO_GRAPH.format(reason=plain(form.no_graph)),
    )


def _terms(scales: Scales) -> str:
    two = scales.two_terms
    if not two:
        return ""
    few = ", ".join(map(code, two[:4])) + (f" and {len(two) - 4} more" if len(two) > 4 else "")
    return TERMS.format(modules="every FP8 product" if len(two) == len(scales.weights) else few)


def _given(scales: Scales) -> str:
    inherited = any(scale.method == INHERITED for scale in scales.activations.values())
    return GIVEN.format(
        became=became(scales),
        activations="are its own" if inherited else "were measured, and are not its own",
    )


def plain(text: str) -> str:
    """A name of somebody else's as Markdown that shows just that: on one line, no markup and no HTML among it."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return re.sub(r"([\\`*\[\]<>~&$]|(?<!\w)_|_(?!\w))", r"\\\1", line)


def code(text: str) -> str:
    """The same as code, in a fence of more backticks than stand in it."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    gap = " " if "`" in line else ""
    return f"{fence}{gap}{line}{gap}{fence}"


def _loading(architecture: str, cache_parts: str, form: Form) -> str:
    """How to load the checkpoint, or that it cannot be."""
    if not form.loadable:
        return UNLOADABLE.format(architecture=architecture)
    if form.experts:
        return MIXTURE.format(version=transformers_version(), file=EXPERT_FILE)
    return LOADABLE.format(hosted=CACHE_BESIDE if cache_parts == "kv" and not form.cache else HOSTED[cache_parts])
