"""State the limits that a result misses, each with what was measured, for the line below its table."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Figures = Mapping[str, Any]


def missed(name: str, result: Figures) -> list[str]:
    """List what the result `name` misses; empty where it passed. Raises ValueError where that cannot be said."""
    if result.get("passed", True):
        return []
    by_model = {model: each for model, each in _models(result.get("results")) if each.get("missed")}
    lines = [f"{model}: {text}" for model, each in by_model.items() for text in each["missed"]]
    lines += [str(text) for text in result.get("missed", [])]
    if not lines and result["benchmark"] in LIMITS:
        lines = list(LIMITS[result["benchmark"]](result))
    if not lines:
        raise ValueError(f"{name}: passed is false, and benchmarks/missed.py does not say of what limit")
    return lines


def paragraph(lines: list[str]) -> str:
    """Return the paragraph below a table, behind an empty line; nothing where no limit is missed."""
    return f"\n**Limits missed:** {'; '.join(lines)}.\n" if lines else ""


def _models(results: Any) -> Iterator[tuple[str, Figures]]:
    if isinstance(results, Mapping):
        yield from ((model, each) for model, each in results.items() if isinstance(each, Mapping))


def _generate(result: Figures) -> Iterator[str]:
    names = {
        "alone_over_bare": "a step of all over the runtime's bare one",
        "overhead_ms": "the loop's own time of a step, ms",
        "flood_over_alone": "the mean step under a flood, over alone",
    }
    for name, words in names.items():
        if result[name] > result["limits"][name]:
            yield f"{words}: {result[name]:.2f} (at most {result['limits'][name]:g})"
    least = result["limits"]["together_over_alone"]
    if result["together_over_alone"] < least:
        yield f"tokens a second of eight over one: {result['together_over_alone']:.2f} (at least {least:g})"


def _memory(result: Figures) -> Iterator[str]:
    for each in result["checkpoints"]:
        if not each["passed"]:
            peak, limit = each["peak_anonymous_bytes"] / 1e9, each["limit_bytes"] / 1e9
            yield f"peak of {each['layers']} layers: {peak:.2f} GB (at most {limit:.2f})"
    growth, limit = result["growth_bytes_a_layer"], result["growth_limit_bytes_a_layer"]
    if growth > limit:
        yield f"growth of the peak a layer: {growth / 1e6:.1f} MB (at most {limit / 1e6:.1f})"


def _distill_memory(result: Figures) -> Iterator[str]:
    for each in result["checkpoints"]:
        if not each["passed"]:
            ratio, most = each["ratio"], each["limit_ratio"]
            yield f"peak of {each['layers']} layers over calibrating: {ratio:.2f} (at most {most:g})"
    growth, limit = result["growth_bytes_a_layer"], result["growth_limit_bytes_a_layer"]
    if growth > limit:
        yield f"growth of the peak a layer: {growth / 1e6:.1f} MB (at most {limit / 1e6:.1f})"


def _bf16_products(result: Figures) -> Iterator[str]:
    for kind, ratio in result["ratio"].items():
        if ratio > result["limit_ratio"][kind]:
            yield f"calibration over torch's own forward, {kind}: {ratio:.2f} (at most {result['limit_ratio'][kind]:g})"


def _convert(result: Figures) -> Iterator[str]:
    if result["ratio"] > result["limit_ratio"]:
        yield f"the slower form over `cp -r`: {result['ratio']:.2f} (at most {result['limit_ratio']:g})"
    if result["peak_bytes"] > result["limit_bytes"]:
        yield f"memory: {result['peak_bytes'] / 1e9:.2f} GB (at most {result['limit_bytes'] / 1e9:g})"


def _convert_classes(result: Figures) -> Iterator[str]:
    for name, row in result["rows"].items():
        if "failed" in row:
            yield f"{name}: transformers does not load it again ({row['failed'].partition(':')[0]})"
        elif "kl" in row and row["misfits"]:
            yield f"{name}: {row['misfits']} keys do not fit"
        elif "kl" in row and row["kl"] >= max(result["limit"], row["kl_without"] / 20):
            share = row["kl"] / row["kl_without"]
            least = f"at most {result['limit']:g}, or 5 % of that with zeros"
            yield f"{name}: KL {row['kl']:.1e}, {share:.1%} of that with zeros ({least})"


def _tune(result: Figures) -> Iterator[str]:
    limits = result["limits"]
    for model, found in result["results"].items():
        if (share := found["kl_over_default"]) > limits["kl_over_default"]:
            yield f"{model}: KL over the default's {share:.2f} (at most {limits['kl_over_default']:.2f})"
        if found["weight_bytes_over_default"] > 1:
            yield f"{model}: weight bytes over the default's {found['weight_bytes_over_default']:.2f} (at most 1)"
        if abs(found["predicted_over_held_out"] - 1) > limits["prediction_off"]:
            off = limits["prediction_off"]
            ratio = found["predicted_over_held_out"]
            yield f"{model}: KL predicted over measured {ratio:.2f} (from {1 - off:g} to {1 + off:g})"


def _load(result: Figures) -> Iterator[str]:
    if not result["servers_agree"]:
        yield "the servers give other texts (none may)"
    for server, found in result["results"].items():
        for rate in found["rates"]:
            if count := rate["lost"] + rate["mixed_up"]:
                offered = f"{rate['offered_per_second']:.0f} requests a second"
                yield f"{server} at {offered}: {count} of {rate['requests']} requests lost or mixed up (none may)"


def _unseen_architectures(result: Figures) -> Iterator[str]:
    for name, found in result["results"].items():
        if "failed" in found:
            yield f"{name}: {found['failed'].partition(':')[0]}"
    dense = result["counts"].get("dense", {})
    for what, least in result["shares"].items():
        if dense and dense[what] < least * dense["tried"]:
            yield f"dense decoders, {what}: {dense[what]} of {dense['tried']} (at least {least:.0%})"


def _published_classes(result: Figures) -> Iterator[str]:
    for name in result["failed"]:
        yield f"{name}: {', '.join(result['rows'][name]['failed'])} ended in an exception (none may)"


def _two_implementations(result: Figures) -> Iterator[str]:
    words = {
        "logit_difference": "largest logit difference",
        "perplexity_difference": "perplexity, exact to ONNX Runtime",
        "perplexity_difference_bf16": "perplexity, BF16 reference to ONNX Runtime",
        "kl_share": "KL between the two, of FP8's",
    }
    for found in result["results"]:
        of = f"{found['model']}, cache {found['kv_cache']}"
        for name, limit in found["limits"].items():
            if found[name] > limit:
                yield f"{of}: {words[name]} {found[name]:.3g} (at most {limit:g})"
        if not found["tokens_before_first_difference"]:
            yield f"{of}: no token before the first differing code (at least one)"
        if found["continuations_unexplained"]:
            yield f"{of}: {found['continuations_unexplained']} continuations part unexplained (none may)"


def _plan(result: Figures) -> Iterator[str]:
    for model, figures in result["results"].items():
        for name, ratio in figures["ratios"].items():
            if not 1 / result["limit"] <= ratio <= result["limit"]:
                yield f"{model}: {name} planned over taken: {ratio:.2f} (within {result['limit']:g} times)"


def _wrong_models(result: Figures) -> Iterator[str]:
    yield f"verdicts that are right on the demo and wrong here: {', '.join(result['wrong'])}"


LIMITS: Mapping[str, Callable[[Figures], Iterator[str]]] = {
    "convert": _convert,
    "convert_classes": _convert_classes,
    "generate": _generate,
    "memory": _memory,
    "distill_memory": _distill_memory,
    "bf16_products": _bf16_products,
    "tune": _tune,
    "load": _load,
    "two_implementations": _two_implementations,
    "unseen_architectures": _unseen_architectures,
    "published_classes": _published_classes,
    "plan": _plan,
    "plan_gemma3": _plan,
    "plan_qwen_coder": _plan,
    "wrong_models": _wrong_models,
}
