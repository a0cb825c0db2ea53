"""The reasons why a matrix is kept that both classes and names give, and what both know of names and sizes."""

import re
from collections.abc import Mapping
from typing import Any

from ...calibrate.input.untrusted import walk

EMBEDDING = "embedding: its rows are read one by one, and multiplied by nothing"
TIED_EMBEDDING = "embedding: the output head is tied to it, and its error would go straight into the logits"
HEAD = "output head: its error would go straight into the logits"
CONV1D = "Conv1D, stored [in, out], for which Hugging Face has no FP8 form"
TURNED = "a stack of experts stored [experts, in, out]"
#: The beginning of the name of a module in a numbered layer.
LAYER = re.compile(r"(.*?\.\d+)\.(?=.)", re.DOTALL)


def vocabulary_sizes(config: Mapping[str, Any]) -> frozenset[int]:
    """The sizes of vocabularies that a configuration names, of all models in it."""
    return frozenset(
        value
        for place, value in walk(dict(config))
        if type(value) is int and re.search(r"vocab\w*_size|n_vocab", place.rpartition("\0")[2])
    )
