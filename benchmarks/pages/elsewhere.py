"""The table of docs/elsewhere.md: the loss in vLLM with the plugin and without it."""

from markdown import load, table


def vllm_plugin() -> str:
    """KL × 10⁶ in vLLM, and over the reference's."""
    rows = []
    for name, found in load("vllm_plugin")["results"].items():
        losses = [f"{found[form]['kl']:.0f}" for form in ("BF16", "one term", "two terms, no plugin")]
        exact = [
            f"{found[form]['kl']:.0f} ({found[form]['kl'] / found[form]['reference_kl']:.2f})"
            for form in ("tail", "two terms")
        ]
        rows.append([name, *losses, *exact])
    head = ["KL × 10⁶ in vLLM", "BF16", "one term", "two terms without the plugin"]
    return table([*head, "a tail of 64 (over)", "two terms (over)"], rows)


TABLES = (vllm_plugin,)
