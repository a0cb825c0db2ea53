"""The table of docs/tune.md."""

from markdown import load, table


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
            f"{found['weight_rounding']}, `{found['kv_cache']}`, {found['two_terms']} of {found['products']}",
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
    return table([*head, "applied", "weight bytes", "prefill", "rounding, cache, two terms"], rows)


TABLES = (tune,)
