"""The table of docs/baselines.md: FP8 beside INT8 and BF16."""

from markdown import load, table


def baselines() -> str:
    """FP8, INT8 and BF16 weights on ONNX Runtime, by two clip methods."""
    results = load("baselines")["results"]
    columns = [("fp8", "amax"), ("int8", "amax"), ("fp8", "mse"), ("int8", "mse")]
    rows = []
    for name, found in results.items():
        cells = [found[method][precision] for precision, method in columns] + [found["amax"]["bf16"]]
        bf16 = found["perplexity_bf16"]
        rows += [[f"{name}: KL", *(f"{cell['kl_mean_nats']:.5f}" for cell in cells)]]
        rows += [[f"{name}: perplexity (BF16: {bf16:.3f})", *(f"{cell['perplexity_increase']:+.2%}" for cell in cells)]]
    titles = [f"{precision.upper()}, {method}" for precision, method in columns]
    return table(["", *titles, "BF16 weights, FP32 arithmetic"], rows)


TABLES = (baselines,)
