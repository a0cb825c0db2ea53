"""The table of docs/forms.md: what each form costs, beside the servers that read it."""

from collections.abc import Mapping
from typing import Literal

from markdown import load, table

from fp8q.options import CheckpointServer, Kind, Server
from fp8q.quantize.scales.servers import computes
from pages.real import kl, perplexity

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


def _read_by(kind: Kind | Literal["every"]) -> str:
    read = [title for title, server in SERVERS.items() if kind == "every" or computes(server, kind)]
    return "all four" if len(read) == len(SERVERS) else ", ".join(read)


def mxfp8_decision() -> str:
    """KL of MXFP8 and of what it would stand beside."""
    results = load("mxfp8")["results"]
    forms = {form: READERS[form][0] for form in ("one", "dynamic", "block")} | MXFP8
    rows = [[name, *(kl(results[model]["rows"][form]) for model in NAMES)] for form, name in forms.items()]
    return table(["form", *NAMES.values()], rows)


TABLES = (form_costs,)
DECISION_TABLES = (mxfp8_decision,)
