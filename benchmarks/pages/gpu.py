"""The tables of docs/gpu.md: what was measured on an H100."""

from collections.abc import Mapping
from typing import Any

from markdown import load, table

WAYS = ("bf16", "fp8 alone", "FP8Linear", "FP8Linear, two terms", "bf16, dequantized weights")
#: Names of docs for those of the benchmark.
NAMES = {
    "FP8Linear": "FP8, one code", "FP8Linear, two terms": "two codes", "fp8 alone": "FP8, codes given", "bf16": "BF16",
    "bf16, dequantized weights": "BF16, weights from FP8 in each call",
}  # fmt: skip


def _tables(name: str, part: str) -> Mapping[str, list[dict[str, Any]]]:
    found: Mapping[str, list[dict[str, Any]]] = load(name)["parts"][part]["tables"]
    return found


def gpu_gemms() -> str:
    """Microseconds of the four GEMMs of a layer, in sum, by tokens."""
    rows = _tables("gpu_h100_products", "products")["products"]
    tokens = sorted({row["tokens"] for row in rows} - {64, 128, 512})
    cells = [
        [f"{model}: {NAMES[way]}", *(f"{_sum(rows, model, way, each):,.0f}" for each in tokens)]
        for model in ("8B", "70B")
        for way in WAYS
    ]
    return table(["µs of a layer's four GEMMs, tokens:", *(f"{each:,}" for each in tokens)], cells)


def _sum(rows: list[dict[str, Any]], model: str, way: str, tokens: int) -> float:
    found = [r["us"] for r in rows if (r["way"], r["tokens"]) == (way, tokens) and r["product"].startswith(model)]
    assert len(found) == 4, "a layer has four"
    return float(sum(found))


def gpu_plugin() -> str:
    """Microseconds of the plugin's four GEMMs of an 8B, in sum, by the form of its inputs."""
    rows = _tables("gpu_h100_products", "products")["the plugin's product"]
    tokens = sorted({row["tokens"] for row in rows})
    names = {"two terms": "two codes", "tail, stacked": "tail of 64, stacked", "tail, apart": "tail of 64, apart"}
    cells = [
        [
            names[way],
            *(f"{sum(r['us'] for r in rows if (r['way'], r['tokens']) == (way, each)):,.0f}" for each in tokens),
        ]
        for way in names
    ]
    return table(["the plugin's, µs; tokens of one prompt:", *(f"{each:,}" for each in tokens)], cells)


def gpu_kernels() -> str:
    """Kernels of one GEMM of 16 rows with its quantization and scaling."""
    rows = _tables("gpu_h100_products", "products")["kernels of a product of 16 rows, 8B qkv"]
    cells = [
        [f"{row['by']}, {row['terms']} code{'s' * (row['terms'] > 1)}", f"{row['kernels']:.0f}", f"{row['us']:.0f}"]
        for row in rows
    ]
    return table(["16 rows, 8B q/k/v", "kernels", "µs"], cells)


def gpu_adder() -> str:
    """Bits that the sums of codes keep, and the share of sums that are the simulated adder's, bit for bit."""
    found = _tables("gpu_nvidia_h100_80gb_hbm3", "numerics")
    bits = {row["sums"]: row for row in found["bits kept behind the leading one"]}
    cells = []
    for fast, adder in ((True, "fp22"), (False, "two-level")):
        kept = bits[f"GPU, use_fast_accum={fast}"]
        equal = [row[f"is {adder}"] for row in found["sums of codes"] if row["use_fast_accum"] is fast]
        errors = [row["relative_error"] for row in found["sums of codes"] if row["use_fast_accum"] is fast]
        cells.append([
            f"`use_fast_accum={fast}`", str(kept["1 behind"]), str(kept["128 behind"]),
            f"{min(errors):.2%} to {max(errors):.2%}".replace("%", " %"),
            f"`{adder}`: " + ", ".join(f"{share:.0%}".replace("%", " %") for share in equal),
        ])  # fmt: skip
    head = [
        "H100",
        "bits, neighbours",
        "bits, 128 apart",
        "error of the sums",
        "equal to the simulated, K 4,096; 14,336; 28,672",
    ]
    return table(head, cells)


def gpu_counting() -> str:
    """Billions of values counted in a second."""
    rows = _tables("gpu_nvidia_h100_80gb_hbm3", "calibration")["counting alone"]
    kinds = list(dict.fromkeys(row["values"] for row in rows))
    rates = {(row["way"], row["values"]): row["gvalues_per_second"] for row in rows}
    cells = [[way, *(f"{rates[way, kind]:.1f}" for kind in kinds)] for way in dict.fromkeys(row["way"] for row in rows)]
    return table(["counting, 10⁹ values a second", *kinds], cells)


def gpu_decoder() -> str:
    """A decode step of 16 rows, and a prompt of 2,048 tokens, of an 8B made of torch's operations."""
    found = _tables("gpu_nvidia_h100_80gb_hbm3", "decoder")
    steps = {(row["kind"], row["cache"]): row for row in found["decode"] if row["batch"] == 16}
    prompts = {row["kind"]: row["ms"] for row in found["prefill"]}
    cells = [
        [kind.replace("terms", "codes"), *(f"{steps[kind, cache]['ms']:.1f}" for cache in ("bf16", "fp8")),
         f"{steps[kind, 'fp8']['joules_per_token']:.2f}", f"{prompts[kind]:.1f}"]
        for kind in prompts
    ]  # fmt: skip
    return table(["8B, ms", "step of 16, BF16 cache", "FP8 cache", "joules a token", "prompt of 2,048"], cells)


def gpu_vllm() -> str:
    """Milliseconds of steps and prompts of an 8B in vLLM, by form, and joules of a decoded token."""
    rows = load("vllm_8b")["rows"]
    cells = [
        [
            form,
            *(f"{_vllm_ms(rows, form, 256, clients):.1f}" for clients in (1, 32)),
            f"{_vllm_row(rows, form, 256, 32)['joules_per_token']:.3f}",
            *(f"{_vllm_ms(rows, form, 2048, clients) / clients:.0f}" for clients in (1, 8)),
        ]
        for form in dict.fromkeys(row["form"] for row in rows)
    ]
    head = ["8B, ms", "step of 1", "step of 32", "joules a token, 32", "prompt of 2,048, alone", "each of 8"]
    return table(head, cells)


def _vllm_row(rows: list[dict[str, Any]], form: str, prompt: int, clients: int) -> dict[str, Any]:
    (row,) = [r for r in rows if (r["form"], r["prompt"], r["clients"]) == (form, prompt, clients)]
    return row


def _vllm_ms(rows: list[dict[str, Any]], form: str, prompt: int, clients: int) -> float:
    """Milliseconds of a token of each of `clients`, with the share of its prompt's time."""
    return float(1e3 * clients / _vllm_row(rows, form, prompt, clients)["tokens_per_second"])


TABLES = (gpu_gemms, gpu_adder, gpu_decoder, gpu_vllm)
COUNTING_TABLES = (gpu_counting,)
DECISION_TABLES = (gpu_plugin, gpu_kernels)
