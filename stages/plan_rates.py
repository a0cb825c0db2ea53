"""Measure on a few tokens how fast this machine runs a model, rounds its weights, and what memory that takes.

Where memory holds the model, it runs two windows as `measure` does and one as `validate` does. What no forward pass
shows (GEMMs on codes and in FP32, scales, rounding, moments) is measured on one weight of each shape, of which there
are few. Where memory does not hold it, or it would take long to load, GEMMs alone are measured.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from ..calibrate.measure.measurement import Measurement, measure_in_memory
from ..calibrate.measure.statistics import Corpus, ModelIdentity
from ..calibrate.model.bf16_gemms import gemms_in_fp32
from ..calibrate.model.decoder import NoChainError, find_layers
from ..calibrate.model.memory import weight_bytes
from ..calibrate.model.source import Source, load_model, meta_model
from ..core.memory import release_memory
from ..core.record import peak_memory_bytes, reset_peak_memory
from ..core.reporter import Silent, Standing
from ..options import RUNTIMES
from ..quantize.reference.linear import FP8Linear
from ..quantize.weights.channels import channel_scales, nearest_codes
from ..quantize.weights.gptq import compensation, gptq_codes
from ..validate.accuracy.compare import BASELINE
from ..validate.accuracy.divergence import Baseline, StoredLogits, block_size, measure_block
from .corpus import Collected
from .gradients import TOKENS, pass_bytes, pass_values
from .measure import Shape, observed_shapes
from .plan_images import seeing_products
from .shared.texts import Tokens

#: The largest weights in BF16, in bytes, that are loaded to measure a forward pass.
LOADED_BYTES = 4 << 30
#: The tokens that GEMMs are measured on, and the rows of a weight that scales are.
GEMM_TOKENS = 256
SCALED_ROWS = 64
#: The inputs that GPTQ is measured on, as many as the widest has between these, with `SCALED_ROWS` rows and with more:
#: each input takes a time of its own, and of few of them the operations are three times as slow.
FEWEST_INPUTS, MOST_INPUTS = 512, 2048
ROUNDED_ROWS = 512
#: The time of a pass beside its GEMMs, as a multiple of these, where no pass is measured.
BESIDE_GEMMS = 1.5
#: The operations of a pass that is run to measure time, about.
PROBE_OPERATIONS = 200_000_000_000
#: Values a second that ONNX Runtime's CPU provider codes and decodes, on a thread.
ONNX_CODED = 0.076e9
#: The bytes of a number in FP32.
FP32_BYTES = 4
#: Memory of the libraries that later stages load, in bytes.
LIBRARY_BYTES = 200_000_000
#: The numbers that Python adds to tell its pace, and the seconds that this took on a quiet machine of two cores.
LOOPS = 2_000_000
LOOPS_SECONDS = 0.04


@dataclass(frozen=True)
class Rates:
    """Seconds for a token: `plain` forward, `observed` with statistics, in `fp32`, through the `reference` and `onnx`,
    of `scoring` its logits, and of gathering `moments`; `scaling` a number of a weight, `compensated` all weights by
    GPTQ. `pace`: how much slower than a quiet machine this one runs Python. `inputs`: the widths of distinct inputs;
    `outputs`: the output channels of each weight; `layer_bytes`, `outside_bytes`: of the largest decoder layer, and of
    what is in none, in BF16; `window_bytes`: what a window takes beside the weights; `pass_values`: a token's in a pass
    forward and back; `seeing`: seconds of the part that sees, for a token of a row with images.
    """

    plain: float
    observed: float
    fp32: float
    reference: float
    onnx: float
    scoring: float
    moments: float
    scaling: float
    compensated: float
    pace: float
    load_seconds: float
    base_bytes: float
    weight_bytes: float
    layer_bytes: float
    outside_bytes: float
    window_bytes: float
    parameters: float
    numbers: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    layers: int
    hidden: int
    vocabulary: int
    pass_values: float
    seeing: float
    streamed: bool

    @property
    def checkpoint_bytes(self) -> float:
        """The bytes of the checkpoint: a byte for each number of a weight that is coded, and BF16 for the rest."""
        return self.weight_bytes - self.numbers

    @property
    def largest_part_bytes(self) -> float:
        """The most that is in memory of a model that goes layer by layer."""
        return max(self.layer_bytes, self.outside_bytes)

    def streamed_bytes(self, tokens: int) -> float:
        """The bytes of hidden states of so many tokens on the disk, where the model goes layer by layer."""
        return 2.0 * 2 * tokens * self.hidden if self.streamed else 0.0

    def backward_bytes(self, tokens: int, by_layer: bool) -> float:
        """The bytes on the disk of a pass forward and back of so many tokens that goes `by_layer`: what enters each
        layer, and what leaves the last, and two files of gradients, in FP32.
        """
        return 4.0 * (self.layers + 3) * tokens * self.hidden if by_layer else 0.0

    def gradient_bytes(self, copies: int, window: int, by_layer: bool) -> float:
        """The memory of a pass forward and back in FP32: by layer, of the output head and its logits; as a whole, of so
        many `copies` of the weights in BF16, and all tensors.
        """
        tokens = max(window, TOKENS)
        if by_layer:
            return 4.0 * self.hidden * self.vocabulary + pass_bytes(self.vocabulary, tokens)
        return copies * self.weight_bytes + pass_bytes(self.pass_values, tokens)

    def of_runtime(self, name: str) -> float:
        """The seconds for a token of a runtime that evaluates."""
        if RUNTIMES[name].library is not None:
            return self.onnx
        if name == "fp32":
            return self.fp32
        return self.plain if name in ("bf16", "original") else self.reference


def measured_rates(
    source: Source, collected: Collected, batch_size: int, device: str, *, stream: bool, moments: bool
) -> Rates:  # fmt: skip
    """Measure everything on `device`; `batch_size`: windows that are calibrated together; `stream`: the model goes
    layer by layer; `moments`: GPTQ may round its weights.
    """
    base = resident_bytes()
    weights = weight_bytes(source)
    vocabulary = source.text_config.vocab_size
    shapes, inputs = observed_shapes(meta_model(source))
    gemms = {shape: GemmSeconds.of(shape, device, moments) for shape in set(shapes.values())}
    times = [gemms[shape] for shape in shapes.values()]
    in_gemms = sum(gemm_time.bf16 for gemm_time in times)
    numbers = sum(map(weight_numbers, shapes.values()))
    values, layers = pass_values(source), source.text_config.num_hidden_layers
    window_bytes = FP32_BYTES * (values - vocabulary) / layers * collected.windows.shape[1]
    probe = Probe(BESIDE_GEMMS * in_gemms, BESIDE_GEMMS * in_gemms, 0.0, window_bytes)
    if not stream and weights <= LOADED_BYTES:
        probe = probed(source, collected.windows, batch_size, device, numbers)
    rows = collected.images.all if collected.images else ()
    widths = tuple(shapes[name][1] for name in inputs)
    rounding = gptq_seconds([*shapes.values()], widths) if moments else 0.0
    fp32 = probe.plain + sum(gemm_time.fp32 - gemm_time.bf16 for gemm_time in times)
    layer, outside = part_bytes(source)
    return Rates(
        plain=probe.plain,
        observed=probe.observed,
        fp32=fp32,
        reference=probe.plain + sum(gemm_time.codes - gemm_time.bf16 for gemm_time in times),
        onnx=fp32 + sum(widths) / (ONNX_CODED * torch.get_num_threads()),
        scoring=scoring_seconds(vocabulary, device),
        moments=sum(gemms[shapes[name]].moments for name in inputs),
        scaling=sum(gemm_time.scaling for gemm_time in times) / numbers,
        compensated=rounding,
        pace=seconds(lambda: sum(range(LOOPS))) / LOOPS_SECONDS,
        load_seconds=probe.load,
        base_bytes=base + LIBRARY_BYTES,
        weight_bytes=weights,
        layer_bytes=layer,
        outside_bytes=outside,
        window_bytes=probe.window_bytes,
        parameters=weights / 2,
        numbers=numbers,
        inputs=widths,
        outputs=tuple(channels for channels, _ in shapes.values()),
        layers=layers,
        hidden=source.text_config.hidden_size,
        vocabulary=vocabulary,
        pass_values=values,
        seeing=seeing_products(source, rows) * BESIDE_GEMMS * in_gemms / numbers,
        streamed=stream,
    )


def part_bytes(source: Source) -> tuple[int, int]:
    """The bytes in BF16 of the largest decoder layer of the model in `source`, and of what is in none; all of the model
    both times, where it is no list of layers.
    """
    model = meta_model(source)
    parts: Counter[int | None] = Counter()
    try:
        index = find_layers(model, source).index
    except NoChainError:
        size = weight_bytes(source)
        return size, size
    for name, parameter in model.named_parameters():
        parts[index(name)] += 2 * parameter.numel()
    return max(size for layer, size in parts.items() if layer is not None), parts[None]


def weight_numbers(shape: Shape) -> int:
    """The numbers of a weight."""
    return shape[0] * shape[1]


@dataclass(frozen=True)
class GemmSeconds:
    """Seconds of the GEMM of one weight for a token: in `bf16` and `fp32`, on `codes`, and of `moments` of its input;
    and the seconds of `scaling` all of the weight.
    """

    bf16: float
    fp32: float
    codes: float
    moments: float
    scaling: float

    @classmethod
    def of(cls, shape: Shape, device: str, moments: bool) -> "GemmSeconds":
        """Measure a weight of this shape."""
        outputs, inputs = shape
        draw = torch.Generator().manual_seed(0)
        weight = torch.randn(outputs, inputs, generator=draw).to(torch.bfloat16)
        x = torch.randn(GEMM_TOKENS, inputs, generator=draw).to(device, torch.bfloat16)
        rows = weight[:SCALED_ROWS]
        scaled = seconds(lambda: scaled_rows(rows))
        scale = torch.full((outputs,), 0.01)
        codes = nearest_codes(weight, scale).to(device)
        on_codes = FP8Linear(codes, scale.to(device), x.new_tensor(0.01, dtype=torch.float32), None, "fast")
        narrow = weight.to(device)
        wide, wide_x = narrow.float(), x.float()
        with gemms_in_fp32():  # as the model's are, where there are no BF16 units
            bf16 = seconds(lambda: nn.functional.linear(x, narrow))
        return cls(
            bf16 / GEMM_TOKENS,
            seconds(lambda: nn.functional.linear(wide_x, wide)) / GEMM_TOKENS,
            seconds(lambda: on_codes(x)) / GEMM_TOKENS,
            seconds(lambda: wide_x.T @ wide_x) / GEMM_TOKENS if moments else 0.0,
            scaled * outputs / len(rows),
        )


def scaled_rows(rows: torch.Tensor) -> None:
    """Choose the scales of some rows of a weight, and round them to nearest."""
    scale = channel_scales(rows, "mse")
    assert scale is not None, "normal numbers have scales"
    nearest_codes(rows, scale)


def scoring_seconds(vocabulary: int, device: str) -> float:
    """The seconds of comparing the logits of a token with a baseline's."""
    rows = block_size(vocabulary, torch.device(device).type)
    logits = torch.randn(rows, vocabulary, device=device).to(torch.bfloat16)
    targets = torch.zeros(rows, dtype=torch.int64, device=device)
    others = {Baseline(BASELINE, StoredLogits(Path(), BASELINE, rows), agreement=True): logits}
    return seconds(lambda: measure_block(logits, targets, others)) / rows


