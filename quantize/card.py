"""The model card of the FP8 checkpoint: what it is, how it was made, and how to load it."""

from .scales import Scales

CARD = """\
---
library_name: transformers
tags: [fp8, compressed-tensors]
---

# {name}, FP8

{architecture} quantized by fp8q: E4M3 weights with one scale per output channel, E4M3
activations with one static scale per tensor, {cache}. {quantized} matrix products run on FP8 codes on both sides; embeddings,
norms and {skipped} stay in BF16.

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")

vLLM loads it as it is: `vllm serve path/to/this/directory`{vllm}. `model.onnx` is the same model as plain ONNX with Q/DQ (standard operators, opset 23)
and `model.fp32.onnx` the same computing in FP32; both read their weights from the safetensors files beside them.
"""


def model_card(name: str, architecture: str, scales: Scales) -> str:
    """The README.md of `model/`, Markdown."""
    kept = ", ".join(f"`{module}` ({decision.reason})" for module, decision in scales.skipped.items()) or "nothing else"
    cache = "E4M3 keys and values with one scale each per layer" if scales.kv_cache else "the KV cache in the compute type"
    return CARD.format(
        name=name,
        architecture=architecture,
        cache=cache,
        quantized=len(scales.weights),
        skipped=kept,
        vllm=" --kv-cache-dtype fp8" if scales.kv_cache else "",
    )
