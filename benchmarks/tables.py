"""The tables of measured figures in docs, made from `results/`, and the pictures.

    python benchmarks/tables.py [--write]

A table stands between `<!-- table NAME -->` and `<!-- end -->`; `tests/benchmarks` holds each against what is made
here, so no figure there is typed; a picture is a file of its own. With `--write` the pages are brought up to date;
without it what differs is named.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accuracy_page import accuracy, accuracy_as_served, accuracy_caches, accuracy_costs, accuracy_plot
from markdown import Figures, load, table

from fp8q.validate.plots import Plot

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- table (?P<name>[a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)
TARGETS = ("sm89", "sm120")
MEGABYTE, GIGABYTE = 1e6, 1e9


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
        if "refused" in found:
            continue
        one, two = found["one_term"], found["two_terms"]
        apart = (found["graph_difference"], one["first_position_difference"], two["kl_nats"])
        products = (one["promised_products"], one["fp8_products"], min(two["fp8_products"], two["two_terms_found"]))
        rows.append([name.removesuffix("Config"), *(f"{each:.0e}" for each in apart), *map(str, products)])
    head = ["", "graph to eager attention (limit 1e-4)", "ONNX Runtime to reference, one term (limit 1e-4)"]
    head += ["two terms: KL, nats (limit 2e-5)", "promised products", "FP8 in one term", "FP8 in two"]
    return table(head, rows)


def refused_architectures() -> str:
    """Which are refused, by the reason that is given."""
    reasons: dict[str, list[str]] = {}
    for name, found in load("unseen_architectures")["results"].items():
        if "refused" in found:
            reason = found["refused"].partition(", which fp8q does not do")[0].partition(" ")[2]
            reasons.setdefault(reason, []).append(name.removesuffix("Config"))
    return table(["refused, because it", ""], ([reason, ", ".join(names)] for reason, names in reasons.items()))


#: How sums are made -> the head of its column.
SUMS = {"fp32": "in FP32", "fp22": "`fp22`", "two-level": "`two-level`", "fp32, rounded to bf16": "rounded to BF16"}


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


def attention() -> str:
    """KL and perplexity of all products without and with attention in FP8."""
    results = load("attention")["results"]
    rows = [
        ("reference, attention wide", "wide", "reference"),
        ("reference, attention FP8", "fp8", "reference"),
        ("ONNX Runtime, attention FP8", "fp8", "onnxruntime"),
    ]
    kl = [
        [title, *(f"{found[how]['kl_mean_nats'][who]:.5f}" for found in results.values())] for title, how, who in rows
    ]
    increases = [
        ", ".join(f"{found[how]['perplexity_increase']['reference']:+.2%}" for how in ("wide", "fp8"))
        for found in results.values()
    ]
    return table(["KL, nats", *results], [*kl, ["perplexity, reference: wide, FP8", *increases]])


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


def engine_sizes() -> str:
    """Bytes of an engine in each precision, of the demo and of one wide layer."""
    results = load("engine_size")["results"]
    rows = []
    for name, found in results.items():
        sizes = found["bytes"]
        cells = (f"{sizes[kind] / MEGABYTE:.2f} MB" for kind in KINDS)
        rows.append([name, f"{found['weights'] / MEGABYTE:.1f} M", *cells, f"{sizes['fp8'] / sizes['bf16']:.2f}"])
    return table(["", "quantized weights", *(kind.upper() for kind in KINDS), "FP8 over BF16"], rows)


KINDS = ("bf16", "int8", "fp8")


def forms() -> str:
    """What the demo's engines run in both forms of its graph."""
    rows = []
    for terms, forms in load("forms")["results"].items():
        for target in TARGETS:
            for form, results in forms.items():
                found = results[target]
                proven = [*found["found"].values(), found["inputs"], *([found["terms"]] if terms == "2" else [])]
                cells = [_ran(found["products"]), str(found["kernels"]), f"{found['bytes'] / MEGABYTE:.2f} MB"]
                rows.append([terms, target, f"`{form}`", *cells, f"{min(proven)} of {found['promised']}"])
    head = ["terms", "", "form", "products of a profile", "other kernels", "engine", "proven: FP8, and all numbers"]
    return table(head, rows)


def form_programs() -> str:
    """One layer's program in both forms."""
    both = load("forms")["results"]["1"]
    lines = zip(*(both[form]["sm89"]["program"] for form in ("dq", "mul")), strict=True)
    return table(["`dq`", "`mul`"], ([f"`{statement}`" for statement in line] for line in lines))


