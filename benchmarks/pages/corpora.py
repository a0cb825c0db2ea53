"""The table of docs/corpora.md."""

from markdown import load, table


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


TABLES = (certificate,)
