"""The tables of docs/architectures.md: accuracy by architecture, and those that work or are refused."""

import re

from markdown import Figures, load, table


def architectures() -> str:
    """Perplexity of the reference by terms and cache."""
    head = ["model", "BF16", "one term", "two terms", "one term, FP8 cache", "two terms, FP8 cache"]
    rows = (architecture(name, result) for name, result in load("architectures")["results"].items())
    return table(head, rows)


def architecture(name: str, result: Figures) -> list[str]:
    """A row of `architectures`: BF16's perplexity, and the increase of each form."""
    forms = [result[f"{cache}{terms}"] for cache in ("off", "fp8") for terms in ("", ", two terms")]
    bf16 = forms[0]["perplexity"]["bf16"]
    return [name, f"{bf16:.3f}", *(f"{each['perplexity']['reference'] / bf16 - 1:+.2%}" for each in forms)]


#: Kinds, as `small_configurations` has them, and how the table calls them.
KINDS = {
    "dense": "dense decoders of text",
    "mixture": "mixtures of experts",
    "hybrid": "hybrids of attention and a recurrence, a convolution or an indexer",
    "variant": "others of these, and language models inside models that see",
}


def breadth() -> str:
    """Kind -> how many go how far."""
    rows = []
    for kind, name in KINDS.items():
        count = load("unseen_architectures")["counts"].get(kind)
        if count is None:  # of an older result
            continue
        shares = [f"{count[what]} ({count[what] / count['tried']:.0%})" for what in ("whole_way", "checkpoint")]
        rows.append([name, str(count["tried"]), *shares, str(count["refused"])])
    return table(["", "tried", "the whole way", "a checkpoint at least", "refused by name"], rows)


def unseen_architectures() -> str:
    """Those that work; and those that get no graph or are refused, by the reason that is given."""
    measured = load("unseen_architectures")
    results, version = measured["results"], measured["versions"]["transformers"]
    works = [_name(name) for name, found in results.items() if "one_term" in found]
    reasons: dict[str, list[str]] = {}
    for name, found in results.items():
        if why := found.get("no_graph"):
            reasons.setdefault(f"a checkpoint, no graph: {_short(_without_name(why))}", []).append(_name(name))
        if "refused" in found:
            reason = found["refused"].partition(", which fp8q does not do")[0].partition(", and fp8q does no other")[0]
            reasons.setdefault(f"refused: {_short(_without_name(reason))}", []).append(_name(name))
        if "unmade" in found:
            reasons.setdefault(f"transformers {version} makes no model of its configuration", []).append(_name(name))
    rows = [("the whole way", works), *sorted(reasons.items())]
    return table(["how far, and why", ""], ([reason, ", ".join(names)] for reason, names in rows))


def _name(configuration: str) -> str:
    return configuration.replace("Config", "")


def _without_name(reason: str) -> str:
    """A reason without the model's name that it begins with, if it does."""
    return reason if reason.startswith(("model/", "torch ")) else reason.partition(" ")[2]


def _short(reason: str) -> str:
    """A reason without the names of modules, so that those of a kind are in one row."""
    return re.sub(r" \([^)]*\)| \(.*$| in model\.\S+|;.*|, and of others.*|\. Use .*", "", reason)


TABLES = (architectures, breadth, unseen_architectures)
