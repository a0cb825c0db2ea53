"""Rotary frequencies as the graph has them: constants, those of texts up to a length.

Of most kinds (`linear`, `llama3`, `yarn`, `proportional`) transformers computes them once. Two kinds it changes in the
forward pass, by the largest position that it is handed: `dynamic` beyond `max_position_embeddings`, `longrope`, which
has two sets of them, beyond `original_max_position_embeddings`. Up to there both are what they are at the start, to the
last bit. A graph holds that set, and is served up to there: in what lies beyond, transformers itself gives a text other
numbers than its halves, and a row of a batch other numbers than alone (docs/decisions/0024).
"""

from torch import nn


def fix_frequencies(model: nn.Module) -> None:
    """Let no rotary embedding of `model` (changed in place) compute its frequencies again in a forward pass."""
    for module in model.modules():
        kind = vars(module).get("rope_type")
        if isinstance(kind, str):
            vars(module)["rope_type"] = _fixed(kind)
        elif isinstance(kind, dict):  # one for each type of layer
            vars(module)["rope_type"] = {layer: _fixed(each) for layer, each in kind.items()}


def _fixed(kind: str) -> str:
    return "default" if "dynamic" in kind or kind == "longrope" else kind
