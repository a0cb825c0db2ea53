"""Models for lm-eval: one in this process, and one on a server."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...calibrate.model.tokenizer import chosen
from ...core.errors import InputError
from ..endpoint.asking import find_model, server_refusal
from ..endpoint.client import Client, RefusedError
from ..endpoint.forms import check_possible
from ..endpoint.schema import AnsweredCompletion, AnsweredLogprobs, UnansweredError, read_answer
from .harness import quiet_harness

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def local_model(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", batch_size: int) -> Any:
    """`model` in this process, as an LM of lm-eval; probabilities in FP32, also of a BF16 model."""
    import torch
    from lm_eval.models.huggingface import HFLM

    with quiet_harness():
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype=torch.float32)


def served_model(client: Client, served: str | None, tokenizer: Path, batch_size: int, longest: int) -> Any:
    """The model `served` by `client`, or its only one, as lm-eval's `local-completions`.

    Requests go through `client`, which bounds what is read, and sends text and key to no other address. Questions are
    sent as token ids of the tokenizer in the directory `tokenizer`, of which a prompt has `longest` at most. Raises
    InputError for a server without that model.
    """
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    listed = find_model(client, served)
    if listed.triton:
        raise InputError(client.url, "is Triton, which has no /v1/completions", "give a server of OpenAI's API")
    with quiet_harness():
        model = LocalCompletionsAPI(
            model=listed.name,
            base_url=f"{client.url}/v1/completions",
            tokenizer_backend="huggingface",
            tokenizer=str(tokenizer),
            max_length=min(longest, listed.longest or longest),
            batch_size=batch_size,
            max_retries=1,
        )
    model.tokenizer = chosen(model.tokenizer, tokenizer, "file")

    def post(messages: Sequence[Any], *, generate: bool = True, gen_kwargs: Any = None, **more: Any) -> Any:
        """Take the place of lm-eval's `model_call`."""
        prompt = model.create_message(messages)
        fields = model._create_payload(
            prompt, generate=generate, gen_kwargs=dict(gen_kwargs or {}), seed=model._seed, eos=model.eos_string, **more
        )
        return completed(client, fields, generate)

    model.model_call = post
    return model


def completed(client: Client, fields: dict[str, Any], generate: bool) -> Any:
    """The answer of `client` to `fields`, as lm-eval reads it; `generate`: of a text, and not of likelihoods.

    Raises InputError for a server that refuses, or answers with other types or numbers than a model can give;
    BackendError for one that fails or is busy.
    """
    try:
        answer = client.post("/v1/completions", fields)
        prompts = fields["prompt"]
        many = isinstance(prompts, list) and not isinstance(prompts[0], int)
        choices = read_answer(AnsweredCompletion, answer).in_order(len(prompts) if many else 1)
    except UnansweredError as error:
        raise InputError(client.url, f"gives no answer to a question ({error})", "see the server's log") from None
    except RefusedError as error:
        remedy = (
            "see the server's log"
            if generate
            else "likelihoods need `echo` with `logprobs`: vLLM and fp8q serve answer them"
        )
        raise server_refusal(client, error, " a question", remedy) from None
    for choice in choices:
        logprobs = choice.logprobs or AnsweredLogprobs()
        rows = [[value] for value in logprobs.token_logprobs or [] if value is not None]
        rows += [[*top.values()] for top in logprobs.top_logprobs or [] if top]
        for row in rows:
            check_possible(client, row, "log-probabilities")
    return answer