def gptq_seconds(shapes: Sequence[Shape], inputs: Sequence[int]) -> float:
    """The seconds of GPTQ for weights of these `shapes` and distinct `inputs`, by the n³ of factoring one of these, and
    by the n and n² m of rounding one of those.
    """
    draw = torch.Generator().manual_seed(0)
    measured = min(MOST_INPUTS, max([FEWEST_INPUTS, *inputs]))
    x = torch.randn(2 * measured, measured, generator=draw)
    moments = x.T @ x
    factored = compensation(moments.clone())
    cubed = seconds(lambda: compensation(moments.clone())) / measured**3

    def rounding(rows: int) -> float:
        weight = torch.randn(rows, measured, generator=draw).to(torch.bfloat16)
        scale = torch.full((rows,), 0.01)
        return seconds(lambda: gptq_codes(weight, scale, factored))

    few = rounding(SCALED_ROWS)
    squared = max(0.0, rounding(ROUNDED_ROWS) - few) / (measured**2 * (ROUNDED_ROWS - SCALED_ROWS))
    one = max(0.0, few / measured - squared * measured * SCALED_ROWS)
    factoring = cubed * sum(width**3 for width in inputs)
    return factoring + sum(one * width + squared * width * width * outputs for outputs, width in shapes)


@dataclass(frozen=True)
class Probe:
    """Seconds for a token of passes that were run, `plain` and `observed`, and of `load`ing the model; the bytes that
    a calibration window takes.
    """

    plain: float
    observed: float
    load: float
    window_bytes: float


