"""How long choosing all scales again takes: the decisions for a 32-layer model, from statistics alone.

    python benchmarks/rescale.py [--layers 32]

Synthetic statistics of a Llama (four distinct inputs a layer, K and V), heavy-tailed, 40 million values a tensor, so
that about as many patterns occur as in a real one. Every method is timed; the limit holds for the slowest. Writing the
checkpoint is not counted: it is bounded by the disk. Prints one JSON line.
"""

import sys
from time import perf_counter

import numpy as np
from result import arguments, described, publish

from fp8q.calibrate.measure.histogram import INFINITY, Histogram, magnitudes
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity, Statistics, StatisticsRecord, TensorStatistics
from fp8q.options import METHODS, Clipping
from fp8q.quantize.scales.activation_scales import activation_scales
from fp8q.quantize.scales.cache_scales import kv_cache_scales

LIMIT_SECONDS = 10.0
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def tensor(rng: np.random.Generator, values: float = 4e7) -> TensorStatistics:
    """Counts of a heavy-tailed density over every BF16 pattern that is expected to occur."""
    x = magnitudes(np.arange(INFINITY)).astype(np.float64)
    density = np.diff(x, append=x[-1]) / (1 + (x * rng.uniform(0.5, 5)) ** 2) ** 2.5
    counts = rng.poisson(values * density / density.sum())
    histogram = Histogram.from_dense(counts.astype(np.int64))
    return TensorStatistics(
        histogram, rng.uniform(0.5, 1, 128).astype(np.float32) * np.float32(histogram.amax), np.ones(1, np.float32)
    )


def synthetic(layers: int) -> Statistics:
    """Statistics of `layers` layers."""
    rng = np.random.default_rng(0)
    groups = {
        f"layers.{i}.{members[0]}": [f"layers.{i}.{member}" for member in members]
        for i in range(layers)
        for members in GROUPS
    }
    names = [f"{first}.input" for first in groups] + [f"layers.{i}.attn.{part}" for i in range(layers) for part in "kv"]
    identity = ModelIdentity(name="synthetic", architecture="LlamaForCausalLM", fingerprint="0" * 64)
    corpus = Corpus(name="synthetic", fingerprint="0" * 64, windows=1024, seq_len=2048, batch_size=8)
    return Statistics(
        StatisticsRecord(model=identity, corpus=corpus, tokens=1024 * 2048, groups=groups),
        {name: tensor(rng) for name in names},
    )


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    head, layers = described("rescale"), options.layers
    statistics = synthetic(layers)
    modules = [member for members in statistics.record.groups.values() for member in members]
    seconds: dict[str, float] = {}
    for method in METHODS:
        start = perf_counter()
        scales, skipped = activation_scales(statistics, modules, Clipping(method))
        cache = kv_cache_scales(statistics, Clipping(method))
        seconds[method] = round(perf_counter() - start, 3)
        assert (len(scales), len(skipped), len(cache)) == (7 * layers, 0, 2 * layers), "every tensor has a scale"
    patterns = int(np.mean([len(found.histogram.bits) for found in statistics.tensors.values()]))
    slowest = max(seconds.values())
    result = {
        "layers": layers,
        "tensors": len(statistics.tensors),
        "patterns_per_tensor": patterns,
        "seconds_by_method": seconds,
        "seconds": slowest,
    }
    limit = {"limit_seconds": LIMIT_SECONDS, "passed": slowest < LIMIT_SECONDS}
    return publish(head, result | limit, options.save)


if __name__ == "__main__":
    sys.exit(main())
