"""The tables of docs/choosing-scales.md."""

from collections.abc import Mapping

from markdown import Figures, load, table

from fp8q.options import METHODS
from pages.real import clips_real

#: Rows of the result that nobody decides by: BF16 itself, what is near a shown row, and scales of an FP8 cache, none of
#: which changes the KL of `FP8 cache too, by amax` by more than a tenth.
NOT_SHOWN = (
    "bf16",
    "percentile 99.9",
    "delayed, history 1024",
    "amax, margin 3",
    "weights by amax, activations by mse",
    "weights per tensor, by amax",
    "FP8 cache, percentile 99.99",
    "FP8 cache by mse",
    "FP8 cache by entropy",
    "FP8 cache, delayed, most recent",
    "FP8 cache, amax, margin 1",
    "FP8 cache, amax, power of two",
)


def choosing_scales() -> str:
    """KL relative to the default's, by choice and model."""
    models: Mapping[str, Figures] = load("choosing_scales")["models"]
    choices = [choice for choice in next(iter(models.values())) if choice not in NOT_SHOWN]
    default = choices[0]
    rows = [
        [
            choice,
            *(f"{rows[choice]['kl_mean_nats'] / rows[default]['kl_mean_nats']:.2f}" for rows in models.values()),
        ]
        for choice in choices
    ]
    absolute = [f"{rows[default]['kl_mean_nats'] * 1e6:.0f}" for rows in models.values()]
    return table(["", *models], [*rows, ["KL of the default, nats × 10⁶", *absolute]])


def clip_methods() -> str:
    """The clip methods, and whether the certificate of the text judges them."""
    rows = [
        [f"`{name}`", method.clip, method.saturates, "yes" if method.by_batch_amax else ""]
        for name, method in METHODS.items()
    ]
    return table(["`--method`", "clip", "saturates", "judged by the [certificate of the text](corpora.md)"], rows)


TABLES = (clip_methods, clips_real)
DECISION_TABLES = (choosing_scales,)
