"""The tables of docs/forms.md: what each form costs as a server computes it, and what lies between two forms."""

from collections.abc import Mapping
from statistics import geometric_mean
from typing import Any

from markdown import load, table

from pages.real import BF16, MODELOPT, flips, kl, perplexity, rows_in

#: What a decision compares: row of the result -> its name there.
DECIDED = {
    "one": "`one`",
    "dynamic": "`dynamic`",
    "block": "`block`",
    "block, FP32 scales": "`block`, `--block-scale-grid bf16`, on Ada",
    "block, FP32 scales, rounded again": "`block`, `--block-scale-grid bf16`, on Blackwell",
    "MXFP8, floor": "MXFP8, exponents by floor",
    "MXFP8, up": "MXFP8, exponents up",
}
NAMES = {"demo": "demo", "smollm2": "SmolLM2-135M"}
#: ModelOpt's files where no server codes joined weights again.
MODELOPT_WRITTEN = f"{MODELOPT}, as written"
#: Rows of `served_forms.py` -> their titles.
SERVED: Mapping[str, str] = {
    BF16: "BF16 itself",
    MODELOPT: "ModelOpt `FP8_DEFAULT_CFG`",
    MODELOPT_WRITTEN: "ModelOpt `FP8_DEFAULT_CFG`, as written",
    "llm-compressor FP8": "llm-compressor `FP8`",
    "llm-compressor FP8_DYNAMIC": "llm-compressor `FP8_DYNAMIC`",
    "llm-compressor FP8_BLOCK": "llm-compressor `FP8_BLOCK`",
    "llm-compressor FP8_BLOCK, FP32 scales": "llm-compressor `FP8_BLOCK`, on Ada",
    "MXFP8": "MXFP8",
    "fp8q, one, nearest": "`one`, `nearest`",
    "fp8q, one, --weight-scale tensor, nearest": "`one`, `--weight-scale tensor`, `nearest`",
    "fp8q, dynamic, nearest": "`dynamic`, `nearest`",
    "fp8q, block, nearest": "`block`, `nearest`",
    "fp8q, block, FP32 scales, nearest": "`block`, `--block-scale-grid bf16`, `nearest`, on Ada",
    "fp8q, two, nearest": "`two`, `nearest`, with `fp8q-vllm`",
    "fp8q, bf16, nearest": "`bf16`, `nearest`",
    "fp8q, one, gptq": "`one`, `gptq`",
    "fp8q, one, --weight-scale tensor, gptq": "`one`, `--weight-scale tensor`, `gptq`",
    "fp8q, dynamic, gptq": "`dynamic`, `gptq`",
    "fp8q, block, gptq": "`block`, `gptq`",
    "fp8q, tail:64, gptq": "`tail:64`, `gptq`, with `fp8q-vllm`",
    "fp8q, two, gptq": "`two`, `gptq`, with `fp8q-vllm`",
    "fp8q, bf16, gptq": "`bf16`, `gptq`",
    "fp8q, tail:64, --preset exact": "`tail:64`, `--preset exact`, with `fp8q-vllm`",
    "fp8q, bf16, --preset exact": "`bf16`, `--preset exact`",
}
#: Result of the served forms of a model -> the model's name.
SERVED_RESULTS = {
    "served_forms": "SmolLM2-135M",
    "served_forms_gemma3": "Gemma 3 270M",
    "served_forms_qwen_coder": "Qwen2.5-Coder-1.5B",
}


def served_forms() -> str:
    """KL over BF16's own of every form as a server computes it, the lossiest first, a column for each model."""
    results = {model: rows_in(result) for result, model in SERVED_RESULTS.items()}

    def times(row: str) -> list[float | None]:
        return [rows[row]["kl_over_bf16"] if row in rows else None for rows in results.values()]

    def mean(row: str) -> float:
        return geometric_mean(value for value in times(row) if value is not None)

    rows = sorted((row for row in SERVED if row != BF16), key=mean, reverse=True)
    cells = [[SERVED[row], *("" if value is None else f"{value:.1f}" for value in times(row))] for row in rows]
    return table(["form", *results], cells)


