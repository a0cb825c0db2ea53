"""The tables of docs/numbers.md: two implementations, sums, calibrating, and what is held to a limit."""

from markdown import GIGABYTE, MEGABYTE, Figures, gigabytes, load, table

#: How sums are made -> the head of its column.
SUMS = {"fp32": "FP32", "fp22": "`fp22`", "two-level": "`two-level`"}
#: The products and lengths of a sum that decide: heavy tails give the figures of normal products.
KINDS, LENGTHS = ("normal", "one sign"), ("512", "4096", "28672")


def two_implementations() -> str:
    """ONNX Runtime against the exact reference, with the limits."""
    head = [
        "model",
        "KV cache",
        "largest logit difference before a code differs (limit 1e-4)",
        "codes that differ",
        "perplexity: exact to ONNX Runtime (limit 0.1 %)",
        "BF16 reference to ONNX Runtime (limit 0.5 %)",
        "KL(exact to ONNX Runtime) of KL(BF16 to FP8) (limit 10 %)",
    ]
    return table(head, map(_implementation, load("two_implementations")["results"]))


def _implementation(found: Figures) -> list[str]:
    return [
        found["model"],
        found["kv_cache"],
        f"{found['logit_difference']:.1e}",
        f"{found['codes_differing_share']:.2%}",
        f"{found['perplexity_difference']:.3%}",
        f"{found['perplexity_difference_bf16']:.3%}",
        f"{found['kl_share']:.1%}",
    ]


def accumulator_products() -> str:
    """The error of single sums by their length, beside what rounding makes."""
    titles = {
        "operands": "both operands in E4M3",
        "bf16": "the sum in BF16",
        "fp22": "`fp22`",
        "two-level": "`two-level`",
    }
    rows = [
        [
            kind,
            f"{int(length):,}",
            *(f"{100 * lengths[length][name]:.3g}%" for name in titles),
        ]
        for kind, lengths in load("accumulator")["products"].items()
        if kind in KINDS
        for length in LENGTHS
    ]
    return table(["products", "K", *titles.values()], rows)


def accumulator_models() -> str:
    """KL from the FP32 model by how the sums are made, with one term and with two."""
    rows = [
        [name, *(_micro(found[terms][how]["kl_nats"]) for terms in ("1", "2") for how in SUMS)]
        for name, found in load("accumulator")["results"].items()
    ]
    first, *others = SUMS.values()
    return table(["KL × 10⁶", f"one term: {first}", *others, f"two terms: {first}", *others], rows)


def _micro(nats: float) -> str:
    return f"{1e6 * nats:.1f}"


def calibration() -> str:
    """Processor time of calibrating over that of the plain forward pass, by batch size."""
    rows = [
        [name, size, *(f"{peer[kind]:.2f}×" for kind in ("further_cpu", "whole_cpu"))]
        for size, found in load("calibration")["batch_sizes"].items()
        for name, peer in found["ratios"].items()
    ]
    return table(["", "batch", "a further batch", "a whole call"], rows)


def without_bf_units() -> str:
    """Render the time that calibration and validation take with and without BF16 units."""
    kinds = load("bf16_products")["kinds"]
    rows = []
    for kind, title in (("native", "BF16 units"), ("avx2", "AVX2 alone")):
        for name, found in kinds[kind]["models"].items():
            ratios, before_and_after = found["ratios"], found["validate"]
            validating = [f"{before_and_after[whose]:.1f} s" for whose in ("torch", "fp8q")]
            rows.append([title, name, f"{ratios['calibration']:.2f}×", *validating])
    return table(["processor", "model", "calibration", "`validate` by torch", "by fp8q"], rows)


def limits() -> str:
    """Time and memory that are held to a limit."""
    rows = [
        ["how much memory does `--stream` take?", "memory", _memory(load("memory"))],
        ["how much memory to write the checkpoint and its graphs?", "export_memory", _writing(load("export_memory"))],
        ["how long do the graphs of a deep model take?", "export_time", _deep(load("export_time"))],
        ["how long does the lint of 10,000 products take?", "lint_time", _lint(load("lint_time"))],
        ["how long to choose all scales of 32 layers again?", "rescale", _rescale(load("rescale"))],
        ["how long to choose the tokens of 64 rows, of 128,256 each?", "sampling", _sampling(load("sampling"))],
    ]
    head = ["question", "`benchmarks/`", "result"]
    return table(head, ([question, f"`{scripts}`", result] for question, scripts, result in rows))


def _memory(result: Figures) -> str:
    found = [
        f"{gigabytes(each['peak_anonymous_bytes'])} for a checkpoint of {each['checkpoint_bytes'] / GIGABYTE:.1f} GB"
        for each in result["checkpoints"]
    ]
    return f"{', '.join(found)} (limit {gigabytes(result['checkpoints'][0]['limit_bytes'])})"


def _writing(result: Figures) -> str:
    found = [
        f"{gigabytes(each['peak_anonymous_bytes'])} for {each['checkpoint_bytes'] / GIGABYTE:.1f} GB"
        for each in result["checkpoints"]
    ]
    return f"{', '.join(found)} (limit {gigabytes(result['limit_bytes'])})"


def _deep(result: Figures) -> str:
    limits = result["limit_seconds"]
    found = [
        f"{depth}: {each['seconds']:.0f} s" + (f" (limit {limits[depth]:.0f})" if depth in limits else "")
        for depth, each in result["layers"].items()
    ]
    further = result["peak_bytes_a_further_layer"] / MEGABYTE
    return f"layers, both graphs: {', '.join(found)}; {further:.1f} MB of memory a further layer"


def _lint(result: Figures) -> str:
    slowest = max(result["graphs"], key=lambda graph: graph["lint_seconds"])
    return (
        f"{slowest['lint_seconds']:.1f} s (limit {result['limit_seconds']:.0f}); "
        f"onnx's load and checker alone {slowest['onnx_load_and_checker_seconds']:.2f} s"
    )


def _rescale(result: Figures) -> str:
    return f"{result['seconds']:.1f} s by the slowest method (limit {result['limit_seconds']:.0f})"


def _sampling(result: Figures) -> str:
    texts, flat = (
        result["logits"][shape]["temperature 0.8, top_p 0.95"]["all_rows"]["processor_ms"]
        for shape in ("texts", "flat")
    )
    return (
        f"processor time of each of {result['threads']} threads: {texts:.1f} ms on logits of texts "
        f"(limit {result['limit_ms']:.0f}), {flat:.1f} ms on flat ones"
    )


TABLES = (
    two_implementations,
    accumulator_products,
    accumulator_models,
    calibration,
    without_bf_units,
    limits,
)
