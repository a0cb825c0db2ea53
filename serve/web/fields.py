"""The fields of requests and answers, from which the OpenAPI description at /openapi.json is made: OpenAI's fields with
their types and bounds.

A field that would change the answer and is not supported is declared with the values that change nothing (`n: 1`,
`tools: []`), and refused with any other; a field without effect (`user`) may have any value. An undeclared field is
refused, as by OpenAI: ignoring it would give another answer than the requested one.

Strict types: a number in quotes is none. The prompt alone is parsed by hand (`prompts`): a union of lists would be
tried for every item of each. The models of answers describe them alone: nothing is built of these while serving.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ...calibrate.text.chat import arguments_object
from ...core.files import PLAIN
from ..loop.request import MOST_LOGPROBS, MOST_PENALTY, MOST_SEED, MOST_STOP_CHARACTERS, MOST_STOP_WORDS, Request
from .refusals import Refusal

#: Prompts in one request, and messages of a chat.
MOST_PROMPTS = 128
MOST_MESSAGES = 2048
#: The largest temperature of OpenAI's API.
MOST_TEMPERATURE = 2
#: Whatever it is, the answer is the same.
Whatever = Annotated[Any, Field(description="Changes nothing here.")]
Penalty = Annotated[float, Field(ge=-MOST_PENALTY, le=MOST_PENALTY)]
StopWord = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
One = Annotated[int, Field(ge=1, le=1)]
Nothing = Annotated[list[Any], Field(max_length=0)]
NoMap = Annotated[dict[str, Any], Field(max_length=0)]
Id = {"type": "integer", "minimum": 0}
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "A text, or token ids taken as they are; or several of either.",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MOST_PROMPTS},
                {"type": "array", "items": Id, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": Id, "minItems": 1},
                    "minItems": 1,
                    "maxItems": MOST_PROMPTS,
                },
            ],
        }
    ),
]


class StrictFields(BaseModel):
    """Fields of the types that are written here, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(StrictFields):
    """The options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: each chunk has the tokens so far, as vLLM has it."
    )
    include_obfuscation: Whatever = None


class Fields(StrictFields):
    """The fields that both endpoints share."""

    model: str | None = Field(None, description="One that /v1/models lists; left out: the first of them.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MOST_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] | None = None
    stop: StopWord | Annotated[list[StopWord], Field(max_length=MOST_STOP_WORDS)] | None = None
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-text token, as measuring wants it.")
    add_special_tokens: bool | None = Field(
        None, description="Have the tokenizer put its own around a text: by default for prompts, and not for chats."
    )
    n: One | None = None
    logit_bias: NoMap | None = None
    top_k: Annotated[int, Field(ge=-1, le=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    user: Whatever = None
    store: Whatever = None
    metadata: Whatever = None
    service_tier: Whatever = None
    safety_identifier: Whatever = None
    prompt_cache_key: Whatever = None
    prompt_cache_retention: Whatever = None

    @property
    def usage_counting(self) -> bool:
        """Tell whether each chunk of such a stream has them."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def usage_wanted(self) -> bool:
        """Tell whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def asked(
        self, prompt: str | tuple[int, ...], most: int, logprobs: int | None, prompt_logprobs: int | None = None,
        special_tokens: bool = True,
    ) -> Request:  # fmt: skip
        """Make the request to the loop, at most `most` tokens of it; defaults are OpenAI's.

        `special_tokens`: the tokenizer puts its own around a text.
        """
        words = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Request(
            prompt, most, words, _or(self.temperature, 1.0), _or(self.top_p, 1.0), self.frequency_penalty or 0.0,
            self.presence_penalty or 0.0, self.seed, logprobs, bool(self.ignore_eos), prompt_logprobs,
            special_tokens if self.add_special_tokens is None else self.add_special_tokens,
        )  # fmt: skip


class CompletionFields(Fields):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = Field(
        None, description="Of each token of the prompt but the first, too: by token id, as vLLM has them."
    )
    echo: bool | None = Field(
        None,
        description="Begin the answer with the prompt, and logprobs with those of its tokens.",
    )
    suffix: Literal[""] | None = None
    best_of: One | None = None


class TextPart(StrictFields):
    """A part of what was said."""

    type: Literal["text"]
    text: str
    cache_control: Whatever = None


class CalledFunction(StrictFields):
    """A function that the model called, with arguments in JSON."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _read(cls, text: str) -> str:
        if arguments_object(text) is None:
            raise PydanticCustomError(PLAIN, "must be an object in JSON")
        return text


