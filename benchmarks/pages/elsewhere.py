"""The table of docs/elsewhere.md: the loss in vLLM with the plugin and without it."""

from markdown import load, table


def vllm_plugin() -> str:
    """KL × 10⁶ in vLLM, and over the reference's."""
    rows = []
    on_gpu = load("vllm_plugin_h100")
    of_gpu = {f"{name}, on an H100 (vLLM {on_gpu['vllm']})": forms for name, forms in on_gpu["results"].items()}
    for name, forms in (load("vllm_plugin")["results"] | of_gpu).items():
        losses = [f"{forms[form]['kl']:.0f}" for form in ("BF16", "one term", "two terms, no plugin")]
        exact = [
            f"{forms[form]['kl']:.0f} ({forms[form]['kl'] / forms[form]['reference_kl']:.2f})"
            for form in ("tail", "two terms")
        ]
        rows.append([name, *losses, *exact])
    head = ["KL × 10⁶ in vLLM", "BF16", "one term", "two terms without the plugin"]
    return table([*head, "a tail of 64 (over)", "two terms (over)"], rows)


TABLES = (vllm_plugin,)
