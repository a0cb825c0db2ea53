"""The table of docs/distill.md: KL before and after learning."""

from markdown import load, table


def distill() -> str:
    """KL before and after learning, on the model's domain and on another."""
    rows = []
    for name, forms in load("distill")["results"].items():
        for form, found in forms.items():
            cells = [f"{found[when][text]:.0f}" for text in found["before"] for when in ("before", "after")]
            steps, seconds = found["held_out"][-1][0], found["seconds"]
            rows.append([f"{name}, {form}", *cells, f"{found['tokens']:,}", f"{steps}", f"{seconds / 60:.0f}"])
    texts = {"own": "own domain", "other": "Wikipedia"}
    head = [f"{texts[text]}, {when}" for text in found["before"] for when in ("before", "after")]
    return table(["", *head, "tokens", "steps", "minutes"], rows)


TABLES = (distill,)
