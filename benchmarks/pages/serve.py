"""The tables of docs/serve.md: what HTTP costs, and what servers do under load and beside unread streams."""

from markdown import load, table


def serve() -> str:
    """One request and eight at once, in a process and over HTTP."""
    found = load("serve")
    rows = [
        [
            "tokens a second, in a process",
            f"{found['alone_tokens_per_second']:.0f}",
            f"{found['eight_tokens_per_second']:.0f}",
        ],
        [
            "as streams over HTTP",
            f"{found['alone_http_tokens_per_second']:.0f}",
            f"{found['eight_http_tokens_per_second']:.0f}",
        ],
        ["a token costs more, ms", f"{found['overhead_ms']:.2f}", ""],
    ]
    return table(["", "one request", "eight at once"], rows)


def under_load() -> str:
    """Latency at rising rates of requests that arrive by chance, and what was lost."""
    found = load("load")
    rows = [
        [
            name,
            f"{each['offered_per_second']:.1f} ({each['offered_per_second'] / server['capacity_per_second']:.0%})",
            *(" / ".join(f"{took:.0f}" for took in each[kind]) for kind in ("first_ms_p50_p99", "latency_ms_p50_p99")),
            str(each["busy"] + each["lost"] + each["mixed_up"]),
        ]
        for name, server in found["results"].items()
        for each in server["rates"][::2]
    ]
    head = ["server", "requests a second (of what it can)", "first token, ms: p50 / p99", "all of it, ms: p50 / p99"]
    return table([*head, "not answered"], rows)


def unread() -> str:
    """The wait of a proper client beside streams that nobody reads."""
    found = load("unread")
    names = {
        "nobody else": "alone_s",
        f"{found['streams']} unread streams of another address": "other_address_s",
        f"{found['streams']} unread streams of its own address": "same_address_s",
    }
    rows = [[words, f"{found[name]:.2f}"] for words, name in names.items()]
    return table(["beside", f"answer of {found['tokens']} tokens, s"], rows)


TABLES = (serve,)
DECISION_TABLES = (unread, under_load)
