"""Measure the progress of a build as one number, from the builder's nested phases."""

import threading
from collections.abc import Callable


class BuildProgress:
    """The finished share of a build. Each phase is one step of its parent phase and has steps of its own.

    The builder calls from its own threads. `cancel` makes it stop at the next step.
    """

    TOTAL = 100

    def __init__(self, advance: Callable[[int], None]):
        """Call `advance` for every finished hundredth."""
        self._advance, self._reported = advance, 0
        self._phases: dict[
            str, tuple[float, float, int]
        ] = {}  # where it begins, how wide one of its steps is, how many are done
        self._lock = threading.Lock()
        self._cancelled = threading.Event()

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        """Begin a phase of `steps` steps within `parent`."""
        begin, width, done = self._phases.get(parent or "", (0.0, 1.0, 0))
        self._phases[phase] = (begin + done * width, width / max(1, steps), 0)

    def step(self, phase: str, index: int) -> bool:
        """Finish step `index` of a phase; return whether to go on."""
        if phase in self._phases:
            begin, width, _ = self._phases[phase]
            self._phases[phase] = (begin, width, index + 1)
            self.reach(begin + (index + 1) * width)
        return not self._cancelled.is_set()

    def finish(self, phase: str) -> None:
        """End a phase."""
        self._phases.pop(phase, None)

    def reach(self, share: float) -> None:
        """Report the finished share of the whole; a smaller share than before is ignored."""
        with self._lock:
            if (percent := min(self.TOTAL, int(share * self.TOTAL + 1e-9))) > self._reported:
                self._advance(percent - self._reported)
                self._reported = percent

    def cancel(self) -> None:
        """Make the builder stop."""
        self._cancelled.set()
