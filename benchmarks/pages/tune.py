"""The tables of decision 18 on mixes: how near they come, and damaged modules that they repair."""

from markdown import load, table

DAMAGES = {"outliers": "outlier channels", "scale": "a scale too small", "keys": "saturating keys"}


def tune() -> str:
    """What a third of the default's KL costs, and how what was predicted compares with what was found."""
    rows = [
        [
            name,
            f"{1e6 * found['default_kl_nats']:.4g}",
            f"{1e6 * found['predicted_kl_nats']:.4g}",
            f"{1e6 * found['held_out_kl_nats']:.4g}",
            f"{1e6 * found['measured_kl_nats']:.4g} ({found['kl_over_default']:.3f})",
            f"{found['weight_rounding']}, `{found['kv_cache']}`",
            f"{found['tail']} and {found['two_terms']} of {found['products']}",
        ]
        for name, found in load("tune")["results"].items()
    ]
    head = ["KL × 10⁶", "default", "predicted", "held out", "evaluation text (of the default)", "rounding, cache"]
    return table([*head, "tails and two terms"], rows)


def culprits() -> str:
    """Over all models: the rank of each damaged tensor, what is chosen for it, and KL over the healthy run's."""
    results = load("culprit_proof")["results"].values()
    rows = []
    for damage, what in DAMAGES.items():
        found = [each["damages"][damage] for each in results]
        chosen = {change["choice"].replace("_", " ") for each in found for change in each["changes"]}
        ratios = [
            [each["damages"][damage][f"{state}_kl_nats"] / each["healthy_kl_nats"] for each in results]
            for state in ("damaged", "repaired")
        ]
        ranks = sorted({each["rank"] for each in found})
        rows.append(
            [
                what,
                ", ".join(map(str, ranks)),
                " or ".join(sorted(chosen)),
                *(f"{min(each):.3g} to {max(each):.3g}" for each in ratios),
            ]
        )
    return table(["damage", "rank", "`tune` chooses", "damaged, of healthy KL", "repaired"], rows)


DECISION_TABLES = (tune, culprits)
