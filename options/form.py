"""The form of a GEMM's input: how the activations that a module reads are coded, chosen by patterns of module names.

Each rule gives a form to the modules that a pattern matches, and of the rules that match a module the last counts. On
the command line a rule is `--form FORM`, for all modules, or `--form 'PATTERN=FORM'`. The older options
`--activation-terms`, `--tail`, `--two-terms` and `--bf16-input` spell such rules too, in this order and before those of
`--form`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..core.errors import InputError

#: The positions at the end of a call that a tail has the second codes of.
DEFAULT_EXACT_TAIL = 64
#: The kinds of forms, as `--form` names them.
Kind = Literal[
    "one",
    "two",
    "tail",
    "dynamic",
    "block",
    "bf16",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Kind -> the form in words, and what the help of `--form` says of it. A tail has its length in words.
WORDS: dict[Kind, tuple[str, str]] = {
    "one": ("one term", "one static code"),
    "two": ("two terms", "two, exact"),
    "tail": ("a tail", "two in the last N positions"),
    "dynamic": ("dynamic", "a scale for each token"),
    "block": ("blocks of 128", "for each 128 values; weights in blocks"),
    "bf16": ("weights alone in FP8", "weights alone are FP8"),
}
#: The pattern that matches every module.
EVERY = "*"


@dataclass(frozen=True)
class Form:
    """The coding of a GEMM's input.

    - `one`: one E4M3 code a value, under one static scale a tensor.
    - `two`: two codes, value = scale × (a + b/16), exact for most BF16 numbers.
    - `tail`: two codes in the last `tail` positions of a call, one in the others.
    - `dynamic`: one code, under a scale for each token that is computed at run time.
    - `block`: one code, under a scale for each 128 values of a token, computed at run time; the weight has a scale for
      each block of 128 x 128.
    - `bf16`: no codes; the weight alone is FP8.
    """

    kind: Kind = "one"
    tail: int | None = None

    def __str__(self) -> str:
        """The form as `--form` takes it."""
        if self.tail is None:
            return self.kind
        return f"tail:{self.tail}"

    @property
    def words(self) -> str:
        """The form in words, for tables and notes: `one term`, `a tail of 64`."""
        words, _ = WORDS[self.kind]
        if self.tail is None:
            return words
        return f"{words} of {self.tail}"

    @property
    def static(self) -> bool:
        """Tell whether the codes have a scale that is stored, and not one that is computed at run time."""
        return self.kind in ("one", "two", "tail")

    @property
    def at_run_time(self) -> bool:
        """Tell whether the codes have a scale that is computed at run time."""
        return not self.static and self.terms > 0

    @property
    def terms(self) -> Literal[0, 1, 2]:
        """The number of codes that a value has where it has most; 0 for BF16."""
        if self.kind == "bf16":
            return 0
        return 2 if self.kind in ("two", "tail") else 1


ONE = Form("one")
TWO = Form("two")
DYNAMIC = Form("dynamic")
BLOCK = Form("block")
BF16 = Form("bf16")
#: Names of forms that need no number, and the forms that are codes under a scale of run time.
NAMED: dict[str, Form] = {kind: Form(kind, DEFAULT_EXACT_TAIL if kind == "tail" else None) for kind in KINDS}
AT_RUN_TIME: tuple[Form, ...] = tuple(form for form in NAMED.values() if form.at_run_time)
#: The forms as the help of `--form` lists them.
FORMS_HELP = ", ".join(f"{kind}{':N' * (kind == 'tail')} ({WORDS[kind][1]})" for kind in KINDS)


def longest_tail(forms: Iterable[Form]) -> int:
    """Return the most last positions that any of `forms` has second codes in alone; 0 without a tail."""
    return max((form.tail for form in forms if form.tail), default=0)


@dataclass(frozen=True)
class FormRule:
    """Give `form` to the modules whose name matches `pattern`; `written`: the option that asks for it, for messages."""

    form: Form
    pattern: str
    written: str

    @property
    def every(self) -> bool:
        """Tell whether the rule is for every module."""
        return self.pattern == EVERY


def parse_form(text: str, written: str) -> Form:
    """Read a form such as `two` or `tail:64`; `written` is the whole option. Raises InputError for anything else."""
    if text in NAMED:
        return NAMED[text]
    length = re.fullmatch(r"tail:([0-9]{1,9})", text)
    if length and int(length[1]):
        return Form("tail", int(length[1]))
    raise InputError(written, "is no form", f"give one of {', '.join(NAMED)} or tail:N, or PATTERN=FORM")


def parse_rule(text: str) -> FormRule:
    """Read one value of `--form`: FORM, or PATTERN=FORM."""
    pattern, _, form = text.rpartition("=")
    return FormRule(parse_form(form, f"--form {text}"), pattern or EVERY, f"--form {text}")


def checked_rules(_: str, value: Sequence[str]) -> tuple[str, ...]:
    """Check the rules of `--form`; empty ones are dropped.

    Raises InputError for one that is malformed, and for one without effect, since a later one is for every module.
    """
    texts = tuple(text for text in value if text)
    rules = [parse_rule(text) for text in texts]
    last = max((number for number, rule in enumerate(rules) if rule.every), default=0)
    if last:
        raise InputError(
            rules[0].written,
            f"{rules[last].written} comes later and is for every module, and the last that matches counts",
            "give that one first, or leave one of them out",
        )
    return texts
