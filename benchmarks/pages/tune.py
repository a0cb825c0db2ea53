"""The table of docs/tune.md."""

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
    """What is found of a damaged module, and what repairs it."""
    rows = [
        [
            name,
            what,
            str(each["rank"]),
            ", ".join(change["choice"].replace("_", " ") for change in each["changes"]),
            f"{1e6 * found['healthy_kl_nats']:,.0f}",
            f"{1e6 * each['damaged_kl_nats']:,.0f}",
            f"{1e6 * each['repaired_kl_nats']:,.0f}",
        ]
        for name, found in load("culprit_proof")["results"].items()
        for damage, what in DAMAGES.items()
        for each in [found["damages"][damage]]
    ]
    return table(["KL × 10⁶", "damage", "rank", "`tune` chooses", "healthy", "damaged", "repaired"], rows)


TABLES = (tune, culprits)
