"""Keeping libraries quiet: what they log, warn of, draw and print is ours to say, or of no use to whoever runs fp8q."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL

from ...core.undo import at_end


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from logging, warning and drawing bars; the settings before are restored."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
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
def muted() -> Iterator[None]:
    """Keep what is written past Python off standard error: Rust's libraries print a panic before they raise it, and all
    of a vocabulary's holes. What a signal ends the program with is heard all the same.
    """
    try:
        kept = os.dup(2)
    except OSError:  # closed: nothing to keep quiet
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        with at_end(lambda: os.dup2(kept, 2)):
            os.dup2(nowhere, 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
