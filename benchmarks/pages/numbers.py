"""The tables of docs/numbers.md: two implementations, sums, calibrating, and all that is held to a limit."""

from markdown import GIGABYTE, MEGABYTE, Figures, gigabytes, load, table

#: How sums are made -> the head of its column.
SUMS = {"fp32": "in FP32", "fp22": "`fp22`", "two-level": "`two-level`", "fp32, rounded to bf16": "rounded to BF16"}


def two_implementations() -> str:
    """ONNX Runtime against the exact reference, with the limits."""
    head = [
        "model",
        "KV cache",
        "tokens before the first differing code",
        "largest logit difference there (limit 1e-4)",
        "codes that differ",
        "ppl BF16",
        "ppl reference, BF16",
        "ppl reference, exact FP32",
        "ppl ONNX Runtime",
        "exact to ONNX Runtime (limit 0.1 %)",
        "BF16 reference to ONNX Runtime (limit 0.5 %)",
        "KL(exact to ONNX Runtime) of KL(BF16 to FP8) (limit 10 %)",
        "greedy continuations that part, unexplained",
    ]
    return table(head, map(_implementation, load("two_implementations")["results"]))


def _implementation(found: Figures) -> list[str]:
    perplexities = (found[f"perplexity_{who}"] for who in ("bf16", "fast", "exact", "onnxruntime"))
    return [
        found["model"],
        found["kv_cache"],
        f"{found['tokens_before_first_difference']:,}",
        f"{found['logit_difference']:.1e}",
        f"{found['codes_differing_share']:.2%}",
        *(f"{perplexity:.3f}" for perplexity in perplexities),
        f"{found['perplexity_difference']:.3%}",
        f"{found['perplexity_difference_bf16']:.3%}",
        f"{found['kl_share']:.1%}",
        f"{found['continuations_parted']} of {found['continuations']}, {found['continuations_unexplained']}",
    ]


def accumulator_products() -> str:
    """The error of single sums by their length, beside what rounding makes."""
    titles = {
        "operands": "both operands in E4M3",
        "weights": "weights alone",
        "bf16": "the sum in BF16",
        "fp22": "`fp22`",
        "ada": "`fp22`, 16 at a time (Ada)",
        "two-level": "`two-level`",
    }
    rows = [
        [
            kind,
            f"{int(length):,}",
            *(f"{100 * found[name]:.3g}%" for name in titles),
            f"{100 * found['fp22, drift']:+.2g}%",
        ]
        for kind, lengths in load("accumulator")["products"].items()
        for length, found in lengths.items()
    ]
    return table(["products", "K", *titles.values(), "`fp22`: drift"], rows)


def accumulator_models() -> str:
    """KL against the FP32 model and against sums in FP32, by how the sums are made, with one term and with two."""
    rows = []
    for name, found in load("accumulator")["results"].items():
        for terms, sums in ((terms, found[terms]) for terms in ("1", "2")):
            against = [_micro(sums[how]["kl_nats"]) for how in SUMS]
            apart = [_micro(sums[how]["kl_sums_nats"]) for how in SUMS if how != "fp32"]
            rows.append([name, terms, _micro(found["the BF16 model"]), *against, *apart])
    first, *others = SUMS.values()
    head = [
        "KL × 10⁶",
        "terms",
        "the BF16 model",
        f"from FP32: sums {first}",
        *others,
        f"from sums in FP32: {others[0]}",
    ]
    return table([*head, *others[1:]], rows)


def _micro(nats: float) -> str:
    return f"{1e6 * nats:.1f}"


def calibration() -> str:
    """What calibrating costs over the plain forward pass, by batch size, in wall and processor time, and as called."""
    result = load("calibration")
    rows = []
    for size, found in result["batch_sizes"].items():
        for name, peer in found["ratios"].items():
            cells = [f"{peer[kind]:.2f}×" for kind in ("further_wall", "further_cpu", "whole_wall", "whole_cpu")]
            rows.append([name, size, *cells])
    head = ["", "batch", "a further batch: wall", "processor", "a whole call: wall", "processor"]
    return table(head, rows)


