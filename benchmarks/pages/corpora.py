"""The table of docs/corpora.md."""

from markdown import load, table


def bos() -> str:
    """Perplexity and statistics of windows that begin with BOS, and of those that do not, beside serving."""
    rows = []
    for name, found in load("bos")["results"].items():
        auto, never = found["auto"], found["never"]
        rows.append(
            [
                name,
                f"{found['served']['perplexity']:.3f}",
                *(
                    f"{one['perplexity']:.3f} ({one['perplexity'] / found['served']['perplexity'] - 1:+.1%})"
                    for one in (auto, never)
                ),
                *(f"{one['octaves_mean']:.3f}" for one in (auto, never)),
                *(f"{one['amax_ratio_least']:.2f} to {one['amax_ratio_most']:.2f}" for one in (auto, never)),
            ]
        )
    head = ["model", "perplexity served", "`auto`", "`never`", "distance in octaves: `auto`", "`never`"]
    return table([*head, "amax over served: `auto`", "`never`"], rows)


TABLES = (bos,)
