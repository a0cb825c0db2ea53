"""Compute the memory that serving a model takes from the files of its run; this is arithmetic, not a measurement.

Weights are counted as they are stored, embeddings included; the bytes that a decode step reads are computed by
`quantize.scales.serving_cost`. The cache's shape is read from the graph's inputs, so any architecture will do.
Activations, the runtime's own memory and fragmentation are left out: the largest batch is an upper bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from onnx import TensorProto

from ...core.files import read_document
from ...core.headers import read_header
from ...core.run import Run
from ...export.onnx_file.loading import load_graph
from ...options import Precision
from ...quantize.reading.run_checkpoint import checkpoint_of, tensor_files
from ...quantize.scales.decisions import Scales, load_scales
from ...quantize.scales.serving_cost import WIDE_BYTES, Cost, cost_of, largest_batch
from ...serve.loop.sessions import PAST
from .document import Capacity, Form

#: The ends of the names of scales, which a model in BF16 does not have.
SCALES = ("_scale", "_scale_inv")


@dataclass(frozen=True)
class Footprint:
    """A model's memory: `weight_bytes` of all that is stored, and the `values` that the cache keeps of a position."""

    weight_bytes: int
    cost: Cost
    values: int


def footprint(run: Run, precision: Precision, vocabulary: int, weights: Sequence[Path] = ()) -> Footprint:
    """Compute the memory of the model in `run` of a precision; `weights`: the files of a BF16 model that lies
    elsewhere.

    Raises InputError where a file of the run does not read.
    """
    directory = checkpoint_of(run, precision)
    files = weights or sorted(directory.glob("*.safetensors"))
    stored = [item for file in files for item in read_header(file).items()]
    if precision == "bf16":
        held = sum(WIDE_BYTES * prod(tensor.shape) for name, tensor in stored if not name.endswith(SCALES))
    else:
        held = sum(tensor.end - tensor.start for _, tensor in stored)
    past = cache_of(run.onnx)
    cost = cost_of(product_shapes(run, vocabulary), {}, _scales(run, precision))
    cache = sum(values * (1 if codes and precision == "fp8" else WIDE_BYTES) for values, codes in past)
    return Footprint(held, replace(cost, cache_bytes=cache), sum(values for values, _ in past))


def with_both(models: Sequence[tuple[str, Footprint]], run: Run, vocabulary: int) -> list[tuple[str, Footprint]]:
    """Put BF16 before the models in `models` and FP8 behind them, each where it is not among them: a model that is
    measured alone is compared by arithmetic, and this needs no BF16 files, since FP8's have the same shapes.
    """
    names = [name for name, _ in models]
    wide = footprint(run, "bf16", vocabulary, sorted(run.model.glob("*.safetensors"))) if "bf16" not in names else None
    codes = footprint(run, "fp8", vocabulary) if "fp8" not in names else None
    return [*([("bf16", wide)] if wide else []), *models, *([("fp8", codes)] if codes else [])]


def _scales(run: Run, precision: Precision) -> Scales | None:
    if precision == "int8":
        return read_document(checkpoint_of(run, precision) / run.scales.name, Scales)
    return load_scales(run) if precision == "fp8" else None


def cache_of(graph: Path) -> list[tuple[int, bool]]:
    """Return, for each tensor of the cache that a graph takes, [batch, heads, capacity, size], its values a position,
    and whether they are FP8 codes.
    """
    cache = []
    for name, value in load_graph(graph).inputs.items():
        if name.startswith(PAST):
            tensor = value.type.tensor_type
            _, heads, _, size = (dimension.dim_value for dimension in tensor.shape.dim)
            cache.append((heads * size, tensor.elem_type == TensorProto.FLOAT8E4M3FN))
    return cache


def product_shapes(run: Run, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of the weight of every GEMM. A head whose weight is not stored is tied to the embeddings, of
    `vocabulary` rows.
    """
    scales = load_scales(run)
    where = tensor_files(run.model)
    stored = {
        name: tensor.shape
        for file in sorted({*where.values()})
        for name, tensor in read_header(run.model / file).items()
    }
    tied = next((shape for shape in stored.values() if len(shape) == 2 and shape[0] == vocabulary), ())
    shapes = {module: stored.get(f"{module}.weight", tied) for module in (*scales.weights, *scales.skipped)}
    return {module: shape for module, shape in shapes.items() if shape}


def capacities(models: Sequence[tuple[str, Footprint]], positions: int, memory: int) -> list[Capacity]:
    """Compute what fits into `memory` bytes, for each model (its name, its memory), in sequences of `positions`."""
    first = models[0][1].cost.step_bytes(positions)
    rows = []
    for name, model in models:
        cache: dict[Form, int] = {"bf16": WIDE_BYTES * model.values, "fp8": model.values}
        rows.append(
            Capacity(
                variant=name,
                weight_bytes=model.weight_bytes,
                step_bytes=model.cost.step_bytes(positions),
                improvement=first / model.cost.step_bytes(positions),
                cache_bytes=cache,
                largest_batch={
                    form: largest_batch(memory, model.weight_bytes, positions * taken) for form, taken in cache.items()
                },
            )
        )
    return rows
