"""How many bytes of the cache a decode step of an engine reads and copies, and how many kernels a layer has.

    python benchmarks/cache_traffic.py [--targets sm89 sm120] [--prompts 1024 8192 32768]

Attention of Llama 3 8B (32 query heads, 8 of keys, heads of 128) between weights of width 4,096 and a narrow MLP,
random and in BF16, whose engines TensorRT-RTX builds for 32 rows of 2,048 tokens, with a cache in BF16 and in FP8.
Bytes are those of the plan's program (`export/engine/cache_traffic.py`), kernels those of three layers less those of
two, and of prompts the names of the kernels with them. `milliseconds` is arithmetic: the bytes of 32 layers at 3.35
TB/s (H100), beside those of the cache alone, which are the floor. Prints one JSON line; exit status 1 where a step
reads more than 1.1 bytes a value of an FP8 cache or 2.2 of a BF16 cache, or copies any.
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from result import arguments, described, publish
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from fp8q.core.reporter import SILENT
from fp8q.export.engine.build import Job, build
from fp8q.export.engine.cache_traffic import cache_traffic
from fp8q.export.engine.plan import Plan, read_plan
from fp8q.export.engine.profiles import profiles
from fp8q.export.graph.trace import trace
from fp8q.export.onnx_file.loading import load_graph
from fp8q.tests.pipeline.conftest import as_if_quantized

ROWS, SLOTS, LAYERS = 32, 2048, 32
#: Bytes a second of an H100's memory, by NVIDIA's data sheet.
BANDWIDTH = 3.35e12
#: Cache -> the tensors of it in FP8, and the most bytes that a step may read of a value.
CACHES = {"fp8": ("kv", 1.1), "bf16": ("", 2.2)}
PREFILL, DECODE = 0, 1


def llama(layers: int) -> LlamaConfig:
    """So many layers of Llama 3 8B's attention, with an MLP of 256."""
    return LlamaConfig(
        vocab_size=256, hidden_size=4096, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=32768,
    )  # fmt: skip


def built(path: Path, target: str, prompt: int) -> Plan:
    """The plan of an engine for prompts of that length and steps of `ROWS` rows of `SLOTS`."""
    plan = read_plan(build(path, Job("tensorrt-rtx", target, sizes(prompt)), SILENT))
    assert plan is not None, "the plan reads"
    return plan


def sizes(prompt: int) -> Any:
    """The two profiles, each likely at the sizes that are measured."""
    prefill, decode = profiles(ROWS, max(prompt, SLOTS), opt_seq_len=prompt)
    return prefill, decode.model_copy(update={"capacity": (0, SLOTS, decode.capacity[2])})


def measured(folder: Path, cache: str, target: str, prompts: list[int]) -> dict[str, Any]:
    """The traffic and the kernels with a cache of one type."""
    parts, limit = CACHES[cache]
    paths = []
    for layers in (2, 3):
        checkpoint = folder / f"{cache}-{layers}"
        path = checkpoint / "model.onnx"
        if not path.is_file():
            plan = as_if_quantized(checkpoint, llama(layers), parts, torch.bfloat16)
            scales = load_file(checkpoint / "scales.safetensors")
            save_file(
                {name: torch.full_like(scale, 0.5) for name, scale in scales.items()}, checkpoint / "scales.safetensors"
            )
            ir.save(trace(checkpoint, replace(plan, groups={})), path)
        paths.append(path)
    two, three = (built(path, target, prompts[0]) for path in paths)
    traffic = cache_traffic(two, load_graph(paths[0]), sizes(prompts[0]))
    assert traffic is not None, "the plan shows a program"
    moved = traffic.read + traffic.written
    return {
        "read_per_value": round(traffic.read_per_value, 4),
        "written_per_value": round(traffic.written / traffic.values, 4),
        "intermediate_per_value": round(traffic.intermediate / traffic.values, 4),
        "milliseconds": round(moved / 2 * LAYERS / BANDWIDTH * 1e3, 3),
        "milliseconds_of_the_cache_alone": round(traffic.held / 2 * LAYERS / BANDWIDTH * 1e3, 3),
        "decode_kernels_a_layer": len(three.kernels[DECODE]) - len(two.kernels[DECODE]),
        "prompts": {
            str(prompt): dict(kernels_of_prompts(two if prompt == prompts[0] else built(paths[0], target, prompt)))
            for prompt in prompts
        },
        "prompt_kernels_a_layer": len(three.kernels[PREFILL]) - len(two.kernels[PREFILL]),
        "passed": traffic.read_per_value <= limit and traffic.written == 0,
    }


def kernels_of_prompts(plan: Plan) -> Iterator[tuple[str, Any]]:
    """The number of a prompt's kernels, and which of them attend."""
    kernels = plan.kernels[PREFILL]
    yield "kernels", len(kernels)
    yield "attention", sorted({kernel.name for kernel in kernels if "mha" in kernel.name})


def main() -> int:
    """Build and print."""
    parser = arguments(__doc__)
    parser.add_argument("--targets", nargs="+", default=["sm89", "sm120"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[1024, 8192, 32768])
    asked = parser.parse_args()
    head = described("cache_traffic")
    with tempfile.TemporaryDirectory() as directory:
        results = {
            target: {cache: measured(Path(directory), cache, target, asked.prompts) for cache in CACHES}
            for target in asked.targets
        }
    passed = all(of_cache["passed"] for caches in results.values() for of_cache in caches.values())
    return publish(head, {"rows": ROWS, "slots": SLOTS, "results": results, "passed": passed}, asked.save)


if __name__ == "__main__":
    sys.exit(main())
