"""A whole decoder of Llama 3 8B's shape, random weights: prefill and decode in BF16, in FP8 and in FP8 with two terms,
the cache in BF16 and in FP8.

Each layer goes through torch.compile (one program serves all of them), and a decode step is one CUDA graph. FP8's gain
is capped by traffic: at batch 16 the weights of 8B that stay wide leave 1.87 times BF16's throughput. The largest batch
is arithmetic, by `capacity` positions a sequence on this GPU's memory. Attention reads an FP8 cache through a
conversion to BF16: torch has no kernel that takes codes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .llama import KINDS, TINY, Decoder, Shape
from .llama import Kind as MakeProduct
from .timing import Kind, Part, Setting, cost, seconds

#: Batches of a decode step, the one with limits first; positions before it, and of a sequence; tokens of a prefill.
BATCHES, PAST, CAPACITY, PROMPT = (16, 1, 64), 1024, 2048, 2048
CACHES = {"bf16": False, "fp8": True}
#: Kind -> the least throughput over BF16's at batch 16.
TARGETS = {"fp8": 1.58, "fp8, two terms": 1.5}
LAUNCHES, WAITS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch"), ("Synchronize", "cudaMemcpy")


#: Seconds of a step, where none of its kind was measured: weights drawn, layers compiled, both caches timed.
FIRST_S = 30.0


def measure(setting: Setting, part: Part) -> None:
    """Every kind of products at the first batch, so that a limit of time leaves what can be compared; then prefill, and
    the other batches.
    """
    bytes_: dict[str, tuple[int, int]] = {}
    works: list[tuple[str, Callable[[str, Decoder, Setting, Part], None]]] = [
        (f"batch {batch}", partial(every_cache, batch)) for batch in setting.pick(BATCHES, (2, 1))
    ]
    for name, work in [works[0], ("prefill", prefill), *works[1:]]:
        for kind, make in KINDS.items():
            made = partial(with_decoder, kind, make, work, setting, part)
            bytes_[kind] = part.step(setting, f"{kind}, {name}", made, Kind("decoder", FIRST_S)) or bytes_.get(
                kind, (0, 0)
            )
    conclusions({kind: each for kind, each in bytes_.items() if all(each)}, part)


def with_decoder(
    kind: str, make: MakeProduct, work: Callable[[str, Decoder, Setting, Part], None], setting: Setting, part: Part
) -> tuple[int, int]:
    """Do `work` with a decoder of that kind, whose memory is free afterwards; the bytes of its weights."""
    torch.compiler.reset()
    torch.manual_seed(0)
    decoder = Decoder(setting.pick(Shape(), TINY), make, setting.device)
    for layer in decoder.layers:
        layer.forward = setting.compiled(layer.forward)
    with torch.inference_mode():
        work(kind, decoder, setting, part)
    found = decoder.weight_bytes
    del decoder, layer
    if not setting.dry:
        torch.cuda.empty_cache()
    return found


def every_cache(batch: int, kind: str, decoder: Decoder, setting: Setting, part: Part) -> None:
    """Decode steps of a batch with the cache in either form."""
    for cache in CACHES:
        part.tried(f"{kind}, batch {batch}, cache {cache}", partial(decode, kind, decoder, batch, cache, setting, part))


def step_of(decoder: Decoder, batch: int, codes: bool, setting: Setting) -> Callable[[], torch.Tensor]:
    """One decode step with a past of `PAST` positions."""
    past, capacity = setting.pick((PAST, CAPACITY), (8, 16))
    decoder.make_room(batch, capacity, codes)
    ids = torch.zeros(batch, 1, dtype=torch.int64, device=setting.device)
    at = torch.full((1,), past, dtype=torch.int64, device=setting.device)
    return lambda: decoder(ids, at, past + 1)


def decode(kind: str, decoder: Decoder, batch: int, cache: str, setting: Setting, part: Part) -> None:
    """Time, memory and energy of a decode step, and what it asks of the host."""
    codes = CACHES[cache]
    step = step_of(decoder, batch, codes, setting)
    if not setting.dry:
        torch.cuda.reset_peak_memory_stats()
    took, energy = cost(step, setting)
    memory = None if setting.dry else torch.cuda.max_memory_allocated()
    part.row(
        "decode", kind=kind, batch=batch, cache=cache, ms=took * 1e3, tokens_per_second=batch / took,
        memory_bytes=memory, joules_per_token=energy and energy / batch,
        largest_batch=largest_batch(decoder, codes, setting),
    )  # fmt: skip
    part.row("a decode step", kind=kind, batch=batch, cache=cache, **profiled(step, setting))


def largest_batch(decoder: Decoder, codes: bool, setting: Setting) -> int | None:
    """Sequences of `CAPACITY` positions that fit beside the weights: arithmetic."""
    if setting.dry:
        return None
    shape, memory = decoder.shape, torch.cuda.get_device_properties(0).total_memory
    position = 2 * shape.layers * shape.kv_heads * shape.head_size * (1 if codes else 2)
    return (memory - decoder.weight_bytes[1]) // (position * CAPACITY)


def profiled(step: Callable[[], object], setting: Setting) -> dict[str, Any]:
    """Launches and waits of the host, kernels, and the share of the time that no kernel runs, without a CUDA graph."""
    from torch.profiler import ProfilerActivity, profile

    steps, cpu = setting.pick(10, 1), [ProfilerActivity.CPU]
    with profile(activities=cpu if setting.dry else [*cpu, ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(steps):
            step()
        if not setting.dry:
            torch.cuda.synchronize()
    events = seen.events() or []
    kernels = sorted(
        (event.time_range.start, event.time_range.end) for event in events if "CUDA" in str(event.device_type)
    )
    busy = sum(end - start for start, end in kernels)
    whole = kernels[-1][1] - kernels[0][0] if kernels else 0
    host = [event.name for event in events if "CPU" in str(event.device_type)]
    return {
        "launches": sum(name.startswith(LAUNCHES) for name in host) / steps,
        "waits": (sum(any(wait in name for wait in WAITS) for name in host) - (not setting.dry)) / steps,
        "kernels": len(kernels) / steps,
        "gaps_share": 1 - busy / whole if whole else None,
    }


def prefill(kind: str, decoder: Decoder, setting: Setting, part: Part) -> None:
    """A prompt of one sequence."""
    part.tried(f"{kind}: prefill", partial(one_prompt, kind, decoder, setting, part))


def one_prompt(kind: str, decoder: Decoder, setting: Setting, part: Part) -> None:
    """Time it."""
    length = setting.pick(PROMPT, 8)
    decoder.make_room(1, length, codes=False)
    ids = torch.zeros(1, length, dtype=torch.int64, device=setting.device)
    at = torch.arange(length, device=setting.device)
    took = seconds([lambda: decoder(ids, at, None)], setting)
    part.row("prefill", kind=kind, tokens=length, ms=took * 1e3, tokens_per_second=length / took)


def conclusions(bytes_: dict[str, tuple[int, int]], part: Part) -> None:
    """What was asked for."""
    speeds = {
        row["kind"]: row["tokens_per_second"]
        for row in part.tables.get("decode", [])
        if (row["batch"], row["cache"]) == (16, "bf16")
    }
    for kind, limit in TARGETS.items():
        found = speeds[kind] / speeds["bf16"] if {kind, "bf16"} <= speeds.keys() else None
        part.target(f"decode at batch 16, {kind}: times BF16's throughput (at most 1.87)", found, limit, least=True)
    for number, (what, limit) in enumerate((("quantized weights", 0.505), ("all weights", 0.57))):
        found = bytes_["fp8"][number] / bytes_["bf16"][number] if {"fp8", "bf16"} <= bytes_.keys() else None
        part.target(f"{what}: bytes over BF16's", found, limit)
