"""Tables of the models that people know, made from the results of `real_models.py`, for several pages."""

from collections.abc import Mapping
from typing import Any

from markdown import load, table

#: A model, as the names of its results have it -> its name on pages.
MODELS = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
#: The results of a model; of a row that several have, the first one's figures are shown.
RESULTS_OF = ("real_models_gptq_{}", "real_models_{}", "real_models_exact_{}")
EXACT, EXACT_ALONE = "fp8q, --preset exact", "weights alone, --preset exact"
BF16, MODELOPT = "BF16", "ModelOpt FP8_DEFAULT_CFG"
#: Row of the results -> its title.
RECIPES = {
    BF16: "BF16 itself",
    MODELOPT: "ModelOpt `FP8_DEFAULT_CFG`",
    "llm-compressor FP8": "llm-compressor `FP8`",
    "llm-compressor FP8_DYNAMIC": "llm-compressor `FP8_DYNAMIC`",
    "llm-compressor FP8_BLOCK": "llm-compressor `FP8_BLOCK`",
    "fp8q, default": "fp8q, `one`, `nearest`",
    "fp8q, one code, gptq": "fp8q, `one`, `gptq`",
    "fp8q, dynamic": "fp8q, `dynamic`, `nearest`",
    "fp8q, dynamic, gptq": "fp8q, `dynamic`, `gptq`",
    "fp8q, two codes, gptq": "fp8q, `two`, `gptq`",
    "weights alone, nearest": "fp8q, `bf16`, `nearest`",
    "weights alone, gptq": "fp8q, `bf16`, `gptq`",
    EXACT: "fp8q, `--preset exact`",
    EXACT_ALONE: "fp8q, `--preset exact --for vllm`",
}
DECODED = {
    "fp8q, default": "one term, nearest",
    "fp8q, one code, gptq": "one term",
    "fp8q, a tail of 64, gptq": "tail of 64",
    EXACT: "`--preset exact`",
    "fp8q, two codes, gptq": "two terms",
    "weights alone, gptq": "weights alone",
    EXACT_ALONE: "`--preset exact --for vllm`",
}
CLIPS = {"fp8q, default": "amax"} | {f"fp8q, default, {clip}": clip for clip in ("percentile", "mse", "entropy")}
CACHE, PARTS = "cache alone, ", ("K", "V", "K and V")


def rows_of(model: str, limits: bool = False) -> Mapping[str, Any]:
    """Row -> its figures; `limits`: the table shows the rows of weights alone, which have limits."""
    rows = dict[str, Any]()
    for result in RESULTS_OF:
        for name, row in rows_in(result.format(model), limits).items():
            rows.setdefault(name, row)
    return rows


def rows_in(result: str, limits: bool = False) -> Mapping[str, Any]:
    """The rows of one result, of one model."""
    (found,) = load(result, limits)["results"].values()
    rows: Mapping[str, Any] = found["rows"]
    return rows


def kl(row: Mapping[str, Any]) -> str:
    """The mean KL × 10⁶ with its interval."""
    low, high = row["kl_interval"]
    return f"{row['kl_mean_micronats']:,.0f} ({low:,.0f} to {high:,.0f})"


def share(row: Mapping[str, Any]) -> str:
    """The mean KL over that of ModelOpt's default."""
    return f"{row['kl_over_modelopt']:.2f}" if "ratio_interval" in row else ""


def perplexity(row: Mapping[str, Any]) -> str:
    """The increase of perplexity."""
    return f"{row['perplexity_increase']:+.2%}"


def flips(row: Mapping[str, Any]) -> str:
    """The share of positions whose most likely word differs."""
    return f"{row['flips']:.1%}"


def recipes(titles: Mapping[str, str]) -> str:
    """KL, its share of ModelOpt's, perplexity and flips of rows, one model after the other."""
    cells = []
    for key, model in MODELS.items():
        rows = rows_of(key, limits=titles is RECIPES)
        for name, title in titles.items():
            row = rows[name]
            cells.append([model, title, kl(row), share(row), perplexity(row), flips(row)])
    return table(["model", "recipe", "KL × 10⁶", "over ModelOpt's", "perplexity", "flips"], cells)


def accuracy_real() -> str:
    """Everybody's recipes."""
    return recipes(RECIPES)


def chats_real() -> str:
    """Some recipes on chats, and on plain text, both by GPTQ before correlations were shrunk."""
    plain, chats = rows_in("real_models_smollm2"), rows_in("real_models_chats_smollm2", limits=True)
    cells = []
    for name, title in {**RECIPES, f"{CACHE}K and V": "cache in FP8 alone"}.items():
        if name in chats:
            cells.append([title, *(cell(rows[name]) for cell in (kl, flips) for rows in (plain, chats))])
    kinds = ("plain text", "chats")
    return table(["SmolLM2-135M", *(f"{name}, {kind}" for name in ("KL × 10⁶", "flips") for kind in kinds)], cells)


def clips_real() -> str:
    """One code, weights to nearest, by what chooses the clip of an input."""
    return recipes(CLIPS)


def decoded_kl(rows: Mapping[str, Any], row: str) -> float:
    """The mean KL × 10⁶ over the second half of the windows."""
    return float(rows[row]["kl_decoded_micronats"])


def exact_answers_real() -> str:
    """KL over the second half of a window, the first being the prompt."""
    cells = []
    for key, name in MODELS.items():
        rows = rows_of(key)
        cells.append([name, *(f"{decoded_kl(rows, row):,.0f}" for row in (BF16, *DECODED))])
    return table(["model", "BF16 itself", *DECODED.values()], cells)


def kv_cache_real() -> str:
    """KL of the cache alone, by what of it is FP8, and of all GEMMs beside it."""
    return caches({f"{CACHE}{what}": what for what in PARTS} | {"fp8q, default": "all W8A8 GEMMs, cache in FP32"})


def kv_cache_heads() -> str:
    """KL of the whole cache in FP8, under a scale for each head, and with queries in FP8 too."""
    rows = [row for row in rows_of("smollm2") if row.startswith(CACHE)]
    return caches({row: row.removeprefix(CACHE) for row in rows if row.removeprefix(CACHE) not in PARTS[:2]})


def caches(titles: Mapping[str, str]) -> str:
    """KL and perplexity of rows, one model after the other."""
    results = {model: rows_of(key) for key, model in MODELS.items()}
    cells = [
        [model, title, kl(rows[row]), perplexity(rows[row])]
        for model, rows in results.items()
        for row, title in titles.items()
    ]
    return table(["model", "in FP8", "KL × 10⁶", "perplexity"], cells)
