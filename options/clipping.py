"""Options of the scale of a tensor of activations or of the cache: the clip and the grid, and the history of amax."""

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from ..core.errors import InputError
from .declare import SCALES, Of, Options, between, first_given, option, percentage

#: Octaves that --margin may move a scale either way: E4M3 spans 18.
LARGEST_MARGIN = 16
Method = Literal["amax", "percentile", "mse", "entropy", "delayed"]
ScaleGrid = Literal["bf16", "power-of-two"]
AmaxAlgorithm = Literal["max", "most_recent"]


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
            if given := first_given(self, [name]):
                raise InputError(
                    given,
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
