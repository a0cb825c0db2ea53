"""Launches, bytes, operations and memory of rounding by GPTQ on a GPU: counted without one, beside one H100's ceilings.

    python benchmarks/rounding_launches.py [--models 8B 70B] [--save NAME]

Every weight of a decoder layer is rounded on a device without numbers (`fake_device`), with fp8q's kernels as one
launch each; layers are alike. Ceilings are of NVIDIA's data sheet of an H100 SXM: FP32 67 · 10¹² operations a second,
as FP64 in tensor cores, and 3.35 · 10¹² bytes. A launch is taken as 5 µs. What a step takes is at least the largest of
the three; the sum over the steps is stated. Not in it: the kernels' own time beside their bytes, and reading and
writing files. All eight passes of a descent are counted, as all are launched. Prints one JSON line.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from fake_device import Counted, fake_device, numbers
from pages.guides import LLAMA_8B, LLAMA_70B, Sizes
from result import arguments, described, publish

from fp8q.quantize.weights.channels import channel_scales, weight_facts
from fp8q.quantize.weights.gptq import Compensation, compensation, gptq_codes

MODELS = {"8B": LLAMA_8B, "70B": LLAMA_70B}
#: Operations a second by the type of numbers, bytes a second, and seconds of a launch.
OPERATIONS = {"float32": 67e12, "float64": 67e12}
BANDWIDTH = 3.35e12
LAUNCH_S = 5e-6
#: The share of an input's energy that its quantization loses.
LOST = 0.001


@dataclass(frozen=True)
class Input:
    """An input of `width` channels, which weights of so many `outputs` read; `times` of them are in a layer."""

    width: int
    outputs: tuple[int, ...]


def inputs(model: Sizes) -> tuple[Input, ...]:
    """The inputs of a decoder layer: of q, k and v, of o, of gate and up, and of down."""
    return (
        Input(model.width, (model.width, model.keys, model.keys)),
        Input(model.width, (model.width,)),
        Input(model.width, (model.inner, model.inner)),
        Input(model.inner, (model.width,)),
    )


def bound(counted: Counted) -> float:
    """The seconds that one H100 takes at least."""
    product = sum(count / OPERATIONS[kind] for kind, count in counted.flop.items())
    return max(product, counted.bytes / BANDWIDTH, counted.started * LAUNCH_S)


def figures(counted: Counted) -> dict[str, object]:
    """The counts of a step."""
    return {
        "launches": counted.started,
        "bytes": counted.bytes,
        "flop": dict(counted.flop),
        "peak_bytes": counted.peak,
        "bound_s": bound(counted),
    }


def measured(step: Callable[[], object]) -> dict[str, object]:
    """Count one step."""
    with fake_device() as counted:
        step()
    return figures(counted)


def factor(width: int) -> Compensation:
    """Factor the second moments of an input, which are on the device before."""
    return compensation(numbers(width, width), LOST)


def rounded(width: int, outputs: int) -> None:
    """Scales, codes and facts of a weight, whose input is factored before."""
    weight = numbers(outputs, width, dtype=torch.bfloat16)
    order = torch.empty(width, dtype=torch.int64, device=weight.device)
    factored = Compensation(order, numbers(width), numbers(width, width), numbers(width, width))
    scale = channel_scales(weight, "mse")
    assert scale is not None
    weight_facts(weight, gptq_codes(weight, scale, factored), scale)


def layer(model: Sizes, known: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """Count the steps of a layer, each `known` step once; step's name -> its counts, and how often a layer takes it."""
    steps: dict[str, dict[str, object]] = {}

    def add(name: str, step: Callable[[], object]) -> None:
        if name not in known:
            known[name] = measured(step)
            print(name, known[name], file=sys.stderr, flush=True)
        times = int(str(steps.get(name, {}).get("times", 0))) + 1
        steps[name] = {"times": times, **known[name]}

    for group in inputs(model):
        add(f"factor {group.width}", lambda width=group.width: factor(width))  # type: ignore[misc]
        for outputs in group.outputs:
            add(f"round {outputs}x{group.width}", lambda o=outputs, w=group.width: rounded(w, o))  # type: ignore[misc]
    return steps


def summed(model: Sizes, steps: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """The counts of all layers of `model` together."""

    def total(name: str) -> float:
        return model.layers * sum(float(str(step[name])) * int(str(step["times"])) for step in steps.values())

    return {
        "launches": int(total("launches")),
        "bytes": int(total("bytes")),
        "bound_s": round(total("bound_s"), 2),
        "peak_bytes": max(int(str(step["peak_bytes"])) for step in steps.values()),
        "steps": steps,
    }


def main() -> int:
    """Count and print."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*MODELS])
    options = parser.parse_args()
    head = described("rounding_launches")
    known: dict[str, dict[str, object]] = {}
    models = {name: summed(MODELS[name], layer(MODELS[name], known)) for name in options.models}
    fits = all(int(str(counted["peak_bytes"])) <= 24e9 for counted in models.values())
    return publish(
        head, {"models": models, "launch_s": LAUNCH_S, "limit_peak_bytes": 24e9, "passed": fits}, options.save
    )


if __name__ == "__main__":
    sys.exit(main())