class ToolCall(StrictFields):
    """A call of a tool in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Whatever = None


#: The fields of a message that templates are told.
TOLD = {"role", "content", "name", "reasoning_content", "reasoning", "tool_calls", "tool_call_id"}


class Said(StrictFields):
    """A message; what clients send back of an answer they were given may come with it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MOST_MESSAGES)] | None = Field(
        None, description="May be null beside tool_calls."
    )
    name: str | None = None
    reasoning_content: str | None = Field(None, description="As vLLM answers it; also `reasoning`.")
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_MESSAGES)] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    function_call: None = None
    annotations: Nothing | None = None
    audio: None = None
    provider_specific_fields: Whatever = None

    @model_validator(mode="after")
    def _has_content(self) -> "Said":
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError(PLAIN, "must have a text as content, or tool_calls")
        return self

    @property
    def message(self) -> dict[str, Any]:
        """The fields that a template may read, for `calibrate.text.chat`."""
        message = self.model_dump(include=TOLD, exclude_none=True)
        for call in message.get("tool_calls", ()):
            call.pop("index", None)
        return message

    @property
    def characters(self) -> int:
        """The number of characters of what was said, and of the calls."""
        parts = self.content if isinstance(self.content, list) else []
        texts = [self.content] if isinstance(self.content, str) else [part.text for part in parts]
        texts += [text for text in (self.reasoning_content, self.reasoning) if text is not None]
        texts += [text for call in self.tool_calls or () for text in (call.function.name, call.function.arguments)]
        return sum(map(len, texts))


class TextFormat(StrictFields):
    """Plain text is what is answered."""

    type: Literal["text"]


class ChatFields(Fields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Said], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: TextFormat | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Whatever = None
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def prompts(field: Any, positions: int) -> list[str | tuple[int, ...]]:
    """The prompts that the field `prompt` holds; raises Refusal for what is none.

    Sizes come before looks at every item: nothing longer than the model's `positions` is gone through.
    """
    items = field if isinstance(field, list) else [field]
    if isinstance(field, list) and items and type(items[0]) is int:
        items = [items]
    if not 1 <= len(items) <= MOST_PROMPTS:
        raise Refusal(400, f"prompt: holds {len(items):,} prompts; give from 1 to {MOST_PROMPTS}", "prompt")
    for item in items:
        if isinstance(item, list) and len(item) >= positions:
            raise Refusal(
                400,
                f"the prompt has {len(item):,} tokens and the model {positions} positions for prompt and answer; "
                f"shorten it to {positions - 1} tokens or fewer",
                "prompt",
                "context_length_exceeded",
            )
        if not isinstance(item, str) and not (isinstance(item, list) and {type(token) for token in item} <= {int}):
            raise Refusal(400, "prompt: must be a text, token ids, or a list of either", "prompt")
    return [item if isinstance(item, str) else tuple(item) for item in items]


Reason = Literal["stop", "length"]


class ModelObject(BaseModel):
    """A model that can be asked."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    precision: Literal["fp8", "bf16"]
    runtime: str
    max_model_len: int


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"]
    data: list[ModelObject]


class Health(BaseModel):
    """Whether the server does its work."""

    status: Literal["ok", "closing", "dead"]


class Usage(BaseModel):
    """Tokens, of all prompts and answers of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLists(BaseModel):
    """Of each token its text, its log-probability, the best ones, and where it begins in the text. Of several tokens
    with one text the likeliest has it, and the others are `token_id:N`. The first token of an echoed prompt has no
    log-probabilities.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """The answer to one prompt."""

    index: int
    text: str
    logprobs: TokenLists | None
    finish_reason: Reason


class Completion(BaseModel):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class OneToken(BaseModel):
    """A token, and the bytes that it adds to the text; null for a special token, which adds none."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(OneToken):
    """A token, and the best ones in its place."""

    top_logprobs: list[OneToken]


class Logprobs(BaseModel):
    """Each token of a message."""

    content: list[TokenLogprob]
    refusal: None


class Message(BaseModel):
    """The message of the model."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """The answer to a chat."""

    index: int
    message: Message
    logprobs: Logprobs | None
    finish_reason: Reason


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
