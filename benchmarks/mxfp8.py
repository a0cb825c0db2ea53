"""What each form of FP8 loses, and whether MXFP8 (blocks of 32 under powers of two) loses less than the others.

    python benchmarks/mxfp8.py [demo smollm2] [--rows PATTERN] [--windows 8] [--samples 24] [--folder build/real]
        [--data TEXT --eval-data TEXT]

Every row quantizes the same GEMMs, is held against the FP32 model (the BF16 checkpoint computed in FP32), and computes
in FP32 what is quantized, so that nothing but quantization is seen; `BF16` alone computes in BF16. KL in nats × 10⁶ and
the increase of perplexity, with intervals over windows, and KL over that of `one`, by the same windows. Weights are
rounded to nearest: those of `one`, `tensor weights`, `dynamic`, `two` and `bf16` by the scales of `fp8q calibrate`,
those of `block` as `fp8q convert` writes them, under powers of two; beside it blocks under FP32 scales, as they are
where nothing is rounded again, and as DeepGEMM has them, where servers round scales up and codes a second time.
MXFP8 has a shared exponent for every 32 values of a row (weights, along
the input) or of a token: `floor` as OCP's MX specification has it (v1.0, section 6.3: the exponent of the largest
magnitude less that of E4M3's largest number, 8), so that magnitudes from 448 to 512 times the scale saturate; `up` is
the smallest power of two under which nothing does, as Blackwell's own conversion has it.

Bytes are of the checkpoint: codes and scales of the GEMMs, the rest in BF16; dB are the power of weights over that of
their errors. Texts are WikiText-2's for SmolLM2 and the
demo's own. Prints one JSON line; exit status 2 where a package or text is not there.
"""

import argparse
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import SHARED, small_models
from real_checkpoints import FOLDER, checkpoint
from real_models import Judge, Tokens, summary
from real_rows import (
    Input,
    Weights,
    dynamic_input,
    exact_input,
    quantized,
    static_input,
    stored_weights,
)
from result import arguments, described, publish

from fp8q.api import CalibrateOptions, ExportOptions, RescaleOptions, calibrate, scales
from fp8q.calibrate.model.source import Source, load_model
from fp8q.core.run import Run
from fp8q.options import ScaleGrid
from fp8q.quantize.codes.blocks import SIDE, group_values
from fp8q.quantize.codes.encoding import CODE, code_values
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.conversion.coding import encode_again, encode_part
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import source_of

#: Values that share an exponent, and the exponent of E4M3's largest number, 448 = 1.75 · 2^8.
MX_BLOCK, MX_EMAX = 32, 8
#: E8M0's smallest exponent.
MX_LEAST = -127
#: Model -> tokens of a window.
CONTEXT = {"demo": 256, "smollm2": 512}
BF16, ONE = "BF16", "one"


def mx_exponents(amax: torch.Tensor, up: bool) -> torch.Tensor:
    """The shared exponents of blocks with these largest magnitudes, int32 of the shape of `amax` float32."""
    if up:
        mantissa, exponent = torch.frexp(amax / E4M3.max)  # [1/2, 1): a power of two has 1/2
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    else:
        exponent = torch.frexp(amax).exponent - 1 - MX_EMAX
    return torch.where(amax == 0, MX_LEAST, exponent.clamp_min(MX_LEAST))


def mx_values(x: torch.Tensor, up: bool) -> torch.Tensor:
    """The numbers that MXFP8 codes of `x` [..., width] stand for, float32; the last block may be shorter."""
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -width % MX_BLOCK)).unflatten(-1, (-1, MX_BLOCK))
    amax = padded.abs().amax(-1, keepdim=True)
    scale = torch.ldexp(torch.ones_like(amax), mx_exponents(amax, up))
    return (code_values(padded, scale) * scale).flatten(-2)[..., :width]


def block_weight(weight: torch.Tensor, grid: ScaleGrid = "power-of-two", again: bool = False) -> torch.Tensor:
    """The numbers of the codes that `fp8q convert --form block` writes for `weight` [out, in], float32; `again`: after
    a server has rounded them a second time, under powers of two.
    """
    part = encode_part("weight", weight, grid)
    if again:
        part = encode_again("weight", torch.from_numpy(part.codes).view(CODE), part.scales)
    scale = torch.from_numpy(part.scales).repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1)
    return torch.from_numpy(part.codes).view(CODE).float() * scale[: weight.shape[0], : weight.shape[1]]


@dataclass(frozen=True)
class Row:
    """A form: the numbers of its weights, its inputs, and the bytes of its scales for a weight [out, in]."""

    weights: Callable[[], Weights]
    inputs: Callable[[str], Input]
    scale_bytes: Callable[[int, int], int]


