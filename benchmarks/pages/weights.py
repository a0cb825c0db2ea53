"""The tables of docs/weights.md: what choosing and rounding weights gives, and takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from markdown import MEGABYTE, Figures, gigabytes, load, table

from pages.real import flips, kl, perplexity


def weights_alone() -> str:
    """KL of each step of rounding where nothing but weights is quantized."""
    models = load("weight_rounding")["results"]
    rows = [
        [_step(name), *(_short(found["kl_mean_micronats"][name]) for found in models.values())]
        for name in ("amax, nearest", "mse, nearest", "amax, gptq", "mse, gptq", "mse, sequential")
    ]
    return table(["weights", *(_sized(name, found) for name, found in models.items())], rows)


#: A model -> its results, of which later ones have rows anew; row -> its title, where it has another.
LEVERS = {
    "SmolLM2-135M": ("weight_levers", "weight_levers_exact"),
    "Gemma 3 270M": ("weight_levers_gemma3", "weight_levers_exact_gemma3"),
}
LEVER_TITLES = {
    "BF16": "BF16 itself",
    "nearest": "`nearest`",
    "gptq": "`gptq`, 64 windows",
    "gptq, the worst in BF16": "`gptq`, 64 windows, the costliest weights in BF16, one by one",
    "gptq, weighed first token": "`gptq`, 64 windows, `--weigh-first-token`",
    "exact": "`--preset exact`, 64 windows",
    "gptq, then learned": "`gptq`, 64 windows, then `fp8q distill`",
    "output side": "the same, `--weigh-outputs 20`",
    "output side, exact": "the same, `--weigh-outputs 20`",
    "exact, 10% in BF16": "`--preset exact --bf16-weights 10%`, 64 windows",
    "output side, exact, 10% in BF16": "the same, `--weigh-outputs 20`",
    "output side, exact, then learned": "the same, then `fp8q distill`, 256 windows, a third of the rate",
    "output side, exact, 10% in BF16, then learned": "the same, then `fp8q distill`, 128 windows, a third of the rate",
    "every lever, 256 windows": "`--preset exact --weigh-outputs 80`, 256 windows",
}
#: A model -> its results with rows of the output side, each behind the row that it goes on from. Of a row that several
#: have, the first counts: the others measured it to have a start.
OUTPUT_SIDE = {
    "SmolLM2-135M": (
        "weight_levers_outputs", "weight_levers_outputs_exact", "weight_levers_learned", "weight_levers_most"
    ),
    "Gemma 3 270M": ("weight_levers_outputs_gemma3",),
}  # fmt: skip


#: Minutes of one thread, and bytes of weights beyond those in FP8.
COSTS = ("minutes", "bytes more")


def _costs(row: Mapping[str, Any]) -> tuple[str, str]:
    minutes = f"{row['seconds'] / 60:.1f}" if "seconds" in row else ""
    return minutes, f"{row['bytes'] - 1:.1%}" if "bytes" in row else ""


def weight_levers() -> str:
    """What each lever leaves of the loss of weights in real models, beside its time and bytes."""
    cells = []
    for model, results in LEVERS.items():
        for name, row in _rows_of(results).items():
            cells.append(
                [
                    model,
                    LEVER_TITLES.get(name, name.replace("gptq", "`gptq`")),
                    f"{row['kl_mean_micronats']:,.0f}",
                    _ratio(row, "kl_over_gptq", "ratio_interval"),
                    f"{row['kl_median_micronats']:,.0f}",
                    perplexity(row),
                    flips(row),
                    *_costs(row),
                ]
            )
    head = ["model", "weights", "KL × 10⁶", "over `gptq`", "median", "perplexity", "flips", *COSTS]
    return table(head, cells)


def _rows_of(results: Sequence[str], renewed: bool = True) -> dict[str, Any]:
    """The rows of all `results` of a model, of which BF16's and GPTQ's are measured again beside each part; `renewed`:
    of other rows that several have the last one counts, else the first.
    """
    rows = dict[str, Any]()
    for result in results:
        (measured,) = load(result)["results"].values()
        same = rows.keys() & ({"BF16", "gptq"} if renewed else measured["rows"].keys())
        rows |= {name: row for name, row in measured["rows"].items() if name not in same}
    return rows


def output_side() -> str:
    """What the output side leaves of the loss of weights, beside that of the rows before it."""
    cells = []
    for model, results in OUTPUT_SIDE.items():
        for name, row in _rows_of(results, renewed=False).items():
            cells.append(
                [
                    model,
                    LEVER_TITLES[name],
                    kl(row),
                    f"{row['kl_over_bf16']:.2f}" if "kl_over_bf16" in row else "",
                    _ratio(row, "kl_over_gptq", "ratio_interval"),
                    _ratio(row, "kl_over_start", "start_interval"),
                    f"{row['kl_median_micronats']:,.0f}",
                    perplexity(row),
                    flips(row),
                    *_costs(row),
                ]
            )
    ratios = ["over BF16's", "over `gptq`", "over its start"]
    return table(["model", "weights", "KL × 10⁶", *ratios, "median", "perplexity", "flips", *COSTS], cells)


#: A model -> the results whose rows have their correlations shrunk, and that of the same rows before, where there is
#: one.
SHRUNK: Mapping[str, tuple[Sequence[str], str | None]] = {
    "SmolLM2-135M": (("weight_levers_shrunk",), "weight_levers_outputs_exact"),
    "Gemma 3 270M": (
        ("weight_levers_shrunk_gemma3", "weight_levers_outputs_exact_gemma3"),
        "weight_levers_outputs_gemma3",
    ),
    "Qwen2.5-Coder-1.5B": (("weight_levers_qwen_coder",), None),
}


def shrunk() -> str:
    """What is left of the loss of weights where GPTQ's correlations are shrunk by how many tokens show them."""
    cells = []
    for model, (results, earlier) in SHRUNK.items():
        windows = load(results[0])["samples"]
        rows, before = _rows_of(results, renewed=False), _rows_of([earlier]) if earlier else {}
        for name, row in rows.items():
            known = before.get(name, {})
            cells.append(
                [
                    model,
                    LEVER_TITLES[name].replace("64 windows", f"{windows} windows"),
                    f"{known['kl_mean_micronats']:,.0f}" if known else "",
                    kl(row),
                    f"{row['kl_over_bf16']:.2f}" if "kl_over_bf16" in row else "",
                    f"{row['kl_median_micronats']:,.0f}",
                    perplexity(row),
                    flips(row),
                    *_costs(row),
                ]
            )
    kls = ["KL × 10⁶ before", "KL × 10⁶", "over BF16's", "median"]
    return table(["model", "weights", *kls, "perplexity", "flips", *COSTS], cells)


