"""Measure what a tail costs, beside one term (the floor), two terms throughout, and FP8 weights alone.

    python benchmarks/tail_cost.py [--rounds 7] [--save tail_cost]

The demo with each form of activations. From the graph: operations of a prompt of 2,048 tokens in the promised products,
over those of one term; asked for at most 1.04 with a tail. From engines that TensorRT-RTX builds here for sm89 and
sm120: promised products in FP8, kernels of each profile, size. On ONNX Runtime, whose CPU computes FP8 by FP32
(emulated: its times say nothing of a GPU's): processor time of a prompt of 512 tokens and of a decode step, a round of
each form after the other, the median's ratio to one term. Prints one JSON line; exit status 1 where a limit is missed.
"""

import math
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from models import small_models
from result import arguments, described, publish

from fp8q.api import (
    CalibrateOptions,
    EngineOptions,
    RescaleOptions,
    build_engine,
    calibrate,
    engine,
    export,
    scales,
)
from fp8q.core.run import Run
from fp8q.export.engine.info import load_engines
from fp8q.export.engine.plan import read_plan
from fp8q.options import BF16, Terms
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.serving_cost import BF16_OPERATIONS
from fp8q.serve.loop.sessions import Batch, open_session

FORMS: dict[str, Terms] = {"one term": 1, "tail of 64": "tail", "two terms": 2, "weights alone": "bf16"}
TARGETS = ("sm89", "sm120")
LONG, PROMPT, STEPS = 2048, 512, 16
#: Operations of a prompt with a tail, over those of one term.
LIMIT = 1.04


def operations(run: Run, positions: int) -> int:
    """Multiplications in the products with FP8 weights of the run's graph, for one prompt of so many `positions`.

    One in BF16 counts as two of codes.
    """
    graph = onnx.load(run.onnx, load_external_data=False).graph
    shapes = {value.name: value.type.tensor_type.shape.dim for value in graph.value_info}
    scales_of_run = load_scales(run)
    cost = {f"{name}.matmul": 1 for name in scales_of_run.fp8_gemms}
    cost |= {f"{name}.matmul": BF16_OPERATIONS for name in scales_of_run.in_form(BF16)}
    total = 0
    for node in graph.node:
        if node.name in cost:
            dims = [dim.dim_value or size(dim.dim_param, positions) for dim in shapes[node.input[0]]]
            total += cost[node.name] * math.prod(dims) * shapes[node.input[1]][-1].dim_value
    return total


def size(text: str, positions: int) -> int:
    """A size of the graph for one prompt: of the batch, its double, the positions, or these and a tail."""
    if tail := re.fullmatch(r"seq \+ Min\((\d+), seq\)", text):
        return positions + min(int(tail[1]), positions)
    return {"batch": 1, "2*batch": 2, "seq": positions}[text]


def engines(run: Run) -> dict[str, Any]:
    """Target -> what its engine runs."""
    build_engine(run.root, EngineOptions(runtime="tensorrt-rtx", targets=TARGETS))
    found, ran = {}, {info.target: info.ran for info in load_engines(run)}
    for view in engine(run.root):
        data = Path(view.file).read_bytes()
        plan = read_plan(data)
        assert plan is not None, "this version's plans read"
        found[view.target] = {
            "promised": view.promised_products,
            "fp8": view.fp8_products,
            "kernels": [len(kernels) for kernels in plan.kernels.values()],
            "ran": ran[view.target],
            "megabytes": round(len(data) / 1e6, 2),
        }
    return found


def calls(run: Run) -> tuple[Callable[[], None], Callable[[], None]]:
    """A prompt of `PROMPT` tokens, and `STEPS` decode steps behind half of it, on ONNX Runtime."""
    session = open_session(run.model, "onnxruntime", run.onnx_fp32.name)
    ids = np.random.default_rng(0).integers(10, session.vocabulary, (1, PROMPT))

    def opened() -> Batch:
        batch = session.open_batch(1, PROMPT)
        batch.reserve(PROMPT, PROMPT, 1)
        return batch

    prompts, decoding, half = opened(), opened(), PROMPT // 2
    nothing = np.zeros(1, np.int64)
    decoding.prefill(0, ids[:, :half], nothing, np.array([half]))

    def prompt() -> None:
        prompts.prefill(0, ids, nothing, np.array([PROMPT]))

    def steps() -> None:
        for step in range(STEPS):
            decoding.decode(ids[:, half + step], np.array([half + step]))

    return prompt, steps


def times(runs: dict[str, Run], rounds: int) -> dict[str, dict[str, float]]:
    """Form -> processor time of a prompt and of a step, in ms, and over one term's."""
    made = {name: calls(run) for name, run in runs.items()}
    taken: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds + 1):  # the first warms up
        for name, work in made.items():
            for kind, call in enumerate(work):
                start = time.process_time()
                call()
                taken.setdefault((name, kind), []).append(time.process_time() - start)
    found: dict[str, dict[str, float]] = {}
    for (name, kind), seconds in taken.items():
        key, share = (("prompt", 1), ("step", STEPS))[kind]
        found.setdefault(name, {})[f"{key}_ms"] = round(statistics.median(seconds[1:]) / share * 1e3, 3)
    floor = found["one term"]
    return {
        name: each | {f"{key}_ratio": round(each[f"{key}_ms"] / floor[f"{key}_ms"], 3) for key in ("prompt", "step")}
        for name, each in found.items()
    }


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    head = described("tail_cost")
    (demo,) = small_models("demo")
    with tempfile.TemporaryDirectory() as folder:
        first = calibrate(
            demo.directory, demo.data, Path(folder) / "one term", demo.eval_data,
            CalibrateOptions(samples=32, seq_len=256),
        )  # fmt: skip
        runs = {"one term": first}
        for name in [name for name in FORMS if name != "one term"]:
            runs[name] = Run(Path(shutil.copytree(first.root, Path(folder) / name)))
            scales(runs[name].root, RescaleOptions(activation_terms=FORMS[name]))
            export(runs[name].root)
        floor = operations(first, LONG)
        results: dict[str, dict[str, Any]] = {
            name: {"operations_ratio": round(operations(run, LONG) / floor, 5), "engines": engines(run)}
            for name, run in runs.items()
        }
        for name, found in times(runs, given.rounds).items():
            results[name] |= found
    built = [found for form in results.values() for found in form["engines"].values()]
    passed = results["tail of 64"]["operations_ratio"] <= LIMIT and all(
        found["promised"] == found["fp8"] for found in built
    )
    return publish(head, {"prompt": PROMPT, "long": LONG, "results": results, "passed": passed}, given.save)


if __name__ == "__main__":
    sys.exit(main())
