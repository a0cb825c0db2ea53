"""The tables of docs/exact-answers.md: what each form loses behind a prompt, and what it costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from markdown import load, table

ONE, TWO, WIDE = "one term", "two terms", "weights alone"
TAILS = (1, 16, 64, 128)
BEST = "tail of 64"


def results() -> Mapping[str, Any]:
    """Model -> its figures."""
    found: Mapping[str, Any] = load("exact_answers")["results"]
    return found


def kl(losses: Sequence[float], quarters: bool = False) -> str:
    """The mean KL × 10⁶, and behind it each quarter's."""
    mean, *parts = (f"{each:.0f}" if each >= 100 else f"{each:.1f}" for each in losses)
    return f"{mean}: {', '.join(parts)}" if quarters else mean


def exact_answers() -> str:
    """Every model: one term as it is by default, and each form with GPTQ."""
    rows = []
    for name, found in results().items():
        gptq = found["gptq"]
        forms = [gptq[form] for form in (ONE, *(f"tail of {tail}" for tail in TAILS), TWO, WIDE)]
        shares = [f"{found['of_one_term']:.3f}", f"{found['of_two_terms']:.2f}"]
        rows.append([name, kl(found["bf16"]), kl(found["nearest"][ONE]), *map(kl, forms), *shares])
    head = ["model", "BF16 itself", "one term, nearest", "one term", *(f"tail of {tail}" for tail in TAILS), TWO, WIDE]
    return table([*head, "tail of 64 over one term, nearest", "over two terms"], rows)


def exact_answers_quarters() -> str:
    """The mean and each quarter of the decoded tokens."""
    forms = (ONE, *(f"tail of {tail}" for tail in TAILS), TWO)
    rows = [[name, *(kl(found["gptq"][form], quarters=True) for form in forms)] for name, found in results().items()]
    return table(["model", *forms], rows)


def exact_answers_weights() -> str:
    """How weights are rounded for a tail."""
    kinds = ("nearest", "gptq, with the ridge", "gptq")
    rows = [
        [name, *(kl(found[kind][form]) for form in (BEST, TWO) for kind in kinds)] for name, found in results().items()
    ]
    head = [f"{form}: {kind}" if kind == kinds[0] else kind for form in (BEST, TWO) for kind in kinds]
    return table(["model", *head], rows)


def exact_answers_prompts() -> str:
    """By the length of the prompt."""
    rows = []
    for name, found in results().items():
        for prompt, forms in found["by prompt"].items():
            one = found["one term by prompt"][prompt]
            rows.append([name, prompt, kl(one), *(kl(forms[form]) for form in ("tail of 1", BEST, TWO))])
    return table(["model", "prompt", ONE, "tail of 1", BEST, TWO], rows)


def exact_answers_caches() -> str:
    """By the form of the cache."""
    names = {"off": "BF16", "v": "values in FP8", "fp8": "FP8"}
    rows = [
        [name, names[cache], *(kl(forms[form]) for form in (ONE, BEST, TWO))]
        for name, found in results().items()
        for cache, forms in found["by cache"].items()
    ]
    return table(["model", "cache", ONE, BEST, TWO], rows)


def tail_cost() -> str:
    """Operations, kernels and times of the forms."""
    rows = []
    for name, found in load("tail_cost")["results"].items():
        built = found["engines"]["sm89"], found["engines"]["sm120"]
        rows.append([
            name,
            f"{found['operations_ratio']:.4f}",
            ", ".join(f"{each['fp8']} of {each['promised']}" for each in built),
            ", ".join(" and ".join(map(str, each["kernels"])) for each in built),
            ", ".join(f"{each['megabytes']:.1f} MB" for each in built),
            f"{found['prompt_ms']:.0f} ms, {found['prompt_ratio']:.2f}",
            f"{found['step_ms']:.2f} ms, {found['step_ratio']:.2f}",
        ])  # fmt: skip
    head = ["form", "operations of a prompt of 2,048", "FP8 products, sm89 and sm120", "kernels: prefill and decode"]
    return table([*head, "engine", "ONNX Runtime: prompt of 512", "a step"], rows)


TABLES = (
    exact_answers,
    exact_answers_quarters,
    exact_answers_weights,
    exact_answers_prompts,
    exact_answers_caches,
    tail_cost,
)
