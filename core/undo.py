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

#: The undo functions of the open blocks, the innermost last.
_open: list[Callable[[], object]] = []


@contextmanager
def at_end(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` when the program ends inside the block; a signal may interrupt `undo` itself and call it again."""
    _open.append(undo)
    try:
        yield
    finally:
        _open.remove(undo)


@contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` when the block raises, or when the program ends inside it."""
    with at_end(undo):
        try:
            yield
        except BaseException:
            undo()
            raise


def all_open() -> None:
    """Undo all open blocks, the innermost first, at the end of the program; errors are ignored."""
    for undo in reversed(_open):
        with suppress(Exception):
            undo()


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a temporary directory that is removed however the block ends."""
    folder = Path(mkdtemp(prefix="fp8q-"))

    def clear() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    with undoing(clear):
        yield folder
    clear()
