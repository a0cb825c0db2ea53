"""The tables of docs/engines.md: both forms of a graph, and what engines take and run."""

from collections.abc import Mapping

from markdown import MEGABYTE, load, table

TARGETS = ("sm89", "sm120")
KINDS = ("bf16", "int8", "fp8")
KILOBYTE = 1e3


def forms() -> str:
    """What the demo's engines run in both forms of its graph."""
    rows = []
    for terms, forms in load("forms")["results"].items():
        for target in TARGETS:
            for form, results in forms.items():
                found = results[target]
                proven = [*found["found"].values(), found["inputs"], *([found["terms"]] if terms == "2" else [])]
                cells = [ran(found["products"]), str(found["kernels"]), f"{found['bytes'] / MEGABYTE:.2f} MB"]
                rows.append([terms, target, f"`{form}`", *cells, f"{min(proven)} of {found['promised']}"])
    head = ["terms", "", "form", "products of a profile", "other kernels", "engine", "proven: FP8, and all numbers"]
    return table(head, rows)


def form_programs() -> str:
    """One layer's program in both forms."""
    both = load("forms")["results"]["1"]
    lines = zip(*(both[form]["sm89"]["program"] for form in ("dq", "mul")), strict=True)
    return table(["`dq`", "`mul`"], ([f"`{statement}`" for statement in line] for line in lines))


def engine_sizes() -> str:
    """Bytes of an engine in each precision, of the demo and of one wide layer."""
    results = load("engine_size")["results"]
    rows = []
    for name, found in results.items():
        sizes = found["bytes"]
        cells = (f"{sizes[kind] / MEGABYTE:.2f} MB" for kind in KINDS)
        rows.append([name, f"{found['weights'] / MEGABYTE:.1f} M", *cells, f"{sizes['fp8'] / sizes['bf16']:.2f}"])
    return table(["", "quantized weights", *(kind.upper() for kind in KINDS), "FP8 over BF16"], rows)


def asked_logits() -> str:
    """Prompts and their logits by the graph that is asked for them, and by the one that gives all."""
    found = load("asked_logits")
    rows = []
    for prompt in found["prompts"]:
        call, served, size = prompt["call"], prompt["served"], prompt["logits_bytes"]
        times = (f"{each['all_ms']:.1f} -> {each['asked_ms']:.1f} ms ({each['ratio']:.2f})" for each in (call, served))
        rows.append([f"the demo, {prompt['length']} tokens", *times, *sizes(size)])
    large = found["llama_8b"]
    ratio = f"not run ({1 - large['head_share']:.2f} at best)"
    rows.append([f"an 8B's chunk of {large['chunk']:,} on a GPU, BF16", ratio, ratio, *sizes(large["logits_bytes"])])
    head = ["", "in one call: all -> asked (ratio)", "served, to the first token", "logits of all", "asked for"]
    return table(head, rows)


def sizes(found: Mapping[str, int]) -> list[str]:
    """Bytes of the logits of all positions, and of those that are asked for."""
    return [f"{found[kind] / KILOBYTE:,.0f} kB" for kind in ("all", "asked")]


def ran(products: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {types}" for types, count in products.items())


TABLES = (
    forms,
    form_programs,
    engine_sizes,
    asked_logits,
)
