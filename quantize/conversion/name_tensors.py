"""Say of a tensor what its name and shape tell, where transformers has no class for the checkpoint.

This fails closed. A matrix is quantized only where the rule knows the end of its name for a linear layer's, and its
shape is one that such a layer has beside the width of the model: an embedding under any name is none, nor is a weight
that is stored [in, out]. A square weight shows no axes, so it takes those that others of its layer show.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from ...calibrate.input.untrusted import walk
from ...core.headers import StoredTensor
from .reasons import HEAD, LAYER, TURNED, vocabulary_sizes
from .rules import Linear, Rules

WEIGHT = ".weight"
#: The fields of config.json that have the width of the model.
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "model_dim", "embed_dim", "embedding_size", "n_embed")
#: The ends of names of tables of tokens' embeddings, whose sizes are those of the vocabulary and of the model.
_TABLES = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "emb", "shared", "vte")

_UNKNOWN = "not known to be a linear layer, by its name and its shape"


class NamedTensors:
    """Judges the tensors of a checkpoint by their names and shapes."""

    def __init__(self, rules: Rules, config: Mapping[str, Any], headers: Mapping[str, StoredTensor]):
        self.rules = rules
        self.headers = headers
        fields = [(place.rpartition("\0")[2], value) for place, value in walk(dict(config)) if type(value) is int]
        tables = [header.shape for name, header in headers.items() if self._is_table(name, header)]
        widths = {value for key, value in fields if key in _WIDTHS}
        self.sizes = {value for _, value in fields}
        self.widths = widths or {columns for _, columns in tables}
        self.vocabularies = vocabulary_sizes(config) or {rows for rows, _ in tables}
        self.types = {str(value) for place, value in walk(dict(config)) if place.rpartition("\0")[2] == "model_type"}
        self.turned = {
            numbered_layer(name): name
            for name, header in headers.items()
            if (entry := self._linear(name)) is not None and self._is_turned(entry, header.shape)
        }

    def matrix(self, name: str) -> str | None:
        """The reason why the matrix `name` is no linear layer's as far as names tell; None for one that is."""
        module, (rows, columns) = name.removesuffix(WEIGHT), self.headers[name].shape
        if rows in self.vocabularies:
            return f"{HEAD.partition(':')[0]} or embedding: it has the vocabulary's {rows:,} rows"
        entry = self._linear(name)
        if entry is None or not self._fits(entry, rows, columns):
            return _UNKNOWN
        if rows == columns and (other := self.turned.get(numbered_layer(name))) is not None:
            return f"square, and {other.removesuffix(WEIGHT)} of its layer is stored [in, out]"
        return None if module else _UNKNOWN

    def stack(self, name: str) -> tuple[str, ...] | str:
        """The projections that the rows of each expert in the stack `name` belong to, in equal parts; or the reason why
        it stays whole.
        """
        leaf = _leaf(name)
        parts = self.rules.stacks.split.get(_leaf(name))
        if parts is None or not any(fnmatchcase(name, pattern) for pattern in self.rules.stacks.modules):
            return "a stack of experts that the rule has no modules for"
        if len(parts) > 1 and self.types.intersection(self.rules.stacks.alternating):
            return "a stack of experts whose projections alternate, row by row"
        axes = self._axes(name)
        others = (f"{name.removesuffix(leaf)}{other}" for other in self.rules.stacks.split)
        shown = axes or next((axes for other in others if other in self.headers and (axes := self._axes(other))), None)
        if shown is None:
            return "a stack of experts whose axes no size tells"
        if shown == "in_out" or self.headers[name].shape[1] % len(parts):
            return TURNED
        return parts

    def _axes(self, name: str) -> str | None:
        """The order of the axes of each expert's weight, where its shape tells it."""
        shape = self.headers[name].shape
        if len(shape) != 3:
            return None
        rows_are_width = shape[1] in self.widths
        columns_are_width = shape[2] in self.widths
        if rows_are_width == columns_are_width:
            return None
        outputs_are_width = _leaf(name).startswith("down")
        if rows_are_width == outputs_are_width:
            return "out_in"
        return "in_out"

    def _linear(self, name: str) -> Linear | None:
        if not name.endswith(WEIGHT) or len(self.headers[name].shape) != 2:
            return None
        module = name.removesuffix(WEIGHT)
        return next((entry for entry in self.rules.linear if entry.matches(module)), None)

    def _fits(self, entry: Linear, rows: int, columns: int) -> bool:
        if entry.width == "in":
            return columns in self.widths
        if entry.width == "out":
            return rows in self.widths
        if entry.width == "either":
            return rows in self.widths or columns in self.widths
        return columns in self.sizes

    def _is_turned(self, entry: Linear, shape: tuple[int, ...]) -> bool:
        axis = {"in": 1, "out": 0}.get(entry.width)
        return axis is not None and shape[axis] not in self.widths and shape[1 - axis] in self.widths

    @staticmethod
    def _is_table(name: str, header: StoredTensor) -> bool:
        if len(header.shape) != 2 or not prod(header.shape):
            return False
        return name.removesuffix(WEIGHT).rpartition(".")[2] in _TABLES


def numbered_layer(name: str) -> str:
    """The beginning of a name up to the first number, which counts layers; empty outside of them."""
    layer = LAYER.match(name)
    return layer[1] if layer else ""


def _leaf(name: str) -> str:
    """The last part of the name of a stack, which may end in `.weight`."""
    return name.removesuffix(WEIGHT).rpartition(".")[2]
