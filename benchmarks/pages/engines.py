"""The tables of docs/engines.md: both forms of a graph, what engines take and run, and what a step reads."""

from collections.abc import Mapping

from markdown import MEGABYTE, load, table

TARGETS = ("sm89", "sm120")
KINDS = ("bf16", "int8", "fp8")
KILOBYTE = 1e3


def forms() -> str:
    """Kernels and bytes of the demo's engines in both forms of its graph, by target."""
    rows = []
    for terms, forms in load("forms")["results"].items():
        for form, targets in forms.items():
            found = [targets[target] for target in TARGETS]
            proven = [each[what] for each in found for what in ("inputs", *(["terms"] if terms == "2" else []))]
            proven += [count for each in found for count in each["found"].values()]
            cells = (f"{each['bytes'] / MEGABYTE:.2f} MB, {each['kernels']}" for each in found)
            rows.append([terms, f"`{form}`", *cells, f"{min(proven)} of {found[0]['promised']}"])
    head = (f"{target}: engine, other kernels" for target in TARGETS)
    return table(["terms", "form", *head, "proven GEMMs"], rows)


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
    """Time to the first token and logits of the longest prompt by both graphs, and of an 8B's chunk by arithmetic."""
    found = load("asked_logits")
    prompt, large = found["prompts"][-1], found["llama_8b"]
    served = prompt["served"]
    time = f"{served['all_ms']:.1f} -> {served['asked_ms']:.1f} ms ({served['ratio']:.2f})"
    bound = f"not run ({1 - large['head_share']:.2f} at best)"
    rows = [
        [f"the demo, {prompt['length']} tokens, on a CPU", time, *sizes(prompt["logits_bytes"])],
        [f"an 8B's chunk of {large['chunk']:,}", bound, *sizes(large["logits_bytes"])],
    ]
    return table(["", "to the first token: all -> asked (ratio)", "logits of all", "asked for"], rows)


def sizes(found: Mapping[str, int]) -> list[str]:
    """Bytes of the logits of all positions, and of those that are asked for."""
    return [f"{found[kind] / KILOBYTE:,.0f} kB" for kind in ("all", "asked")]


def cache_traffic() -> str:
    """Bytes of the cache in a decode step, and kernels of a layer."""
    rows = []
    for target, caches in load("cache_traffic")["results"].items():
        for cache, found in caches.items():
            attention = {name for prompt in found["prompts"].values() for name in prompt["attention"]}
            rows.append([
                target, cache.upper(), f"{found['read_per_value']:.2f}", f"{found['written_per_value']:.2f}",
                f"{found['milliseconds']:.1f} ({found['milliseconds_of_the_cache_alone']:.1f})",
                str(found["decode_kernels_a_layer"]), str(found["prompt_kernels_a_layer"]),
                ", ".join(f"`{name}`" for name in sorted(attention)),
            ])  # fmt: skip
    head = ["target", "cache", "bytes read a value", "copied", "ms of 32 layers (floor)", "kernels a layer: step"]
    return table([*head, "prompt", "attention of prompts"], rows)


TABLES = (engine_sizes,)
CACHE_TABLES = (cache_traffic,)
FORM_TABLES = (forms,)
LOGIT_TABLES = (asked_logits,)
