"""Calibration on the GPU: what watching costs over the plain forward pass at Llama 3 8B's shape, and the fastest way to
count exactly.

Watched is what calibration watches: the inputs of qkv, o, gate/up and down, and keys and values, by its own `Observer`,
whose counting is replaced by each contender. `nothing counted` is what remains of watching when counting is free.

The waits of the host in a batch, and the bytes it copies, are counted on the meta device (`waits`), which a dry run can
do as well; on a GPU, PyTorch's own warnings of waits are counted beside them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch

from fp8q.calibrate.measure import observe
from fp8q.calibrate.measure.counting import count_by_sorting
from fp8q.calibrate.measure.histogram import PATTERNS
from fp8q.calibrate.model.launching import has_triton

from .llama import TINY, Decoder, Shape, wide
from .timing import Kind, Part, Setting, Work, seconds
from .waits import calibration_batch, warned_waits

Counter = Callable[[torch.Tensor], torch.Tensor]
#: Sequences and tokens of a batch; the overhead that is asked for, and the waits.
BATCH, LENGTH, LIMIT, WAITS = 4, 2048, 1.10, 2
PRODUCTS = ("qkv", "o", "gate_up", "down")


def counters(setting: Setting, part: Part) -> dict[str, Counter]:
    """The contenders; kernels run on a GPU alone."""
    found: dict[str, Counter] = {"bincount": partial(torch.bincount, minlength=PATTERNS), "sort": count_by_sorting}
    if not has_triton() or setting.dry:
        part.skipped["kernels that count"] = "they run on a GPU alone" if has_triton() else "Triton is not installed"
        return found
    from fp8q.calibrate.measure.counting_kernel import triton_count

    return {"kernel": triton_count} | found


def measure(setting: Setting, part: Part) -> None:
    """Waits, counting alone, then the overhead."""
    part.step(setting, "waits of a batch", partial(waiting, setting, part), Kind("waits", 60))
    ways = counters(setting, part)
    for kind in ("normal", "heavy tails", "nine tenths zero"):
        part.step(setting, f"counting, {kind}", partial(counting, kind, ways, setting, part), Kind("counting", 20))
    overhead(ways, setting, part)


def waiting(setting: Setting, part: Part) -> None:
    """Waits and copies of a batch, with second moments and without."""
    for name, moments in (("histograms", False), ("histograms and second moments", True)):
        counted = calibration_batch(Shape(), BATCH, LENGTH, moments)
        part.row("waits and copies of a batch of an 8B, counted on the meta device", gathered=name, waits=counted.waits,
                 bytes_to_gpu=counted.to_device, bytes_to_memory=counted.to_memory)  # fmt: skip
        part.target(f"{name}: waits of the host in a batch", counted.waits, WAITS)
        part.target(f"{name}: bytes copied to memory in a batch", counted.to_memory, 0)
    if not setting.dry:
        shape, batch, length = setting.pick((Shape(), BATCH, LENGTH), (TINY, 2, 8))
        warned = partial(warned_waits, shape, batch, length, setting.device)
        found = part.tried("waits that PyTorch warns of", warned)
        part.target("waits of the host in a batch that PyTorch warns of", found, WAITS)
        torch.cuda.empty_cache()


def drawn(kind: str, values: int, device: str) -> torch.Tensor:
    """BF16 magnitudes' patterns, int16 [values]: normal, with heavy tails, and mostly zero, where most contend."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(values, generator=generator)
    if kind == "heavy tails":
        x = x / torch.rand(values, generator=generator).clamp_min(1e-6)
    if kind == "nine tenths zero":
        x = x * (torch.rand(values, generator=generator) > 0.9)
    return x.to(torch.bfloat16).abs().view(torch.int16).to(device)


