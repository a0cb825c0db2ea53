"""The shapes of answers, for the description at /openapi.json: nothing is built of these while serving."""

from typing import Literal

from pydantic import BaseModel

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
