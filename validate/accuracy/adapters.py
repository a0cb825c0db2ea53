"""Compare runtimes with each adapter: FP8 with the adapter against BF16 with the adapter.

So the numbers of an adapter show the loss by FP8 for its users, and nothing of the adapter's own effect.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...calibrate.model.source import Source
from ...core.run import Run
from .compare import Workplace, compare_in_turn
from .document import RuntimeAccuracy, with_adapter
from .perplexity import Evaluation
from .runtimes import openers, vocabulary
from .top_logits import TopLogits


@dataclass(frozen=True)
class AdapterOutcome:
    """The accuracy by adapter and runtime; by `<runtime> with <adapter>` the losses of all tokens, the likeliest tokens
    at `positions_to_keep`, and why one failed.
    """

    rows: dict[str, dict[str, RuntimeAccuracy]] = field(default_factory=dict)
    nll: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    top: dict[str, TopLogits] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def compare_adapted(
    run: Run,
    evaluation: Evaluation,
    runtimes: Mapping[str, tuple[str, ...]],
    source: Callable[[], Source],
    workplace: Workplace,
) -> AdapterOutcome:
    """Run `evaluation` once with each adapter of the run, through its `runtimes`.

    `source` opens the model with its adapters beside it.
    """
    found, prompt = AdapterOutcome(), evaluation.protocol.prompt
    for variant in source().variants[1:]:
        assert variant.on, "what is beside the base is an adapter"
        name = variant.on.name
        chosen = runtimes[name]
        made = openers(chosen, run, lambda: variant, workplace.device, name, prompt)  # noqa: B023  # called before the next
        own = {each: opener for each, opener in made.items() if each in chosen}
        workplace.report.note(f"{name}: {', '.join(own)} with this adapter on")
        folder = workplace.folder / f"adapter-{name}"
        outcome = compare_in_turn(evaluation, own, vocabulary(run.model), folder, workplace.report)
        found.rows[name] = outcome.accuracy.runtimes
        found.nll.update({with_adapter(each, name): values for each, values in outcome.nll.items()})
        found.top.update({with_adapter(each, name): top for each, top in outcome.top.items()})
        found.failed.update({with_adapter(each, name): why for each, why in outcome.failed.items()})
    return found
