"""Explain a builder's error: the module it concerns, the fault, and the remedy.

TensorRT reports in many lines, some about a missing driver, and names ONNX nodes or its own layers, which are named
after them. The failures below were provoked with TensorRT-RTX 1.7.1; others are passed on in TensorRT's words.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..onnx_file import names

#: Lines that say nothing of what went wrong: no driver on a machine that builds ahead of time, and the parser's place
#: in the file.
_NOISE = re.compile(r"cudaError 35|While parsing node|--- (Begin|End) node")
#: The runtime's wrapping of a message, and the place in its source.
_WRAPPED = re.compile(r"Error Code \d+: [\w ]+ \((.+)\)", re.DOTALL)
_SOURCE = re.compile(r"\.? In \w+ at /\S+")
_LONGEST = 300


@dataclass(frozen=True)
class Failure:
    """A known failure, recognized by the pattern `sign` in the message, with its meaning and remedy; `{0}` is the
    pattern's group.
    """

    sign: str
    meaning: str
    remedy: str


AGAIN = "run `fp8q export` again, and if it stays, report this line"
STANDARD = "export with standard operators (`fp8q export`), or install a newer runtime"
KNOWN = (
    Failure(
        r"not supported by a dedicated kernel",
        "there is no fused attention kernel for its type, head size or number of heads",
        (
            "it takes BF16 or FP16, a head size that is a multiple of 8 from 16 to 256, and at least 4 heads to decode "
            "with; other models need plain products and a softmax"
        ),
    ),
    Failure(r"HW-specific datatypes: (\w+)", "the target has no {0}", "choose sm89 or newer with --target"),
    Failure(r"Plugin not found", "the runtime does not know this operator", STANDARD),
    Failure(r"^false$", "the runtime's parser refuses this operator and gives no reason", STANDARD),
    Failure(
        r"within workspace limit",
        "a kernel takes more memory for intermediate results than --workspace allows",
        "raise --workspace, or leave it out",
    ),
    Failure(
        r"offset/length out of range for file: (\S+)",
        "its external data {0} is cut short",
        "copy the whole of model/ again",
    ),
    Failure(r"Failed to open file: (\S+)", "its external data {0} is missing", "copy the whole of model/ again"),
    Failure(r"ParseFromCodedStream", "the file is no ONNX model, or is cut short", AGAIN),
    Failure(
        r"(?i)out ?of ?memory|bad_alloc|MEM_ALLOC", "there is not enough memory", "lower --max-batch or --max-seq-len"
    ),
)


def explain(
    messages: Sequence[str],
    node: str = "",
    operator: str = "",
    layers: Sequence[str] = (),
    near: Callable[[str], str | None] = lambda node: None,
) -> str:
    """One line with module and node, the fault, and the remedy.

    `messages`: the runtime's messages, the most specific first; `node`, `operator`: the place that the parser names;
    `layers`: names to search for in the messages; `near`: the module nearest to a node without a module.
    """
    telling = [message for message in messages if message and not _NOISE.search(message)]
    where = _where(node or _subject(telling, layers), operator, near)
    for failure in KNOWN:
        if match := next(filter(None, (re.search(failure.sign, message) for message in telling)), None):
            return f"{where}{failure.meaning.format(*match.groups())}; {failure.remedy}"
    return f"{where}{_gist(telling[0]) if telling else 'it gave no reason'}; {AGAIN}"


def _subject(messages: Sequence[str], layers: Sequence[str]) -> str:
    """The layer that the messages name; for attention without a kernel, which names none, the first attention."""
    if any("dedicated kernel" in message for message in messages):
        layers = [layer.removesuffix("_AttentionInput") for layer in layers if layer.endswith("_AttentionInput")]
        return layers[0] if layers else ""
    named = [layer for layer in layers if any(layer in message for message in messages)]
    return max(named, key=len, default="")


def _where(node: str, operator: str, near: Callable[[str], str | None]) -> str:
    kind = f", {operator}" if operator else ""
    if module := names.module_of(node):
        return f"{module} (node {node}{kind}): "
    if node and (module := near(node)):
        return f"near {module} (node {node}{kind}): "
    return f"node {node}{kind.replace(',', ' of type', 1)}: " if node else ""


def _gist(message: str) -> str:
    wrapped = _WRAPPED.search(message)
    words = " ".join(_SOURCE.sub("", wrapped[1] if wrapped else message).split())
    return words if len(words) <= _LONGEST else words[:_LONGEST] + "…"
