"""The scheme of a module: how its weight and its input are coded, or why both stay in BF16.

One value a module, without torch. Whatever reads, writes, computes, draws, lints or serves a module asks its scheme.
config.json spells the forms of inputs as lists of modules under the key `fp8q`, which this file alone reads and writes:

    two_terms       the modules whose input is two codes a value; other loaders take the first alone
    tails           those among them with second codes in so many last positions of a call alone
    dynamic_inputs  those whose input has a scale for each token, as the groups of config.json say too
    block_inputs    those whose weight has a scale for each block of 128 x 128, and their input one for each 128 values
    bf16_inputs     those of which the weight alone is codes
    wide_cache      the attention modules whose cache stays in BF16 although the files have its scales

A module that no list has takes one code a value under a static scale.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...options import AT_RUN_TIME, BF16, ONE, TWO, Form

#: The part of a weight that shares a scale: all of it, an output channel, or a block.
Granularity = Literal["tensor", "channel", "block"]
#: The rows and columns of a weight's block where a configuration names none; ModelOpt never names any.
BLOCK_SIDES = (128, 128)
#: The field of config.json for the layers that an FP8 cache leaves out.
BF16_CACHE = "wide_cache"
_TWO_CODES = "two_terms"
_TAILS = "tails"
#: The lists of modules in one form each.
_LISTS = {f"{form}_inputs": form for form in (*AT_RUN_TIME, BF16)}


@dataclass(frozen=True)
class Scheme:
    """The quantization of a module.

    `weights`: the part of the weight that shares a scale; None: the module stays in BF16, for the `reason`. `input`:
    the form of its input, as far as a checkpoint that fp8q did not write declares it. `block`: the rows and columns of
    a block, where the weight has blocks.
    """

    weights: Granularity | None = "channel"
    input: Form = ONE
    reason: str | None = None
    block: tuple[int, int] = BLOCK_SIDES


#: The scheme of a module that is not quantized.
UNQUANTIZED = Scheme(None, BF16)


def modules_in(forms: Mapping[str, Form], *wanted: Form) -> list[str]:
    """List the modules of `forms` that have one of the forms `wanted`, in their order."""
    return [module for module, form in forms.items() if form in wanted]


def in_two_codes(forms: Mapping[str, Form]) -> list[str]:
    """List the modules of `forms` whose input is two codes a value, in all positions of a call or in its last ones."""
    return [module for module, form in forms.items() if form.terms == TWO.terms]


def tails_of(forms: Mapping[str, Form]) -> dict[str, int]:
    """Map the modules of `forms` in tails to the number of last positions that have second codes."""
    return {module: form.tail for module, form in forms.items() if form.tail is not None}


def form_fields(forms: Mapping[str, Form], bf16_cache: Iterable[str] = ()) -> dict[str, object]:
    """Spell `forms`, and the attention modules of `bf16_cache`, as the fields of config.json; none that is empty."""
    fields: dict[str, object] = {_TWO_CODES: in_two_codes(forms), _TAILS: tails_of(forms)}
    fields |= {name: modules_in(forms, form) for name, form in _LISTS.items()}
    fields[BF16_CACHE] = list(bf16_cache)
    return {name: value for name, value in fields.items() if value}


def forms_in(fields: object) -> dict[str, Form]:
    """Read the forms of inputs from the field `fp8q` of config.json; what is malformed counts as absent.

    A module that is absent takes one code a value.
    """
    known: Mapping[str, Any] = fields if isinstance(fields, dict) else {}
    forms = dict.fromkeys(_names(known.get(_TWO_CODES)), TWO)
    tails = known.get(_TAILS)
    for module, positions in tails.items() if isinstance(tails, dict) else ():
        if module in forms and type(positions) is int and positions > 0:
            forms[module] = Form("tail", positions)
    for name, form in _LISTS.items():
        forms |= dict.fromkeys(_names(known.get(name)), form)
    return forms


def bf16_caches_in(fields: object) -> list[str]:
    """Read the attention modules whose cache stays in BF16 from the field `fp8q` of config.json."""
    if isinstance(fields, dict):
        return _names(fields.get(BF16_CACHE))
    return []


def _names(value: object) -> list[str]:
    if isinstance(value, list):
        return [name for name in value if isinstance(name, str)]
    return []
