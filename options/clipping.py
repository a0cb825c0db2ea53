"""Options of the scale of a tensor of activations or of the cache: the clip and the grid, and the history of amax.

`METHODS` is the registry of clip methods: choices of the command line, the certificate of the text, the table in
docs/choosing-scales.md, benchmarks and tests follow from it. The function of a method needs NumPy and the formats,
which this layer does not import, so it stands in `quantize/scales/clip.py` and names its entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from ..core.errors import InputError
from .declare import SCALES, Of, Options, between, first_changed, option, percentage

#: Octaves that --margin may move a scale either way: E4M3 spans 18.
LARGEST_MARGIN = 16


@dataclass(frozen=True)
class ClipMethod:
    """A method of choosing the clip of a tensor.

    `clip` and `saturates` describe it in docs/choosing-scales.md: the magnitude that it clips at, and the values that
    lie beyond. `by_batch_amax`: its clip follows from the amax of batches alone, so that the certificate of the
    calibration text, which is computed from these, is true of it. The options of a method are fields of `Clipping` with
    the mark `Of(name)`.
    """

    clip: str
    saturates: str
    by_batch_amax: bool = False


#: The methods by the names that `--method` takes.
METHODS: Mapping[str, ClipMethod] = {
    "amax": ClipMethod("the largest magnitude seen", "nothing that was seen", by_batch_amax=True),
    "percentile": ClipMethod("the observed magnitude at `--percentile`", "the rest"),
    "mse": ClipMethod(
        "of the BF16 scale with the least squared error, which is often a little above the amax's",
        "what pays for itself",
    ),
    "entropy": ClipMethod(
        "of the BF16 scale with the least KL divergence between the distribution and what the cells of E4M3 keep of it "
        "(TensorRT's entropy calibrator)",
        "often much",
    ),
    "delayed": ClipMethod(
        "what Transformer Engine's history would hold after the last batch (`--amax-history-len`, "
        "`--amax-compute-algo`, `--interval`)",
        "what the history forgot",
        by_batch_amax=True,
    ),
}
if TYPE_CHECKING:
    Method = str
else:
    Method = Literal[*METHODS]
ScaleGrid = Literal["bf16", "power-of-two"]
#: The help of `--block-scale-grid`.
BLOCK_SCALE_GRID = (
    "The numbers that the scales of blocks, and of groups of their inputs, are rounded up to: vLLM and SGLang compute "
    "blocks under powers of two on Hopper and Blackwell, and round others again."
)
AmaxAlgorithm = Literal["max", "most_recent"]


def no_blocks(grid: ScaleGrid) -> InputError:
    """Make the error for `--block-scale-grid` where no module is in blocks."""
    return InputError(
        f"--block-scale-grid {grid}", "is for blocks, and no module is in them", "leave it out, or give --form block"
    )


def octaves(option: str, value: int) -> int:
    """The rule of a power of two by which scales are multiplied."""
    if abs(value) > LARGEST_MARGIN:
        raise InputError(
            f"{option} {value}",
            f"must lie between -{LARGEST_MARGIN} and {LARGEST_MARGIN}",
            "the scale is multiplied by 2 to this power",
        )
    return value


@dataclass(frozen=True)
class Clipping(Options):
    """Options of the scale of an activation or cache tensor: the method's clip times 2^margin, on the grid of scales.

    The last three fields have Transformer Engine's names.
    """

    method: Annotated[Method, option(SCALES, "How the scales of activations and of an FP8 cache are chosen.")] = "amax"
    percentile: Annotated[
        float, option(SCALES, "For --method percentile, in percent.", "P"), Of("percentile"), percentage
    ] = 99.99
    margin: Annotated[
        int, option(SCALES, "Multiply these scales by 2^N: more headroom, more underflow.", "N"), octaves
    ] = 0
    scale_grid: Annotated[ScaleGrid, option(SCALES, "The numbers that these scales are rounded up to.")] = "bf16"
    amax_history_len: Annotated[
        int,
        option(SCALES, "Delayed scaling: batches in the history; more than there are means all.", "N"),
        Of("delayed"),
        between(1),
    ] = 1024
    amax_compute_algo: Annotated[
        AmaxAlgorithm, option(SCALES, "Delayed scaling: the history's largest amax, or its last."), Of("delayed")
    ] = "max"
    interval: Annotated[
        int, option(SCALES, "Delayed scaling: batches from one scale to the next.", "N"), Of("delayed"), between(1)
    ] = 1

    def __post_init__(self) -> None:
        """Refuse also options of a method other than the chosen one."""
        super().__post_init__()
        for name in self.idle:
            if option := first_changed(self, [name]):
                raise InputError(
                    option,
                    f"is for --method {self.declared()[name].of}, and the method is {self.method}",
                    "choose that one, or leave this out",
                )

    @property
    def idle(self) -> list[str]:
        """The fields that belong to a method other than the chosen one."""
        return [name for name, field in self.declared().items() if field.of not in (None, self.method)]


@dataclass(frozen=True)
class History(Clipping):
    """The history of amax that `fp8q inspect --delayed` simulates."""

    method: Annotated[Literal["delayed"], Parameter(parse=False)] = "delayed"