def served_figures() -> str:
    """All figures of every form, one model after the other."""
    cells = []
    for result, model in SERVED_RESULTS.items():
        rows = rows_in(result)
        for name in sorted(rows, key=lambda name: -rows[name]["kl_mean_micronats"]):
            row = rows[name]
            cells.append([model, SERVED[name], kl(row), perplexity(row), flips(row)])
    return table(["model", "form", "KL × 10⁶", "perplexity", "flips"], cells)


#: Model -> the result of its mixes; row -> its title.
MIXES = {
    "SmolLM2-135M": "input_mixes",
    "Gemma 3 270M": "input_mixes_gemma3",
    "Qwen2.5-Coder-1.5B": "input_mixes_qwen_coder",
}
MIX_TITLES = {
    "one, gptq": "`one`, `gptq`",
    "one": "`one`",
    "dynamic, gptq": "`dynamic`, `gptq`",
    "0% exact": "`dynamic`",
    "0% exact, rounded for codes": "`dynamic`, rounded for it",
    "10% exact": "a tenth exact",
    "25% exact": "a quarter exact",
    "down_proj exact": "`*.down_proj=bf16`",
    "50% exact": "half exact",
    "100% exact": "`bf16`: all exact",
}


def input_mixes() -> str:
    """Loss and operations of a scale for each token with the costliest inputs exact."""
    cells = []
    for model, result in MIXES.items():
        (measured,) = load(result)["results"].values()
        for name in (name for name in MIX_TITLES if name in measured["rows"]):
            row = measured["rows"][name]
            low, high = row["ratio_interval"]
            ratio = f"{row['kl_over_dynamic']:.2f} ({low:.2f} to {high:.2f})"
            cells.append(
                [model, MIX_TITLES[name], f"{row['operations']:.0%}", kl(row), ratio, perplexity(row), flips(row)]
            )
    return table(["model", "inputs", "operations", "KL × 10⁶", "over `dynamic`, `gptq`", "perplexity", "flips"], cells)


def exact_shares() -> str:
    """Operations, and the loss over that of `dynamic` by GPTQ, with shares of the inputs exact."""
    rows = [measured["rows"] for result in MIXES.values() for measured in load(result)["results"].values()]
    cells = []
    for name in ("dynamic, gptq", "0% exact", "10% exact", "25% exact", "50% exact", "100% exact"):
        ratios = (f"{row[name]['kl_over_dynamic']:.2f}" for row in rows)
        cells.append([MIX_TITLES[name], f"{rows[0][name]['operations']:.0%}", *ratios])
    return table(["inputs", "operations", *(f"{model}: KL over the first row's" for model in MIXES)], cells)


def exact_kinds() -> str:
    """How many inputs of each kind of GEMM are exact at each share."""
    cells = []
    for model, result in MIXES.items():
        (measured,) = load(result)["results"].values()
        kinds = [*measured["rows"]["100% exact"]["exact"]]
        for name in ("10% exact", "25% exact", "50% exact"):
            exact = measured["rows"][name]["exact"]
            cells.append([model, MIX_TITLES[name], *(str(exact.get(kind, 0)) for kind in kinds)])
    return table(["model", "inputs", *(f"`{kind}`" for kind in kinds)], cells)


def mxfp8_decision() -> str:
    """KL of MXFP8 and of what it would stand beside, and the noise of weights."""
    results = load("mxfp8")["results"]

    def cells(row: Mapping[str, Any]) -> list[str]:
        return [kl(row), f"{row['weights_db']:.1f} dB"]

    rows = [
        [title, *(cell for model in NAMES for cell in cells(results[model]["rows"][form]))]
        for form, title in DECIDED.items()
    ]
    return table(["form", *(cell for name in NAMES.values() for cell in (name, "weights over their errors"))], rows)


TABLES = (served_forms, served_figures, exact_shares)
KIND_TABLES = (input_mixes, exact_kinds)
DECISION_TABLES = (mxfp8_decision,)