class Ticks(Silent):
    """Notes the time of each step of a bar."""

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self.times: list[float] = []

    @contextmanager
    def track(
        self, description: str, total: int, unit: str = "steps", standing: Standing | None = None
    ) -> Iterator[Callable[[int], None]]:
        """Note when the bar begins and when it advances."""
        self.times.append(time.perf_counter())
        yield lambda units: self.times.append(time.perf_counter())


def probed(source: Source, calibration: Tokens, batch_size: int, device: str, numbers: int) -> Probe:
    """Load the model, and run two small batches of `calibration` windows as `measure` does and one as `validate` does;
    `numbers`: of the model's weights.
    """
    begun = time.perf_counter()
    model = load_model(source, torch.bfloat16, device)
    loading = time.perf_counter() - begun
    tokens = max(GEMM_TOKENS, PROBE_OPERATIONS // (2 * numbers))
    length = min(calibration.shape[1], tokens)
    windows = max(1, min(len(calibration) // 2, tokens // length, batch_size))
    ids = calibration[: 2 * windows, :length]
    identity = ModelIdentity(
        name="", revision=None, architecture="", fingerprint=source.fingerprint, tokenizer=source.tokenizer_fingerprint
    )
    corpus = Corpus(name="", fingerprint="", windows=len(ids), seq_len=length, batch_size=windows)
    batch = torch.from_numpy(ids[:windows]).to(device)
    with torch.inference_mode():  # which brings weights from their files into memory too
        plain = seconds(partial(model, input_ids=batch, use_cache=False))
    release_memory()
    ticks = Ticks()
    held = resident_bytes()
    reset_peak_memory()
    measure_in_memory(model, Measurement(ids, identity, corpus), ticks)
    growth = max(0, peak_memory_bytes() - held)
    observed = min(after - before for before, after in pairwise(ticks.times))
    del model
    release_memory()
    whole_windows = windows * length / calibration.shape[1]
    return Probe(plain / batch.numel(), observed / batch.numel(), loading, growth / whole_windows)


def seconds(work: Callable[[], object]) -> float:
    """The least seconds that `work` takes of two calls behind a first one."""
    work()
    taken = []
    for _ in range(2):
        begun = time.perf_counter()
        work()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def resident_bytes() -> int:
    """The resident memory of this process by now, in bytes; its peak where the system does not say."""
    reset_peak_memory()
    return peak_memory_bytes()
