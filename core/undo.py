"""Undo the work of a block that fails: when it raises, and when a signal ends the program inside of it.

The command line's signal handler raises nothing. `KeyboardInterrupt` may come up in a library's callback, where it
aborts the process (torch, from C++), becomes an error of the library's own, or is lost (in a weak reference's call). So
the handler calls `all_open` and ends the program at once: everything that unwinding would undo is undone from this
list. In a notebook there is no such handler, and blocks unwind as usual.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

#: What the blocks that are open now would undo, the innermost last.
_open: list[Callable[[], object]] = []


@contextmanager
def at_end(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` when the program ends inside the block; it may come in the middle of itself."""
    _open.append(undo)
    try:
        yield
    finally:
        _open.remove(undo)


@contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` when the block raises, or the program ends inside of it."""
    with at_end(undo):
        try:
            yield
        except BaseException:
            undo()
            raise


def all_open() -> None:
    """Undo what all open blocks would, the innermost first: the program ends, and nothing else may keep it."""
    for undo in reversed(_open):
        with suppress(Exception):
            undo()


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary directory, removed whichever way the block ends."""
    folder = Path(mkdtemp(prefix="fp8q-"))

    def clear() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    with undoing(clear):
        yield folder
    clear()
