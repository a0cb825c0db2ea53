"""The arithmetic of every server for every scheme: one table, which the lint, `tune` and the search of `fp8q run` ask.

A server computes the form of an input as it is, another one in its place, or refuses it. Of the part of a weight that
shares a scale there is no other choice than the form leaves: blocks of 128 x 128 go with `block` alone, and a scale for
the whole weight is computed where one for each channel is.

`tensorrt`: fp8q's graphs, which have static scales alone. `vllm-plugin`: vLLM with fp8q-vllm, whose 16 bits are the
values of two codes, or nearer ones (docs/decisions/0116). `any`: what all readers of compressed-tensors' static
checkpoints compute. The others are named as in `fp8q lint --for`, and are those of the versions that
`quantize.lint.servers.READ` names: TensorRT-LLM takes channel weights with a scale for each token, and blocks, and
refuses static scales in compressed-tensors' form.
"""

from collections.abc import Collection, Iterable

from ...options import CheckpointServer, Form, Kind, Layout, Server
from .scheme import Granularity

_COLUMNS: tuple[Server | CheckpointServer, ...] = (
    "tensorrt", "vllm-plugin", "vllm", "sglang", "transformers", "tensorrt-llm", "any",
)  # fmt: skip
#: Kind of form -> the kind that each server computes of it; None: none.
COMPUTED: dict[Kind, tuple[Kind | None, ...]] = {
    "one": ("one", "one", "one", "one", "one", None, "one"),
    "dynamic": (None, "dynamic", "dynamic", "dynamic", "dynamic", "dynamic", None),
    "block": (None, "block", "block", "block", "block", "block", None),
    "tail": ("tail", "tail", "one", "one", "one", None, "one"),
    "two": ("two", "two", "one", "one", "one", None, "one"),
    "bf16": ("bf16", "bf16", "bf16", "bf16", "bf16", None, "bf16"),
}  # fmt: skip
#: Kind of form that ModelOpt's layout says -> the part of a weight that has one scale there.
MODELOPT_GRANULARITY: dict[Kind, Granularity] = {"one": "tensor", "dynamic": "channel"}
#: The same of files in ModelOpt's layout: SGLang reads static scales alone, and transformers does not know it.
COMPUTED_OF_MODELOPT: dict[Kind, tuple[Kind | None, ...]] = {
    "one": ("one", "one", "one", "one", None, "one", None),
    "dynamic": (None, "dynamic", "dynamic", None, None, "dynamic", None),
}
#: The servers that compute experts in one code alone. vLLM and SGLang have no GEMM of experts in two terms or with FP8
#: weights alone, and vLLM wants all experts of a layer in one form.
ONE_CODE_IN_EXPERTS: tuple[Server, ...] = ("vllm-plugin", "vllm", "sglang", "any")


#: Kind of form -> the reason why a run with modules in it has no graph.
NO_GRAPH: dict[Kind, str] = {
    "dynamic": "--form dynamic gives each token a scale at run time, for which TensorRT has no FP8 GEMM (`fp8q scales "
    "RUN --form one` takes the static scales, which the run has too)",
    "block": "--form block gives each 128 values of a token a scale at run time, and each block of a weight its own, "
    "for which TensorRT has no FP8 GEMM (`fp8q scales RUN --form one` takes static scales, which the run has too)",
}


def graph_refusal(forms: Iterable[Form], vision: Collection[str] = ()) -> str | None:
    """Give the reason why a run with modules in these `forms` has no graph; None where it may have one. `vision`: what
    is in FP8 that text does not reach.
    """
    if vision:
        return "--vision quantizes what text does not reach, and graphs take text alone"
    kinds = {form.kind for form in forms}
    return next((reason for kind, reason in NO_GRAPH.items() if kind in kinds), None)


def computed(server: Server | CheckpointServer, kind: Kind, layout: Layout = "compressed-tensors") -> Kind | None:
    """Return the kind of form that `server` computes where a module has `kind` in files of this `layout`; None where it
    refuses that, or the layout has no such form.
    """
    column = _COLUMNS.index(server)
    if layout == "modelopt":
        return COMPUTED_OF_MODELOPT[kind][column] if kind in COMPUTED_OF_MODELOPT else None
    return COMPUTED[kind][column]


def computes(server: Server | CheckpointServer, kind: Kind) -> bool:
    """Tell whether `server` computes this kind of form as fp8q does."""
    return computed(server, kind) == kind


def need_the_plugin(kinds: Iterable[Kind]) -> bool:
    """Tell whether vLLM computes these kinds of forms with fp8q-vllm alone."""
    return any(computes("vllm-plugin", kind) and not computes("vllm", kind) for kind in kinds)
