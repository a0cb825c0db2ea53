"""Ask the runtimes for needles: one call a needle, whose last logits tell what greedy decoding writes.

Greedy decoding writes the answer exactly if the likeliest token is the answer's at each of its positions, behind the
answer's tokens before. So one call over prompt and answer scores both that and the answer's log-probability, and
nothing is generated. Logits are computed of the answer's positions alone: those of a whole long prompt would be
gigabytes.

A run with an FP8 cache is asked a second time with its cache in the compute type (`BF16_CACHE`), which tells what the
cache does and what the GEMMs do.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from transformers import DynamicCache, PreTrainedModel

from ...calibrate.measure.scoring import log_softmax, losses
from ...calibrate.model.caches import new_cache
from ...calibrate.model.source import Source, load_model
from ...core.reporter import Reporter
from ...core.run import Run
from ...options import ONE_TERM_ALONE, Accumulator
from ...quantize.reference.fp8_model import Reference
from ..accuracy.adder_cost import time_of_sums
from ..accuracy.runtimes import open_reference
from .document import BASELINE, Answered, NeedleAnswers
from .prompts import Needle

#: The reference of a run with an FP8 cache, over a cache in the compute type.
BF16_CACHE = "reference-bf16-cache"
#: Answers a needle.
Ask = Callable[[Needle], Answered]


def needle_runtimes(
    run: Run, source: Source, device: str, in_two: bool, fp8_cache: bool
) -> dict[str, Callable[[], Ask]]:
    """The runtimes that find needles, each as a function that loads it."""

    def fp8(first_terms: bool = False, bf16_cache: bool = False) -> Ask:
        loaded = open_reference(run, "fast", device)
        if first_terms:
            loaded.take_first_terms()
        return ask_reference(loaded, bf16_cache)

    made: dict[str, Callable[[], Ask]] = {
        BASELINE: lambda: ask_model(load_model(source, torch.bfloat16, device)),
        "reference": fp8,
    }
    if fp8_cache:
        made[BF16_CACHE] = lambda: fp8(bf16_cache=True)
    if in_two:
        made[ONE_TERM_ALONE] = lambda: fp8(first_terms=True)
    return made


def ask_model(model: PreTrainedModel) -> Ask:
    """Ask a float model."""
    return lambda needle: _answer(model, needle, None)


def ask_reference(loaded: Reference, bf16_cache: bool = False) -> Ask:
    """Ask the FP8 model over its own cache, or one in its compute type; an answer has the form of decoded tokens."""

    def ask(needle: Needle) -> Answered:
        with loaded.answering(needle.answer - 1) if loaded.tail else nullcontext():
            return _answer(loaded.model, needle, new_cache(loaded.model) if bf16_cache else loaded.new_cache())

    return ask


def _answer(model: PreTrainedModel, needle: Needle, cache: DynamicCache | None) -> Answered:
    """Compute the logits behind the prompt and behind each token of the answer but the last, and score them."""
    ids = torch.from_numpy(needle.ids[None, :-1]).to(model.device)
    logits = model(
        input_ids=ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=needle.answer
    ).logits[0, -needle.answer :]
    wanted = torch.from_numpy(needle.ids[-needle.answer :]).to(logits.device)
    loss = losses(log_softmax(logits), wanted).sum()
    return Answered(right=bool((logits.argmax(-1) == wanted).all()), log_probability=-float(loss))


def sums_cost(run: Run, needles: Sequence[Needle], accumulator: Accumulator, device: str) -> str:
    """Tell the time that sums in `accumulator` take on this machine, without those of attention."""
    tokens = sum(len(needle.ids) for needle in needles)
    return (
        f"--accumulator {accumulator}: {len(needles)} of the needles are asked with such sums too; "
        f"{time_of_sums(run, tokens, accumulator, device)}, and attention in FP8 takes its own time"
    )


def find(
    needles: Sequence[Needle], runtimes: Mapping[str, Callable[[], Ask]], sums: Mapping[str, Callable[[], Ask]],
    report: Reporter,
) -> list[NeedleAnswers]:  # fmt: skip
    """Ask every runtime for all needles, and those of `sums` for the first of each length and depth."""
    answers: list[dict[str, Answered]] = [{} for _ in needles]
    first = [number for number, needle in enumerate(needles) if needle.trial == 0]
    turns = [(name, load, [*range(len(needles))]) for name, load in runtimes.items()]
    turns += [(name, load, first) for name, load in sums.items()]
    with report.track("Finding needles", sum(len(asked) for _, _, asked in turns), "needles") as advance:
        for name, load, asked in turns:
            ask = load()
            with torch.inference_mode():
                for number in asked:
                    answers[number][name] = ask(needles[number])
                    advance(1)
            del ask
    return [
        NeedleAnswers(
            length=needle.length,
            depth=needle.depth,
            trial=needle.trial,
            key=needle.key,
            value=needle.value,
            answers=by_runtime,
        )
        for needle, by_runtime in zip(needles, answers, strict=True)
    ]
