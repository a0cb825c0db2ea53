"""The sizes of a run's weights as rows: in BF16, in FP8, in each graph and engine."""

from dataclasses import dataclass
from pathlib import Path

from ...core.columns import size
from ...core.headers import read_header
from ...core.run import Run
from ...quantize.codes.formats import CODE_DTYPE
from .rows import PRECISIONS, EngineRow, engine_rows


@dataclass(frozen=True)
class SizeRow:
    """A file, or files, of the run and their bytes, as a share of the BF16 weights where they hold little else;
    `contents`: the parts of an engine.
    """

    what: str
    path: str | None
    bytes: int
    share_of_bf16: float | None = None
    contents: str | None = None


def size_rows(run: Run) -> list[SizeRow]:
    """Return the sizes of the weights: in BF16, in the FP8 checkpoint, in the graphs beside it, in each engine."""
    shards = sorted(run.model.glob("*.safetensors"))
    if not shards:
        return []
    bf16 = sum(map(bf16_bytes, shards))
    held = sum(path.stat().st_size for path in shards)
    rows = [
        SizeRow("weights in BF16", None, bf16, 1.0),
        SizeRow("FP8 checkpoint", "model/*.safetensors", held, held / bf16),
    ]
    rows += [
        SizeRow(what, f"model/{path.name}", path.stat().st_size)
        for path, what in _graphs(run).items()
        if path.is_file()
    ]
    return [*rows, *(_engine(row, held if row.precision == "fp8" else bf16, bf16) for row in engine_rows(run))]


def _engine(engine: EngineRow, weights: int, bf16: int) -> SizeRow:
    """The row of an engine that holds some `weights` bytes of weights. The rest is its program, which takes the same
    for a product of any size: only of an engine that is mostly weights does the share of `bf16` bytes tell something.
    """
    program = engine.bytes - weights
    small = program > weights
    return SizeRow(
        f"{PRECISIONS[engine.precision]} engine for {engine.target}".lstrip(),
        engine.file,
        engine.bytes,
        None if small else engine.bytes / bf16,
        None
        if program < 0
        else f"some {size(weights)} of weights, and {size(program)} of compiled program"
        + (", which does not grow with the size of a product" if small else ""),
    )


def _graphs(run: Run) -> dict[Path, str]:
    return {
        run.onnx: "ONNX graph; its weights are the checkpoint’s",
        run.onnx_fp32: "the same graph, computing in FP32",
    }


def bf16_bytes(shard: Path) -> int:
    """Return the bytes that the tensors of an FP8 checkpoint's file take in the BF16 model: codes doubled, scales left
    out. Reads the header alone.
    """
    return sum(
        (at.end - at.start) * (2 if at.dtype == CODE_DTYPE else 1)
        for name, at in read_header(shard).items()
        if not name.endswith("_scale")
    )
