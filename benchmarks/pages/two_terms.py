"""The table of docs/two-terms.md: what BF16 and FP16 keep of two terms."""

from markdown import load, table


def half_precision() -> str:
    """KL against FP32 of the model itself and of two terms, by the type of everything but the GEMMs."""
    columns, kinds = ("BF16", "FP16"), ("the model itself", "two terms")
    rows = [
        [f"{name}: {row}", *(f"{found[row][column]:.1f}" for column in columns)]
        for name, found in load("fp16")["results"].items()
        for row in kinds
    ]
    return table(["KL from FP32 × 10⁶", *columns], rows)


TABLES = (half_precision,)
