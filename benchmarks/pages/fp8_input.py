"""The table of docs/fp8-input.md: what starting from FP8 costs."""

from collections.abc import Mapping
from typing import Any

from markdown import load, table

#: The forms that are shown: a scale a tensor loses what one a channel does, and few checkpoints have blocks of 64.
ROWS = ("for comparison: FP8 of the BF16 original", "a scale a channel", "a scale a block of 128 × 128")


def given_as_codes() -> str:
    """KL against the model as it was given, by its form; of weights alone behind it."""
    models: Mapping[str, Mapping[str, Mapping[str, Any]]] = load("fp8_input")["results"]
    rows = [
        [
            row,
            *(
                f"{found[row]['kl_mean_nats_times_1e6']:.0f} ({found[row]['weights_kl_mean_nats_times_1e6']:.0f})"
                for found in models.values()
            ),
        ]
        for row in ROWS
    ]
    return table(["the model as it was given", *models], rows)


TABLES = (given_as_codes,)
