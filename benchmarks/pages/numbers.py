"""The tables of docs/numbers.md: two implementations, sums, calibrating, and what is held to a limit."""

from markdown import GIGABYTE, Figures, gigabytes, load, table

#: How sums are made -> the head of its column.
SUMS = {"fp32": "FP32", "fp22": "`fp22`", "two-level": "`two-level`"}
#: The products and lengths of a sum that decide: heavy tails give the figures of normal products.
KINDS, LENGTHS = ("normal", "one sign"), ("4096", "14336", "28672")
#: The models with the largest losses, and the one on which `fp22` takes most of the gain of two terms.
MODELS = ("demo", "llama", "opt")
#: The model whose run is planned, by its directory.
PLANNED = {
    "smollm2": "SmolLM2-135M",
    "gemma3": "Gemma 3 270M, one thread",
    "qwen_coder": "Qwen2.5-Coder-1.5B, 16 windows, `--form one`, one thread",
}


def two_implementations() -> str:
    """ONNX Runtime against the exact reference, with the limits."""
    head = [
        "model",
        "KV cache",
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
        if name in MODELS
    ]
    first, *others = SUMS.values()
    return table(["KL × 10⁶", f"one term: {first}", *others, f"two terms: {first}", *others], rows)


def _micro(nats: float) -> str:
    return f"{1e6 * nats:.1f}"


def calibration() -> str:
    """Processor time of calibrating a further batch over that of the plain forward pass, by batch size."""
    sizes = load("calibration")["batch_sizes"]
    rows = [
        [name, *(f"{found['ratios'][name]['further_cpu']:.2f}×" for found in sizes.values())]
        for name in next(iter(sizes.values()))["ratios"]
    ]
    return table(["", *(f"batch of {size}" for size in sizes)], rows)


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


def plans() -> str:
    """What `fp8q run` took of each model, and what it planned over that."""
    rows = []
    results: dict[str, Figures] = {}
    for part in ("plan", "plan_gemma3", "plan_qwen_coder"):
        results |= load(part)["results"]
    for name, figures in results.items():
        stages = figures["stages"].values()
        seconds = sum(stage["seconds"] for stage in stages)
        peak = max(stage["peak_memory_bytes"] for stage in stages)
        ratios = [f"{figures['ratios'][what]:.2f}" for what in ("seconds", "memory", "disk")]
        rows.append([PLANNED[name], f"{seconds / 60:.1f} min", gigabytes(peak), *ratios])
    return table(["model", "took", "memory", "planned over taken: time", "memory", "disk"], rows)


def limits() -> str:
    """Time and memory that are held to a limit."""
    streamed, written = load("memory"), load("export_memory")
    rows = [
        [
            "memory of `--stream`, for a checkpoint",
            "memory",
            _memory(streamed, streamed["checkpoints"][0]["limit_bytes"]),
        ],
        ["memory to write checkpoint and graphs", "export_memory", _memory(written, written["limit_bytes"])],
        ["both graphs of a deep model", "export_time", _deep(load("export_time"))],
        ["lint of 10,000 GEMMs", "lint_time", _lint(load("lint_time"))],
        ["all scales of 32 layers again", "rescale", _rescale(load("rescale"))],
        ["next tokens of 64 rows of 128,256 logits", "sampling", _sampling(load("sampling"))],
    ]
    return table(
        ["", "`benchmarks/`", "result (limit)"], ([what, f"`{script}`", found] for what, script, found in rows)
    )


def _memory(result: Figures, limit: float) -> str:
    found = (
        f"{gigabytes(each['peak_anonymous_bytes'])} for {each['checkpoint_bytes'] / GIGABYTE:.1f} GB"
        for each in result["checkpoints"]
    )
    return f"{', '.join(found)} ({gigabytes(limit)})"


def _deep(result: Figures) -> str:
    limits, layers = result["limit_seconds"], result["layers"]
    return ", ".join(f"{depth} layers: {layers[depth]['seconds']:.0f} s ({limits[depth]:.0f} s)" for depth in limits)


def _lint(result: Figures) -> str:
    slowest = max(result["graphs"], key=lambda graph: graph["lint_seconds"])
    return f"{slowest['lint_seconds']:.1f} s ({result['limit_seconds']:.0f} s)"


def _rescale(result: Figures) -> str:
    return f"{result['seconds']:.1f} s by the slowest method ({result['limit_seconds']:.0f} s)"


def _sampling(result: Figures) -> str:
    drawn = result["logits"]["texts"]["temperature 0.8, top_p 0.95"]
    here = f"{drawn['all_rows']['processor_ms']:.1f} ms ({result['limit_ms']:.0f} ms)"
    return f"{here}, from a GPU's summaries {drawn['summaries']['ms']:.1f} ms"


TABLES = (
    two_implementations,
    accumulator_products,
    accumulator_models,
    calibration,
    plans,
    limits,
)
DECISION_TABLES = (without_bf_units,)
