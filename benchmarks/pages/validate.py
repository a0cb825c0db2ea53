"""The tables of docs/validate.md."""

from markdown import load, table

from fp8q.options import RUNTIMES

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


def runtimes() -> str:
    """The runtimes, and what each runs."""
    return table(["`--runtimes`", "what runs"], [[f"`{name}`", runtime.runs] for name, runtime in RUNTIMES.items()])


TABLES = (runtimes, top_logits)
