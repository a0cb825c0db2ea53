"""The table of docs/forms.md: what each form costs, beside the servers that read it."""

from collections.abc import Mapping

from markdown import load, table

from pages.real import kl, perplexity

#: Row of the result -> its name in the table, and whether transformers, vLLM, SGLang and TensorRT-LLM read what fp8q
#: writes of it (`fp8q lint --for`).
READERS: Mapping[str, tuple[str, tuple[bool, bool, bool, bool]]] = {
    "BF16": ("BF16 itself", (True, True, True, True)),
    "one": ("`one`", (True, True, True, False)),
    "one, tensor weights": ("`one`, `--weight-scale tensor`", (True, True, True, False)),
    "dynamic": ("`dynamic`", (True, True, True, True)),
    "block": ("`block`, as `convert` rounds", (True, True, True, True)),
    "two": ("`two`, by `fp8q-vllm` in vLLM", (False, True, False, False)),
    "bf16": ("`bf16`: weights alone", (True, True, True, False)),
}
#: Rows of what fp8q does not write.
MXFP8 = {"MXFP8, floor": "MXFP8, exponents by floor", "MXFP8, up": "MXFP8, exponents up"}
NAMES = {"demo": "demo", "smollm2": "SmolLM2-135M"}


def form_costs() -> str:
    """Every form: KL and perplexity of both models, and who reads it."""
    results = load("mxfp8")["results"]
    rows = []
    for form, (name, readers) in READERS.items():
        cells = [name]
        for model in NAMES:
            row = results[model]["rows"][form]
            cells += [kl(row), perplexity(row)]
        servers = ("transformers", "vLLM", "SGLang", "TensorRT-LLM")
        read = [server for server, reads in zip(servers, readers, strict=True) if reads]
        cells.append("all four" if len(read) == len(servers) else ", ".join(read))
        rows.append(cells)
    head = [f"{name}: {what}" for name in NAMES.values() for what in ("KL × 10⁶", "perplexity")]
    return table(["form", *head, "read by"], rows)


def mxfp8_decision() -> str:
    """KL of MXFP8 and of what it would stand beside."""
    results = load("mxfp8")["results"]
    forms = {form: READERS[form][0] for form in ("one", "dynamic", "block")} | MXFP8
    rows = [[name, *(kl(results[model]["rows"][form]) for model in NAMES)] for form, name in forms.items()]
    return table(["form", *NAMES.values()], rows)


TABLES = (form_costs,)
DECISION_TABLES = (mxfp8_decision,)
