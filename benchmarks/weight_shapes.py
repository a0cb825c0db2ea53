"""The processor seconds and memory that rounding one weight by GPTQ takes, for the shapes of an 8B Llama.

    python benchmarks/weight_shapes.py [--shapes 4096x4096 …]

Each shape is OUTxIN, a random weight on one thread in a process of its own. The eigenvalues of its second moments H
[in, in] fall as i^-0.75: rounding then takes five passes of coordinate descent, where Gemma 3's modules take three or
four.
Factoring H takes time by the cube of IN, and no more for more outputs; rounding takes time in proportion to OUT, so the
last shape has a quarter of the outputs of the Llama's. Prints one JSON line.
"""

import sys
import time
from multiprocessing import get_context

import torch
from result import arguments, described, publish

from fp8q.core.record import peak_memory_bytes, reset_peak_memory
from fp8q.quantize.weights.channels import channel_scales
from fp8q.quantize.weights.gptq import compensation, gptq_codes

#: The exponent by which the eigenvalues of H fall.
FALL = 0.75
SHAPES = ("4096x4096", "14336x4096", "1024x14336")


def falling_moments(width: int) -> torch.Tensor:
    """Second moments float32 [width, width] of eigenvalues i^-0.75, along the directions of a cosine transform whose
    inputs have random signs and a random order.

    Their entries are sums over cosines of a difference and of a sum of indices, and so need no product of matrices.
    """
    eigenvalues = torch.zeros(2 * width, dtype=torch.float64)
    eigenvalues[:width] = torch.arange(1, width + 1, dtype=torch.float64) ** -FALL
    eigenvalues[0] /= 2  # the transform's first direction is a constant, whose cosines have twice the squares
    cosines: torch.Tensor = torch.fft.fft(eigenvalues).real.float()
    order, index = torch.randperm(width), torch.arange(width)
    moments: torch.Tensor = (cosines[(index[:, None] - index).abs()] + cosines[index[:, None] + index + 1]) / width
    signs = torch.randint(0, 2, (width,)).float() * 2 - 1
    return (moments * signs * signs[:, None])[order][:, order]


def one_matrix(shape: str) -> dict[str, float]:
    """Measure seconds and peak memory of one random matrix."""
    torch.set_num_threads(1)
    out, width = (int(size) for size in shape.split("x"))
    weight = (0.02 * torch.randn(out, width)).to(torch.bfloat16)
    moments = falling_moments(width)
    scale = channel_scales(weight, "mse")
    assert scale is not None
    reset_peak_memory()
    before, start = peak_memory_bytes(), time.process_time()
    factored = compensation(moments)
    middle = time.process_time()
    gptq_codes(weight, scale, factored)
    return {
        "factor_s": round(middle - start, 1),
        "round_s": round(time.process_time() - middle, 1),
        "moments_bytes": moments.nbytes,
        "peak_bytes_more": peak_memory_bytes() - before,
    }


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, metavar="OUTxIN")
    options = parser.parse_args()
    head = described("weight_shapes")
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        shapes = {shape: pool.apply(one_matrix, (shape,)) for shape in options.shapes}
    return publish(head, {"threads": 1, "shapes": shapes}, options.save)


if __name__ == "__main__":
    sys.exit(main())