def forms(run: Run, source: Source) -> Iterator[tuple[str, Row]]:
    """Each form of the GEMMs of a `run` of `source`, which was rounded to nearest."""
    stored, activations = source.weights(), load_scales(run).activations
    static = {name: static_input(activation) for name, activation in activations.items()}

    def ours(**options: Any) -> Callable[[], Weights]:
        def made() -> Weights:
            scales(run.root, RescaleOptions(**options))
            return stored_weights(run)

        return made

    def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Weights]:
        return lambda: {
            name: change(stored.tensor(source.stored(f"{name}.weight")).to(torch.bfloat16)) for name in activations
        }

    def two_codes() -> dict[str, Input]:
        scales(run.root, RescaleOptions(form=("two",)))
        return {name: static_input(activation) for name, activation in load_scales(run).activations.items()}

    def blocks_of(height: int, width: int, size: int) -> Callable[[int, int], int]:
        return lambda rows, columns: size * -(-rows // height) * -(-columns // width)

    channel, in_blocks = (lambda rows, columns: 4 * rows), blocks_of(SIDE, SIDE, 4)
    mx = blocks_of(1, MX_BLOCK, 1)
    yield ONE, Row(ours(), static.__getitem__, channel)
    yield "one, tensor weights", Row(ours(weight_scale="tensor"), static.__getitem__, lambda *_: 4)
    yield "dynamic", Row(ours(weight_scale="channel"), lambda _: dynamic_input, channel)
    yield "block", Row(each(block_weight), lambda _: lambda x: group_values(x, powers=True), in_blocks)
    fp32 = partial(block_weight, grid="bf16")
    yield "block, FP32 scales", Row(each(fp32), lambda _: lambda x: group_values(x, powers=False), in_blocks)
    yield (
        "block, FP32 scales, rounded again",
        Row(each(partial(fp32, again=True)), lambda _: lambda x: group_values(x, powers=True), in_blocks),
    )
    yield "MXFP8, floor", Row(each(lambda w: mx_values(w, False)), lambda _: lambda x: mx_values(x, False), mx)
    yield "MXFP8, up", Row(each(lambda w: mx_values(w, True)), lambda _: lambda x: mx_values(x, True), mx)
    yield "bf16", Row(ours(), lambda _: exact_input, channel)
    doubled = two_codes()
    yield "two", Row(lambda: stored_weights(run), doubled.__getitem__, channel)


def checkpoint_bytes(source: Source, modules: set[str], scale_bytes: Callable[[int, int], int]) -> int:
    """The bytes of a checkpoint whose `modules` are codes and scales, and all else BF16."""
    weights, total = source.weights(), 0
    coded = {source.stored(f"{module}.weight") for module in modules}
    for name in weights.names():
        shape = weights.shape(name)
        size = int(np.prod(shape))
        total += size + scale_bytes(shape[0], shape[1]) if name in coded else 2 * size
    return total


def weights_db(source: Source, weights: Weights) -> float:
    """The power of the `weights` of the source over that of their rounding errors, in dB."""
    tensors = source.weights()
    power = noise = 0.0
    for module, values in weights.items():
        exact = tensors.tensor(source.stored(f"{module}.weight")).to(torch.bfloat16).double()
        power += float(exact.square().sum())
        noise += float((exact - values).square().sum())
    return 10 * math.log10(power / noise)


def measure(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Row -> its figures and seconds."""
    (demo,) = small_models("demo")
    small = name == "demo"
    directory = demo.directory if small else str(checkpoint(name, asked.folder))
    data, eval_data = (demo.data, demo.eval_data) if small else (asked.data, asked.eval_data)
    judged: dict[str, Tokens] = {}
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        options = CalibrateOptions(samples=asked.samples, seq_len=CONTEXT[name])
        run = calibrate(directory, data, Path(scratch) / "run", eval_data, options, ExportOptions(graph=False))
        source, texts = source_of(run), load_tokens(run, run.evaluation).reshape(-1)
        windows = texts[: len(texts) // CONTEXT[name] * CONTEXT[name]].reshape(-1, CONTEXT[name])
        windows = windows[np.linspace(0, len(windows) - 1, min(asked.windows, len(windows))).astype(np.int64)]
        modules = {*load_scales(run).weights}
        judge = Judge(load_model(source, torch.float32, "cpu"), windows, Path(scratch))

        def add(row: str, model: torch.nn.Module, size: int) -> None:
            start = time.monotonic()
            judged[row] = judge.compare(model)
            other = judged.get(ONE)
            rows[row] = summary(judged[row], other) | {"bytes": size, "seconds": round(time.monotonic() - start, 1)}
            print(f"{name}: {row}: {rows[row]}", file=sys.stderr, flush=True)

        add(BF16, load_model(source, torch.bfloat16, "cpu"), checkpoint_bytes(source, set(), lambda *_: 0))
        for row, form in forms(run, source):
            if re.search(asked.rows, row):
                weights = form.weights()
                model = quantized(source, weights, {module: form.inputs(module) for module in modules})
                add(row, model, checkpoint_bytes(source, modules, form.scale_bytes))
                rows[row]["weights_db"] = round(weights_db(source, weights), 2)
    return {"context": CONTEXT[name], "evaluation_tokens": int(windows.size), "gemms": len(modules), "rows": rows}


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(CONTEXT)}; both without")
    parser.add_argument("--rows", default="", metavar="PATTERN", help="a regular expression of the rows to measure")
    parser.add_argument("--windows", type=int, default=8, help="windows of the evaluation text")
    parser.add_argument("--samples", type=int, default=24, help="windows of the calibration text")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of SmolLM2's checkpoint")
    parser.add_argument("--data", default=str(SHARED / "data" / "wikitext-2-raw-valid.txt"))
    parser.add_argument("--eval-data", default=str(SHARED / "data" / "wikitext-2-raw-test.txt"))
    asked = parser.parse_args()
    if unknown := [name for name in asked.models if name not in CONTEXT]:
        parser.error(f"{unknown[0]}: is no model here; there are {', '.join(CONTEXT)}")
    head = described("mxfp8")
    results = {name: measure(name, asked) for name in asked.models or CONTEXT}
    return publish(head, {"samples": asked.samples, "windows": asked.windows, "results": results}, asked.save)


if __name__ == "__main__":
    sys.exit(main())