def counting(kind: str, ways: dict[str, Counter], setting: Setting, part: Part) -> None:
    """Each way's time on values of a kind, and whether it counts what `bincount` does."""
    patterns = drawn(kind, setting.pick(1 << 25, 1 << 10), setting.device)
    right = torch.bincount(patterns.cpu(), minlength=PATTERNS)
    for way, count in ways.items():
        found = part.tried(f"{way}, {kind}", partial(count, patterns))
        if found is None:
            continue
        took = seconds([partial(count, patterns)], setting, graph=False)
        part.row("counting alone", values=kind, way=way, gvalues_per_second=len(patterns) / took / 1e9)
        differing = int((found.cpu() != right).sum())
        part.target(f"{way}, {kind}: counts others than bincount's", differing, 0)


@contextmanager
def watched(decoder: Decoder, count: Counter) -> Iterator[None]:
    """What calibration does while the decoder runs, counting as `count` does."""
    shape, made = decoder.shape, []
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size

    def see(*observers: observe.Observer, split: bool = False) -> Callable[..., None]:
        def hook(module: torch.nn.Module, given: tuple[torch.Tensor, ...], out: torch.Tensor | None = None) -> None:
            seen = given[:1] if not split or out is None else out[..., queries:].split(keys, -1)
            for observer, x in zip(observers, seen, strict=True):
                observer.update(x, 0)

        return hook

    with ExitStack() as stack, mock.patch.object(observe, "count_patterns", count):
        for layer in decoder.layers:
            products = [module for name, module in layer.named_children() if name in PRODUCTS]
            assert len(products) == len(PRODUCTS), "a layer has four products"
            made += [product.register_forward_pre_hook(see(observe.Observer(1))) for product in products]
            pair = observe.Observer(1), observe.Observer(1)
            made.append(products[0].register_forward_hook(see(*pair, split=True)))
        for handle in made:
            stack.callback(handle.remove)
        yield


def overhead(ways: dict[str, Counter], setting: Setting, part: Part) -> None:
    """The forward pass with each way of counting over the plain one."""
    kind, found = Kind("forward pass", 30), dict[str, float]()
    nothing = torch.zeros(PATTERNS, dtype=torch.int64, device=setting.device)
    made = part.step(setting, "overhead, plain", partial(plain_pass, setting), kind)
    if made is not None:
        decoder, work, plain = made
        for way, count in {"nothing counted": lambda patterns: nothing.clone(), **ways}.items():
            watching = partial(watched_pass, decoder, work, count, way, setting, part)
            took = part.step(setting, f"overhead, {way}", watching, kind)
            if took is not None:
                found[way] = took / plain
                part.row("overhead of watching", way=way, tokens=setting.pick(BATCH * LENGTH, 16), plain_ms=plain * 1e3,
                         times_plain=found[way])  # fmt: skip
    best = min((name for name in found if name in ways), key=lambda name: found[name], default=None)
    part.target(f"overhead of exact histograms, by {best}", found[best] if best else None, LIMIT)


def plain_pass(setting: Setting) -> tuple[Decoder, Work, float]:
    """A decoder, its forward pass, and the seconds of that when nobody watches."""
    decoder = Decoder(setting.pick(Shape(), TINY), wide, setting.device)
    batch, length = setting.pick((BATCH, LENGTH), (2, 8))
    decoder.make_room(batch, length, codes=False)
    ids = torch.zeros(batch, length, dtype=torch.int64, device=setting.device)
    at = torch.arange(length, device=setting.device)

    def work() -> torch.Tensor:
        with torch.inference_mode():
            return decoder(ids, at, None)  # type: ignore[no-any-return]

    return decoder, work, seconds([work], setting, graph=False, rounds=5)


def watched_pass(
    decoder: Decoder, work: Work, count: Counter, way: str, setting: Setting, part: Part
) -> float | None:  # fmt: skip
    """Seconds of the forward pass while calibration watches and counts so; None where it fails."""
    with watched(decoder, count):
        return part.tried(f"overhead, {way}", lambda: seconds([work], setting, graph=False, rounds=5))