def engine_products() -> str:
    """What the demo's engines run, by precision."""
    found = load("engine_size")["results"]["demo"]
    rows = [
        [kind.upper(), f"{found['bytes'][kind] / MEGABYTE:.2f} MB", _ran(found["products"][kind])] for kind in KINDS
    ]
    return table(["", "engine", "products"], rows)


def _ran(products: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {types}" for types, count in products.items())


def choosing_scales() -> str:
    """KL relative to the default's and the increase of perplexity, by choice and model."""
    models: Mapping[str, Figures] = load("choosing_scales")["models"]
    choices = [choice for choice in next(iter(models.values())) if choice != "bf16"]
    default = choices[0]
    rows = [
        [
            choice,
            *(
                f"{rows[choice]['kl_mean_nats'] / rows[default]['kl_mean_nats']:.2f} "
                f"({rows[choice]['perplexity_increase']:+.2%})"
                for rows in models.values()
            ),
        ]
        for choice in choices
    ]
    absolute = [
        f"{rows[default]['kl_mean_nats'] * 1e6:.0f}, {rows['bf16']['perplexity']:.2f}" for rows in models.values()
    ]
    return table(["", *models], [*rows, ["KL of the default (nats × 10⁶), perplexity of BF16", *absolute]])


def kv_cache() -> str:
    """KL of the cache alone, by what of it is FP8, and of all products beside it."""
    models: Mapping[str, Mapping[str, float]] = load("kv_cache")["kl_mean_nats_times_1e6"]
    rows = [[row, *(f"{found[row]:.0f}" for found in models.values())] for row in next(iter(models.values()))]
    return table(["KL, nats × 10⁶", *models], rows)


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


def weight_mse() -> str:
    """The search for weight scales beside ModelOpt's, by threads."""
    rows = [
        [
            str(found["threads"]),
            f"{found['ours_s']:.3f} s",
            f"{found['modelopt_s']:.2f} s",
            f"{found['ratio']:.0f}",
            f"{found['cpu_ratio']:.0f}",
            f"{found['error_ratio']:.3f}",
            f"{found['ceiling_s']:.3f} s",
        ]
        for found in load("weight_mse")["results"]
    ]
    head = ["threads", "ours", "ModelOpt", "ratio", "the same in processor time", "error, ours over ModelOpt's"]
    return table([*head, "one read of the weights"], rows)


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


def weight_rounding() -> str:
    """KL with activations of one term, relative to one amax scale for the whole weight."""
    models = load("weight_rounding")["results"]
    names = ("amax, nearest", "mse, nearest", "amax, gptq", "mse, gptq", "mse, sequential", "lossless weights")
    rows = [
        [_step(name), *(f"{found['one_term_over_whole_weight'][name]:.2f}" for found in models.values())]
        for name in names
    ]
    return table(["weights", *(_sized(name, found) for name, found in models.items())], rows)


def weights_alone() -> str:
    """KL of each step of rounding where nothing but weights is quantized."""
    models = load("weight_rounding")["results"]
    steps = ("nearest", "one after the other", "in falling order", "gptq", "sequential")
    rows = [
        [_step(name), *(_short(found["kl_mean_micronats"][name]) for found in models.values())]
        for name in ("amax, nearest", "amax, gptq", *(f"mse, {step}" for step in steps))
    ]
    return table(["weights", *(_sized(name, found) for name, found in models.items())], rows)


def weight_seconds() -> str:
    """What rounding takes."""
    models = load("weight_rounding")["results"]
    measuring = [
        [f"measuring for `{rounding}`", *(_short(found["measure_s"][rounding]) for found in models.values())]
        for rounding in ("nearest", "gptq")
    ]
    rounding = [
        [f"rounding, {_step(name)}", *(_short(found["seconds"][name]) for found in models.values())]
        for name in ("mse, nearest", "mse, gptq", "mse, sequential")
    ]
    return table(["seconds", *(_sized(name, found) for name, found in models.items())], [*measuring, *rounding])


def weight_shapes() -> str:
    """What one matrix takes by `gptq`."""
    rows = [
        [
            "[{}, {}]".format(*shape.split("x")),
            f"{found['factor_s']:.0f} s",
            f"{found['round_s']:.0f} s",
            _gigabytes(found["moments_bytes"]),
            _gigabytes(found["peak_bytes_more"]),
        ]
        for shape, found in load("weight_rounding")["shapes"].items()
    ]
    return table(["weight [out, in]", "factoring H", "rounding", "H", "memory besides weight and H"], rows)


def sequential_memory() -> str:
    """What `--stream --weight-rounding sequential` takes, by the number of layers."""
    result = load("memory_sequential")
    rows = [
        [
            str(found["layers"]),
            _gigabytes(found["checkpoint_bytes"]),
            *(_gigabytes(found["stages"][stage]["peak_anonymous_bytes"]) for stage in ("start", "measure", "quantize")),
            f"{found['stages']['quantize']['seconds'] / found['layers']:.0f}",
        ]
        for found in result["checkpoints"]
    ]
    head = ["layers", "checkpoint", "peak: start", "measuring", "rounding and writing", "seconds a layer"]
    return table(head, rows)


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}"


