"""The model card of the FP8 checkpoint: what it is, how it was made, and how to load it."""

from .form import CACHE_SCALES, Form
from .scales import Scales

CARD = """\
---
{tags}
---

# {name}, FP8

{architecture} quantized by fp8q: E4M3 weights with one scale per output channel, E4M3
activations with one static scale per tensor, {cache}. {quantized} matrix products run on FP8 codes on both sides; embeddings,
norms and {skipped} stay in BF16.

{loading} `model.onnx` is the same model as plain ONNX with Q/DQ (standard operators, opset 23)
and `model.fp32.onnx` the same computing in FP32; both read their weights from the safetensors files beside them.
"""


LOADABLE = """\
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")

vLLM loads it as it is: `vllm serve path/to/this/directory`{vllm}."""

UNLOADABLE = """\
**transformers and vLLM cannot load it**: {architecture} keeps its weights in Conv1D modules, [in, out], for which compressed-tensors has no FP8 form. `from_pretrained`
stops with an error about `quant_method`. fp8q's reference and ONNX run it."""

CACHE_BESIDE = f"""

transformers and vLLM have no place for the scales of this architecture's cache, and keep it in the compute type: the scales are in `{CACHE_SCALES}`, for fp8q and ONNX."""


def model_card(name: str, architecture: str, scales: Scales, form: Form) -> str:
    """The README.md of `model/`, Markdown."""
    kept = ", ".join(f"`{module}` ({decision.reason})" for module, decision in scales.skipped.items()) or "nothing else"
    cache = "E4M3 keys and values with one scale each per layer" if scales.kv_cache else "the KV cache in the compute type"
    return CARD.format(
        name=name,
        architecture=architecture,
        cache=cache,
        quantized=len(scales.weights),
        skipped=kept,
        tags="library_name: transformers\ntags: [fp8, compressed-tensors]" if form.loadable else "tags: [fp8]",
        loading=_loading(architecture, bool(scales.kv_cache), form),
    )


def _loading(architecture: str, fp8_cache: bool, form: Form) -> str:
    """How to load the checkpoint, or that it cannot be."""
    if not form.loadable:
        return UNLOADABLE.format(architecture=architecture)
    return LOADABLE.format(vllm=" --kv-cache-dtype fp8" if fp8_cache and form.cache else "") + (CACHE_BESIDE if fp8_cache and not form.cache else "")
