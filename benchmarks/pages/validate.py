"""The table of docs/validate.md."""

from markdown import gigabytes, load, table


def validate_memory() -> str:
    """The peak of each runtime by itself, and of all in one call."""
    found = load("validate_memory")
    rows = [[name, gigabytes(each["peak_anonymous_bytes"])] for name, each in found["runtimes"].items()]
    limit = f"{gigabytes(found['together']['peak_anonymous_bytes'])} (limit {gigabytes(found['limit_bytes'])})"
    return table(["`--runtimes`", "peak of memory"], [*rows, ["all of them in one call", limit]])


def top_logits() -> str:
    """KL by the likeliest tokens that are kept: how much of it they show, what it is at most, and their size."""
    found = load("top_logits")["results"]
    counts = list(next(iter(found.values()))["kept"])

    def cell(each: dict[str, float]) -> str:
        return f"{100 * each['share']:.0f} %, {100 * each['rest']:.1f} %, {each['most_nats']:.2g}"

    rows = [
        [f"**{count}**" if count == "32" else count, str(next(iter(found.values()))["kept"][count]["bytes"])]
        + [cell(each["kept"][count]) for each in found.values()]
        for count in counts
    ]
    whole = ["all", ""] + [f"{each['kl_nats']:.5f} nats" for each in found.values()]
    return table(["tokens kept", "bytes of a position", *found], [*rows, whole])


TABLES = (validate_memory, top_logits)
