"""How fast weight scales of least squared error are found: ours against ModelOpt's `mse` calibration of the same
per-channel FP8 weights.

    python benchmarks/weight_mse.py [--rounds 3] [--threads 2 1]

Three matrices of the shapes of a Llama of width 2048 (27 M weights; ModelOpt needs a minute for 0.2 B on two cores, so
no more), normal with a spread of channels and heavy tails. Both run in this process with the same number of threads,
taking turns; the best round of each counts. ModelOpt's time is that of
`mtq.calibrate(model, "mse")` on a model whose quantizers are placed already. Errors are both measured alike: the sum
over all weights of (w - scale · code)², the scale in FP32. `cpu_ratio` compares processor time, which a busy machine
changes little. The ceiling is one read of the weights, `w.abs().amax(1)`. Prints one JSON line; exit status 1 when a
limit is not met.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from result import arguments, described, publish
from torch import nn

from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.weights.mse import mse_scales

#: Of the clock, of the processors.
Seconds = tuple[float, float]
SHAPES = ((2048, 2048), (5632, 2048), (2048, 5632))
LIMIT_RATIO, LIMIT_ERROR_RATIO = 50.0, 1.0
QUANTIZERS = [
    {"quantizer_name": "*", "enable": False},
    {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": (4, 3), "axis": 0}},
]


def weights() -> list[torch.Tensor]:
    """Matrices of `SHAPES`, BF16: Student's t with five degrees of freedom, channels spread over two octaves."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        chi = torch.stack([torch.randn(rows, columns, generator=generator).square_() for _ in range(5)]).mean(0)
        spread = torch.exp2(2 * torch.rand(rows, 1, generator=generator))
        return (0.01 * spread * torch.randn(rows, columns, generator=generator) / chi.sqrt()).to(torch.bfloat16)

    return [matrix(*shape) for shape in SHAPES]


def modelopt_model(tensors: list[torch.Tensor]) -> nn.ModuleList:
    """Linear layers with these weights, ModelOpt's per-channel FP8 weight quantizers placed and nothing calibrated."""
    import modelopt.torch.quantization as mtq

    model = nn.ModuleList()
    for tensor in tensors:
        layer = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, dtype=torch.bfloat16)
        layer.weight = nn.Parameter(tensor.clone(), requires_grad=False)
        model.append(layer)
    mtq.quantize(model, {"quant_cfg": QUANTIZERS, "algorithm": None})  # in place
    return model


def modelopt_search(tensors: list[torch.Tensor]) -> tuple[Seconds, list[torch.Tensor]]:
    """Seconds of ModelOpt's search on a new model (it cannot calibrate one twice), and the scale of each row, float32
    [out], of each layer.
    """
    import modelopt.torch.quantization as mtq

    model = modelopt_model(tensors)
    with open(os.devnull, "w") as null, contextlib.redirect_stderr(null), contextlib.redirect_stdout(null):
        elapsed = timed(lambda: mtq.calibrate(model, {"method": "mse"}))
    quantizers: list[Any] = [layer.weight_quantizer for layer in model]
    return elapsed, [quantizer.amax.float().flatten() / E4M3.max for quantizer in quantizers]


def timed(work: Callable[[], object]) -> Seconds:
    """Seconds that `work` takes, of the clock and of the processors."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def squared_error(tensor: torch.Tensor, scale: torch.Tensor) -> float:
    """Sum of (w - scale · code)² over the matrix, in float64."""
    return float(
        (tensor.float() - encode(tensor, scale[:, None]).float() * scale[:, None]).square_().sum(dtype=torch.float64)
    )


def measure(tensors: list[torch.Tensor], rounds: int) -> tuple[dict[str, Seconds], float]:
    """The best seconds of ours, ModelOpt's and the ceiling, taking turns, and the error of ours over ModelOpt's."""
    ours = [mse_scales(tensor) for tensor in tensors]
    best = dict.fromkeys(("ours", "modelopt", "ceiling"), (float("inf"), float("inf")))
    for _ in range(rounds):
        modelopt_s, theirs = modelopt_search(tensors)
        found = {
            "ours": timed(lambda: [mse_scales(tensor) for tensor in tensors]),
            "modelopt": modelopt_s,
            "ceiling": timed(lambda: [tensor.abs().amax(1) for tensor in tensors]),
        }
        best = {name: (min(wall, found[name][0]), min(cpu, found[name][1])) for name, (wall, cpu) in best.items()}
    errors = [
        sum(squared_error(tensor, scale) for tensor, scale in zip(tensors, scales, strict=True))
        for scales in (ours, theirs)
    ]
    return best, errors[0] / errors[1]


def judged(threads: int, rounds: int) -> dict[str, Any]:
    """The figures with so many threads."""
    torch.set_num_threads(threads)
    tensors = weights()
    best, error_ratio = measure(tensors, rounds)
    time_s = {name: wall for name, (wall, _) in best.items()}
    parameters = sum(tensor.numel() for tensor in tensors)
    ratio = time_s["modelopt"] / time_s["ours"]
    return {
        "threads": threads,
        "parameters": parameters,
        "ours_s": round(time_s["ours"], 4),
        "modelopt_s": round(time_s["modelopt"], 3),
        "ceiling_s": round(time_s["ceiling"], 4),
        "ours_s_per_billion": round(1e9 * time_s["ours"] / parameters, 2),
        "modelopt_s_per_billion": round(1e9 * time_s["modelopt"] / parameters, 1),
        "ratio": round(ratio, 1),
        "cpu_ratio": round(best["modelopt"][1] / best["ours"][1], 1),
        "error_ratio": round(error_ratio, 5),
        "passed": ratio >= LIMIT_RATIO and error_ratio <= LIMIT_ERROR_RATIO,
    }


def main() -> int:
    """Measure, print, judge."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    options = parser.parse_args()
    head = described("weight_mse")
    results = [judged(threads, options.rounds) for threads in options.threads]
    limits = {"limit_ratio": LIMIT_RATIO, "limit_error_ratio": LIMIT_ERROR_RATIO, "rounds": options.rounds}
    passed = all(result["passed"] for result in results)
    return publish(head, {**limits, "results": results, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
