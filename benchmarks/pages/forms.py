"""The tables of docs/forms.md: what each form costs as a server computes it, and what lies between two forms."""

from collections.abc import Mapping

from markdown import load, table

from pages.real import BF16, EXACT_ALONE, flips, kl, perplexity, rows_in, rows_of
from pages.real import MODELS as REAL_MODELS

#: What a decision compares: row of the result -> its name there. Blocks were measured before powers of two.
DECIDED = {
    "one": "`one`",
    "dynamic": "`dynamic`",
    "block": "`block`, `--block-scale-grid bf16`",
    "MXFP8, floor": "MXFP8, exponents by floor",
    "MXFP8, up": "MXFP8, exponents up",
}
NAMES = {"demo": "demo", "smollm2": "SmolLM2-135M"}
#: Rows of forms as servers compute them: the title, and the row in the results of `served_forms.py` or, where a server
#: computes what was written, of `real_models.py`.
SERVED: Mapping[str, str] = {
    "ModelOpt `FP8_DEFAULT_CFG`": "ModelOpt FP8_DEFAULT_CFG",
    "llm-compressor `FP8`": "llm-compressor FP8",
    "llm-compressor `FP8_BLOCK`": "llm-compressor FP8_BLOCK",
    "MXFP8": "MXFP8",
    "`one`, `--weight-scale tensor`, `nearest`": "fp8q, one, --weight-scale tensor, nearest",
    "`one`, `--weight-scale tensor`, `gptq`": "fp8q, one, --weight-scale tensor, gptq",
    "`block`, `nearest`": "fp8q, block, nearest",
    "`block`, `gptq`": "fp8q, block, gptq",
    "`block`, `--block-scale-grid bf16`, `nearest`, on Ada": "fp8q, block, FP32 scales, nearest",
}
WRITTEN: Mapping[str, str] = {
    "BF16 itself": BF16,
    "llm-compressor `FP8_DYNAMIC`": "llm-compressor FP8_DYNAMIC",
    "llm-compressor `FP8_BLOCK`, on Ada": "llm-compressor FP8_BLOCK",
    "`one`, `nearest`": "fp8q, default",
    "`one`, `gptq`": "fp8q, one code, gptq",
    "`dynamic`, `nearest`": "fp8q, dynamic",
    "`dynamic`, `gptq`": "fp8q, dynamic, gptq",
    "`tail:64`, `gptq`, with `fp8q-vllm`": "fp8q, a tail of 64, gptq",
    "`two`, `gptq`, with `fp8q-vllm`": "fp8q, two codes, gptq",
    "`bf16`, `nearest`": "weights alone, nearest",
    "`bf16`, `gptq`": "weights alone, gptq",
    "`bf16`, `--preset exact`": EXACT_ALONE,
}
#: Model -> the results of its served forms.
SERVED_RESULTS = {"smollm2": "served_forms", "gemma3": "served_forms_gemma3"}


def served_forms() -> str:
    """Every form as a server computes it, the lossiest first."""
    cells = []
    for model, result in SERVED_RESULTS.items():
        served, written = rows_in(result), rows_of(model)
        rows = {title: served[name] for title, name in SERVED.items() if name in served}
        rows |= {title: written[name] for title, name in WRITTEN.items()}
        of_bf16 = written[BF16]["kl_mean_micronats"]
        for title, row in sorted(rows.items(), key=lambda named: -named[1]["kl_mean_micronats"]):
            times = row.get("kl_over_bf16", row["kl_mean_micronats"] / of_bf16)
            cells.append([REAL_MODELS[model], title, kl(row), f"{times:.1f}", perplexity(row), flips(row)])
    return table(["model", "form", "KL × 10⁶", "over BF16's", "perplexity", "flips"], cells)


#: Model -> the result of its mixes; row -> its title.
MIXES = {"SmolLM2-135M": "input_mixes", "Gemma 3 270M": "input_mixes_gemma3"}
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
    """KL of MXFP8 and of what it would stand beside."""
    results = load("mxfp8")["results"]
    rows = [[title, *(kl(results[model]["rows"][form]) for model in NAMES)] for form, title in DECIDED.items()]
    return table(["form", *NAMES.values()], rows)


TABLES = (served_forms, exact_shares)
KIND_TABLES = (input_mixes, exact_kinds)
DECISION_TABLES = (mxfp8_decision,)
