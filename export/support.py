"""Which architectures can be exported, told before any work: the graph's attention and cache must be able to take the place of the model's own."""

import inspect
import sys
from typing import TYPE_CHECKING

from ..calibrate.observe import attention_modules, matrix_products
from ..calibrate.weights import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..calibrate.source import Source


def unsupported(model: "PreTrainedModel", source: "Source") -> str | None:
    """What of `model` (the meta device will do) cannot be done, to follow the architecture's name in a sentence; None where all can.

    1. Code that came with the checkpoint: the later stages load none. 2. Soft-capped logits: fused attention ignores them in silence. 3. Attention
    that does not go through transformers' interface, where the graph's takes its place. 4. Layers whose cache is written by no module that says
    which layer it is. 5. Weights that loading makes of other tensors than those stored: the graph points at these.
    """
    module = sys.modules[type(model).__module__]
    if "auto_map" in source.config.to_dict() and source.trust_remote_code:
        return "runs code that came with the checkpoint"
    if getattr(source.text_config, "attn_logit_softcapping", None):
        return "caps its attention logits"
    if "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(module):
        return "has an attention that transformers does not let be replaced"
    layers = attention_modules(model)
    if sorted(layers) != list(range(source.text_config.num_hidden_layers)):
        return "writes its cache where it cannot be told which layer it is"
    stored = Weights(source).names()
    tied = model.get_output_embeddings() if source.text_config.tie_word_embeddings else None
    for name, product in matrix_products(model).items():
        if product is not tied and source.stored(f"{name}.weight") not in stored:
            return f"stores no {name}.weight (transformers makes it of other tensors when it loads them: load it once and save_pretrained it)"
    return None
