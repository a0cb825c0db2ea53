"""The tables of docs/architectures.md: by architecture, of those that work and of those that are refused."""

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


def unseen_architectures() -> str:
    """Of those that work: how far implementations are apart, and FP8 products."""
    rows = []
    for name, found in load("unseen_architectures")["results"].items():
        if "one_term" not in found:
            continue
        one, two = found["one_term"], found["two_terms"]
        apart = (found["graph_difference"], one["first_position_difference"], two["kl_nats"])
        products = (one["promised_products"], one["fp8_products"], min(two["fp8_products"], two["two_terms_found"]))
        rows.append([name.removesuffix("Config"), *(f"{each:.0e}" for each in apart), *map(str, products)])
    head = ["", "graph to eager attention (limit 1e-4)", "ONNX Runtime to reference, one term (limit 1e-4)"]
    head += ["two terms: KL, nats (limit 2e-5)", "promised products", "FP8 in one term", "FP8 in two"]
    return table(head, rows)


def refused_architectures() -> str:
    """Which are refused or get no graph, by the reason that is given."""
    reasons: dict[str, list[str]] = {}
    for name, found in load("unseen_architectures")["results"].items():
        if why := found.get("no_graph"):
            reasons.setdefault(f"{why.partition(' ')[2]}: no graph", []).append(name.removesuffix("Config"))
        if "refused" in found:
            reason = found["refused"].partition(", which fp8q does not do")[0].partition(" ")[2]
            reasons.setdefault(reason, []).append(name.removesuffix("Config"))
    return table(["refused, because it", ""], ([reason, ", ".join(names)] for reason, names in reasons.items()))


TABLES = (
    architectures,
    unseen_architectures,
    refused_architectures,
)
