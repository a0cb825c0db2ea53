"""The tables of docs/two-terms.md: forms of the product, what FP16 keeps, and attention's probabilities."""

from markdown import MEGABYTE, load, table


def two_terms() -> str:
    """The forms of a product of two terms, as they were built, and how often each rounds."""
    roundings = {
        "one term": "to BF16: 1",
        "product and sum in BF16": "each half, the sixteenth, the sum: 4",
        "halves widened to FP32, then added": "each half, the sum: 3",
        "product and sum in FP32": "the sum: 1",
        "two products, one a term": "each product, the sixteenth, the sum: 4",
        "Concat behind DequantizeLinear": "each half, the sixteenth, the sum: 4",
    }
    forms = load("two_terms")["forms"]
    rows = [
        [
            name,
            " and ".join(map(str, sorted(set(found["fp8_products"])))),
            " and ".join(map(str, sorted(set(found["kernels"])))),
            f"{found['bytes'] / MEGABYTE:.1f} MB",
            roundings[name],
        ]
        for name, found in forms.items()
    ]
    head = ["form", "FP8 products", "other kernels", "engine", "roundings between the sum of codes and the result"]
    return table(head, rows)


def half_precision() -> str:
    """KL against FP32 of one term, of two and of activations as they are, by the type of what is wide."""
    columns = ("BF16", "FP16", "FP32")
    rows = [
        [f"{name}: {row}", *(f"{kl[column]:.1f}" if column in kl else "" for column in columns)]
        for name, found in load("fp16")["results"].items()
        for row, kl in found.items()
    ]
    return table(["KL from FP32 × 10⁶", *columns], rows)


def probabilities() -> str:
    """Which probabilities are below 2^-14, and what rounding them costs."""
    kinds = ("one term", "two terms", "two terms, only below")
    rows = [
        [
            name,
            f"{found['context']}",
            f"{found['share_below']:.1%}",
            f"{found['mass_below']:.3%}",
            *(f"{found['output_error'][kind]:.2g}" for kind in kinds),
            *(f"{found['kl_mean_nats_times_1e6'][kind]:.3g}" for kind in kinds),
        ]
        for name, found in load("probabilities")["results"].items()
    ]
    head = ["model", "context", "below 2^-14", "of their sum", "error of the output: one term", "two terms"]
    return table([*head, "of it below 2^-14", "KL × 10⁶: one term", "two terms", "of it below 2^-14"], rows)


TABLES = (
    two_terms,
    half_precision,
    probabilities,
)
