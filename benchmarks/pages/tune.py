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
            f"{found['predicted_over_held_out']:.2f}",
            f"{1e6 * found['measured_kl_nats']:.4g} ({found['kl_over_default']:.3f})",
            f"{1e6 * found['applied_kl_nats']:.4g}" if found["applied_kl_nats"] is not None else "",
            f"{found['weight_bytes_over_default']:.2f}",
            f"{found['prefill_flops_ratio']:.2f}",
            f"{found['weight_rounding']}, `{found['kv_cache']}`",
            f"{found['tail']} and {found['two_terms']} of {found['products']}",
        ]
        for name, found in load("tune")["results"].items()
    ]
    head = [
        "KL × 10⁶",
        "default",
        "predicted",
        "held out",
        "predicted over held out",
        "evaluation text, of the default",
    ]
    return table([*head, "applied", "weight bytes", "prefill", "rounding, cache", "tails and two terms"], rows)


def culprits() -> str:
    """What is found of a damaged module, and what repairs it."""
    rows = [
        [
            name,
            what,
            str(each["rank"]),
            f"{1e6 * each['alone_kl_nats']:,.0f} ({1e6 * each['next_kl_nats']:,.0f})",
            ", ".join(f"`{check}`" for check in each["found_by"]) or "not found",
            ", ".join(f"`{change['module']}`: {change['choice'].replace('_', ' ')}" for change in each["changes"]),
            f"{1e6 * found['healthy_kl_nats']:,.0f}",
            f"{1e6 * each['damaged_kl_nats']:,.0f}",
            f"{1e6 * each['repaired_kl_nats']:,.0f}",
        ]
        for name, found in load("culprit_proof")["results"].items()
        for damage, what in DAMAGES.items()
        for each in [found["damages"][damage]]
    ]
    head = ["KL × 10⁶", "damage", "rank", "alone (the next)", "found by", "what `tune` changes", "healthy", "damaged"]
    return table([*head, "repaired"], rows)


TABLES = (tune, culprits)
