"""Optimization profiles: the ranges of batch, seq, scored and capacity that an engine is built for.

There are two. `prefill` takes any batch of prompts with or without a past. `decode` takes one token a row. A capacity
of 0, the prompt alone, is an empty tensor: TensorRT-RTX takes 0 as minimum and as optimum and generates the same
kernels for decode as from 1 up. Of graphs that concatenate the cache it chooses its matrix-vector attention
(`_gemv_mha_v1`) with seq exactly 1, which it does not where seq may be 2.

The graph has two ways of attention, one for a call of one token a row and one for several
(`modules.cached_attention`). The compiler leaves the other way out of a profile's program where the number of tokens
tells: so `prefill` begins at two tokens. Capacities are whole blocks.

Of a graph that gives the logits that are asked for, `scored` is how many: one a row where a prompt is served, which
kernels are chosen for, and all where it is validated.

The shapes of an input follow from the names of its dimensions in the graph (`batch`, `seq`, `scored`, `capacity`,
`blocks`, and sums and products of these, as `capacity + seq` and `8*batch*blocks`), so no input has to be known by
name.
"""

import math
from collections.abc import Mapping, Sequence

from pydantic import Field

from ...core.errors import InputError
from ...core.files import Strict
from ..onnx_file import names

#: Positions of a prompt that the serving loop reads in one call: `serve.loop.engine_session.CHUNK`, which is copied to
#: where this is not. A test holds them equal.
CHUNK = 1024
#: Slots of a block of the cache, and the fewest tokens of a call that is not a decode step.
BLOCK = names.BLOCK
FEWEST = 2
Range = tuple[int, int, int]
Shape = tuple[int, ...]


class Profile(Strict):
    """One optimization profile: minimum, optimum and maximum of each dynamic dimension."""

    name: str
    batch: Range = Field(description="rows")
    seq: Range = Field(description="tokens a row takes in this step")
    capacity: Range = Field(description="slots of the past")
    scored: Range = Field(default=(1, 1, 1), description="positions of a row whose logits are asked for")

    @property
    def ranges(self) -> dict[str, Range]:
        """The range of each dynamic dimension, by its name in the graph."""
        least, likely, most = (slots // BLOCK for slots in self.capacity)
        return {
            "batch": self.batch,
            "seq": self.seq,
            "scored": self.scored,
            "capacity": self.capacity,
            "blocks": (least, likely, most),
        }

    def shapes(self, tensor: str, dimensions: Sequence[int | str]) -> tuple[Shape, Shape, Shape]:
        """Minimum, optimum and maximum shape of an input whose dimensions are sizes, names, or sums of names.

        Raises InputError for any other dimension.
        """
        least, likely, most = ({name: sizes[i] for name, sizes in self.ranges.items()} for i in range(3))
        return tuple(
            tuple(size_of(tensor, dimension, sizes) for dimension in dimensions) for sizes in (least, likely, most)
        )  # type: ignore[return-value]


def size_of(tensor: str, dimension: int | str, sizes: Mapping[str, int]) -> int:
    """Compute a dimension of `tensor` that is a size, a name, or a sum of products of these.

    Raises InputError for a name that `sizes` lacks.
    """
    if isinstance(dimension, int):
        return dimension
    sums = [factors.split("*") for factors in dimension.replace(" ", "").split("+")]
    if unknown := [word for factors in sums for word in factors if word not in sizes and not word.isdecimal()]:
        what = f"{unknown[0]} is none of {', '.join(sizes)}" if unknown[0] else "it has no name"
        raise InputError(
            tensor, f"its dimension {dimension!r} has no range ({what})", "export the graph with `fp8q export`"
        )
    return sum(math.prod(sizes[word] if word in sizes else int(word) for word in factors) for factors in sums)


def round_up_to_blocks(slots: int) -> int:
    """Round a number of slots up to whole blocks."""
    return -(-slots // BLOCK) * BLOCK


def profiles(
    max_batch: int,
    max_seq_len: int,
    max_prompt: int | None = None,
    opt_batch: int | None = None,
    opt_seq_len: int | None = None,
) -> tuple[Profile, ...]:
    """The profiles of an engine for up to `max_batch` rows of up to `max_seq_len` tokens, with up to `max_prompt`
    tokens (None: all) in one step.

    Kernels are chosen for these optima: `opt_batch` prompts (None: one) of `opt_seq_len` tokens (None: a `CHUNK`)
    without a past; `opt_batch` rows (None: all) decoding over a buffer of `opt_seq_len` (None: the whole length).
    Lengths of buffers are rounded up to whole blocks.
    """
    longest = max(max_prompt or max_seq_len, FEWEST)
    slots = round_up_to_blocks(max_seq_len)
    return (
        Profile(
            name="prefill",
            batch=(1, opt_batch or 1, max_batch),
            seq=(FEWEST, max(min(opt_seq_len or CHUNK, longest), FEWEST), longest),
            capacity=(0, 0, slots),
            scored=(1, 1, longest),
        ),
        Profile(
            name="decode",
            batch=(1, opt_batch or max_batch, max_batch),
            seq=(1, 1, 1),
            capacity=(0, round_up_to_blocks(opt_seq_len) if opt_seq_len else slots, slots),
        ),
    )