#: A model -> the results in which what GPTQ leaves chose the weights that stay in BF16, and that of the choice before.
SPENT: Mapping[str, tuple[Sequence[str], str]] = {
    "SmolLM2-135M": (("weight_levers_spent_exact", "weight_levers_spent"), "weight_levers_shrunk"),
    "Gemma 3 270M": (
        ("weight_levers_spent_gemma3", "weight_levers_learned_gemma3"),
        "weight_levers_outputs_exact_gemma3",
    ),
}


def spent() -> str:
    """What weights in BF16 leave, chosen by the loss of nearest codes and by that of GPTQ's."""
    cells = []
    for model, (results, earlier) in SPENT.items():
        before = _rows_of([earlier])
        for name, row in _rows_of(results, renewed=False).items():
            if name in ("BF16", "gptq"):
                continue
            known = before.get(name)
            title = LEVER_TITLES[name]
            cells.append(
                [
                    model,
                    title if "learned" in name else title.replace("the same", f"`{_share_of(name)}`"),
                    *(_loss_of(known) if known else ["", "", ""]),
                    kl(row),
                    f"{row['kl_over_bf16']:.2f}",
                    perplexity(row),
                    flips(row),
                    *_costs(row),
                ]
            )
    chosen = ("KL × 10⁶", "over BF16's", "perplexity")
    by = [f"{figure}, by {codes}" for codes in ("nearest", "GPTQ") for figure in chosen]
    return table(["model", "weights", *by, "flips", *COSTS], cells)


def _loss_of(row: Figures) -> list[str]:
    """KL, its ratio to BF16's own, and perplexity."""
    return [f"{row['kl_mean_micronats']:,.0f}", f"{row['kl_over_bf16']:.2f}", perplexity(row)]


def _share_of(row: str) -> str:
    """The options of a row that the output side stands behind."""
    return "--preset exact" + (" --bf16-weights 10%" if "10%" in row else "")


def output_side_codes() -> str:
    """The share of codes that the output side changes, by kind of GEMM."""
    rows = []
    for model, results in OUTPUT_SIDE.items():
        changed = _rows_of(results, renewed=False)["output side"]["changed"]
        rows.append([model, *(f"{share:.0%}" for share in changed.values())])
    return table(["codes that differ", *(f"`{kind}`" for kind in changed)], rows)


def _ratio(row: Figures, name: str, interval: str) -> str:
    if name not in row:
        return ""
    low, high = row[interval]
    return f"{row[name]:.2f} ({low:.2f} to {high:.2f})"


def weight_seconds() -> str:
    """What rounding takes."""
    models = load("weight_rounding")["results"]
    measuring = [
        [f"measuring for `{rounding}`", *(_short(found["measure_s"][rounding]) for found in models.values())]
        for rounding in ("nearest", "gptq")
    ]
    rounding = [
        [f"rounding, {_step(name)}", *(_short(found["seconds"][name]) for found in models.values())]
        for name in ("mse, gptq", "mse, sequential")
    ]
    return table(["seconds", *(_sized(name, found) for name, found in models.items())], [*measuring, *rounding])


def weight_shapes() -> str:
    """What one matrix takes by `gptq`."""
    rows = [
        [
            "[{}, {}]".format(*shape.split("x")),
            f"{found['factor_s']:.0f} s",
            f"{found['round_s']:.0f} s",
            gigabytes(found["moments_bytes"]),
            gigabytes(found["peak_bytes_more"]),
        ]
        for shape, found in load("weight_shapes")["shapes"].items()
    ]
    return table(["weight [out, in]", "factoring H", "rounding", "H", "memory besides weight and H"], rows)


def sequential_memory() -> str:
    """What `--stream --weight-rounding sequential` takes, by the number of layers."""
    result = load("memory_sequential")
    rows = [
        [
            str(found["layers"]),
            gigabytes(found["checkpoint_bytes"]),
            gigabytes(found["stages"]["quantize"]["peak_anonymous_bytes"]),
            f"{found['stages']['quantize']['seconds'] / found['layers']:.0f}",
        ]
        for found in result["checkpoints"]
    ]
    return table(["layers", "checkpoint", "peak of anonymous memory", "seconds a layer"], rows)


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}"


def _step(name: str) -> str:
    return ", ".join(f"`{part}`" for part in name.split(", "))


def _sized(name: str, found: Figures) -> str:
    return f"{name} ({found['parameters'] / MEGABYTE:.1f}M)"


TABLES = (weights_alone,)
LEVER_TABLES = (weight_levers,)
SHRUNK_TABLES, SPENT_TABLES = (shrunk,), (spent,)
OUTPUT_TABLES = (output_side, output_side_codes)
SECOND_TABLES = (weight_seconds, weight_shapes, sequential_memory)
