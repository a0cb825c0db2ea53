"""Check the fields of config.json before transformers makes a model: types, sizes against the weights, and references
to other files.

transformers checks the fields that a model type declares, and trusts the fields common to all (windows, layer types,
token ids). And it would build a skeleton of a billion layers, layer by layer, although the headers of the weights show
at once that there are four.
"""

import re
from collections.abc import Callable, Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

from ...core.errors import InputError
from ..input.untrusted import AGAIN

#: The keys of the number of positions.
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
#: The keys of the number of layers.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
#: Keys that make transformers read other files, or build another model, than config.json and its weights.
ELSEWHERE = {
    "configuration_files": "has transformers read another file in its place",
    "fusion_config": "has transformers replace parts of the model",
}
#: More experts than any model has (Doge's configuration says 16,384): a skeleton may make a module of each.
EXPERTS = 1 << 16
LARGEST_INT = 2**31 - 1
_SIZE = re.compile(r"(\w+_(size|dim|heads|rank|groups)|n_(embd|inner|head|heads)|d_(model|ff|kv))")
_NO_SIZE = re.compile(r"window|chunk|block|batch|cache|image|patch|kernel")
#: A norm's; `eps` alone may be 0: it is ProphetNet's smoothing of labels.
_EPSILON = re.compile(r"\w+_(eps|epsilon)|epsilon")


def check_fields(file: Path, config: Mapping[str, Any]) -> None:
    """Raise InputError, naming `file`, the key and the value, for a value of `config` of the wrong type."""
    for key, why in ELSEWHERE.items():
        if config.get(key):
            raise InputError(file, f"{key} {why}, which fp8q does not do", "take it out, or give another model")
    for key, value in config.items():
        if key == "sliding_window" and value == 0 and _without_windows(config):
            continue  # how transformers writes that no layer has one (Qwen2-MoE)
        for keys, right, kind in KINDS:
            if keys(key) and value is not None and not right(value):
                raise InputError(file, f"{key} is {abbreviated(value)}, and not {kind}", AGAIN)


def check_token_ids(file: Path, config: Mapping[str, Any]) -> None:
    """Check the ids of special tokens in generation_config.json, as `check_fields` does."""
    for key in TOKEN_IDS:
        if config.get(key) is not None and not _ids(config[key]):
            raise InputError(file, f"{key} is {abbreviated(config[key])}, and not a token id or a list of them", AGAIN)


def check_sizes(file: Path, config: Mapping[str, Any], shapes: Collection[tuple[int, ...]]) -> None:
    """Raise InputError, naming `file`, for a size in `config` that weights of these `shapes` cannot have: every layer
    has at least one tensor, and a dimension of a given size needs a tensor with as many values.
    """
    values = sum(map(prod, shapes))
    for key, size in config.items():
        if not _count(size):
            continue
        if key in LAYERS and size > len(shapes):
            held = f"hold {len(shapes):,} tensors"
        elif _SIZE.fullmatch(key) and not _NO_SIZE.search(key) and size > values:
            held = f"hold {values:,} values"
        elif "expert" in key and size > EXPERTS:
            held = "are not those of so many"
        else:
            continue
        raise InputError(file, f"{key} is {size:,}, and the weights {held}", AGAIN)


def abbreviated(value: object) -> str:
    """Shorten a long value for an error."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_INT


def _positions(value: object) -> bool:
    """Tell whether a value is a number of positions; transformers writes 1200.0 of them (MusicFlamingo)."""
    return _count(int(value) if isinstance(value, float) and value.is_integer() else value)


def _without_windows(config: Mapping[str, Any]) -> bool:
    layer_types = config.get("layer_types")
    listed = isinstance(layer_types, list) and bool(layer_types)
    return config.get("use_sliding_window") is False or (
        listed and {*map(str, layer_types or ())} == {"full_attention"}
    )


def _ids(value: object) -> bool:
    listed = value if isinstance(value, list) else [value]
    return all(isinstance(number, int) and not isinstance(number, bool) for number in listed)


def _strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _small(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1


#: Which keys, what their values must be unless they are null, and how to say it.
KINDS: tuple[tuple[Callable[[str], object], Callable[[object], bool], str], ...] = (
    ({"architectures", "layer_types"}.__contains__, _strings, "a list of names"),
    (set(POSITIONS).__contains__, _positions, f"a whole number from 1 to {LARGEST_INT:,}"),
    ({*LAYERS, "sliding_window"}.__contains__, _count, f"a whole number from 1 to {LARGEST_INT:,}"),
    (
        {"vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"}.__contains__,
        _count,
        f"a whole number from 1 to {LARGEST_INT:,}",
    ),
    (set(TOKEN_IDS).__contains__, _ids, "a token id or a list of them"),
    ({"auto_map", "rope_scaling", "rope_parameters"}.__contains__, lambda value: isinstance(value, dict), "an object"),
    ({"transformers_weights"}.__contains__, lambda value: isinstance(value, str), "the name of a file"),
    (_EPSILON.fullmatch, _small, "a number between 0 and 1"),
)
