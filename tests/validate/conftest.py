"""A small run made by hand: real histograms, scales, losses and files, small enough to work out on paper.

Two layers of three GEMMs and an output head. What q and k receive was chosen so that everything about its scale is
known: 448 once, so the scale is 1; 1 three times, which is a code; 2⁻¹¹ four times, which rounds to zero. The last
GEMM saw NaN. The other tensors are normal deviates.
"""

import struct
from collections.abc import Callable
from json import dumps
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from loaded_runtimes import compare_runtimes

from fp8q.calibrate.measure.histogram import Histogram
from fp8q.calibrate.measure.statistics import (
    Corpus,
    ModelIdentity,
    Statistics,
    StatisticsRecord,
    TensorStatistics,
    save_statistics,
)
from fp8q.calibrate.text.evaluation import cut
from fp8q.core.files import write_document
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.options import Clipping
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.scales.activation_scales import activation_scales
from fp8q.quantize.scales.cache_scales import kv_cache_scales
from fp8q.quantize.scales.clip import scale_of
from fp8q.quantize.scales.decisions import Scales, Skipped, WeightScales
from fp8q.validate.accuracy.document import save_accuracy

KNOWN = np.array([448.0, 1, 1, 1, 2**-11, 2**-11, 2**-11, 2**-11], np.float32)
OUT, WIDTH, VOCABULARY = 16, 32, 8
GROUPS = {
    f"model.layers.{i}.{first}": [f"model.layers.{i}.{member}" for member in members]
    for i in (0, 1)
    for first, members in (("q", "qk"), ("down", ["down"]))
}


@pytest.fixture
def calibrated_run(tmp_path: Path) -> Run:
    """A run that was calibrated and no more."""
    return make_calibrated(Run(tmp_path / "run"))


@pytest.fixture
def evaluated_run(calibrated_run: Run) -> Run:
    """The same, evaluated: BF16 and FP8 are bigram tables of logits."""
    return make_evaluated(calibrated_run)


def make_calibrated(run: Run) -> Run:
    statistics = measured(np.random.default_rng(8))
    with RunWriter(run).stage("measure", {"model": "a" * 64}, {"batch_size": 1}) as log:
        log.notes.append("--samples lowered from 512 to 2: the text has no more")
        log.outputs += save_statistics(run, statistics)
    modules = [module for members in GROUPS.values() for module in members]
    scales, skipped = activation_scales(statistics, modules, Clipping())
    with RunWriter(run).stage("quantize", {}, {"method": "amax"}) as log:
        weights = {
            module: write_weight(run.model / f"model-{i}.safetensors", module, i) for i, module in enumerate(scales)
        }
        head = Skipped(reason="output head: its error would go straight into the logits")
        write_document(
            run.scales,
            Scales(
                weights=weights,
                activations=scales,
                kv_cache=kv_cache_scales(statistics, Clipping()),
                skipped={"lm_head": head} | skipped,
            ),
        )
        log.outputs += [run.scales, *sorted(run.model.iterdir())]
    return run


def measured(rng: np.random.Generator) -> Statistics:
    normal = {
        f"model.layers.{i}.{name}": bf16(rng.normal(size=4096)) for i in (0, 1) for name in ("down.input", "k", "v")
    }
    values = normal | {
        "model.layers.0.q.input": KNOWN,
        "model.layers.1.q.input": 2 * KNOWN,
        "model.layers.1.down.input": np.array([1, np.nan], np.float32),
    }
    identity = ModelIdentity(name="<tiny> & small", architecture="LlamaForCausalLM", fingerprint="a" * 64)
    corpus = Corpus(name="text.txt", fingerprint="b" * 64, windows=2, seq_len=64, batch_size=1)
    record = StatisticsRecord(model=identity, corpus=corpus, tokens=128, groups=GROUPS)
    return Statistics(record, {name: statistics_of(x) for name, x in values.items()})


def bf16(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    return torch.from_numpy(values).to(torch.bfloat16).float().numpy()


def statistics_of(values: npt.NDArray[np.float32]) -> TensorStatistics:
    histogram = Histogram.from_dense(np.bincount(np.abs(values).view(np.uint32) >> 16, minlength=1 << 15))
    batches = np.array([np.abs(half).max() for half in np.array_split(values, 2)], np.float32)
    return TensorStatistics(histogram, batches, np.array([histogram.amax], np.float32))


def write_weight(path: Path, module: str, seed: int) -> WeightScales:
    """Quantize a random matrix per output channel and write its codes and scales, as the checkpoint's writer does with
    torch.
    """
    weight = bf16(np.random.default_rng(seed).normal(size=(OUT, WIDTH)))
    scale = scale_of(np.abs(weight).max(axis=1), E4M3)
    codes = E4M3.encode(weight / scale[:, None])
    noise = ((weight - E4M3.decode(codes) * scale[:, None]).astype(np.float64) ** 2).sum()
    write_safetensors(
        path,
        {
            f"{module}.weight": ("F8_E4M3", codes),
            f"{module}.weight_scale": ("F32", scale[:, None]),
            f"{module}.bias": ("BF16", np.zeros(OUT, np.uint16)),
        },
    )
    sqnr = 10 * float(np.log10((weight.astype(np.float64) ** 2).sum() / noise))
    return WeightScales(
        method="amax", axis=0, channels=OUT, scale_min=float(scale.min()), scale_max=float(scale.max()), sqnr_db=sqnr
    )


def write_safetensors(path: Path, tensors: dict[str, tuple[str, npt.NDArray[np.generic]]]) -> None:
    """The format by hand (8 bytes of length, JSON, data), since NumPy has no FP8."""
    header, data = dict[str, object](), b""
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def make_evaluated(run: Run) -> Run:
    rng = np.random.default_rng(9)
    logits = rng.normal(scale=2, size=(VOCABULARY, VOCABULARY)).astype(np.float32)
    rounded = E4M3.decode(E4M3.encode(logits))
    evaluation = cut(rng.integers(VOCABULARY, size=640), "held-out.txt", 64, 64)
    with RunWriter(run).stage("validate", {}, {"context": 64}) as log:
        log.outputs += save_accuracy(
            run,
            *compare_runtimes(evaluation, {"bf16": bigram(logits), "reference": bigram(rounded)}, VOCABULARY, SILENT),
        )
    return run


def bigram(logits: npt.NDArray[np.float32]) -> Callable[[npt.NDArray[np.int64]], torch.Tensor]:
    """A language model that sees one token: the logits are a row of a table."""
    return lambda ids: torch.from_numpy(logits)[torch.from_numpy(ids)]
