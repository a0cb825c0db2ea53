"""The table of docs/generate.md: one request, eight, and one under a flood."""

from markdown import load, table


def generate() -> str:
    """What steps and tokens take, beside the runtime's bare step and beside transformers."""
    found = load("generate")

    def row(what: str, one: str, eight: str = "", form: str = "{:.2f}") -> list[str]:
        return [what, *(form.format(found[name]) if name else "" for name in (one, eight))]

    peer = "transformers_bf16_{}_tokens_per_second".format
    rows = [
        row("the runtime's bare step, ms", "bare_ms", "bare_eight_ms"),
        row("tokens a second", "alone_tokens_per_second", "together_tokens_per_second", "{:.0f}"),
        row("the same by transformers, of the BF16 model", peer("one"), peer("eight"), "{:.0f}"),
        row("under a flood of prompts, over alone: mean", "flood_over_alone"),
        row("the slowest hundredth", "flood_p99_over_alone"),
    ]
    return table(["", "one request", "eight at once"], rows)


TABLES = (generate,)
