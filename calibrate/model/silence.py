"""Keeping transformers quiet: what it logs, warns of and draws is ours to say, or of no use to whoever runs fp8q."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL


@contextmanager
def quiet() -> Iterator[None]:
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