def without_bf_units() -> str:
    """Render the time that calibration and validation take with and without BF16 units."""
    kinds = load("bf16_products")["kinds"]
    rows = []
    for kind, title in (("native", "BF16 units"), ("avx2", "AVX2 alone")):
        for name, found in kinds[kind]["models"].items():
            ratios, before_and_after = found["ratios"], found["validate"]
            validating = f"{before_and_after['torch']:.1f} s, {before_and_after['fp8q']:.1f} s"
            cells = [f"{ratios[what]:.2f}×" for what in ("calibration", "forward", "fp32")]
            rows.append([title, name, *cells, validating])
    head = ["processor", "model", "calibration", "forward pass", "in FP32 throughout", "`validate`: torch's, fp8q's"]
    return table(head, rows)


def apart_from_bf_units() -> str:
    """Render how far widened products are from those of BF16 units."""
    rows = []
    for name, found in load("bf16_products")["kinds"]["native"]["models"].items():
        apart = found["compared"]
        names = ("kl_fp32_native", "kl_fp32_widened", "kl_native_widened", "kl_native_reordered")
        counts = [f"{apart[what]} of {apart['tensors']}" for what in ("amax_differ", "scales_differ")]
        rows.append([name, *(_micro(apart[what]) for what in names), *counts, f"{apart['largest_scale_ratio']:.4f}"])
    head = [
        "model", "FP32, BF16 units", "FP32, widened", "BF16 units, widened", "BF16 units, the same in another order",
        "amax that differ", "scales that differ", "largest ratio of two scales",
    ]  # fmt: skip
    return table(head, rows)


def limits() -> str:
    """What is held to a limit, and which page has the rest."""
    rows = [
        ["which architectures, and with what perplexities?", "architectures, unseen_architectures", "architectures.md"],
        ["which clip method, which margin, which format?", "choosing_scales", "choosing-scales.md"],
        ["what do weight scales and rounding give?", "weight_rounding, weight_mse", "weights.md"],
        ["what does an FP8 cache cost? FP8 attention?", "kv_cache, attention", "kv-cache.md, attention.md"],
        ["what do engines run with weights' scales in one place or the other?", "forms", "engines.md"],
        ["what do INT8 and BF16 cost beside FP8? What does an engine take?", "baselines, engine_size", "baselines.md"],
        ["how much memory does `--stream` take?", "memory", _memory(load("memory"))],
        ["how much memory to write the checkpoint and its graphs?", "export_memory", _writing(load("export_memory"))],
        ["how long do the graphs of a deep model take?", "export_time", _deep(load("export_time"))],
        ["how long does the lint of 10,000 products take?", "lint_time", _lint(load("lint_time"))],
        ["how long to choose all scales of 32 layers again?", "rescale", _rescale(load("rescale"))],
        ["how long to choose the tokens of 64 rows, of 128,256 each?", "sampling", _sampling(load("sampling"))],
    ]
    head = ["question", "`benchmarks/`", "result, or the page that has it"]
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
    def shown(shape: str) -> str:
        both = result["logits"][shape]["temperature 0.8, top_p 0.95"]
        return f"{both['all_rows']['processor_ms']:.1f} ms (row by row {both['row_by_row']['processor_ms']:.0f})"

    return (
        f"temperature 0.8, top_p 0.95, processor time of each of {result['threads']} threads: {shown('texts')} on "
        f"logits of texts (limit {result['limit_ms']:.0f}), {shown('flat')} on flat ones; the best of each row alone "
        f"{result['one_pass']['processor_ms']:.1f}"
    )


TABLES = (
    two_implementations,
    accumulator_products,
    accumulator_models,
    calibration,
    without_bf_units,
    apart_from_bf_units,
    limits,
)
