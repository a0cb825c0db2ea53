"""Measure the progress of a build, as one number out of the builder's nested phases."""

import threading
from collections.abc import Callable


class BuildProgress:
    """The share of a build that is done, from the builder's phases: each is one step of its parent, and has steps of
    its own.

    The builder calls from its own threads. `cancel` makes it stop at the next step.
    """

    TOTAL = 100

    def __init__(self, advance: Callable[[int], None]):
        """Tell `advance` of every hundredth that is done."""
        self._advance, self._reported = advance, 0
        self._phases: dict[
            str, tuple[float, float, int]
        ] = {}  # where it begins, how wide one of its steps is, how many are done
        self._lock = threading.Lock()
        self._cancelled = threading.Event()

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        """A phase of `steps` steps begins within `parent`."""
        begin, width, done = self._phases.get(parent or "", (0.0, 1.0, 0))
        self._phases[phase] = (begin + done * width, width / max(1, steps), 0)

    def step(self, phase: str, index: int) -> bool:
        """Step `index` of a phase is done; answers whether to go on."""
        if phase in self._phases:
            begin, width, _ = self._phases[phase]
            self._phases[phase] = (begin, width, index + 1)
            self.reach(begin + (index + 1) * width)
        return not self._cancelled.is_set()

    def finish(self, phase: str) -> None:
        """A phase has ended."""
        self._phases.pop(phase, None)

    def reach(self, share: float) -> None:
        """This share of the whole is done; less than before is passed over."""
        with self._lock:
            if (percent := min(self.TOTAL, int(share * self.TOTAL + 1e-9))) > self._reported:
                self._advance(percent - self._reported)
                self._reported = percent

    def cancel(self) -> None:
        """Let the builder stop."""
        self._cancelled.set()
