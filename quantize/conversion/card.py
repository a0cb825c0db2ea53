"""Write the model card of a converted checkpoint: its form, what was kept and why, the proof, and who loads it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ...core.errors import visible
from ...options import ScaleGrid
from ..codes.blocks import SIDE
from .coding import Errors
from .name_tensors import WEIGHT
from .plan import CheckpointPlan

TEXT = """\
---
library_name: transformers
tags: [fp8{tag}]
---

# {name}, FP8

Converted by fp8q without text and without running the model: {form}.
{choice}{unloadable}
{quantized:,} tensors are E4M3 codes{blocks}.
Each code was decoded and compared with the number that it stands for: the largest error is {steps:.3g} of a step
between codes, and {relative:.2%} of a value.

**Not measured**: what this costs in accuracy. This does, against the original and on text of yours:

    fp8q compare ORIGINAL --model path/to/this/directory --data TEXT --out OUT

Served by vLLM:

    vllm serve path/to/this/directory

## Kept in the source's type

{kept}
{left}"""
#: The section on files of the source that were not copied.
LEFT = """
## Left with the source

{lines}
"""
#: The description of each form.
FORMS = {
    "dynamic": "weights with one scale per output channel, inputs with one for each token, computed where it is served",
    "block": f"weights in blocks of {SIDE} x {SIDE} with a scale each, inputs with one per {SIDE} values of a token",
}
#: The sentence of a source that was in blocks already.
RESCALED = (
    "It was in blocks already: scales were rounded up to powers of two, under which servers compute blocks, and codes "
    "rounded again."
)
#: The grids of the scales of blocks.
GRIDS: dict[ScaleGrid, str] = {
    "power-of-two": "powers of two, as servers compute blocks on Hopper and Blackwell",
    "bf16": "BF16 numbers, which servers round again on Hopper and Blackwell",
}
#: Names that are listed for one reason; the rest are counted.
LISTED = 4


def unquantized_by_reason(unquantized: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason -> the modules that are kept for it, in the order of the files."""
    modules_by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in unquantized.items():
        modules_by_reason[reason].append(name.removesuffix(WEIGHT))
    return dict(modules_by_reason)


def card(plan: CheckpointPlan, name: str, errors: Errors, left: Sequence[str]) -> bytes:
    """The text of the card of the checkpoint `name`; `left`: lines on files of its source that were not copied."""
    lines = []
    for reason, modules in unquantized_by_reason(plan.unquantized).items():
        more = f" and {len(modules) - LISTED:,} more" if len(modules) > LISTED else ""
        lines.append(f"- {', '.join(f'`{visible(module)}`' for module in modules[:LISTED])}{more}: {reason}")
    rest = "was not in blocks" if plan.quantization else "is no matrix: norms, biases, convolutions, states"
    lines.append(f"- whatever {rest}")
    text = TEXT.format(
        name=visible(name),
        tag="" if plan.layout == "fp8" else f", {plan.layout}",
        form=FORMS[plan.form],
        quantized=plan.quantized,
        choice=RESCALED if plan.quantization else f"Linear layers are what {plan.decided_by} says.",
        blocks="" if plan.blocks is None else f", under scales that are {GRIDS[plan.blocks]}",
        unloadable=f"\n**{plan.unloadable}.**" if plan.unloadable else "",
        steps=errors.steps,
        relative=errors.relative,
        kept="\n".join(lines),
        left=LEFT.format(lines="\n".join(f"- {line}" for line in left)) if left else "",
    )
    return text.encode()
