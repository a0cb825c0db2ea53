"""Compare runtimes with each adapter beside the model on: FP8 with it against BF16 with it.

So an adapter's numbers say what FP8 of the base costs whoever is served with it, and nothing of what the adapter does.
"""

from collections.abc import Callable
from pathlib import Path

from ...calibrate.model.source import Source
from ...core.reporter import Reporter
from ...core.run import Run
from .compare import compare_in_turn
from .document import RuntimeAccuracy
from .perplexity import Evaluation
from .runtimes import openers, vocabulary

#: The runtimes that take an adapter.
WITH_ADAPTERS = ("bf16", "reference", "onnxruntime")
Found = dict[str, dict[str, RuntimeAccuracy]]


def compare_adapted(
    run: Run,
    evaluation: Evaluation,
    runtimes: tuple[str, ...],
    source: Callable[[], Source],
    device: str,
    folder: Path,
    report: Reporter,
) -> tuple[Found, dict[str, str]]:
    """Run `evaluation` through those of `runtimes` that take an adapter, with each of the run's on.

    `source` gives the model with its adapters beside it; `folder` keeps what is found. Returns what was found by
    adapter and runtime, and by `<runtime> with <adapter>` why one failed.
    """
    found, failed = Found(), dict[str, str]()
    for variant in source().variants[1:]:
        assert variant.on, "what is beside the base is an adapter"
        name = variant.on.name
        chosen = tuple(each for each in runtimes if each in WITH_ADAPTERS)
        made = openers(chosen, run, lambda: variant, device, name)  # noqa: B023  # called before the next
        own = {each: opener for each, opener in made.items() if each in chosen}
        report.note(f"{name}: {', '.join(own)} with this adapter on")
        outcome = compare_in_turn(evaluation, own, vocabulary(run.model), folder / f"adapter-{name}", report)
        found[name] = outcome.accuracy.runtimes
        failed |= {f"{each} with {name}": why for each, why in outcome.failed.items()}
    return found, failed
