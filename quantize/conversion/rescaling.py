"""Plan a checkpoint in blocks again, under scales that are powers of two.

vLLM and SGLang compute blocks so on Hopper and Blackwell, and round the codes of a checkpoint whose scales are others a
second time when they load it. Written so, the second rounding changes nothing, and what is compared and published is
what is served. Names, shapes and the quantization of config.json stay.
"""

from collections.abc import Sequence
from pathlib import Path

from ...core.errors import InputError
from ...core.headers import make_header, read_header
from ...options import ConvertLayout, ConvertOptions
from ...options.declare import first_changed
from ..codes.formats import CODE_DTYPE
from ..reading.fp8_tensors import Checkpoint, Codes, Float32s, open_checkpoint
from ..scales.clip import powers_of_two
from ..scales.scheme import BLOCK_SIDES
from .plan import CheckpointPlan, Copied, Matrix, ShardPlan, Written

#: The layouts that blocks are written in.
IN_BLOCKS: tuple[ConvertLayout, ...] = ("compressed-tensors", "fp8")
#: The options that choose what is quantized, which the source has decided.
OF_THE_CHOICE = ("block_scale_grid", "skip", "rules", "mtp")


def checkpoint_in_blocks(path: Path) -> Checkpoint | None:
    """Open the checkpoint in `path` where weights of it are codes in blocks; None for any other."""
    checkpoint = open_checkpoint(path)
    if checkpoint is None or all(codes.granularity != "block" for codes in checkpoint.codes.values()):
        return None
    return checkpoint


def rescaled_plan(checkpoint: Checkpoint, name: str, files: Sequence[Path], options: ConvertOptions) -> CheckpointPlan:
    """Plan the `checkpoint` of this `name`, whose weights lie in `files`, with powers of two for the scales of blocks.

    Raises InputError for options that choose anew what the source has chosen, for scales that are missing or damaged,
    for stacks of experts in blocks, and for a checkpoint without blocks, or whose scales are powers of two already.
    """
    written = checkpoint.declared.form
    layout = next((layout for layout in IN_BLOCKS if layout == written), None)
    if layout is None:
        raise InputError(
            name, f"is in blocks in the form {written}, which is not written", "convert the one it was made from"
        )
    if options.layout not in (None, layout):
        raise InputError(name, f"is in the layout {layout}, in which its scales would stay", "leave --layout out")
    if option := first_changed(options, OF_THE_CHOICE):
        raise InputError(
            option.split()[0],
            f"chooses what is quantized and how, and {name} is in blocks already",
            "leave it out, to have its scales rounded up to powers of two",
        )
    scales = {codes.weight: (codes, _scales(checkpoint, codes)) for codes in _in_blocks(checkpoint)}
    if all(powers_of_two(values) for _, values in scales.values()):
        raise InputError(
            name,
            "has powers of two for the scales of its blocks already",
            "serve it as it is: nothing is rounded again",
        )
    shards = [_shard(file, scales) for file in files]
    return CheckpointPlan(
        "block",
        layout,
        tuple(shards),
        {},
        decided_by="its own configuration",
        blocks="power-of-two",
        quantization=checkpoint.config["quantization_config"],
    )


def _in_blocks(checkpoint: Checkpoint) -> list[Codes]:
    """The weights of `checkpoint` that have a scale for each block of 128 x 128."""
    in_blocks = [codes for codes in checkpoint.codes.values() if codes.granularity == "block"]
    for codes in in_blocks:
        if len(codes.shape) != 2 or codes.block != BLOCK_SIDES:
            raise InputError(
                codes.weight,
                f"{list(codes.shape)} has blocks of {list(codes.block or ())}, and a matrix in blocks of "
                f"{list(BLOCK_SIDES)} is scaled again",
                "convert the checkpoint that it was made from",
            )
    return in_blocks


def _scales(checkpoint: Checkpoint, codes: Codes) -> Float32s:
    """Read the scales of `codes`, float32 [blocks, blocks]; InputError for one that is negative or not finite. A block
    of zeros may have 0.
    """
    values = checkpoint.scales(codes)
    if not (values >= 0).all() or values.max() == float("inf"):
        raise InputError(
            codes.scale or codes.weight, "has a scale that is negative or not finite", "copy or download it again"
        )
    return values


def _shard(file: Path, scales: dict[str, tuple[Codes, Float32s]]) -> ShardPlan:
    """Plan a file: codes and scales of blocks are made again, and all else is copied."""
    written: dict[str, Written] = {}
    copies: list[Copied] = []
    matrices: list[Matrix] = []
    again = {codes.scale for codes, _ in scales.values()}
    for name, stored in read_header(file).items():
        if name in scales:
            codes, values = scales[name]
            assert codes.scale is not None, "what has no scale has no granularity"
            rows, columns = stored.shape
            written[name] = (CODE_DTYPE, (rows, columns))
            written[codes.scale] = ("F32", values.shape)
            matrices.append(Matrix(name, stored.start, stored.dtype, rows, columns, name, codes.scale, factors=values))
        elif name not in again:
            copies.append(Copied(name, stored))
            written[name] = (stored.dtype, stored.shape)
    return ShardPlan(file, *make_header(file, written), tuple(copies), tuple(matrices))
