"""The table of docs/fp8-input.md: what starting from FP8 costs."""

from collections.abc import Mapping
from typing import Any

from markdown import load, table


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
            loss(found[row]["least_sqnr_db"] for found in models.values()),
        ]
        for row in next(iter(models.values()))
    ]
    return table(["the model as it was given", *models, "least SQNR of a weight"], rows)


def loss(decibels: Any) -> str:
    """The least of several signal-to-noise ratios; that nothing is lost where there are none."""
    found = [each for each in decibels if each is not None]
    return f"{min(found):.1f} dB" if found else "nothing lost"


TABLES = (given_as_codes,)
