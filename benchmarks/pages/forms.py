"""The table of docs/forms.md: what each form costs, beside the servers that read it."""

from collections.abc import Mapping
from typing import Literal

from markdown import load, table

from fp8q.options import CheckpointServer, Kind, Server
from fp8q.quantize.scales.servers import computes
from pages.real import flips, kl, perplexity

#: Row of the result -> its name in the table, and the form that fp8q writes of it.
READERS: Mapping[str, tuple[str, Kind | Literal["every"]]] = {
    "BF16": ("BF16 itself", "every"),
    "one": ("`one`", "one"),
    "one, tensor weights": ("`one`, `--weight-scale tensor`", "one"),
    "dynamic": ("`dynamic`", "dynamic"),
    "block": ("`block`, `--block-scale-grid bf16`", "block"),  # measured before powers of two
    "two": ("`two`, by `fp8q-vllm` in vLLM", "two"),
    "bf16": ("`bf16`: weights alone", "bf16"),
}
SERVERS: Mapping[str, Server | CheckpointServer] = {
    "transformers": "transformers", "vLLM": "vllm-plugin", "SGLang": "sglang", "TensorRT-LLM": "tensorrt-llm",
}  # fmt: skip
#: Rows of what fp8q does not write.
MXFP8 = {"MXFP8, floor": "MXFP8, exponents by floor", "MXFP8, up": "MXFP8, exponents up"}
NAMES = {"demo": "demo", "smollm2": "SmolLM2-135M"}


def form_costs() -> str:
    """Every form: KL and perplexity of both models, and who reads it."""
    results = load("mxfp8")["results"]
    rows = []
    for form, (name, kind) in READERS.items():
        cells = [name]
        for model in NAMES:
            row = results[model]["rows"][form]
            cells += [kl(row), perplexity(row)]
        cells.append(_read_by(kind))
        rows.append(cells)
    head = [f"{name}: {what}" for name in NAMES.values() for what in ("KL × 10⁶", "perplexity")]
    return table(["form", *head, "read by"], rows)


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


def _read_by(kind: Kind | Literal["every"]) -> str:
    read = [title for title, server in SERVERS.items() if kind == "every" or computes(server, kind)]
    return "all four" if len(read) == len(SERVERS) else ", ".join(read)


def mxfp8_decision() -> str:
    """KL of MXFP8 and of what it would stand beside."""
    results = load("mxfp8")["results"]
    forms = {form: READERS[form][0] for form in ("one", "dynamic", "block")} | MXFP8
    rows = [[name, *(kl(results[model]["rows"][form]) for model in NAMES)] for form, name in forms.items()]
    return table(["form", *NAMES.values()], rows)


TABLES = (form_costs, exact_shares)
KIND_TABLES = (input_mixes, exact_kinds)
DECISION_TABLES = (mxfp8_decision,)
