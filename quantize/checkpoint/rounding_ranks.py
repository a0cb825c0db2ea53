"""Round weights by GPTQ in several ranks: each rounds groups of weights that read one input, and rank 0 writes.

Factoring the moments of an input of n values takes some n³ operations, and rounding m output channels by them some
13 n² m (GPTQ, and the passes of descent). Groups are assigned by that, the costliest first, each to the rank with the
least so far. A group's codes depend on its weights and moments alone, so they are those of one process, bit for bit.

Rank 0 has the second moments, and what is known of outputs. A thread for each other rank sends it those of a group and
gets its codes back, one group after the other, while rank 0 rounds its own: so another rank stores the moments of one
group at a time. Codes lie in a folder of rank 0's, where a call finds them that goes on after a rank was killed; the
checkpoint is written from there.
"""

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Literal

import numpy as np

from ...calibrate.measure.held_out import input_name, tokens_file
from ...calibrate.measure.moments import first_file, moments_file
from ...calibrate.model.source import Source
from ...calibrate.ranks.shares import assigned
from ...calibrate.ranks.world import FileChannel, World
from ...core.errors import Fp8qError
from ...core.files import Strict
from ..weights.code_sources import FloatWeight, GptqCodes
from ..weights.gptq import Compensations, MeasuredWindows
from ..weights.output_side import output_files
from ..weights.rounding_progress import CachedCodes
from ..weights.sequential_ranks import SentScaling
from .narrowing import Narrowing

#: The cost of rounding an output channel of an input of n values, in n².
CHANNEL_COST = 13

#: The modules that read one input.
Group = tuple[str, ...]


class RoundingTask(Strict):
    """The rounding that rank 0 tells the others to make.

    `shares`: of each rank, its groups of modules; `axes`: module -> the axis of its output channels; `by_outputs`: the
    codes are revised by the gradients at outputs. The other fields are those of `Compensations`.
    """

    scaling: SentScaling
    first: dict[str, str]
    lost: dict[str, float]
    experts: list[str]
    first_tokens: dict[str, float]
    window: int | None
    axes: dict[str, Literal[0, 1]]
    by_outputs: bool
    shares: list[list[Group]]

    def compensations(self, moments: Path) -> Compensations:
        """Open the second moments in the folder `moments`."""
        return Compensations(
            moments, self.first, self.lost, (), self.experts, MeasuredWindows(self.window, self.first_tokens)
        )


def round_in_ranks(
    world: World, source: Source, codes: GptqCodes, axes: Mapping[str, Literal[0, 1]], modules: Collection[str],
    device: str,
) -> None:  # fmt: skip
    """Round the weights of `modules` in all ranks of `world`, into the stored ones of `codes`; rank 0 calls this.

    `axes`: module -> the axis of output channels in its weight.
    """
    assert codes.stored is not None, "ranks hand their codes over"
    stored = codes.stored
    compensations = codes.compensations
    groups: dict[str, list[str]] = {}
    for module in sorted(modules):
        if module not in compensations.unknown and not stored.has(module, compensations.lost[module]):
            groups.setdefault(compensations.first.get(module, module), []).append(module)
    costs = {tuple(members): _cost(source, compensations.folder, first, members) for first, members in groups.items()}
    task = RoundingTask(
        scaling=SentScaling.of(codes.scaling),
        first=dict(compensations.first),
        lost=dict(compensations.lost),
        experts=list(compensations.experts),
        first_tokens=dict(compensations.windows.first),
        window=compensations.windows.tokens,
        axes=dict(axes),
        by_outputs=codes.outputs is not None,
        shares=assigned(costs, world.size),
    )
    world.gathered(task.model_dump())
    channels = _channels(world)
    failures: list[Exception] = []

    def serve(rank: int) -> None:
        try:
            for group in task.shares[rank]:
                channels[rank].send([*_moments_of(group, compensations)])
                if codes.outputs:
                    channels[rank].send([path for module in group for path in output_files(codes.outputs, module)])
                _receive_codes(channels[rank], stored, stored.folder / f"received-{rank}")
        except (Fp8qError, OSError, RuntimeError) as error:  # raised by the main thread
            failures.append(error)

    # a rank that is killed, or this one, ends them with the process
    threads = [Thread(target=serve, args=(rank,), daemon=True) for rank in channels]
    for thread in threads:
        thread.start()
    for group in task.shares[0]:
        round_group(source, codes, group, axes, device)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def round_share(world: World, source: Source, task: RoundingTask, folder: Path, device: str) -> None:
    """Round, in a rank above 0, the groups that rank 0 assigns by `task`, with files in `folder`."""
    channel = _channels(world)[0]
    for group in task.shares[world.rank]:
        shutil.rmtree(folder, ignore_errors=True)
        moments = folder / "moments"
        outputs = folder / "outputs" if task.by_outputs else None
        stored = CachedCodes(folder / "codes")
        for path in (moments, outputs, stored.folder):
            if path:
                path.mkdir(parents=True)
        channel.receive(moments)
        if outputs:
            channel.receive(outputs)
        codes = GptqCodes(task.scaling.scaling, task.compensations(moments), stored, outputs)
        round_group(source, codes, group, task.axes, device)
        channel.send(stored.files())
    shutil.rmtree(folder, ignore_errors=True)


def _cost(source: Source, moments: Path, first: str, members: Sequence[str]) -> int:
    """The operations of rounding the weights of `members`, about."""
    width = len(np.load(moments_file(moments, first), mmap_mode="r", allow_pickle=False))
    weights = source.weights()
    numbers = sum(int(np.prod(weights.shape(source.stored(f"{module}.weight")))) for module in members)
    return width**3 + CHANNEL_COST * width * numbers


def _channels(world: World) -> dict[int, FileChannel]:
    """Connect rank 0 with each other rank; another rank -> the channel, as this rank has it; a collective."""
    groups = world.paired([(0, rank) for rank in range(1, world.size)])
    if world.rank:
        return {0: FileChannel(world, groups[world.rank - 1], 0)}
    return {rank: FileChannel(world, group, rank) for rank, group in enumerate(groups, 1)}


def _moments_of(group: Group, compensations: Compensations) -> Iterator[Path]:
    """Yield the files of second moments, first tokens and held-out tokens that `group` is rounded by."""
    folder = compensations.folder
    names = {compensations.first.get(module, module) for module in group} | {*group}
    paths = {path for name in names for path in (moments_file(folder, name), first_file(folder, name))}
    paths |= {tokens_file(folder, input_name(module)) for module in group if compensations.judges(module)}
    yield from sorted(path for path in paths if path.is_file())


def _receive_codes(channel: FileChannel, stored: CachedCodes, received: Path) -> None:
    """Receive a group's codes, and add them to the `stored` ones once they are complete."""
    shutil.rmtree(received, ignore_errors=True)
    received.mkdir()
    channel.receive(received)
    for file in received.iterdir():
        file.replace(stored.folder / file.name)
    received.rmdir()


def round_group(
    source: Source, codes: GptqCodes, group: Sequence[str], axes: Mapping[str, Literal[0, 1]], device: str
) -> None:  # fmt: skip
    """Round the weights of `group`; the codes are stored, and a weight of zeros has none."""
    narrowing = Narrowing(source, source.weights())
    for module in group:
        read = partial(narrowing.tensor, source.stored(f"{module}.weight"))
        codes.quantized(FloatWeight(module, read, axes[module], device))
