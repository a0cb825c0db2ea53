"""Answers of servers, read by their schema: every type strict, every list bounded by what was asked for.

Fields that nobody here reads are passed over, since servers add their own. A field that is read and has another type
means that the server does not answer in this form. An answer may be as long as the longest that was asked for; the
number of its bytes follows from the question, so that a server that sends more is not read on.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, StringConstraints, TypeAdapter, ValidationError

from ...core.files import plain_text

#: The bytes that every answer may have, and those for each log-probability in it: vLLM's entries, with the token's
#: text and rank, have some 100, and a token's text may be 256 characters of six bytes in JSON.
BASE_BYTES = 1 << 20
ENTRY_BYTES = 512
#: The most that a server may count: positions of a model, tokens of a prompt.
MOST_COUNT = 2**31 - 1
#: The most characters of a place in an answer that are repeated.
MOST_QUOTED = 80


class UnansweredError(Exception):
    """The server does not answer in this form, for this reason."""


class _FirstFault(FailFast):
    """Stop at the first wrong entry of a list; hashable, so that it may stand in a union."""

    __hash__ = object.__hash__


FIRST_FAULT = _FirstFault()


class Answer(BaseModel):
    """A part of a server's answer."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
#: A token's id as JSON's keys are written.
IdText = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]


class ListedModel(Answer):
    """A model of `/v1/models`, with the tokens that it takes where the server tells (vLLM)."""

    id: str
    max_model_len: Annotated[int, Field(ge=1, le=MOST_COUNT)] | None = None


class AnsweredModelList(Answer):
    """The answer of `/v1/models`."""

    data: Annotated[list[ListedModel], FIRST_FAULT]


class TritonModel(Answer):
    """A model of Triton's repository."""

    name: str


TritonModels = TypeAdapter(Annotated[list[TritonModel], FIRST_FAULT])


class Generated(Answer):
    """The answer of Triton's `generate`."""

    text_output: str
    num_input_tokens: Count | None = None


class Entry(Answer):
    """One token of a position in `prompt_logprobs`."""

    logprob: float


class AnsweredLogprobs(Answer):
    """`logprobs` of a completion: each list has an entry for each token."""

    tokens: Annotated[list[str | int], FIRST_FAULT] | None = None
    token_logprobs: Annotated[list[float | None], FIRST_FAULT] | None = None
    top_logprobs: Annotated[list[dict[str, float] | None], FIRST_FAULT] | None = None


class AnsweredChoice(Answer):
    """A completion of one prompt."""

    index: Count | None = None
    text: str | None = None
    logprobs: AnsweredLogprobs | None = None
    prompt_logprobs: Annotated[list[dict[IdText, Entry] | None], FIRST_FAULT] | None = None
    prompt_token_ids: Annotated[list[Count], FIRST_FAULT] | None = None


class AnsweredUsage(Answer):
    """Tokens as the server counts them."""

    prompt_tokens: Count | None = None


class AnsweredCompletion(Answer):
    """The answer of `/v1/completions`, and of chats so far as they are read."""

    choices: Annotated[list[AnsweredChoice], FIRST_FAULT]
    usage: AnsweredUsage | None = None
    prompt_token_ids: Annotated[list[Count], FIRST_FAULT] | None = None

    @property
    def counted(self) -> int:
        """The tokens of the prompts as the server counts them; 0 where it does not."""
        return (self.usage and self.usage.prompt_tokens) or 0

    def in_order(self, count: int) -> list[AnsweredChoice]:
        """The `count` choices, by index; raises UnansweredError for another number, or for two of one index."""
        if len(self.choices) != count:
            raise UnansweredError(f"{len(self.choices)} choices for {count} prompts")
        numbers = [choice.index for choice in self.choices]
        if all(number in (None, 0) for number in numbers):  # servers that number nothing answer in order
            return self.choices
        if sorted(number for number in numbers if number is not None) != list(range(count)):
            raise UnansweredError(f"choices with the indices {str(numbers)[:MOST_QUOTED]}")
        return sorted(self.choices, key=lambda choice: choice.index or 0)


Read = TypeVar("Read")


def read_answer(kind: type[Read] | TypeAdapter[Read], answer: Any) -> Read:
    """Return an answer as `kind`; raises UnansweredError, with the first place that differs, for any other."""
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    try:
        return adapter.validate_python(answer)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        place = place if len(place) <= MOST_QUOTED else f"{place[:MOST_QUOTED]}…"
        raise UnansweredError(f"{place or 'the answer'} {plain_text(first)}") from None


def most_bytes(fields: Mapping[str, Any]) -> int:
    """The bytes that an answer to a completion's `fields` may have.

    Each token of the prompts, and each that may be generated, has its own log-probability, its text, and as many
    likeliest tokens as were asked for. A prompt that is a text has no more tokens than bytes.
    """
    prompt = fields.get("prompt", fields.get("text_input", fields.get("messages", "")))
    prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    tokens = sum(len(item) if isinstance(item, list) else len(str(item).encode(errors="replace")) for item in prompts)
    generated = len(prompts) * int(fields.get("max_tokens") or 16)
    entries = 2 + max(int(fields.get(name) or 0) for name in ("logprobs", "prompt_logprobs"))
    return BASE_BYTES + (tokens + generated) * entries * ENTRY_BYTES
