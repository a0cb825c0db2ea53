"""Compare runtimes with each adapter: FP8 with the adapter against BF16 with the adapter.

So the numbers of an adapter show the loss by FP8 for its users, and nothing of the adapter's own effect.
"""

from collections.abc import Callable

from ...calibrate.model.source import Source
from ...core.run import Run
from .compare import Workplace, compare_in_turn
from .document import RuntimeAccuracy
from .perplexity import Evaluation
from .runtimes import openers, vocabulary

#: The runtimes that take an adapter.
WITH_ADAPTERS = ("bf16", "reference", "onnxruntime")
Found = dict[str, dict[str, RuntimeAccuracy]]


def compare_adapted(
    run: Run, evaluation: Evaluation, runtimes: tuple[str, ...], source: Callable[[], Source], workplace: Workplace
) -> tuple[Found, dict[str, str]]:
    """Run `evaluation` through those of `runtimes` that take an adapter, once with each adapter of the run.

    `source` opens the model with its adapters beside it. Returns the accuracy by adapter and runtime, and by
    `<runtime> with <adapter>` why one failed.
    """
    found, failed, prompt = Found(), dict[str, str](), evaluation.protocol.prompt
    for variant in source().variants[1:]:
        assert variant.on, "what is beside the base is an adapter"
        name = variant.on.name
        chosen = tuple(each for each in runtimes if each in WITH_ADAPTERS)
        made = openers(chosen, run, lambda: variant, workplace.device, name, prompt)  # noqa: B023  # called before the next
        own = {each: opener for each, opener in made.items() if each in chosen}
        workplace.report.note(f"{name}: {', '.join(own)} with this adapter on")
        folder = workplace.folder / f"adapter-{name}"
        outcome = compare_in_turn(evaluation, own, vocabulary(run.model), folder, workplace.report)
        found[name] = outcome.accuracy.runtimes
        failed |= {f"{each} with {name}": why for each, why in outcome.failed.items()}
    return found, failed
