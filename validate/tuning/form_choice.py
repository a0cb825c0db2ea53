"""`forms.json`: the form that `fp8q run` found for a limit, its cost, and what each other form would have cost."""

from collections import Counter
from typing import Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from ...core.columns import Column, Table, increase, nats, number_column, share, size, text_column
from ...core.files import PLAIN, FirstSchema, Strict, read_document
from ...core.run import Run
from ...options import BF16, KvCache, Server
from ..accuracy.decision import of_100, percent
from .choices import TWO_TERMS, Group, GroupForm, Mix, input_form

#: A form in words, by its name in a mix.
WORDS: dict[GroupForm, str] = {
    "one_term": "one code",
    "dynamic": "one code, scales of tokens",
    TWO_TERMS: "two codes",
    "weights_alone": BF16.words,
    "bf16": "BF16",
}


class FormRow(Strict):
    """The loss and the cost of one form. `prefill_flops_ratio`: operations of a prompt, 1 for one code everywhere."""

    form: str = Field(description="in words")
    weight_rounding: str
    kl_nats: float = Field(description="mean KL(bf16 || this) per token")
    known: Literal["measured", "predicted"]
    tokens: int | None = Field(default=None, description="of the evaluation text that it was measured on")
    perplexity_increase: float | None = Field(default=None, description="measured, as a fraction")
    flips: float | None = Field(default=None, description="measured share of tokens of which another is the likeliest")
    weight_bytes: int
    prefill_flops_ratio: float
    chosen: bool = False


class FormRecipe(Strict):
    """The options of `fp8q scales` for the chosen form, besides the run's."""

    form: list[str]
    skip: list[str]
    weight_rounding: str
    weigh_first_token: bool = False
    kv_cache: KvCache


class FormChoice(Strict):
    """`forms.json`. `aim_kl_nats`: the KL that was aimed at, from the limits and the share of them that a nat of KL
    uses on this text; `met`: whether the verdict on the evaluation text is within the limits.
    """

    schema_: FirstSchema = 1
    server: Server
    limit: float = Field(description="of the increase of perplexity, a fraction")
    kl_limit_nats: float | None = Field(default=None, description="of KL from BF16; absent in files of older versions")
    flips_limit: float | None = Field(default=None, description="of flips; absent in files of older versions")
    aim_kl_nats: float
    met: bool
    needs_plugin: bool = Field(description="whether vLLM computes it with fp8q-vllm alone")
    recipe: FormRecipe
    rows: list[FormRow]

    @field_validator("rows")
    @classmethod
    def _one_is_chosen(cls, rows: list[FormRow]) -> list[FormRow]:
        if sum(row.chosen for row in rows) != 1:
            raise PydanticCustomError(PLAIN, "must have one that is chosen")
        return rows

    @property
    def chosen(self) -> FormRow:
        """The row of the chosen form."""
        return next(row for row in self.rows if row.chosen)


def mix_in_words(groups: tuple[Group, ...], mix: Mix, tail: int) -> str:
    """Describe a mix in words: `a tail of 64`, or the numbers of modules in each form."""
    words = {**WORDS, "tail": input_form("tail", tail).words}
    counts = Counter[GroupForm]()
    for group in groups:
        counts[mix.forms[group.name]] += len(group.weights)
    (form, most), *others = counts.most_common()
    if not others:
        return words[form]
    return f"{words[form]} in {most}, " + ", ".join(f"{words[other]} in {count}" for other, count in others)


def load_form_choice(run: Run) -> FormChoice:
    """Read `forms.json`; raises InputError when it is missing or not the file that `fp8q run` wrote."""
    return read_document(run.require(run.form_choice, "forms"), FormChoice)


#: The outcome of a search in which no form meets the limits, and a remedy.
NO_FORM_MEETS = "`fp8q run` found no form that meets the limits"
ALLOW_MORE = "allow more with --max-ppl-increase, --max-kl or --max-flips"
#: How candidates were compared: their price, and the text that they were measured on.
CHOSEN_ON = (
    "Cheapest by the mean of two ratios to one code everywhere: the bytes of a decode step, and the operations of a "
    "prompt. Candidates were measured on a few windows of the evaluation text, which the verdict is of too: "
    "`fp8q validate RUN --data TEXT` gives one on text that chose nothing."
)


def form_table(choice: FormChoice) -> Table[FormRow]:
    """Tabulate the forms that were measured or predicted, with the chosen one last."""
    columns = (
        text_column("form"),
        text_column("rounding", "weight_rounding"),
        number_column("KL", nats, "kl_nats"),
        number_column("perplexity", increase, "perplexity_increase"),
        number_column("flips", share, "flips"),
        Column[FormRow]("known by", _known, numeric=False),
        number_column("weights", size, "weight_bytes"),
        number_column("prompt", "{:.2f} ×".format, "prefill_flops_ratio"),
    )
    return Table(
        "Forms that the limits were held against", sorted(choice.rows, key=lambda row: row.chosen), columns, "None.",
        note=f"{choice_sentence(choice)} {CHOSEN_ON}",
    )  # fmt: skip


def _known(row: FormRow) -> str:
    mark = "chosen, " if row.chosen else ""
    if row.tokens is None:
        return f"{mark}{row.known}"
    return f"{mark}{row.known}, {row.tokens:,} tokens"


def choice_sentence(choice: FormChoice) -> str:
    """State which form was chosen, and what it costs beside one code everywhere."""
    chosen = choice.chosen
    first = choice.rows[0]
    outcome = "is the cheapest that meets" if choice.met else "loses least, and still more than"
    plugin = "; vLLM computes it with the plugin fp8q-vllm alone" if choice.needs_plugin else ""
    limits = [f"{percent(choice.limit)} perplexity"]
    limits += [f"KL {nats(choice.kl_limit_nats)} nats"] if choice.kl_limit_nats is not None else []
    limits += [f"{of_100(choice.flips_limit)} of 100 next tokens"] if choice.flips_limit is not None else []
    return (
        f"{chosen.form[0].upper()}{chosen.form[1:]} ({chosen.weight_rounding}) {outcome} the limits "
        f"({', '.join(limits)}) for --for {choice.server}: {chosen.weight_bytes / first.weight_bytes:.2f} times "
        f"the bytes of one code and {chosen.prefill_flops_ratio:.2f} times the operations of a prompt{plugin}. "
        "`--form` chooses another."
    )
