"""The sizes of a run's weights as rows: in BF16, in FP8, in each graph and engine."""

from dataclasses import dataclass
from pathlib import Path

from ...core.headers import read_header
from ...core.run import Run
from ...quantize.codes.formats import CODE_DTYPE
from .rows import PRECISIONS, engine_rows


@dataclass(frozen=True)
class SizeRow:
    """A file, or files, of the run and their bytes, as a share of the BF16 weights where they hold the weights."""

    what: str
    path: str | None
    bytes: int
    share_of_bf16: float | None = None


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
    rows += [
        SizeRow(
            f"{PRECISIONS[engine.precision]} engine for {engine.target}".lstrip(),
            engine.file,
            engine.bytes,
            engine.bytes / bf16,
        )
        for engine in engine_rows(run)
    ]
    return rows


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
