"""The processor seconds and memory that rounding one weight by GPTQ takes, for the shapes of an 8B Llama.

    python benchmarks/weight_shapes.py [--shapes 4096x4096 …]

Each shape is OUTxIN, a random weight with random second moments H [in, in], on one thread in a process of its own.
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

SHAPES = ("4096x4096", "14336x4096", "1024x14336")


def one_matrix(shape: str) -> dict[str, float]:
    """Measure seconds and peak memory of one random matrix."""
    torch.set_num_threads(1)
    out, width = (int(size) for size in shape.split("x"))
    weight = (0.02 * torch.randn(out, width)).to(torch.bfloat16)
    few = torch.randn(width // 4, width)
    moments = few.T @ few + torch.eye(width)
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