def _step(name: str) -> str:
    method, comma, step = name.partition(", ")
    if not comma:
        return "not rounded at all: the floor"
    return f"`{method}`, {step if ' ' in step else f'`{step}`'}"


def _sized(name: str, found: Figures) -> str:
    return f"{name} ({found['parameters'] / MEGABYTE:.1f} M)"


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
    ]
    head = ["question", "`benchmarks/`", "result, or the page that has it"]
    return table(head, ([question, f"`{scripts}`", result] for question, scripts, result in rows))


def _gigabytes(size: float) -> str:
    return f"{size / GIGABYTE:.2f} GB"


def _memory(result: Figures) -> str:
    found = [
        f"{_gigabytes(each['peak_anonymous_bytes'])} for a checkpoint of {each['checkpoint_bytes'] / GIGABYTE:.1f} GB"
        for each in result["checkpoints"]
    ]
    return f"{', '.join(found)} (limit {_gigabytes(result['checkpoints'][0]['limit_bytes'])})"


def _writing(result: Figures) -> str:
    found = [
        f"{_gigabytes(each['peak_anonymous_bytes'])} for {each['checkpoint_bytes'] / GIGABYTE:.1f} GB"
        for each in result["checkpoints"]
    ]
    return f"{', '.join(found)} (limit {_gigabytes(result['limit_bytes'])})"


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


#: Page -> the tables on it.
PAGES: Mapping[str, Sequence[Callable[[], str]]] = {
    "docs/accuracy.md": (accuracy, accuracy_caches, accuracy_as_served, accuracy_costs),
    "docs/architectures.md": (architectures, unseen_architectures, refused_architectures),
    "docs/attention.md": (attention,),
    "docs/baselines.md": (baselines, engine_products),
    "docs/choosing-scales.md": (choosing_scales,),
    "docs/engines.md": (forms, form_programs, engine_sizes),
    "docs/kv-cache.md": (kv_cache,),
    "docs/two-terms.md": (two_terms, half_precision, probabilities),
    "docs/numbers.md": (two_implementations, accumulator_products, accumulator_models, calibration, limits),
    "docs/weights.md": (weight_mse, weight_rounding, weights_alone, weight_seconds, weight_shapes, sequential_memory),
}


#: Picture -> what draws it.
PICTURES: Mapping[str, Callable[[], Plot]] = {"docs/accuracy.svg": accuracy_plot}


def made(page: str, text: str) -> str:
    """`text` of a page with its tables made anew. Raises ValueError when they are not those of `PAGES`."""
    tables = {make.__name__: make for make in PAGES[page]}
    found = [block["name"] for block in BLOCK.finditer(text)]
    if sorted(found) != sorted(tables):
        raise ValueError(f"{page}: has the tables {found}, and should have {list(tables)}")
    return BLOCK.sub(lambda block: f"{block[1]}{tables[block['name']]()}{block[3]}", text)


def old(page: str) -> str:
    """What a page or picture is now."""
    path = ROOT / page
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> int:
    """Write the pages, or name those that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    wanted = {page: made(page, old(page)) for page in PAGES}
    wanted |= {picture: draw().wide for picture, draw in PICTURES.items()}
    stale = [page for page, text in wanted.items() if old(page) != text]
    if write:
        for page in stale:
            (ROOT / page).write_text(wanted[page], encoding="utf-8")
    print("\n".join(f"{page}: {'written' if write else 'differs from its results'}" for page in stale) or "all as made")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main())
