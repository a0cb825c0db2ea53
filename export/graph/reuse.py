"""Keep the graphs of a run when only numbers change: other scales leave names, shapes, types and offsets as they are.

A graph holds no scale and no code: it points at them in the safetensors beside it, each scale at its own place
(`passes.simplify` merges none). Tracing takes a minute, so the graphs move from the old checkpoint to the new one where
all that they follow from is equal: config.json with its quantization scheme, and the header of every shard (each
tensor's name, type, shape and offset). They are linted against the new scales like every graph.
"""

import shutil
from pathlib import Path

from ...core.errors import InputError
from ...core.headers import header_bytes
from ...core.run import Run
from ...quantize.reading.run_checkpoint import ADAPTERS


def carry_graphs(run: Run, checkpoint: Path) -> None:
    """Copy the graphs of `run` into `checkpoint`, which is about to replace `run.model`, where they still fit it.

    Nothing is copied where a file that they follow from no longer reads.
    """
    try:
        same = layout(run.model) == layout(checkpoint)
    except (InputError, FileNotFoundError):
        return
    if same:
        for graph in run.model.glob("model*.onnx"):
            shutil.copyfile(graph, checkpoint / graph.name)


def layout(checkpoint: Path) -> dict[str, bytes]:
    """The files that graphs follow from, by name: config.json, and the headers of the shards and of the adapters."""
    adapters = checkpoint / ADAPTERS
    configs = [checkpoint / "config.json", *sorted(adapters.glob("*/*.json"))]
    shards = [*sorted(checkpoint.glob("*.safetensors")), *sorted(adapters.glob("*/*.safetensors"))]
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in configs} | {
        str(shard.relative_to(checkpoint)): header_bytes(shard) for shard in shards
    }
