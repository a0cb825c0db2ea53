"""The table of docs/validate.md."""

from markdown import load, table

#: Numbers of tokens that are shown; `top_logits.npz` keeps 32.
COUNTS = ("8", "32", "128")


def top_logits() -> str:
    """KL by the likeliest tokens that are kept: how much of it they show and what it is at most."""
    found = load("top_logits")["results"]

    def cell(each: dict[str, float]) -> str:
        return f"{100 * each['share']:.0f} %, {100 * each['rest']:.1f} %, {each['most_nats']:.2g}"

    rows = [
        [f"**{count}**" if count == "32" else count, *(cell(each["kept"][count]) for each in found.values())]
        for count in COUNTS
    ]
    whole = ["all"] + [f"{each['kl_nats']:.5f} nats" for each in found.values()]
    return table(["tokens kept", *found], [*rows, whole])


TABLES = (top_logits,)
