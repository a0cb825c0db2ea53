"""The tables of fp8q evaluate, on pages of decisions."""

from typing import Any

from markdown import load, table

from pages.real import MODELS


def tasks() -> str:
    """Recovery and flips of each form in each task, below BF16's score and its flips from FP32: of SmolLM2, and of the
    demo.
    """
    models = load("tasks_smollm2")["results"] | load("tasks")["results"]
    rows, names = [], list[str]()
    for model, forms in models.items():
        results = next(iter(forms.values()))
        names = [f"{row['task']}, {row['metric']}" for row in results]
        own = [f"{100 * row['bf16']:.1f}; {flips(row['noise'])}" for row in results]
        rows.append([MODELS.get(model, model), "BF16: score; flips from FP32", *own])
        for form, found in forms.items():
            rows.append(["", form, *(f"{recovery(row['paired'])}; {flips(row['paired'])}" for row in found)])
    return table(["model", "FP8: recovery; flips", *names], rows)


def recovery(paired: dict[str, Any]) -> str:
    """Recovery in percent, with its interval."""
    whole = f"{100 * paired['recovery']:.1f} %"
    if "recovery_low" not in paired:
        return whole
    return f"{whole} ({100 * paired['recovery_low']:.1f} to {100 * paired['recovery_high']:.1f})"


def flips(paired: dict[str, Any]) -> str:
    """Flips by direction."""
    return f"{paired['right_to_wrong']} + {paired['wrong_to_right']}"


def needles() -> str:
    """Needles found at all depths together, and the change of the answers' log-probability, by length and runtime."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for forms in (*load("needles")["results"].values(), *load("needles_4096")["results"].values()):
        for form, found in forms.items():
            for row in found:
                every = row["all"]
                change = f", {every['change']:+.3f}" if "change" in every else ""
                cell = f"{every['right']} of {every['needles']}{change}"
                rows.setdefault((form, row["runtime"]), {}).setdefault(f"{row['length']:,}", cell)
    lengths = list(dict.fromkeys(length for cells in rows.values() for length in cells))
    head = ["FP8", "runtime", *(f"{length} tokens" for length in lengths)]
    return table(head, [[*names, *(cells.get(length, "") for length in lengths)] for names, cells in rows.items()])


TASK_TABLES = (tasks,)
DECISION_TABLES = (needles,)
