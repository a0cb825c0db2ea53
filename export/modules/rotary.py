"""Fix the rotary frequencies of the graph: they are constants, valid for texts up to a length.

For most kinds (`linear`, `llama3`, `yarn`, `proportional`) transformers computes frequencies once. Two kinds change in
the forward pass with the largest position: `dynamic` beyond `max_position_embeddings`, and `longrope`, which has two
sets, beyond `original_max_position_embeddings`. Up to there both equal the initial frequencies bit for bit. A graph
holds these and is served up to there. Beyond, transformers itself gives a text other numbers than its halves, and a row
of a batch other numbers than the row alone (docs/decisions/0024).
"""

from torch import nn


def fix_frequencies(model: nn.Module) -> None:
    """Keep all rotary embeddings of `model` (changed in place) from computing frequencies again in a forward pass."""
    for module in model.modules():
        kind = vars(module).get("rope_type")
        if isinstance(kind, str):
            vars(module)["rope_type"] = _fixed(kind)
        elif isinstance(kind, dict):  # one for each type of layer
            vars(module)["rope_type"] = {layer: _fixed(layer_kind) for layer, layer_kind in kind.items()}


def _fixed(kind: str) -> str:
    return "default" if "dynamic" in kind or kind == "longrope" else kind
