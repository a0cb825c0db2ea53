"""The tables of docs/experts.md: how many tokens an amax needs, and branches beside all experts as one product."""

from collections.abc import Mapping
from typing import Any

from markdown import load, table

FORMS = {"branches": "a branch each", "batched": "one product"}


def experts_as_branches() -> str:
    """One layer, by the number of experts and the form."""
    results: Mapping[str, Mapping[str, Any]] = load("experts")["results"]
    heads = [
        "experts", "form", "build", "plan", "kernels a step", "waits for the device", "products in FP8",
        "weights read a step", "ONNX Runtime, a step", "a prompt of 128",
    ]  # fmt: skip
    rows = [
        [
            f"{experts}, {found['chosen']} a token",
            name,
            f"{of['build_seconds']:.1f} s",
            f"{of['bytes'] / 1e6:.0f} MB",
            str(of["kernels"]),
            str(of["waits"]),
            f"{of['fp8_products']} of {of['products']}",
            f"{found['expert_megabytes'] * found['read_of_them'][form]:.1f} MB",
            f"{of['decode_ms']:.1f} ms",
            f"{of['prefill_ms']:.0f} ms",
        ]
        for experts, found in results.items()
        for form, name in FORMS.items()
        for of in (found["forms"][form],)
    ]
    return table(heads, rows)


def expert_tokens() -> str:
    """What an amax of so many tokens loses, beside that of a layer's other experts."""
    (found,) = load("expert_tokens")["results"].values()
    rows = [
        [
            "the others' largest" if name == "others" else f"{int(name):,} tokens",
            f"{of['amax_median']:.2f}, {of['amax_p10']:.2f}",
            f"{1e6 * of['clipped_median']:.1f}, {1e6 * of['clipped_p90']:.0f}",
            f"{of['error_median']:.2f}, {of['error_p90']:.2f}",
            f"{1e6 * of['kl_nats']:.0f}, {1e6 * of['kl_worst_nats']:.0f}",
        ]
        for name, of in found["taken"].items()
    ]
    rows.append(["all tokens", "1, 1", "0, 0", "1, 1", f"{1e6 * found['kl_nats']:.0f}"])
    heads = [
        "amax of", "over that of all tokens: median, worst tenth", "clipped of the other tokens, in a million",
        "squared error, over that by all", "KL × 10⁶, worst",
    ]  # fmt: skip
    return table(heads, rows)


def branches_in_all() -> str:
    """What building takes by the number of branches in all."""
    results: Mapping[str, Mapping[str, Any]] = load("experts")["deep"]
    rows = [
        [
            shape.replace("x", " layer of " if shape.startswith("1x") else " layers of "),
            str(found["branches"]),
            f"{found['build_processor_seconds']:.0f} s",
            f"{found['bytes'] / 1e6:.0f} MB",
            str(found["kernels"]),
        ]
        for shape, found in sorted(results.items(), key=lambda each: (each[0].startswith("1x"), each[1]["branches"]))
    ]
    return table(["experts", "branches", "build, processor time", "plan", "kernels a step"], rows)


TABLES = (expert_tokens, experts_as_branches, branches_in_all)
