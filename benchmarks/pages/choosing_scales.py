"""The table of docs/choosing-scales.md."""

from collections.abc import Mapping

from markdown import Figures, load, table


def choosing_scales() -> str:
    """KL relative to the default's and the increase of perplexity, by choice and model."""
    models: Mapping[str, Figures] = load("choosing_scales")["models"]
    choices = [choice for choice in next(iter(models.values())) if choice != "bf16"]
    default = choices[0]
    rows = [
        [
            choice,
            *(
                f"{rows[choice]['kl_mean_nats'] / rows[default]['kl_mean_nats']:.2f} "
                f"({rows[choice]['perplexity_increase']:+.2%})"
                for rows in models.values()
            ),
        ]
        for choice in choices
    ]
    absolute = [
        f"{rows[default]['kl_mean_nats'] * 1e6:.0f}, {rows['bf16']['perplexity']:.2f}" for rows in models.values()
    ]
    return table(["", *models], [*rows, ["KL of the default (nats × 10⁶), perplexity of BF16", *absolute]])


TABLES = (choosing_scales,)
