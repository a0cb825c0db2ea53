"""The tables of docs/experts.md: the tokens that an amax needs, what judged codes leave, and the time that branches
take to build.
"""

from collections.abc import Mapping
from typing import Any

from markdown import load, table

#: Lengths of stretches that are shown.
STRETCHES = ("32", "128", "256", "512", "1024", "others")


def expert_tokens() -> str:
    """What an amax of so many tokens loses, beside that of a layer's other experts."""
    (found,) = load("expert_tokens")["results"].values()
    rows = [
        [
            "the others' largest" if name == "others" else f"{int(name):,} tokens",
            f"{of['amax_median']:.2f}, {of['amax_p10']:.2f}",
            f"{of['error_median']:.2f}, {of['error_p90']:.2f}",
            f"{1e6 * of['kl_nats']:.0f}",
        ]
        for name, of in found["taken"].items()
        if name in STRETCHES
    ]
    rows.append(["all tokens", "1, 1", "1, 1", f"{1e6 * found['kl_nats']:.0f}"])
    heads = ["amax of", "over that of all tokens: median, worst tenth", "squared error over that by all", "KL × 10⁶"]
    return table(heads, rows)


def branches_in_all() -> str:
    """What building takes by the number of branches in all."""
    results: Mapping[str, Mapping[str, Any]] = load("experts")["deep"]
    rows = [
        [
            shape.replace("x", " layer of " if shape.startswith("1x") else " layers of "),
            str(found["branches"]),
            f"{found['build_processor_seconds']:.0f} s",
            f"{found['bytes'] / 1e6:.0f} MB",
        ]
        for shape, found in sorted(results.items(), key=lambda each: (each[0].startswith("1x"), each[1]["branches"]))
        if found["branches"] > 64
    ]
    return table(["experts", "branches", "build, processor time", "plan"], rows)


def expert_rounding() -> str:
    """KL by each rounding of all weights, and the difference that judging makes."""
    rows = []
    for model, measured in load("expert_rounding")["results"].items():
        kl, less, last = (
            measured["kl_mean_micronats"],
            measured["judged_minus"]["gptq"],
            measured["gptq_over_nearest"]["down"],
        )
        codes = sum(measured["judged_weights"].values())
        rows.append(
            [
                model,
                f"{measured['tokens_of_an_expert']['median']:,}",
                *(f"{kl[rounding]:,.0f}" for rounding in ("nearest", "gptq", "judged")),
                f"{less['mean']:+,.0f} ({less['low']:+,.0f} to {less['high']:+,.0f})",
                f"{last['worse']} of {last['weights']}",
                f"{codes - measured['judged_weights'].get('gptq', 0)} of {codes}",
            ]
        )
    heads = [
        "model",
        "tokens of an expert, median",
        "KL × 10⁶, `nearest`",
        "`gptq` unjudged",
        "judged",
        "judged − `gptq`",
    ]
    return table([*heads, "last GEMMs worse than `nearest` by `gptq`", "weights with other codes"], rows)


BRANCH_TABLES = (branches_in_all,)
TOKEN_TABLES = (expert_tokens,)
ROUNDING_TABLES = (expert_rounding,)
