"""The table of docs/elsewhere.md: what vLLM loses with the plugin and without it."""

from markdown import load, table


def vllm_plugin() -> str:
    """KL × 10⁶ in vLLM, beside the reference's, and the time of a step over that of one term."""
    rows = []
    for name, found in load("vllm_plugin")["results"].items():
        one = found["one term"]["step_ms"]
        exact = [
            f"{found[form]['kl']:.0f} ({found[form]['kl'] / found[form]['reference_kl']:.2f})"
            for form in ("tail", "two terms")
        ]
        losses = [f"{found[form]['kl']:.0f}" for form in ("BF16", "one term", "two terms, no plugin")]
        steps = [f"{found[form]['step_ms'] / one:.2f}" for form in ("BF16", "two terms")]
        rows.append([name, *losses, *exact, *steps])
    head = [
        "KL × 10⁶ in vLLM",
        "BF16",
        "one term, `gptq`",
        "two terms without the plugin",
        "a tail of 64 (over the reference)",
    ]
    return table([*head, "two terms (over the reference)", "a step over one term's: BF16", "two terms"], rows)


TABLES = (vllm_plugin,)
