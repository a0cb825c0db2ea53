"""The tables of docs/exact-answers.md: what each form loses behind a prompt, and what it costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from markdown import load, table

from pages.real import exact_answers_real

ONE, TWO, WIDE = "one term", "two terms", "weights alone"
BEST = "tail of 64"
FORMS = (ONE, BEST, TWO, WIDE)


def results() -> Mapping[str, Any]:
    """Model -> its figures."""
    found: Mapping[str, Any] = load("exact_answers")["results"]
    return found


def kl(losses: Sequence[float]) -> str:
    """The mean KL × 10⁶, before which the result has each quarter's."""
    mean = losses[0]
    return f"{mean:.0f}" if mean >= 100 else f"{mean:.1f}"


def exact_answers() -> str:
    """Every model: one term as it is by default, and each form with GPTQ."""
    rows = []
    for name, found in results().items():
        gptq = found["gptq"]
        forms = [gptq[form] for form in FORMS]
        rows.append([name, kl(found["bf16"]), kl(found["nearest"][ONE]), *map(kl, forms)])
    return table(["model", "BF16 itself", "one term, nearest", *FORMS], rows)


def exact_answers_prompts() -> str:
    """The share of one term's loss that a tail of 64 leaves, by the length of the prompt."""
    lengths = ("128", "256", "384")
    rows = [
        [name, *(f"{found['by prompt'][each][BEST][0] / found['one term by prompt'][each][0]:.3f}" for each in lengths)]
        for name, found in results().items()
    ]
    return table(["KL, tail of 64 over one term", *(f"prompt of {each}" for each in lengths)], rows)


def exact_answers_caches() -> str:
    """KL of a tail of 64 with an FP8 cache; `exact_answers` has it with one in BF16."""
    names = {"v": "values in FP8", "fp8": "keys and values"}
    rows = [[name, *(kl(found["by cache"][cache][BEST]) for cache in names)] for name, found in results().items()]
    return table(["tail of 64", *names.values()], rows)


def tail_cost() -> str:
    """Operations, kernels and times of the forms."""
    rows = []
    for name, found in load("tail_cost")["results"].items():
        built = found["engines"]["sm89"]
        rows.append([
            name,
            f"{found['operations_ratio']:.2f}",
            " and ".join(map(str, built["kernels"])),
            f"{built['megabytes']:.1f} MB",
            f"{found['prompt_ratio']:.2f}",
            f"{found['step_ratio']:.2f}",
        ])  # fmt: skip
    head = ["form", "operations, prompt of 2,048", "kernels: prefill and decode", "engine"]
    return table([*head, "CPU: a prompt", "a step"], rows)


TABLES = (exact_answers_real, tail_cost)
DECISION_TABLES = (exact_answers, exact_answers_prompts, exact_answers_caches)
