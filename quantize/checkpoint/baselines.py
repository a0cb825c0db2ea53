"""Write the weights that FP8 is compared with: the source in BF16, and INT8 of the same modules by the same statistics.

BF16 weights are copies of the source's bytes (`files.clone_file`); weights in another type are cast to BF16, tensor by
tensor.

INT8 is the usual scheme: symmetric, weights amax / 127 per output channel, activations per tensor and static, without
SmoothQuant. Its clips are chosen by the run's method from the exact histograms, on the grid of the 128 integer
magnitudes. Scales are rounded up to BF16 numbers, as those of FP8 are: that costs INT8 0.07 dB at most. Embeddings,
head, skipped modules and the cache stay in BF16.
"""

from pathlib import Path

from ...calibrate.checkpoint.weights import INDEX
from ...calibrate.measure.statistics import Statistics
from ...calibrate.model.source import Source
from ...core.files import clone_file, write_document
from ...core.reporter import Reporter
from ...options import Clipping
from ..codes.formats import INT8
from ..scales.activation_scales import activation_scales
from ..scales.decisions import Scales
from ..weights.channels import WeightScaling
from ..weights.code_sources import NearestCodes, Rounding
from .narrowing import CAST, Narrowing
from .ties import ties_of
from .writer import ShardWriter, quantize_checkpoint, write_config


def write_bf16(source: Source, directory: Path, report: Reporter) -> None:
    """Write the weights of `source` in BF16 to `directory` (new): its own files where nothing is cast.

    What transformers keeps in FP32 stays so.
    """
    directory.mkdir(parents=True)
    weights = source.weights()
    ties = ties_of(source)
    write_config(source, directory, None, ties)
    narrowing = Narrowing(source, weights)
    cast = any(weights.dtype(name) in CAST and not narrowing.keeps(name) for name in weights.names())
    if source.merged is None and not cast and not ties.renamed:
        index = [source.path / INDEX] if len(source.weight_files) > 1 else []
        for file in (*source.weight_files, *index):
            clone_file(file, directory / file.name)
        return
    writer = ShardWriter(directory, ties.renamed)
    with report.track("Casting weights to BF16", len(weights.names()), "tensors") as advance:
        for name in weights.names():
            writer.add(name, narrowing.tensor(name))
            advance(1)
    writer.close()


def write_int8(
    source: Source, directory: Path, statistics: Statistics, fp8: Scales, clipping: Clipping, report: Reporter
) -> Scales:
    """Write INT8 weights of the modules that `fp8` quantizes, and their scales.json, to `directory` (new).

    Returns the INT8 scales.
    """
    activations, unfit = activation_scales(statistics, fp8.weights, clipping, INT8)
    chosen = Scales(format="int8", weights={}, activations=activations, skipped=fp8.skipped | unfit)
    scaling = WeightScaling("amax")
    rounding = Rounding(scaling, (NearestCodes(scaling, INT8),))
    done = chosen.with_weights(quantize_checkpoint(source, directory, chosen, rounding, report))
    write_document(directory / "scales.json", done)
    return done
