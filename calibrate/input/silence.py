"""Silence libraries: their logs, warnings, progress bars and prints."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL, getLogger

from ...core.undo import at_end


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from logging, warning and drawing bars in this block; restore its settings after it."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def logging_from(name: str, level: int) -> Iterator[None]:
    """Let the logger `name` pass messages of `level` and above alone in this block."""
    logger = getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def muted() -> Iterator[None]:
    """Discard output to standard error from outside Python: Rust's libraries print a panic before they raise it, and
    every gap of a vocabulary. The message of a signal that ends the program still appears.
    """
    try:
        stderr_copy = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        with at_end(lambda: os.dup2(stderr_copy, 2)):
            os.dup2(nowhere, 2)
            yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(nowhere)
        os.close(stderr_copy)
