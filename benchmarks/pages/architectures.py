"""The tables of docs/architectures.md: by architecture, of those that work and of those that are refused."""

import re

from markdown import Figures, load, table

from .engines import TARGETS


def architectures() -> str:
    """Perplexity by runtime, cache and terms, KL, and FP8 products by target."""
    columns = ["BF16", *(f"{who}{cache}" for cache in ("", ", FP8 cache") for who in ("FP8 reference", "ONNX Runtime"))]
    head = ["model", "terms", *columns, "KL × 10⁶: cache BF16, FP8", "promised products"]
    results = load("architectures")["results"].items()
    rows = (architecture(name, result, terms) for name, result in results for terms in (1, 2))
    return table([*head, *(f"FP8 on {target}" for target in TARGETS)], rows)


def architecture(name: str, result: Figures, terms: int) -> list[str]:
    """A row of `architectures`: the products in FP8 with either cache, of two terms those found with both."""
    both = [result[f"{cache}, two terms" if terms == 2 else cache] for cache in ("off", "fp8")]
    bf16 = both[0]["perplexity"]["bf16"]
    runs = [each["perplexity"][who] for each in both for who in ("reference", "onnxruntime")]
    kl = ", ".join(f"{each['kl_reference_nats'] * 1e6:.0f}" for each in both)
    counts = ("fp8_products", "two_terms_found") if terms == 2 else ("fp8_products",)
    products = [min(each[count][target] for each in both for count in counts) for target in TARGETS]
    perplexities = [f"{bf16:.3f}", *(f"{run:.3f} ({run / bf16 - 1:+.2%})" for run in runs)]
    return [name, str(terms), *perplexities, kl, *map(str, (both[0]["promised_products"], *products))]


#: Kinds, as `small_configurations` has them, and how the table calls them.
KINDS = {
    "dense": "dense decoders of text",
    "mixture": "mixtures of experts",
    "variant": "others of these, and language models inside models that see",
    "sees or hears": "models that see or hear, with transformers' own sizes: the configuration alone",
    "recurrent": "with a recurrent state: the configuration alone",
    "encoder": "encoders and halves of them: the configuration alone",
    "other": "trained for something else, or parts of another model: the configuration alone",
}


def breadth() -> str:
    """Kind -> how many go how far."""
    rows = []
    for kind, name in KINDS.items():
        if count := load("unseen_architectures")["counts"].get(kind):
            shares = [f"{count[what]} ({count[what] / count['tried']:.0%})" for what in ("whole_way", "checkpoint")]
            tried = kind in ("dense", "mixture", "variant")
            rows.append([name, str(count["tried"]), *(shares if tried else ("", "")), str(count["refused"])])
    return table(["", "tried", "the whole way", "a checkpoint at least", "refused by name"], rows)


def unseen_architectures() -> str:
    """Of those that work: how far implementations are apart, and FP8 products."""
    rows = []
    for name, found in load("unseen_architectures")["results"].items():
        if "one_term" not in found:
            continue
        one, two = found["one_term"], found.get("two_terms")
        apart = [found["graph_difference"], one["first_position_difference"]]
        products = [str(one["promised_products"]), str(one["fp8_products"])]
        cells = [f"{two['kl_nats']:.0e}", str(min(two["fp8_products"], two["two_terms_found"]))] if two else ["", ""]
        rows.append([_name(name), *(f"{each:.0e}" for each in apart), cells[0], *products, cells[1]])
    head = ["", "graph to eager attention (limit 1e-4)", "ONNX Runtime to reference, one term (limit 1e-4)"]
    head += ["two terms: KL, nats (limit 2e-5)", "promised products", "FP8 in one term", "FP8 in two"]
    return table(head, rows)


def refused_architectures() -> str:
    """Which are refused or get no graph, by the reason that is given."""
    reasons: dict[str, list[str]] = {}
    for name, found in load("unseen_architectures")["results"].items():
        if why := found.get("no_graph"):
            reasons.setdefault(f"a checkpoint, no graph: {_short(why.partition(' ')[2])}", []).append(_name(name))
        if "refused" in found:
            reason = found["refused"].partition(", which fp8q does not do")[0].partition(", and fp8q does no other")[0]
            reason = reason if reason.startswith("model/") else reason.partition(" ")[2]
            reasons.setdefault(f"refused: {_short(reason)}", []).append(_name(name))
        if "unmade" in found:
            reasons.setdefault("transformers 5.14.1 makes no model of its configuration", []).append(_name(name))
    return table(["what, and why", ""], ([reason, ", ".join(names)] for reason, names in sorted(reasons.items())))


def _name(configuration: str) -> str:
    return configuration.replace("Config", "")


def _short(reason: str) -> str:
    """A reason without the names of modules, so that those of a kind are in one row."""
    return re.sub(r" \([^)]*\)| \(.*$| in model\.\S+|;.*|, and of others.*|\. Use .*", "", reason)


TABLES = (
    architectures,
    breadth,
    unseen_architectures,
    refused_architectures,
)
