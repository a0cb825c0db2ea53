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


def certificate() -> str:
    """What the certificate says of the next window, and what the next windows did."""
    rows = []
    for name, found in load("certificate")["results"].items():
        for size, rates in found["by_windows"].items():
            exceeds, harmful = rates["exceeds"], rates["harmful"]
            cells = [exceeds["told"], exceeds["happened"], harmful["told"], harmful["happened"]]
            cells += [harmful["happened_in_order"], harmful["other_text"]]
            rows.append([name, size, *(f"{100 * rate:.2f} %" for rate in cells)])
    head = ["model", "windows", "exceeds: told", "happened", "harmful: told", "happened", "in the text's order"]
    return table([*head, "on other text"], rows)


TABLES = (bos, certificate)
