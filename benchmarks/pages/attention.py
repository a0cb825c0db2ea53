"""The table of docs/attention.md."""

from markdown import load, table


def attention() -> str:
    """KL and perplexity of all GEMMs without and with attention in FP8."""
    results = load("attention")["results"]
    rows = [
        ("attention in BF16", "wide", "reference"),
        ("attention in FP8", "fp8", "reference"),
    ]
    kl = [
        [title, *(f"{found[how]['kl_mean_nats'][who]:.5f}" for found in results.values())] for title, how, who in rows
    ]
    increases = [
        ", ".join(f"{found[how]['perplexity_increase']['reference']:+.2%}" for how in ("wide", "fp8"))
        for found in results.values()
    ]
    return table(["KL, nats", *results], [*kl, ["perplexity: in BF16, in FP8", *increases]])


TABLES = (attention,)
