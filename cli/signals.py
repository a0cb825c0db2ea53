"""End the program on a signal: what is open is undone, one line is said, and the process ends where it stands.

No exception is raised, for reasons that `undo` has. A second signal ends the process at once, undoing nothing: the next
call does, as after a kill. Several processes that work together tell each other of SIGTERM (`calibrate.ranks`), and put
a handler of their own in this one's place meanwhile.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from ..core.undo import all_open

GOES_ON = "what is finished is kept, and the same command goes on from there"
#: The commands that write nothing that a second call could go on from.
WITHOUT_STAGES = frozenset(("doctor", "engine", "generate", "inspect", "lint", "push", "serve"))
#: What each signal is told as; the exit code is 128 and its number, as shells have it.
SIGNAL_TEXTS = {
    signal.SIGHUP: "the terminal was closed",
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "stopped by SIGTERM",
}
_heard: list[int] = []
_start: list[str] = []
#: Whether a bar is drawn, which has hidden the cursor; the line belongs under it.
drawing = threading.Event()


def handle_signals() -> None:
    """End the program at each of these signals, but for those that whoever started it wants ignored (`nohup`)."""
    with suppress(OSError):
        _start.append(os.getcwd())
    for number in SIGNAL_TEXTS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end_process)


def deafen() -> None:
    """Let Ctrl-C change nothing any more: the work is done and its exit code stands, while Python clears up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def line(number: int) -> str:
    """Say which signal ended the program, and what is kept, where the command keeps something."""
    said = SIGNAL_TEXTS[signal.Signals(number)]
    if WITHOUT_STAGES.intersection(sys.argv[1:2]):
        return said
    return f"{said}; {GOES_ON}"


def end_process(number: int, frame: FrameType | None) -> None:
    """Undo what is open, say why, and end the process; the second time at once."""
    _heard.append(number)
    if len(_heard) == 1:
        with suppress(OSError):
            os.chdir(_start[0])  # where relative paths mean what they did
        all_open()
    # below Python's own streams, which may be in the middle of a line of their own
    with suppress(OSError):
        os.write(2, f"{CURSOR if drawing.is_set() else ''}fp8q: {line(number)}\n".encode())
    os._exit(128 + number)


def asking(stop: Callable[[], object], waiting: str) -> list[int]:
    """Let the first signal call `stop`, which asks the program to end well, and the second end it at once; `waiting` is
    said meanwhile.

    Returns a list that will hold the signal heard.
    """
    heard: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        said = SIGNAL_TEXTS[signal.Signals(number)]
        with suppress(OSError):
            os.write(2, f"fp8q: {said}{f'; {waiting}' if len(heard) == 1 else ' again'}\n".encode())
        if len(heard) > 1:
            os._exit(128 + number)
        stop()

    for number in SIGNAL_TEXTS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, ask)
    return heard


#: Below the bar, with the cursor shown again (ECMA-48, DECTCEM).
CURSOR = "\n\x1b[?25h"
