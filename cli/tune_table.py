"""Show the results of `fp8q tune`: the frontier, then the mix for the budget, last, where a terminal leaves the eye."""

from pathlib import Path
from typing import TYPE_CHECKING

from .views import draw_table, emit

if TYPE_CHECKING:
    from ..validate.tuning.document import Tuning
    from .console import Terminal


def show_tuning(speak: "Terminal", run: Path, tuning: "Tuning", as_json: bool) -> None:
    """Show the tuning of `run`, and what to do next."""
    from ..validate.tuning.document import change_table, conclusion, outcome_table, point_table

    if as_json:
        emit(tuning.model_dump(by_alias=True, mode="json"))
        return
    draw_table(speak, point_table(tuning))
    if tuning.chosen is not None:
        changes = change_table(tuning)
        if changes.rows:
            draw_table(speak, changes)
        else:
            speak.say(changes.missing)
        draw_table(speak, outcome_table(tuning))
    speak.say(conclusion(tuning, str(run)))
